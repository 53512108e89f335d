"""Estimate the cost of steps with drafts, and choose a draft for ``draft="auto"``.

The estimate counts the bytes that a step reads and the products that it computes. ``"auto"`` raises
ValueError if no draft is expected to pay.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nnxmoe.config.printable import short
from nnxmoe.config.validate import whole_number
from nnxmoe.generation.draft import ModelBasedDraft, MTPDraft, PromptLookup, mtp_modules
from nnxmoe.generation.passes import CacheSize, cache_bytes
from nnxmoe.generation.rows import Draft
from nnxmoe.layers.linear.kernel import as_weight, is_kernel
from nnxmoe.layers.linear.lora import UnmergeValue
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import strip_metadata
from nnxmoe.moe.block import MoE
from nnxmoe.moe.dispatch import Dense
from nnxmoe.runtime.progress import say

DraftOption = Draft | Literal["auto"] | None

# Operations per byte read at which computing takes as long as reading. GPU: H100, 989 TFLOP/s and 3.35 TB/s.
# TPU: v5p, 459 TFLOP/s and 2.77 TB/s. CPU: two cores in bfloat16, with the models of tests/benchmarks/models.py.
BALANCE = {"gpu": 295.0, "tpu": 166.0, "cpu": 20.0}
# On CPUs the float32 product of one row takes as long as reading. Products of several rows take longer: Llama's steps
# of 2 and 8 ids take 1.49 and 2.56 times as long as a step of one id (jax 0.10.2, two cores).
CPU_FLOAT32 = 3.0
# Share of drafts that other systems accept. DeepSeek-V3's prediction layer: 0.81 to 0.90 (DeepSeek-V3 technical
# report, section 5.4.3; vLLM #12755). Prompt lookup: 1.5 ids per step on GSM8K, far more if answers copy the prompt.
MTP, LOOKUP = "multi-token prediction", "prompt lookup"
REACHABLE = {MTP: 0.85, LOOKUP: 1 / 3}
LEAST = 1.1  # smallest expected speed-up for "auto": less is within the error of the estimate
MOST = 7  # largest number of ids that "auto" drafts with prompt lookup


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """Cost of steps that verify ``count`` drafts per row.

    Attributes:
        source: source of the drafts.
        count: number of drafts per row and step.
        plain_bytes: bytes of weights and cache that a step without drafts reads.
        bytes: bytes of weights and cache that a step with drafts reads.
        ratio: time of a step with drafts / time of a step without drafts.
    """

    source: str
    count: int
    plain_bytes: float
    bytes: float
    ratio: float

    @property
    def break_even(self) -> float:
        """Share of drafts that must be accepted to pay, or inf if accepting every draft does not pay."""
        return acceptance(self.ratio, self.count)

    def speed(self, accepted: float) -> float:
        """Return the speed-up over steps without drafts if the share ``accepted`` of drafts is accepted."""
        return made(accepted, self.count) / self.ratio

    @property
    def expected(self) -> float:
        """Share of drafts that ``"auto"`` expects to be accepted, or 0 for sources it never chooses."""
        return REACHABLE.get(self.source, 0.0)

    @property
    def pays(self) -> str:
        """Text that states when drafts pay."""
        worst = self.break_even
        return f"pay if more than {worst:.0%} are accepted" if math.isfinite(worst) else "never pay"

    @property
    def name(self) -> str:
        """Number and source of the drafts, as text."""
        return f"{self.count} draft{'s' * (self.count > 1)} by {self.source}"

    def __str__(self) -> str:
        more = self.bytes / self.plain_bytes
        return f"{self.name}: a step reads {more:.2f} x the bytes in {self.ratio:.2f} x the time; drafts {self.pays}"


def made(accepted: float, count: int) -> float:
    """Return the expected number of ids per step with ``count`` drafts.

    Args:
        accepted: probability that a draft is accepted if all earlier drafts of the step are (Leviathan
            et al. 2023).
    """
    return sum(accepted**n for n in range(count + 1))


def acceptance(ratio: float, count: int) -> float:
    """Return the acceptance probability at which a step with ``count`` drafts yields ``ratio`` ids.

    Returns inf if ``ratio`` is above ``count + 1``.
    """
    if ratio <= 1:
        return 0.0
    if ratio > count + 1:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if made(middle, count) < ratio else (low, middle)
    return (low + high) / 2


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Bytes and operations of passes over a module.

    Attributes:
        dense: bytes that every pass reads.
        experts: per MoE layer, the share of experts that a token is routed to, and the bytes of all
            experts.
        operations: operations per token.
        dtype: dtype of activations.
    """

    dense: int
    experts: tuple[tuple[float, int], ...]
    operations: float
    dtype: Any

    def read(self, tokens: int) -> float:
        """Return the expected bytes read by a pass over ``tokens``, with independent and uniform routing."""
        return self.dense + sum(size * (1 - (1 - share) ** tokens) for share, size in self.experts)

    def time(self, tokens: int, cache: float = 0.0) -> float:
        """Return the time of a pass, in bytes that memory delivers in this time."""
        read, operations, platform = self.read(tokens) + cache, self.operations * tokens, jax.default_backend()
        if platform == "cpu" and self.dtype == jnp.float32:
            return read + (operations / CPU_FLOAT32 if tokens > 1 else 0.0)
        return max(read, operations / BALANCE.get(platform, BALANCE["gpu"]))


def _weights(module: nnx.Module, head: CausalLM) -> _Weights:
    """Measure the weights of a module that ends in a decoder's output head.

    Excludes the embedding, because a pass reads only a few of its rows.
    """
    dense, operations = _bytes(module), _operations(module)
    if head.head is None:
        operations += 2 * math.prod(head.embed.table.shape)
    else:
        dense -= _bytes(head.embed)
    found = []
    for _, block in nnx.iter_graph(module):
        if isinstance(block, MoE):
            count = block.experts.count
            chosen = count if isinstance(block.dispatch, Dense) else getattr(block.router.select, "k", count)
            found.append((chosen / count, _bytes(block.experts)))
            operations -= (1 - chosen / count) * _operations(block.experts)
    return _Weights(dense - sum(size for _, size in found), tuple(found), operations, head.dtype)


def _bytes(module: nnx.Module) -> int:
    flat = nnx.to_flat_state(nnx.state(module))
    return sum(math.prod(v.shape) * v.dtype.itemsize for _, v in flat if not isinstance(v, UnmergeValue))


def _operations(module: nnx.Module) -> float:
    """Count the operations of the linear maps per token, with every expert."""
    parts = [part for _, part in nnx.iter_graph(module) if isinstance(part, QuantizedWeight) or is_kernel(part)]
    maps = map(as_weight, parts)
    return 2.0 * sum(math.prod((*one.lead, *one.ins, *one.outs)) for one in maps)


def _cost(model: CausalLM, source: str, count: int, own: Any, slots: int, capacity: int) -> DraftCost:
    """Estimate the cost of steps with ``count`` drafts per row.

    Args:
        own: modules that draft, as in `ModelBasedDraft.modules`. If None, drafts cost nothing.
    """
    decoder = strip_metadata(model)
    weights, cache = _weights(decoder, decoder), cache_bytes(model, slots, CacheSize(capacity, 0))
    tokens = slots * (count + 1)
    time, read = weights.time(tokens, cache), weights.read(tokens) + cache
    if own is not None:  # a pass over the accepted ids, then a pass per further draft
        passes = [tokens, *[slots] * (count - 1)]
        drafts, layer = _weights(own, own["decoder"]), getattr(own, "mtp", None)
        part = own["decoder"].empty_cache if layer is None else functools.partial(layer.empty_cache, own["decoder"])
        buffers = jax.eval_shape(lambda: jax.tree.leaves(part(slots, capacity).layers))
        each = sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers)
        time += sum(drafts.time(one, each) for one in passes)
        read += sum(drafts.read(one) + each for one in passes)
    return DraftCost(source, count, weights.read(slots) + cache, read, time / weights.time(slots, cache))


def draft_cost(model: CausalLM, draft: Draft, *, slots: int = 1, capacity: int = 2048) -> DraftCost:
    """Estimate the cost of steps with a draft.

    The time of a pass is the time of reading or of computing on this platform, whichever is longer. The
    estimate excludes collectives, launches and the operations of attention. Drafts of classes other
    than `PromptLookup`, `MTPDraft` and `ModelDraft` count as free.

    Args:
        model: the model. Abstract arrays suffice.
        draft: the draft.
        slots: number of rows in use.
        capacity: tokens per row of the cache.
    """
    slots, capacity = whole_number("slots", slots, 1), whole_number("capacity", capacity, 1)
    own = draft.modules if isinstance(draft, ModelBasedDraft) else None
    source = {PromptLookup: LOOKUP, MTPDraft: MTP}.get(type(draft), type(draft).__name__)
    return _cost(model, source, draft.count, own, slots, capacity)


def auto_cost(model: CausalLM, slots: int, capacity: int) -> DraftCost:
    """Estimate the cost of the draft that ``"auto"`` chooses.

    ``"auto"`` drafts one id with the multi-token prediction layers if there are any. Otherwise it uses
    prompt lookup, with the number of ids that is fastest at the `REACHABLE` share.
    """
    if model.mtp:
        return _cost(model, MTP, 1, mtp_modules(model), slots, capacity)
    costs = [_cost(model, LOOKUP, count, None, slots, capacity) for count in range(1, MOST + 1)]
    return max(costs, key=lambda cost: cost.speed(cost.expected))


def resolve(model: CausalLM, draft: DraftOption, slots: int, capacity: int) -> Draft | None:
    """Return ``draft``, or for ``"auto"`` the draft of `auto_cost`. Logs the cost of an ``"auto"`` draft.

    Raises:
        ValueError: if an ``"auto"`` draft does not pay, or if ``draft`` is not a valid option.
    """
    proposes = callable(getattr(draft, "propose", None)) and not isinstance(draft, type)
    if draft is None or proposes:
        return draft  # pyright: ignore[reportReturnType]
    if draft != "auto":
        raise ValueError(f"draft={short(draft)}: use 'auto', None, or an object such as nnxmoe.PromptLookup()")
    cost = auto_cost(model, slots, capacity)
    if cost.speed(cost.expected) < LEAST:
        raise ValueError(
            f"draft='auto' does not pay with {slots} slots: {cost}, and about {cost.expected:.0%} can be expected. "
            "Leave draft out, or choose one such as nnxmoe.PromptLookup(4) yourself"
        )
    _say_once(str(cost))
    return MTPDraft.of(model, cost.count) if cost.source == MTP else PromptLookup(cost.count)


@functools.lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    say("%s", message)


def break_even(model: CausalLM, draft: Draft, *, slots: int = 1, capacity: int = 2048) -> float:
    """Return the share of drafts that the model must accept for drafts to pay, or inf if they never pay.

        nnxmoe.break_even(model, nnxmoe.PromptLookup(4), slots=8)

    A step over ``k`` drafts yields ``(1 - a ** (k + 1)) / (1 - a)`` ids if each draft is accepted with
    probability ``a`` (Leviathan et al. 2023). `draft_cost` estimates the time of the step.

    Args:
        model: the model. Abstract arrays suffice.
        draft: the draft.
        slots: number of rows in use.
        capacity: tokens per row of the cache.
    """
    return draft_cost(model, draft, slots=slots, capacity=capacity).break_even
