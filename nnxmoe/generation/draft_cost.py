"""The cost of steps with drafts, estimated from the bytes that they read and the products that they compute; and
``draft="auto"``, which drafts where that pays and refuses where it cannot."""

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

# Operations per byte read at which products take as long as reading: H100 989 TFLOP/s and 3.35 TB/s, TPU v5p 459 and
# 2.77; two CPU cores in bfloat16, with the models of tests/benchmarks/models.py.
BALANCE = {"gpu": 295.0, "tpu": 166.0, "cpu": 20.0}
# On CPUs the float32 product of one row takes as long as reading, that of several rows longer: Llama's steps of 2 and 8
# ids take 1.49 and 2.56 times as long as those of one (jax 0.10.2, two cores).
CPU_FLOAT32 = 3.0
# The share of drafts that was accepted elsewhere: DeepSeek-V3's layer 0.81 to 0.90 (its report, section 5.4.3; vLLM
# #12755); prompt lookup 1.5 ids per step on GSM8K, and far more where answers copy.
MTP, LOOKUP = "multi-token prediction", "prompt lookup"
REACHABLE = {MTP: 0.85, LOOKUP: 1 / 3}
LEAST = 1.1  # the expected speed-up that "auto" asks for: less is within the error of the estimate
MOST = 7  # ids that prompt lookup drafts


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """The cost of steps that verify ``count`` drafts per row. ``plain_bytes`` and ``bytes``: read by a step without and
    with drafts, weights and cache; ``ratio``: the time of one with drafts / the time of one without."""

    source: str
    count: int
    plain_bytes: float
    bytes: float
    ratio: float

    @property
    def break_even(self) -> float:
        """The share of drafts that must be accepted; infinite if not even all of them are enough."""
        return acceptance(self.ratio, self.count)

    def speed(self, accepted: float) -> float:
        """New ids per time in multiples of those without drafts, if this share of drafts is accepted."""
        return made(accepted, self.count) / self.ratio

    @property
    def expected(self) -> float:
        """The share that ``"auto"`` expects to be accepted; 0 for other sources than it chooses from."""
        return REACHABLE.get(self.source, 0.0)

    @property
    def pays(self) -> str:
        """Where drafts pay, in words."""
        worst = self.break_even
        return f"pay if more than {worst:.0%} are accepted" if math.isfinite(worst) else "never pay"

    @property
    def name(self) -> str:
        """Number and source of the drafts."""
        return f"{self.count} draft{'s' * (self.count > 1)} by {self.source}"

    def __str__(self) -> str:
        more = self.bytes / self.plain_bytes
        return f"{self.name}: a step reads {more:.2f} x the bytes in {self.ratio:.2f} x the time; drafts {self.pays}"


def made(accepted: float, count: int) -> float:
    """Ids per step with ``count`` drafts, each accepted with this probability if those before it are (Leviathan et al.
    2023)."""
    return sum(accepted**n for n in range(count + 1))


def acceptance(ratio: float, count: int) -> float:
    """The probability with which a step with ``count`` drafts makes ``ratio`` ids; infinite above ``count + 1``."""
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
    """Reads and products of passes over a module: ``dense`` bytes in every pass; per MoE layer the share of its experts
    that a token is routed to, and their bytes; operations per token, and the dtype of activations."""

    dense: int
    experts: tuple[tuple[float, int], ...]
    operations: float
    dtype: Any

    def read(self, tokens: int) -> float:
        """Expected bytes that a pass over ``tokens`` reads, if every token is routed independently and uniformly."""
        return self.dense + sum(size * (1 - (1 - share) ** tokens) for share, size in self.experts)

    def time(self, tokens: int, cache: float = 0.0) -> float:
        """Time of a pass, in units of the bytes that memory could deliver in it."""
        read, operations, platform = self.read(tokens) + cache, self.operations * tokens, jax.default_backend()
        if platform == "cpu" and self.dtype == jnp.float32:
            return read + (operations / CPU_FLOAT32 if tokens > 1 else 0.0)
        return max(read, operations / BALANCE.get(platform, BALANCE["gpu"]))


def _weights(module: nnx.Module, head: CausalLM) -> _Weights:
    """Weights of a module that ends in a decoder's output head; the embedding is left out, because a pass reads only a
    few of its rows."""
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
    """Operations of the linear maps per token, with every expert counted."""
    parts = [part for _, part in nnx.iter_graph(module) if isinstance(part, QuantizedWeight) or is_kernel(part)]
    maps = map(as_weight, parts)
    return 2.0 * sum(math.prod((*one.lead, *one.ins, *one.outs)) for one in maps)


def _cost(model: CausalLM, source: str, count: int, own: Any, slots: int, capacity: int) -> DraftCost:
    """``own``: the modules that draft, as of `ModelBasedDraft.modules`; None: drafts cost nothing."""
    decoder = strip_metadata(model)
    weights, cache = _weights(decoder, decoder), cache_bytes(model, slots, CacheSize(capacity, 0))
    tokens = slots * (count + 1)
    time, read = weights.time(tokens, cache), weights.read(tokens) + cache
    if own is not None:  # one pass over what was accepted, then one per further draft
        passes = [tokens, *[slots] * (count - 1)]
        drafts, layer = _weights(own, own["decoder"]), getattr(own, "mtp", None)
        part = own["decoder"].empty_cache if layer is None else functools.partial(layer.empty_cache, own["decoder"])
        buffers = jax.eval_shape(lambda: jax.tree.leaves(part(slots, capacity).layers))
        each = sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers)
        time += sum(drafts.time(one, each) for one in passes)
        read += sum(drafts.read(one) + each for one in passes)
    return DraftCost(source, count, weights.read(slots) + cache, read, time / weights.time(slots, cache))


def draft_cost(model: CausalLM, draft: Draft, *, slots: int = 1, capacity: int = 2048) -> DraftCost:
    """The cost of steps with these drafts, with ``slots`` rows in use and a cache of ``capacity`` tokens per row.

    The model may have shapes only. The time is that of reading or of computing, whichever is longer, on this
    platform; collectives, launches and the operations of attention are left out, and drafts of classes other than
    `PromptLookup`, `MTPDraft` and `ModelDraft` count as free.
    """
    slots, capacity = whole_number("slots", slots, 1), whole_number("capacity", capacity, 1)
    own = draft.modules if isinstance(draft, ModelBasedDraft) else None
    source = {PromptLookup: LOOKUP, MTPDraft: MTP}.get(type(draft), type(draft).__name__)
    return _cost(model, source, draft.count, own, slots, capacity)


def auto_cost(model: CausalLM, slots: int, capacity: int) -> DraftCost:
    """Cost of the drafts that ``"auto"`` chooses: one by the layers for multi-token prediction if there are any, else
    the number by prompt lookup that is fastest at the `REACHABLE` share."""
    if model.mtp:
        return _cost(model, MTP, 1, mtp_modules(model), slots, capacity)
    costs = [_cost(model, LOOKUP, count, None, slots, capacity) for count in range(1, MOST + 1)]
    return max(costs, key=lambda cost: cost.speed(cost.expected))


def resolve(model: CausalLM, draft: DraftOption, slots: int, capacity: int) -> Draft | None:
    """``draft`` itself, or for ``"auto"`` the drafts of `auto_cost`, whose cost is logged. Raises ValueError if they do
    not pay, and for another text."""
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
    """The share of drafts that the model must accept for steps with them to pay, each draft by itself; infinite if not
    even all of them are enough.

        nnxmoe.break_even(model, nnxmoe.PromptLookup(4), slots=8)

    A step over ``k`` drafts makes ``(1 - a ** (k + 1)) / (1 - a)`` ids if each is accepted with probability ``a``
    (Leviathan et al. 2023). Its time is estimated from the bytes that it reads and the products that it computes on
    this platform, with ``slots`` rows in use and a cache of ``capacity`` tokens each; see `draft_cost`. The model may
    have shapes only.
    """
    return draft_cost(model, draft, slots=slots, capacity=capacity).break_even
