"""The training objective: next-token cross-entropy computed in chunks, plus auxiliary losses."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from nnxmoe.axes import divided_over, shards
from nnxmoe.layers.kernel import Kernel
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.moe import balance as balancing
from nnxmoe.moe.router import Routing

FIELDS = ("tokens", "targets", "loss_mask", "segment_ids", "positions", "attention_mask")
MASKS = ("loss_mask", "attention_mask")
Batch = Mapping[str, Any]
Sums = tuple[Float[Array, ""], Float[Array, ""]]


class Head(Protocol):
    """``(x, kernel, targets, weights, z, shards) -> (loss, cross-entropy)``, weighted sums over all tokens.

    The loss adds ``z * logsumexp(logits) ** 2`` per token and is the sum to differentiate. ``kernel [D V]`` is the
    output head's, tied or not. Logits are float32, products take operands of ``x``'s dtype. Rows are split over
    ``shards`` devices.
    """

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kernel: Kernel,
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        z: float,
        shards: int = 1,
    ) -> Sums: ...


@dataclasses.dataclass(frozen=True)
class Whole:
    """All logits at once: the oracle."""

    def __call__(self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, shards: int = 1) -> Sums:
        each, entropy, _ = _losses(kernel.float32(x), targets, z)
        return jnp.sum(each * weights), jax.lax.stop_gradient(jnp.sum(entropy * weights))


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """At most ``logits`` logits per device at a time; the full logits are never materialised.

    The same pass computes the gradients, so no product runs twice. Exact: a token's softmax is never split. Each chunk
    takes the same number of tokens from every row, so that rows stay on their devices.
    """

    logits: int = 1 << 26

    def __post_init__(self) -> None:
        if self.logits < 1:
            raise ValueError(f"ChunkedLoss(logits={self.logits}): the number of logits per chunk must be at least 1")

    def __call__(self, x: Array, kernel: Kernel, targets: Array, weights: Array, z: float, shards: int = 1) -> Sums:
        vocab = kernel.shape[1]
        batch, length = targets.shape
        step = min(length, max(1, self.logits // (vocab * -(-batch // shards))))
        sums: Any = _chunked(x, kernel, targets, jax.lax.stop_gradient(weights), step, z)
        return sums[0], jax.lax.stop_gradient(sums[1])


def _losses(logits: Array, targets: Array, z: float) -> tuple[Array, Array, Array]:
    """Per token: loss, cross-entropy and logsumexp."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return norm - chosen + z * norm**2, norm - chosen, norm


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _chunked(x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float) -> Sums:
    cast = kernel.cast(x.dtype)

    def one(sums: Sums, chunk: Any) -> tuple[Sums, None]:
        x, targets, weights = chunk
        each, entropy, _ = _losses(cast.float32(x), targets, z)
        return (sums[0] + jnp.sum(each * weights), sums[1] + jnp.sum(entropy * weights)), None

    return jax.lax.scan(one, (jnp.zeros(()), jnp.zeros(())), _chunks(step, x, targets, weights))[0]


def _with_slopes(x: Array, kernel: Kernel, targets: Array, weights: Array, step: int, z: float) -> Any:
    """The sums, and the gradients of the first with respect to ``x`` and, where it is trained, ``kernel``."""
    cast = kernel.cast(x.dtype)

    def one(carry: Any, chunk: Any) -> Any:
        total, entropies, slope = carry
        x, targets, weights = chunk
        logits = cast.float32(x)
        each, entropy, norm = _losses(logits, targets, z)
        hit = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        shares = jnp.exp(logits - norm[..., None])
        by_logits = (shares * (1 + 2 * z * norm)[..., None] - hit) * weights[..., None]
        by_logits = by_logits.astype(x.dtype)
        if slope is not None:
            slope = jax.tree.map(jnp.add, slope, kernel.outer(x, by_logits))
        sums = total + jnp.sum(each * weights), entropies + jnp.sum(entropy * weights)
        return (*sums, slope), cast.back(by_logits)

    slope = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), kernel) if kernel.trained else None
    start = (jnp.zeros(()), jnp.zeros(()), slope)
    (total, entropy, slope), by_x = jax.lax.scan(one, start, _chunks(step, x, targets, weights))
    batch, length, dim = x.shape
    by_x = jnp.moveaxis(by_x, 0, 1).reshape(batch, -1, dim)[:, :length]
    slope = None if slope is None else jax.tree.map(lambda a, like: a.astype(like.dtype), slope, kernel)
    return (total, entropy), (by_x, slope)


def _chunked_jvp(step: int, z: float, given: Any, moved: Any) -> Any:
    x, kernel, targets, weights = given
    sums, slopes = _with_slopes(x, kernel, targets, weights, step, z)
    total = jnp.zeros(())
    # Leaf by leaf; a kernel that is not trained comes last and has no slope.
    for slope, along in zip(jax.tree.leaves(slopes), jax.tree.leaves(moved[:2]), strict=False):
        if not isinstance(along, SymbolicZero):
            # In float32, in reverse mode too: 1 / tokens in bfloat16 is off by up to 0.4 %, as all gradients would be.
            total += jnp.sum(slope.astype(jnp.float32) * along.astype(jnp.float32))
    return sums, (total, jnp.zeros(()))


_chunked.defjvp(_chunked_jvp, symbolic_zeros=True)


def _chunks(step: int, *arrays: Array) -> tuple[Array, ...]:
    """``[B, T, …] -> [n, B, step, …]``, padded with zeros: tokens of weight 0."""

    def cut(a: Array) -> Array:
        count = -(-a.shape[1] // step)
        a = jnp.pad(a, [(0, 0), (0, count * step - a.shape[1]), *[(0, 0)] * (a.ndim - 2)])
        return jnp.moveaxis(a.reshape(a.shape[0], count, step, *a.shape[2:]), 1, 0)

    return tuple(map(cut, arrays))


# Batches


def check_batch(batch: Batch) -> None:
    """Raises ValueError for unknown fields, for shapes that differ and for ids that are not integers."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch must be a dict of arrays, got {type(batch).__name__}: pass an iterable of dicts")
    if unknown := [name for name in batch if name not in FIELDS]:
        raise ValueError(f"unknown field {unknown[0]!r} in a batch: the fields are {', '.join(FIELDS)}")
    if "tokens" not in batch:
        raise ValueError(f"a batch needs tokens [B, T], got {', '.join(batch) or 'no fields'}")
    shape = list(jnp.shape(batch["tokens"]))
    if len(shape) != 2:
        raise ValueError(f"tokens has the shape {shape}: it must be [B, T]")
    for name, array in batch.items():
        if (other := list(jnp.shape(array))) != shape:
            raise ValueError(f"{name} has the shape {other}, not that of tokens, {shape}: every array must be [B, T]")
        dtype = np.asarray(array).dtype if isinstance(array, list | tuple) else array.dtype
        if name not in MASKS and not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"{name} has the dtype {dtype}: use an integer dtype, such as int32")


def check_ids(batch: Batch, vocab: int) -> None:
    """Raises ValueError for ids outside the vocabulary. Reads the arrays, so it cannot be traced."""
    for name in ("tokens", "targets"):
        ids = np.asarray(batch.get(name, 0))
        for found in (int(np.min(ids, initial=0)), int(np.max(ids, initial=0))):
            if not 0 <= found < vocab:
                raise ValueError(
                    f"{name} contains the id {found}, outside the model's vocabulary 0 to {vocab - 1}: use the model's "
                    "tokenizer; where nothing is to be predicted, set the id and loss_mask to 0"
                )


def real_tokens(batch: Batch) -> Array:
    """``[B, T]``, False for padding: where the attention mask or the segment id is 0."""
    real = jnp.ones(jnp.shape(batch["tokens"]), bool)
    if "attention_mask" in batch:
        real &= jnp.asarray(batch["attention_mask"]) != 0
    if "segment_ids" in batch:
        real &= jnp.asarray(batch["segment_ids"]) != 0
    return real


def targets_of(batch: Batch) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The target of each token, and its weight: 1 where the loss counts it, else 0.

    Without ``targets`` in the batch the target is the next token of the row, which counts if it is no padding, belongs
    to the same segment and has ``loss_mask`` 1.
    """
    real = real_tokens(batch)
    counts = real & (jnp.asarray(batch["loss_mask"]) != 0) if "loss_mask" in batch else real
    if "targets" in batch:
        return jnp.asarray(batch["targets"]), counts.astype(jnp.float32)
    follows = jnp.roll(counts, -1, axis=1) & real & (jnp.arange(real.shape[1]) < real.shape[1] - 1)[None, :]
    if "segment_ids" in batch:
        segment = jnp.asarray(batch["segment_ids"])
        follows &= jnp.roll(segment, -1, axis=1) == segment
    return jnp.roll(jnp.asarray(batch["tokens"]), -1, axis=1), follows.astype(jnp.float32)


# The objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of one batch, as arrays or as their shapes."""

    total: Any  # the scalar to minimise
    cross_entropy: Any  # mean over the tokens that count
    tokens: Any  # how many tokens count
    balance: Any  # without its weight, as is router_z
    router_z: Any
    load: Any  # int [L, E]: assignments per MoE layer and expert
    dropped: Any  # int [L]: assignments that exceeded an expert's capacity


@dataclasses.dataclass(frozen=True)
class Objective:
    """Mean next-token cross-entropy plus weighted auxiliary losses; each weight defaults to 0.

    ``z_loss`` weighs the mean squared logsumexp of the logits (PaLM; Chowdhery et al. 2022), ``balance`` the mean of
    ``balance_loss`` over the MoE layers, ``router_z_loss`` the mean of the routers' z-losses.
    """

    z_loss: float = 0.0
    balance: float = 0.0
    balance_loss: Callable[[Routing], Float[Array, ""]] = balancing.switch_loss
    router_z_loss: float = 0.0
    head: Head = ChunkedLoss()

    def __call__(
        self,
        model: CausalLM,
        batch: Batch,
        key: Any = None,
        tokens: Float[Array, ""] | None = None,
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], Losses]:
        """The scalar to minimise, and the losses it consists of, of a batch that `check_batch` accepts.

        With gradient accumulation ``batch`` is a part whose results are added to those of the other parts: ``tokens``
        is the number of tokens that count in the whole batch, ``share`` the weight of this part's auxiliary losses.
        """
        segments = batch.get("segment_ids")
        mask = real_tokens(batch) if segments is not None or "attention_mask" in batch else None
        body = model.body(batch["tokens"], mask, batch.get("positions"), segments, None, key, self._summarise_routing)
        targets, weights = targets_of(batch)
        count = jnp.maximum(jnp.sum(weights), 1.0) if tokens is None else tokens
        kernel = model.head_weight()
        x = body.x
        if model.strategy.mesh is None:  # one long row, which chunks may cut anywhere
            x, targets, weights = (a.reshape(1, -1, *a.shape[2:]) for a in (x, targets, weights))
        parts = shards(model.strategy.mesh, divided_over(len(targets), model.strategy.mesh))
        total, entropy = self.head(x, kernel, targets, weights, self.z_loss, parts)
        total, entropy = total / count, entropy / count
        infos = [body.infos[i] for i in sorted(body.infos)]
        even, router_z = (share * _mean([info.routing[i] for info in infos]) for i in range(2))
        total += self.balance * even + self.router_z_loss * router_z
        experts = infos[0].dispatch.load.shape[-1] if infos else 0
        load = jnp.stack([info.dispatch.load for info in infos]) if infos else jnp.zeros((0, experts), jnp.int32)
        dropped = jnp.stack([info.dispatch.dropped for info in infos]) if infos else jnp.zeros((0,), jnp.int32)
        return total, Losses(total, entropy, jnp.sum(weights), even, router_z, load, dropped)

    def _summarise_routing(self, routing: Routing) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Auxiliary losses of one layer, computed within the layer so that its scores need not be kept."""
        return self.balance_loss(routing), balancing.z_loss(routing)


def _mean(values: list[Array]) -> Array:
    return jnp.mean(jnp.stack(values)) if values else jnp.zeros(())
