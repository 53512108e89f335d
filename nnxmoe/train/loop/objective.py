"""What a training step minimises: next-token cross-entropy plus auxiliary losses, or a function of model and batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nnxmoe.axes import divided_over, shards
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.moe import balance as balancing
from nnxmoe.moe.router import Routing
from nnxmoe.train.loop.batch import Batch, check_batch, check_dict, real_tokens, targets_of
from nnxmoe.train.loop.loss import ChunkedLoss, Head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of one batch, as arrays or as their shapes; None where an objective does not know them."""

    total: Any  # the scalar to minimise
    cross_entropy: Any  # mean over the tokens that count
    tokens: Any  # how many tokens count
    balance: Any  # without its weight, as is router_z
    router_z: Any
    load: Any  # int [L, E]: assignments per MoE layer and expert
    dropped: Any  # int [L]: assignments that exceeded an expert's capacity


class TrainingObjective(Protocol):
    """What a step minimises. `Objective` is one, and `of_function` makes one of any function of model and batch."""

    def check(self, batch: Batch) -> None:
        """Raises ValueError if the batch is malformed."""
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
        check_dict(batch)
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
        total = jnp.asarray(self.function(model, batch))
        if total.shape or not jnp.issubdtype(total.dtype, jnp.floating):
            raise ValueError(
                f"the objective returned {total.dtype} {list(total.shape)}: return a scalar, such as the mean over rows"
            )
        total = total.astype(jnp.float32) * share
        none = jnp.zeros((0,), jnp.int32)
        return total, Losses(total, None, None, None, None, none.reshape(0, 0), none)


def of_function(objective: Any) -> TrainingObjective:
    """The objective itself, or one made of a function ``(model, batch) -> scalar``.

    Its batches are any dicts of arrays with the same number of rows; with accumulation the mean over the parts of a
    batch is minimised. A loss in ten lines, such as DPO's, needs no more.
    """
    if hasattr(objective, "check"):
        return objective
    if not callable(objective):
        raise ValueError(f"objective={objective!r}: pass train.Objective(…), or a function of a model and a batch")
    return _OfFunction(objective)


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

    def check(self, batch: Batch) -> None:
        """Raises ValueError for a batch that `check_batch` refuses."""
        check_batch(batch)

    def count(self, batch: Batch) -> Float[Array, ""]:
        """The number of tokens that count, at least 1."""
        return jnp.maximum(jnp.sum(targets_of(batch)[1]), 1.0)

    def __call__(
        self,
        model: CausalLM,
        batch: Batch,
        key: Any = None,
        count: Float[Array, ""] | None = None,
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], Losses]:
        """The scalar to minimise, and the losses it consists of; see `TrainingObjective`."""
        segments = batch.get("segment_ids")
        mask = real_tokens(batch) if segments is not None or "attention_mask" in batch else None
        body = model.body(batch["tokens"], mask, batch.get("positions"), segments, None, key, self._summarise_routing)
        targets, weights = targets_of(batch)
        count = self.count(batch) if count is None else count
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
