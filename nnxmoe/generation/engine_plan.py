"""Validate the arguments of an `Engine` and compute its sizes before memory is allocated."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding

from nnxmoe.config.validate import check_object, check_type, whole_number
from nnxmoe.generation import draft_cost
from nnxmoe.generation.draft import ModelBasedDraft, MTPDraft
from nnxmoe.generation.grouping import SMALL, Grouping, as_one_large_chunk, one_by_one
from nnxmoe.generation.ids import eos_ids
from nnxmoe.generation.passes import CacheSize, cache_bytes, unroll_for_decoding
from nnxmoe.generation.request import EngineLimits
from nnxmoe.generation.rows import Draft, LogitsProcessor, StepOptions
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import replicated_place, split_for_program, split_once
from nnxmoe.runtime.memory import refuse_beyond_memory
from nnxmoe.sharding import batch_axes
from nnxmoe.sharding_rules import shard_count


@dataclasses.dataclass(frozen=True, eq=False)
class EnginePlan:
    """Constant sizes and options of an `Engine`.

    Attributes:
        model: the model. Scanned layers are unrolled into a copy if memory permits.
        limits: maximum sizes of request options, with space for the checkpoint's EOS tokens.
        capacity: tokens per row, including the prompt and the new ids.
        slots: number of rows, a multiple of ``batch_shards``.
        batch_shards: number of shards of the batch on the mesh.
        draft: proposes ids to verify, or None.
        cache_size: ``capacity`` plus space for the ids of a draft.
        grouping: chooses which waiting prompts are prefilled together.
        step_options: static options of the compiled step.
        max_prefixes: number of prefixes whose caches fit in ``prefix_bytes``.
        place: sharding that replicates to the devices of the model, or None if its arrays are uncommitted.
    """

    model: CausalLM
    limits: EngineLimits
    capacity: int
    slots: int
    batch_shards: int
    draft: Draft | None
    cache_size: CacheSize
    grouping: Grouping
    step_options: StepOptions
    max_prefixes: int
    place: Sharding | None

    @property
    def step_width(self) -> int:
        """Number of ids per row and step: the last id and the drafts after it."""
        return 1 + self.cache_size.lookahead

    @property
    def masks_ended_rows(self) -> bool:
        """Whether steps must not append to the caches of ended rows.

        With several rows or drafts, steps continue after a row has ended. The prefix cache copies ended
        rows.
        """
        return self.slots > 1 or self.step_width > 1 or self.max_prefixes > 0

    def pad_rows(self, rows: int) -> int:
        """Round a number of rows up to a multiple of ``batch_shards``."""
        return rows + -rows % self.batch_shards

    def cache_bytes(self, rows: int) -> int:
        """Compute the bytes of a cache of ``rows`` rows in this process."""
        return cache_bytes(self.model, rows, self.cache_size)

    def with_model(self, model: CausalLM) -> "EnginePlan":
        """Replace the model, and the arrays of an `MTPDraft`.

        Raises:
            ValueError: if the compiled programs cannot run the model.
        """
        check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
        model = unroll_for_decoding(model)
        check_same_programs(self.model, model)
        draft = self.draft
        if isinstance(draft, MTPDraft):
            draft = MTPDraft.of(model, draft.count).commit(self.place)
        return dataclasses.replace(self, model=model, draft=draft)


def check_same_programs(model: CausalLM, other: CausalLM) -> None:
    """Raise ValueError if programs compiled for ``model`` cannot run the arrays of ``other``."""
    remedy = "create a new Engine for this model"
    for name in ("vocab_size", "dtype", "mesh"):
        expected, value = getattr(model, name), getattr(other, name)
        if expected != value:
            raise ValueError(f"model.{name} is {value}, but this engine was compiled for {expected}: {remedy}")
    (structure, arrays), (other_structure, other_arrays) = split_for_program(model), split_for_program(other)
    if (structure.graph, structure.tree) != (other_structure.graph, other_structure.tree):
        raise ValueError(f"the model's structure differs from {model!r}, the model of this engine: {remedy}")
    for array, other_array in zip(arrays, other_arrays, strict=True):
        is_equal = (array.dtype, array.shape) == (other_array.dtype, other_array.shape)
        if not (is_equal and array.sharding.is_equivalent_to(other_array.sharding, array.ndim)):
            value, expected = (f"{a.dtype} {list(a.shape)} with {a.sharding}" for a in (other_array, array))
            raise ValueError(f"model has an array {value}, but this engine was compiled for {expected}: {remedy}")


def plan_engine(
    model: CausalLM,
    slots: int,
    capacity: int,
    limits: EngineLimits | None,
    logits_processor: LogitsProcessor | None,
    draft: draft_cost.DraftOption,
    prefix_bytes: int,
    grouping: Grouping | None,
) -> EnginePlan:
    """Validate the arguments of an `Engine`, round its sizes and check that its caches fit in memory.

    Raises:
        ValueError: see `Engine`.
    """
    _check_types(model, limits, logits_processor=logits_processor, grouping=grouping)
    model, limits = unroll_for_decoding(model), limits or EngineLimits()
    limits = dataclasses.replace(limits, max_stop_ids=max(limits.max_stop_ids, len(eos_ids(model, ...))))
    capacity, slots = whole_number("capacity", capacity, 1), whole_number("slots", slots, 1)
    mesh = model.strategy.mesh
    batch_shards = shard_count(mesh, batch_axes(mesh))
    slots += -slots % batch_shards
    place = replicated_place(split_once(model)[1])
    resolved = _resolve_draft(model, draft, slots, capacity)
    lookahead = 0 if resolved is None else resolved.count
    _check_rope_length(model, capacity, lookahead, has_independent_rows=grouping is None)
    if grouping is None:
        grouping = as_one_large_chunk if resolved is None else one_by_one
    cache_size = CacheSize(capacity + lookahead, lookahead)
    bytes_per_prefix = cache_bytes(model, batch_shards, cache_size)
    plan = EnginePlan(
        model=model,
        limits=limits,
        capacity=capacity,
        slots=slots,
        batch_shards=batch_shards,
        draft=resolved.commit(place) if isinstance(resolved, ModelBasedDraft) else resolved,
        cache_size=cache_size,
        grouping=grouping,
        step_options=StepOptions(
            limits.sampling, limits.max_logprobs, limits.tempered_logprobs, logits_processor, mesh
        ),
        max_prefixes=whole_number("prefix_bytes", prefix_bytes, 0) // max(bytes_per_prefix, 1),
        place=place,
    )
    _check_memory(plan, plan.max_prefixes * bytes_per_prefix)
    return plan


def _check_types(model: Any, limits: Any, **functions: Any) -> None:
    check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
    check_type("limits", limits, EngineLimits | None, "nnxmoe.EngineLimits(…), or None")
    for name, function in functions.items():
        if function is not None:
            check_object("Engine", name, function, "a function")


def _resolve_draft(model: CausalLM, draft: draft_cost.DraftOption, slots: int, capacity: int) -> Draft | None:
    if draft is not None and not model.token_independent():
        raise ValueError(
            f"draft={draft}: with {model.strategy.dispatch}, draft tokens would compete with real tokens for "
            "experts and change the output. Use Strategy(dispatch=nnxmoe.Sorted())"
        )
    resolved = draft_cost.resolve(model, draft, slots, capacity)
    if isinstance(resolved, ModelBasedDraft) and resolved.vocab_size != model.vocab_size:
        raise ValueError(
            f"draft={resolved}: its vocabulary has {resolved.vocab_size} ids, but the model's has {model.vocab_size}. "
            "Pass a draft model with the same tokenizer and vocab_size"
        )
    return resolved


def _check_rope_length(model: CausalLM, capacity: int, lookahead: int, has_independent_rows: bool) -> None:
    """Raise ValueError if rotary frequencies change because of other rows, or of draft tokens beyond the capacity."""
    length = model.fixed_rope_length
    if length is None:
        return
    if model.has_dynamic_rope and has_independent_rows and capacity > length:
        raise ValueError(
            f"capacity={capacity}: the rotary embedding of this model depends on the longest row beyond {length} "
            "tokens, so requests would affect each other. Reduce capacity to this length, or use generate()"
        )
    if not model.has_dynamic_rope and capacity <= length < capacity + lookahead:
        raise ValueError(
            f"capacity={capacity}: with {lookahead} draft tokens, the cache exceeds the {length} positions beyond "
            f"which the rotary frequencies change. Generate without a draft, or use a capacity of {length - lookahead}"
        )


def _check_memory(plan: EnginePlan, prefix_bytes: int) -> None:
    """Raise ValueError if the caches of rows, prefills, prefixes and the draft do not fit in memory."""
    draft, tokens = plan.draft, plan.cache_size.tokens
    draft_arrays = [] if draft is None else jax.eval_shape(lambda: jax.tree.leaves(draft.empty(plan.slots, tokens)))
    draft_bytes = sum(array.size * array.dtype.itemsize for array in draft_arrays)
    prefill_bytes = 0
    if plan.slots > 1 and plan.grouping in (as_one_large_chunk, one_by_one):  # prefills run while other rows decode
        rows = plan.grouping([SMALL] * plan.slots, plan.slots).rows
        prefill_bytes = plan.cache_bytes(plan.pad_rows(rows))
    description = f"a cache of {tokens} tokens for batch {plan.slots} takes"
    remedy = "use fewer max_new_tokens, a smaller capacity, or a smaller batch"
    refuse_beyond_memory(plan.cache_bytes(plan.slots) + prefill_bytes + draft_bytes + prefix_bytes, description, remedy)
