"""Objectives of training: next-token cross-entropy plus auxiliary losses, or a function of model and batch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.validate import set_numbers
from nnxmoe.layers.context import OutputRequest
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import Body
from nnxmoe.moe import balance as balancing
from nnxmoe.moe.router import Routing
from nnxmoe.train.loop.batch import Batch, check_batch, real_tokens, targets_ahead, targets_of
from nnxmoe.train.loop.loss import ChunkedLoss, Head, Sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of one batch, as arrays or as their shapes; None where an objective does not know them."""

    total: Any  # the scalar to minimise
    cross_entropy: Any  # mean over the tokens that count
    tokens: Any  # how many tokens count, or pairs of completions
    balance: Any  # without its weight, as is router_z
    router_z: Any
    load: Any  # int [L, E]: assignments per MoE layer and expert, those of prediction layers last
    dropped: Any  # int [L]: assignments that exceeded an expert's capacity
    mtp: Any = None  # mean over the depths of multi-token prediction, without its weight
    measured: Any = dataclasses.field(default_factory=dict)  # name -> scalar, of a function's own metrics


class TrainingObjective(Protocol):
    """An objective that a step minimises. `Objective` is one, and `of_function` makes one of any function of model and
    batch."""

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch is malformed."""
        ...

    def count(self, batch: Batch) -> Any:
        """How many tokens of a whole batch count; None if the objective does not divide by them."""
        ...

    def __call__(
        self, model: CausalLM, batch: Batch, key: Any, count: Any, share: float
    ) -> tuple[Float[Array, ""], Losses]:
        """The scalar to minimise, and its parts.

        With gradient accumulation ``batch`` is a part, and the results of the parts are added: ``count`` is that of the
        whole batch (else None), ``share`` the weight of what is not divided by it. ``key``: for random numbers.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _OfFunction:
    function: Callable[..., Any]

    def check(self, batch: Batch) -> None:
        if not batch:
            raise ValueError("a batch must be a dict of arrays, got an empty one: pass at least one array")
        rows = {name: np.shape(array)[:1] for name, array in batch.items()}
        if len(set(rows.values())) > 1 or () in rows.values():
            raise ValueError(f"the arrays of a batch have different numbers of rows, {rows}: all must be [B, …]")

    def count(self, batch: Batch) -> None:
        return None

    def __call__(
        self, model: CausalLM, batch: Batch, key: Any = None, count: Any = None, share: float = 1.0
    ) -> tuple[Float[Array, ""], Losses]:
        found = self.function(model, batch)
        loss, more = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(more, Mapping):
            raise ValueError(f"the objective returned {type(more).__name__} beside the loss: return a dict of scalars")
        total, *rest = (_scalar(name, value) * share for name, value in {_LOSS: loss, **more}.items())
        none = jnp.zeros((0,), jnp.int32)
        measured = dict(zip(more, rest, strict=True))
        return total, Losses(total, None, None, None, None, none.reshape(0, 0), none, measured=measured)


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
    """The objective itself, or one made of a function ``(model, batch) -> loss`` or ``-> (loss, {name: scalar})``,
    whose scalars are logged as metrics.

    Its batches are any dicts of arrays with the same number of rows; with accumulation the mean over the parts of a
    batch is minimised. A loss in ten lines, such as DPO's, needs no more.
    """
    if hasattr(objective, "check"):
        return objective
    if not callable(objective):
        raise ValueError(f"objective={objective!r}: pass train.Objective(…), or a function of a model and a batch")
    return _OfFunction(objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterLosses(KnownFields):
    """The part of an objective that reads the routers: their weighted losses and the loads of the experts.

    ``balance`` weighs the mean of ``balance_loss`` over the MoE layers, ``router_z_loss`` the mean of the routers'
    z-losses; both default to 0.
    """

    balance: float = 0.0
    balance_loss: Callable[[Routing], Float[Array, ""]] = balancing.switch_loss
    router_z_loss: float = 0.0

    def __post_init__(self) -> None:
        set_numbers(self, "balance", "router_z_loss")

    def of_model(self, model: CausalLM) -> Self:
        """The objective for a model. Raises ValueError if it needs layers that the model lacks."""
        return self

    def _body(self, model: CausalLM, batch: Batch, key: Any) -> Body:
        """All layers of the model, each with the losses of its router."""
        segments = batch.get("segment_ids")
        mask = real_tokens(batch) if segments is not None or "attention_mask" in batch else None
        given = batch["tokens"], mask, batch.get("positions"), segments, None, key
        request = OutputRequest(all_hidden=False, reduce_routing=self._summarise_routing)
        return model.body(*given, request)

    def _of_routers(
        self, infos: Sequence[Any], share: float
    ) -> tuple[Float[Array, ""], tuple[Array, Array, Array, Array]]:
        """The weighted sum of the routers' losses, and the fields ``balance`` to ``dropped`` of `Losses`."""
        even, router_z = (share * _mean([info.routing[i] for info in infos]) for i in range(2))
        load = jnp.stack([info.dispatch.load for info in infos]) if infos else jnp.zeros((0, 0), jnp.int32)
        dropped = jnp.stack([info.dispatch.dropped for info in infos]) if infos else jnp.zeros((0,), jnp.int32)
        return self.balance * even + self.router_z_loss * router_z, (even, router_z, load, dropped)

    def _summarise_routing(self, routing: Routing) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Auxiliary losses of one layer, computed within the layer so that its scores need not be kept."""
        return self.balance_loss(routing), balancing.z_loss(routing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(RouterLosses):
    """Mean next-token cross-entropy plus weighted auxiliary losses; each weight defaults to 0.

    ``z_loss`` weighs the mean squared logsumexp of the logits (PaLM; Chowdhery et al. 2022), `RouterLosses` has the
    weights of the routers' losses. ``mtp`` weighs the loss
    of multi-token prediction (DeepSeek-V3: 0.3, later 0.1): the mean over ``model.mtp`` of the mean cross-entropy of
    tokens 2, 3, … steps further on in the same document. With 0 those layers are not computed, and `Step` does not
    train them. ``depths``: their number, set by `of_model`.
    """

    z_loss: float = 0.0
    head: Head = ChunkedLoss()
    mtp: float = 0.0
    depths: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "z_loss", "mtp")

    def of_model(self, model: CausalLM) -> Self:
        """The objective for the number of prediction layers of a model. ValueError if it needs some and there are
        none."""
        if self.mtp and not model.mtp:
            raise ValueError(
                f"Objective(mtp={self.mtp}): the model has no multi-token prediction layers: load it with mtp=True"
            )
        return dataclasses.replace(self, depths=len(model.mtp) if self.mtp else 0)

    def check(self, batch: Batch) -> None:
        check_batch(batch)

    def count(self, batch: Batch) -> tuple[Float[Array, ""], ...]:
        """The number of tokens that count, at least 1: in the main loss, and at each depth of prediction."""
        weights = [targets_of(batch)[1], *(ahead.weights for ahead in targets_ahead(batch, self.depths))]
        return tuple(jnp.maximum(jnp.sum(each), 1.0) for each in weights)

    def __call__(
        self,
        model: CausalLM,
        batch: Batch,
        key: Any = None,
        count: tuple[Float[Array, ""], ...] | None = None,
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], Losses]:
        """The scalar to minimise, and the losses it consists of; see `TrainingObjective`."""
        body = self._body(model, batch, key)
        targets, weights = targets_of(batch)
        counts = self.of_model(model).count(batch) if count is None else count
        total, entropy = self._sums(model, body.x, targets, weights, self.z_loss)
        total, entropy = total / counts[0], entropy / counts[0]
        ahead, further = self._predict(model, body.mtp_hidden, batch, key, counts[1:])
        auxiliary, routers = self._of_routers([body.infos[i] for i in sorted(body.infos)] + further, share)
        total += auxiliary
        total = total if ahead is None else total + self.mtp * ahead
        return total, Losses(total, entropy, jnp.sum(weights), *routers, mtp=ahead)

    def _sums(self, model: CausalLM, x: Array, targets: Array, weights: Array, z: float) -> Sums:
        """Weighted sums over all tokens of the loss and the cross-entropy, from the input of the output head."""
        kernel, mesh = model.head_weight(), model.strategy.mesh
        if mesh is None:  # one long row, which chunks may cut anywhere
            x, targets, weights = (a.reshape(1, -1, *a.shape[2:]) for a in (x, targets, weights))
        return self.head(x, kernel, targets, weights, z, mesh)

    def _predict(
        self, model: CausalLM, states: Array, batch: Batch, key: Any, counts: Sequence[Array]
    ) -> tuple[Array | None, list[Any]]:
        """Mean loss of the prediction layers and their `MoEInfo`s. Each layer gets the states of the one before; layers
        without targets are not computed."""
        losses, infos = [], []
        for k, (count, ahead) in enumerate(zip(counts, targets_ahead(batch, len(counts)), strict=True)):
            own = None if key is None else jax.random.fold_in(key, len(model.stacks) + k)
            given = ahead.tokens, ahead.there, batch.get("positions"), batch.get("segment_ids"), None, own
            out = model.mtp[k](model, states, *given, self._summarise_routing)
            states = out.mtp_hidden
            losses.append(self._sums(model, out.x, ahead.targets, ahead.weights, 0.0)[0] / count)
            infos += out.infos.values()
        return (_mean(losses) if losses else None), infos


def _mean(values: list[Array]) -> Array:
    return jnp.mean(jnp.stack(values)) if values else jnp.zeros(())
