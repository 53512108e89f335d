"""Estimate the cost of steps with drafts, and choose a draft for ``draft="auto"``.

The estimate counts the bytes that a step reads and the operations that it computes. ``"auto"`` raises
ValueError if no draft is expected to be faster.
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
from nnxmoe.layers.embed import is_embedding_table
from nnxmoe.layers.linear.kernel import as_weight, is_kernel
from nnxmoe.layers.linear.lora import UnmergeValue
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import strip_metadata
from nnxmoe.moe.block import MoE
from nnxmoe.moe.dispatch import Dense
from nnxmoe.runtime.progress import say

DraftOption = Draft | Literal["auto"] | None

# Arithmetic intensity (operations per byte read) at which compute takes as long as reading. GPU: H100, 989 TFLOP/s and
# 3.35 TB/s. TPU: v5p, 459 TFLOP/s and 2.77 TB/s. CPU: measured on two cores in bfloat16 with
# tests/benchmarks/models.py.
BALANCE = {"gpu": 295.0, "tpu": 166.0, "cpu": 20.0}
# On CPUs, a float32 product of one row takes as long as reading the weights. Products of several rows take longer:
# Llama steps of 2 and 8 ids take 1.49 and 2.56 times as long as a step of one id (jax 0.10.2, two cores).
CPU_FLOAT32 = 3.0
# Acceptance rates in other systems. DeepSeek-V3's prediction layer: 0.81 to 0.90 (DeepSeek-V3 technical report,
# section 5.4.3; vLLM #12755). Prompt lookup: 1.5 ids per step on GSM8K, far more if answers copy the prompt.
MTP, LOOKUP = "multi-token prediction", "prompt lookup"
REACHABLE = {MTP: 0.85, LOOKUP: 1 / 3}
MIN_SPEEDUP = 1.1  # Minimum expected speedup for "auto". A smaller speedup is within the error of the estimate.
MAX_LOOKUP = 7  # Maximum number of ids that "auto" drafts with prompt lookup.


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """Cost of decoding steps that verify ``count`` draft tokens per row.

    Attributes:
        source: source of the drafts.
        count: number of draft tokens per row and step.
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
        """Acceptance rate above which drafts are faster, or inf if they are slower even if all are accepted."""
        return acceptance(self.ratio, self.count)

    def speed(self, accepted: float) -> float:
        """Return the speedup over steps without drafts at the acceptance rate ``accepted``."""
        return made(accepted, self.count) / self.ratio

    @property
    def expected(self) -> float:
        """Acceptance rate that ``"auto"`` expects, or 0 for sources that ``"auto"`` never selects."""
        return REACHABLE.get(self.source, 0.0)

    @property
    def break_even_text(self) -> str:
        """Clause that states when drafts are faster, for messages."""
        rate = self.break_even
        return f"are faster if more than {rate:.0%} are accepted" if math.isfinite(rate) else "are never faster"

    @property
    def name(self) -> str:
        """Number and source of the draft tokens, as text."""
        return f"{self.count} draft{'s' * (self.count > 1)} by {self.source}"

    def __str__(self) -> str:
        traffic = self.bytes / self.plain_bytes
        text = f"{self.name}: a step reads {traffic:.2f} x the bytes in {self.ratio:.2f} x the time"
        return f"{text}; drafts {self.break_even_text}"


def made(accepted: float, count: int) -> float:
    """Return the expected number of ids per step with ``count`` draft tokens.

    Args:
        accepted: probability that a draft token is accepted if all earlier draft tokens of the step are accepted
            (Leviathan et al. 2023).
    """
    return sum(accepted**n for n in range(count + 1))


def acceptance(ratio: float, count: int) -> float:
    """Return the acceptance probability at which a step with ``count`` draft tokens yields ``ratio`` ids.

    Returns inf if ``ratio`` exceeds ``count + 1``.
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
    """Bytes read and operations computed by a forward pass through a module.

    Attributes:
        dense: bytes that every pass reads.
        experts: per MoE layer, the fraction of experts that a token is routed to, and the bytes of all
            experts.
        operations: operations per token.
        dtype: dtype of activations.
    """

    dense: int
    experts: tuple[tuple[float, int], ...]
    operations: float
    dtype: Any

    def read(self, tokens: int) -> float:
        """Return the expected bytes that a pass over ``tokens`` reads if routing is independent and uniform."""
        return self.dense + sum(size * (1 - (1 - share) ** tokens) for share, size in self.experts)

    def time(self, tokens: int, cache: float = 0.0) -> float:
        """Return the time of a pass, in units of the time to read one byte."""
        read_bytes, operations, platform = self.read(tokens) + cache, self.operations * tokens, jax.default_backend()
        if platform == "cpu" and self.dtype == jnp.float32:
            return read_bytes + (operations / CPU_FLOAT32 if tokens > 1 else 0.0)
        return max(read_bytes, operations / BALANCE.get(platform, BALANCE["gpu"]))


def _weights(module: nnx.Module, head: CausalLM) -> _Weights:
    """Measure the weights of a module that ends with the output head of a decoder.

    Excludes embedding tables except a tied output head, because a pass reads only a few of their rows.
    """
    tables = [v for _, v in nnx.to_flat_state(nnx.state(module)) if is_embedding_table(v)]
    dense, operations = _bytes(module) - sum(map(_nbytes, tables)), _operations(module)
    if head.head is None:
        dense += _nbytes(head.embed.table)
        operations += 2 * math.prod(head.embed.table.shape)
    experts = []
    for _, block in nnx.iter_graph(module):
        if isinstance(block, MoE):
            count = block.experts.count
            active = count if isinstance(block.dispatch, Dense) else getattr(block.router.select, "k", count)
            experts.append((active / count, _bytes(block.experts)))
            operations -= (1 - active / count) * _operations(block.experts)
    return _Weights(dense - sum(size for _, size in experts), tuple(experts), operations, head.dtype)


def _bytes(module: nnx.Module) -> int:
    flat = nnx.to_flat_state(nnx.state(module))
    return sum(_nbytes(v) for _, v in flat if not isinstance(v, UnmergeValue))


def _nbytes(variable: nnx.Variable) -> int:
    return math.prod(variable.shape) * variable.dtype.itemsize


def _operations(module: nnx.Module) -> float:
    """Count the operations of all linear layers per token, including all experts."""
    kernels = [node for _, node in nnx.iter_graph(module) if isinstance(node, QuantizedWeight) or is_kernel(node)]
    weights = map(as_weight, kernels)
    return 2.0 * sum(math.prod((*weight.lead, *weight.ins, *weight.outs)) for weight in weights)


def _cost(model: CausalLM, source: str, count: int, draft_modules: Any, slots: int, capacity: int) -> DraftCost:
    """Estimate the cost of steps with ``count`` draft tokens per row.

    Args:
        draft_modules: modules of the draft, as in `ModelBasedDraft.modules`. If None, proposing drafts costs nothing.
    """
    decoder = strip_metadata(model)
    weights, cache = _weights(decoder, decoder), cache_bytes(model, slots, CacheSize(capacity, 0))
    tokens = slots * (count + 1)
    time, read_bytes = weights.time(tokens, cache), weights.read(tokens) + cache
    if draft_modules is not None:  # one pass over the verified ids, then one pass per additional draft
        passes = [tokens, *[slots] * (count - 1)]
        drafts, layer = _weights(draft_modules, draft_modules["decoder"]), getattr(draft_modules, "mtp", None)
        empty_cache = (
            draft_modules["decoder"].empty_cache
            if layer is None
            else functools.partial(layer.empty_cache, draft_modules["decoder"])
        )
        buffers = jax.eval_shape(lambda: jax.tree.leaves(empty_cache(slots, capacity).layers))
        cache_read = sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers)
        time += sum(drafts.time(pass_tokens, cache_read) for pass_tokens in passes)
        read_bytes += sum(drafts.read(pass_tokens) + cache_read for pass_tokens in passes)
    return DraftCost(source, count, weights.read(slots) + cache, read_bytes, time / weights.time(slots, cache))


def draft_cost(model: CausalLM, draft: Draft, *, slots: int = 1, capacity: int = 2048) -> DraftCost:
    """Estimate the cost of steps with a draft.

    The time of a pass is the time to read or the time to compute on this platform, whichever is longer.
    The estimate excludes collectives, kernel launches and the operations of attention. Drafts of classes
    other than `PromptLookup`, `MTPDraft` and `ModelDraft` are assumed to be free.

    Args:
        model: model that verifies the draft tokens. Its arrays may be abstract.
        draft: source of the draft tokens.
        slots: number of rows in use.
        capacity: tokens per row of the cache.
    """
    slots, capacity = whole_number("slots", slots, 1), whole_number("capacity", capacity, 1)
    draft_modules = draft.modules if isinstance(draft, ModelBasedDraft) else None
    source = {PromptLookup: LOOKUP, MTPDraft: MTP}.get(type(draft), type(draft).__name__)
    return _cost(model, source, draft.count, draft_modules, slots, capacity)


def auto_cost(model: CausalLM, slots: int, capacity: int) -> DraftCost:
    """Estimate the cost of the draft that ``"auto"`` selects.

    ``"auto"`` drafts one id with the multi-token prediction layers if the model has them. Otherwise it uses
    prompt lookup, with the number of ids that is fastest at the `REACHABLE` acceptance rate.
    """
    if model.mtp:
        return _cost(model, MTP, 1, mtp_modules(model), slots, capacity)
    costs = [_cost(model, LOOKUP, count, None, slots, capacity) for count in range(1, MAX_LOOKUP + 1)]
    return max(costs, key=lambda cost: cost.speed(cost.expected))


def resolve(model: CausalLM, draft: DraftOption, slots: int, capacity: int) -> Draft | None:
    """Return ``draft``, or the draft of `auto_cost` for ``"auto"``. Logs the cost of an ``"auto"`` draft.

    Raises:
        ValueError: if an ``"auto"`` draft is not expected to be faster, or ``draft`` is not a valid option.
    """
    proposes = callable(getattr(draft, "propose", None)) and not isinstance(draft, type)
    if draft is None or proposes:
        return draft  # pyright: ignore[reportReturnType]
    if draft != "auto":
        raise ValueError(f"draft={short(draft)}: use 'auto', None, or an object such as nnxmoe.PromptLookup()")
    cost = auto_cost(model, slots, capacity)
    if cost.speed(cost.expected) < MIN_SPEEDUP:
        raise ValueError(
            f"draft='auto' is not faster with {slots} slots: {cost}, and about {cost.expected:.0%} are expected to be. "
            "Remove draft=, or pass a draft such as nnxmoe.PromptLookup(4)"
        )
    _say_once(str(cost))
    return MTPDraft.of(model, cost.count) if cost.source == MTP else PromptLookup(cost.count)


@functools.lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    say("%s", message)


def break_even(model: CausalLM, draft: Draft, *, slots: int = 1, capacity: int = 2048) -> float:
    """Return the acceptance rate above which a draft is faster, or inf if it is never faster.

        nnxmoe.break_even(model, nnxmoe.PromptLookup(4), slots=8)

    A step over ``k`` drafts yields ``(1 - a ** (k + 1)) / (1 - a)`` ids if each draft is accepted with
    probability ``a`` (Leviathan et al. 2023). `draft_cost` estimates the time of the step.

    Args:
        model: model that verifies the draft tokens. Its arrays may be abstract.
        draft: source of the draft tokens.
        slots: number of rows in use.
        capacity: tokens per row of the cache.
    """
    return draft_cost(model, draft, slots=slots, capacity=capacity).break_even
