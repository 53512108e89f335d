"""Training objectives: next-token cross-entropy plus auxiliary losses, or a function of model and batch."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.validate import check_object, set_numbers
from nnxmoe.layers.context import OutputRequest
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.given_routing import check_routing
from nnxmoe.model.output import Body
from nnxmoe.moe import balance as balancing
from nnxmoe.moe.selection import Routing
from nnxmoe.train.loop.batch import Batch, check_batch, real_tokens, targets_ahead, targets_of
from nnxmoe.train.loop.loss import ChunkedLoss, Head, Sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """Losses of one batch, as arrays or shapes. A field is None if the objective does not compute it."""

    total: Any  # the scalar to minimize
    cross_entropy: Any  # mean over the unmasked tokens
    tokens: Any  # number of unmasked tokens, or of pairs of completions
    balance: Any  # load-balancing loss, unweighted
    router_z: Any  # routers' z-loss, unweighted
    load: Any  # int [L, E]: assignments per MoE layer and expert, prediction layers last
    dropped: Any  # int [L]: assignments that exceeded an expert's capacity
    mtp: Any = None  # unweighted mean over the depths of multi-token prediction
    measured: Any = dataclasses.field(default_factory=dict)  # name -> scalar: additional metrics of the objective


class TrainingObjective(Protocol):
    """Objective that a step minimizes, such as `Objective` or a function wrapped by `of_function`."""

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch is malformed."""
        ...

    def count(self, batch: Batch) -> Any:
        """Count the tokens that the loss is averaged over. Returns None if the loss is not divided by a count."""
        ...

    def __call__(
        self, model: CausalLM, batch: Batch, key: Any, count: Any, share: float
    ) -> tuple[Float[Array, ""], Losses]:
        """Compute the scalar to minimize, and its terms.

        With gradient accumulation, the results of all microbatches are summed.

        Args:
            batch: A batch, or a microbatch with gradient accumulation.
            key: Random key.
            count: Result of `count` for the whole batch, or None without accumulation.
            share: Weight of the terms that are not divided by ``count``.
        """
        ...


@runtime_checkable
class SampledObjective(TrainingObjective, Protocol):
    """Objective whose batches are sampled from the model that is being trained, such as `GRPO`."""

    def rollouts(self, prompts: Iterable[Any], seed: int, row_multiple: int) -> Iterable[Batch]:
        """Return an iterable of batches; see `Rollouts`."""
        ...


@dataclasses.dataclass(frozen=True)
class _OfFunction:
    function: Callable[..., Any]

    def check(self, batch: Batch) -> None:
        if not batch:
            raise ValueError("a batch must be a dict of arrays, got an empty dict: pass at least one array")
        rows = {name: np.shape(array)[:1] for name, array in batch.items()}
        if len(set(rows.values())) > 1 or () in rows.values():
            raise ValueError(f"the arrays of a batch have different numbers of rows, {rows}: all must be [B, …]")

    def count(self, batch: Batch) -> None:
        return None

    def __call__(
        self, model: CausalLM, batch: Batch, key: Any = None, count: Any = None, share: float = 1.0
    ) -> tuple[Float[Array, ""], Losses]:
        result = self.function(model, batch)
        loss, scalars = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(scalars, Mapping):
            raise ValueError(
                f"the objective returned {type(scalars).__name__} in addition to the loss: return a dict of scalars"
            )
        total, *scaled = (_scalar(name, value) * share for name, value in {_LOSS: loss, **scalars}.items())
        empty = jnp.zeros((0,), jnp.int32)
        measured = dict(zip(scalars, scaled, strict=True))
        return total, Losses(total, None, None, None, None, empty.reshape(0, 0), empty, measured=measured)


_LOSS = "the loss"


def _scalar(name: str, value: Any) -> Float[Array, ""]:
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        raise ValueError(
            f"the objective returned a {type(value).__name__} as {name}: return a scalar, or a scalar and a dict of "
            "scalars to log"
        ) from error
    if array.shape or not (jnp.issubdtype(array.dtype, jnp.floating) or name != _LOSS):
        raise ValueError(
            f"the objective returned {array.dtype} {list(array.shape)} as {name}: return a scalar, such as the mean "
            "over rows"
        )
    return array.astype(jnp.float32)


def of_function(objective: Any) -> TrainingObjective:
    """Wrap a function of model and batch as an objective. Objectives are returned unchanged.

    The function is ``(model, batch) -> loss`` or ``-> (loss, {name: scalar})``. The scalars are logged
    as metrics. Batches may be any dicts of arrays with equal numbers of rows. With gradient
    accumulation, the mean over the microbatches is minimized.
    """
    if hasattr(objective, "check"):
        return objective
    if not callable(objective):
        raise ValueError(f"objective={objective!r}: pass train.Objective(…), or a function of a model and a batch")
    return _OfFunction(objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterLosses(KnownFields):
    """Base class of objectives that report router losses and expert loads.

    Attributes:
        balance: Weight of the mean of ``balance_loss`` over the MoE layers.
        balance_loss: Load-balancing loss of one layer.
        router_z_loss: Weight of the mean of the routers' z-losses.
    """

    balance: float = 0.0
    balance_loss: Callable[[Routing], Float[Array, ""]] = balancing.switch_loss
    router_z_loss: float = 0.0

    def __post_init__(self) -> None:
        set_numbers(self, "balance", "router_z_loss")
        check_object(type(self).__name__, "balance_loss", self.balance_loss, "train.Objective().balance_loss")

    def of_model(self, model: CausalLM) -> Self:
        """Adapt the objective to a model. Raises ValueError if the model lacks layers that it requires."""
        return self

    def _body(self, model: CausalLM, batch: Batch, key: Any) -> Body:
        """Run all layers of the model, and compute the losses of each router inside its layer."""
        segments = batch.get("segment_ids")
        mask = real_tokens(batch) if segments is not None or "attention_mask" in batch else None
        inputs = batch["tokens"], mask, batch.get("positions"), segments, None, key
        request = OutputRequest(all_hidden=False, reduce_routing=self._summarise_routing)
        routing = check_routing(model, batch.get("routing"), jnp.shape(batch["tokens"]))
        return model.body(*inputs, request, routing=routing)

    def _of_routers(
        self, infos: Sequence[Any], share: float
    ) -> tuple[Float[Array, ""], tuple[Array, Array, Array, Array]]:
        """Return the weighted router losses, and the fields ``balance`` to ``dropped`` of `Losses`."""
        balance, router_z = (share * _mean([info.routing[i] for info in infos]) for i in range(2))
        load = jnp.stack([info.dispatch.load for info in infos]) if infos else jnp.zeros((0, 0), jnp.int32)
        dropped = jnp.stack([info.dispatch.dropped for info in infos]) if infos else jnp.zeros((0,), jnp.int32)
        return self.balance * balance + self.router_z_loss * router_z, (balance, router_z, load, dropped)

    def _summarise_routing(self, routing: Routing) -> tuple[Float[Array, ""], ...]:
        """Compute the auxiliary losses inside the layer, so that the router scores need not be stored."""
        return self.balance_loss(routing), balancing.z_loss(routing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(RouterLosses):
    """Mean next-token cross-entropy plus weighted auxiliary losses. Each weight defaults to 0.

    Attributes:
        z_loss: Weight of the mean squared logsumexp of the logits (PaLM; Chowdhery et al. 2022).
        head: Loss as a function of the output head's input, such as `ChunkedLoss` or `Whole`.
        mtp: Weight of the multi-token prediction loss (DeepSeek-V3: 0.3, later 0.1). This loss is the
            mean over ``model.mtp`` of the mean cross-entropy of tokens 2, 3, … steps ahead in the same
            document. If 0, the prediction layers are not computed, and `Step` does not train them.
        depths: Number of prediction layers, set by `of_model`.
    """

    z_loss: float = 0.0
    head: Head = ChunkedLoss()
    mtp: float = 0.0
    depths: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "z_loss", "mtp")
        check_object("Objective", "head", self.head, "train.ChunkedLoss()")

    def of_model(self, model: CausalLM) -> Self:
        """Return a copy with ``depths`` set to the model's number of prediction layers.

        Raises ValueError if ``mtp`` is not 0 and the model has no prediction layers.
        """
        if self.mtp and not model.mtp:
            raise ValueError(
                f"Objective(mtp={self.mtp}): the model has no multi-token prediction layers. Load it with mtp=True"
            )
        return dataclasses.replace(self, depths=len(model.mtp) if self.mtp else 0)

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch is malformed."""
        check_batch(batch)

    def count(self, batch: Batch) -> tuple[Float[Array, ""], ...]:
        """Count the tokens in the main loss and at each prediction depth, each at least 1."""
        weights = [targets_of(batch)[1], *(ahead.weights for ahead in targets_ahead(batch, self.depths))]
        return tuple(jnp.maximum(jnp.sum(mask), 1.0) for mask in weights)

    def __call__(
        self,
        model: CausalLM,
        batch: Batch,
        key: Any = None,
        count: tuple[Float[Array, ""], ...] | None = None,
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], Losses]:
        """Compute the scalar to minimize and its terms; see `TrainingObjective`."""
        body = self._body(model, batch, key)
        targets, weights = targets_of(batch)
        counts = self.of_model(model).count(batch) if count is None else count
        total, entropy = self._sums(model, body.x, targets, weights, self.z_loss)
        total, entropy = total / counts[0], entropy / counts[0]
        mtp_loss, mtp_infos = self._predict(model, body.mtp_hidden, batch, key, counts[1:])
        auxiliary, routers = self._of_routers([body.infos[i] for i in sorted(body.infos)] + mtp_infos, share)
        total += auxiliary
        total = total if mtp_loss is None else total + self.mtp * mtp_loss
        return total, Losses(total, entropy, jnp.sum(weights), *routers, mtp=mtp_loss)

    def _sums(self, model: CausalLM, x: Array, targets: Array, weights: Array, z: float) -> Sums:
        """Sum the weighted loss and cross-entropy over all tokens, from the output head's input."""
        kernel, mesh = model.head_weight(), model.strategy.mesh
        if mesh is None:  # one long row, so that chunks may split it anywhere
            x, targets, weights = (a.reshape(1, -1, *a.shape[2:]) for a in (x, targets, weights))
        return self.head(x, kernel, targets, weights, z, mesh)

    def _predict(
        self, model: CausalLM, states: Array, batch: Batch, key: Any, counts: Sequence[Array]
    ) -> tuple[Array | None, list[Any]]:
        """Return the mean loss of the prediction layers, and the `MoEInfo`s of these layers.

        Each layer receives the hidden states of the previous layer. Only ``len(counts)`` layers are computed.
        """
        losses, infos = [], []
        for k, (count, ahead) in enumerate(zip(counts, targets_ahead(batch, len(counts)), strict=True)):
            layer_key = None if key is None else jax.random.fold_in(key, len(model.stacks) + k)
            inputs = ahead.tokens, ahead.there, batch.get("positions"), batch.get("segment_ids"), None, layer_key
            output = model.mtp[k](model, states, *inputs, self._summarise_routing)
            states = output.mtp_hidden
            losses.append(self._sums(model, output.x, ahead.targets, ahead.weights, 0.0)[0] / count)
            infos += output.infos.values()
        return (_mean(losses) if losses else None), infos


def _mean(values: list[Array]) -> Array:
    return jnp.mean(jnp.stack(values)) if values else jnp.zeros(())
