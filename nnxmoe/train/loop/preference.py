"""Preference learning from pairs of completions: DPO (Rafailov et al. 2023) and its variants.

    train.lora.add(model, rank=16, rngs=nnx.Rngs(0))
    data = train.preferences("pairs.jsonl", tokenizer, batch_size=8, seq_len=512)
    train.fit(model, data, objective=train.DPO(train.lora.without, beta=0.1), …)

Without adapters, the reference is a second model. ``with_reference(data, model)`` adds the
log-probabilities of this model to the batches:

    train.fit(model, train.with_reference(data, model), objective=train.DPO(), …)
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.config.validate import check_object, set_numbers
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import Body
from nnxmoe.model.program import model_program
from nnxmoe.sharding import batch_axes, shard_constraint
from nnxmoe.train.loop.batch import Batch, Restartable, as_arrays, check_batch, check_ids, check_masks, targets_of
from nnxmoe.train.loop.feed import put_rows, rows_of_process
from nnxmoe.train.loop.loss import log_probabilities
from nnxmoe.train.loop.objective import Losses, RouterLosses

FIELDS = ("tokens", "loss_mask", "attention_mask")
REFERENCE = "reference_logps"

Pairs = Float[Array, "B 2"]
PairLoss = Callable[[Pairs, Pairs, float], Float[Array, "B"]]
"""Function ``(ratios, tokens, beta) -> loss`` per pair, with columns for the chosen and the rejected completion.
``ratios`` are log-probabilities minus the reference's log-probabilities. ``tokens`` are numbers of tokens."""


def sigmoid_loss(ratios: Pairs, tokens: Pairs, beta: float) -> Float[Array, "B"]:
    """Compute the DPO loss ``-log sigmoid(beta * margin)`` (Rafailov et al. 2023, eq. 7)."""
    return -jax.nn.log_sigmoid(beta * (ratios[:, 0] - ratios[:, 1]))


def hinge_loss(ratios: Pairs, tokens: Pairs, beta: float) -> Float[Array, "B"]:
    """Compute SLiC's hinge loss ``max(0, 1 - beta * margin)`` (Zhao et al. 2023).

    The log-probabilities are relative to the reference (Liu et al. 2023).
    """
    return jax.nn.relu(1 - beta * (ratios[:, 0] - ratios[:, 1]))


def ipo_loss(ratios: Pairs, tokens: Pairs, beta: float) -> Float[Array, "B"]:
    """Compute the IPO loss ``(margin - 1 / (2 beta)) ** 2`` (Azar et al. 2023, eq. 17).

    The margin is the difference of means over tokens, as in TRL.
    """
    means = ratios / jnp.maximum(tokens, 1.0)
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2


@dataclasses.dataclass(frozen=True)
class DPO(RouterLosses):
    """Mean preference loss over the pairs of a batch.

    A batch has three int arrays ``[B, 2, T]``, as created by `nnxmoe.train.preferences`. ``tokens`` has
    the chosen and the rejected row of each pair, padded on the right. ``loss_mask`` is 1 for the tokens
    of the completion. ``attention_mask`` is optional and 0 for padding. A pair is excluded if a
    completion has no unmasked tokens. Metrics have TRL's names.

    The router losses include both rows of each pair. If their weights are 0, they are only reported, as
    in `Objective`.

    Args:
        reference: Function from the trained model to the reference model, such as `lora.without` for
            adapters initialized to zero. It costs one forward pass per step and no memory for weights.
            If None, batches must contain ``reference_logps [B, 2]``, see `with_reference`.
        beta: Factor of the margin in the loss, and of the log-probability ratios in the rewards.
        loss: Loss per pair, such as `sigmoid_loss`, `hinge_loss` or `ipo_loss`.
        label_smoothing: Probability that the labels of a pair are swapped (cDPO, Mitchell 2023).

    Raises:
        ValueError: If ``beta`` is not positive, ``label_smoothing`` is outside [0, 0.5), or
            ``reference`` is a model.
    """

    reference: Callable[[CausalLM], CausalLM] | None = None
    beta: float = 0.1
    loss: PairLoss = sigmoid_loss
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.reference, CausalLM):
            raise ValueError(
                "DPO(reference=…) is a model: pass the batches through train.with_reference(batches, model)"
            )
        super().__post_init__()
        check_object("DPO", "loss", self.loss, "train.sigmoid_loss")
        if self.reference is not None:
            check_object("DPO", "reference", self.reference, "train.lora.without")
        set_numbers(self, "beta", positive=True)
        set_numbers(self, "label_smoothing")
        if self.label_smoothing >= 0.5:
            raise ValueError(f"DPO(label_smoothing={self.label_smoothing}): it must be at least 0 and less than 0.5")

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch is malformed or does not have exactly one reference."""
        check_pairs({name: array for name, array in batch.items() if name != REFERENCE})
        if self.reference is not None and REFERENCE in batch:
            raise ValueError(f"the batch has {REFERENCE} and DPO has a reference function: remove one of them")
        if self.reference is None and REFERENCE not in batch:
            raise ValueError(
                f"the batch has no {REFERENCE}: pass the batches through train.with_reference(batches, model), or for "
                "new adapters use train.DPO(train.lora.without)"
            )
        if REFERENCE in batch and (shape := list(jnp.shape(batch[REFERENCE]))) != [len(batch["tokens"]), 2]:
            raise ValueError(f"{REFERENCE} has the shape {shape}: it must be [B, 2], {[len(batch['tokens']), 2]}")

    def count(self, batch: Batch) -> Float[Array, ""]:
        """Count the pairs that have tokens in both completions. Returns at least 1."""
        return jnp.maximum(jnp.sum(_counting(_tokens_of(_rows(batch)))), 1.0)

    def __call__(
        self, model: CausalLM, batch: Batch, key: Any = None, count: Any = None, share: float = 1.0
    ) -> tuple[Float[Array, ""], Losses]:
        """Compute the scalar to minimize, and the metrics; see `TrainingObjective`."""
        rows = _rows(batch)
        logps, body = self.logps(model, rows, key)
        reference_logps = (
            batch[REFERENCE] if self.reference is None else self.logps(self.reference(model), rows, key)[0]
        )
        ratios, tokens = logps - jax.lax.stop_gradient(reference_logps), _tokens_of(rows)
        losses = self.loss(ratios, tokens, self.beta)
        if self.label_smoothing:
            swapped_losses = self.loss(ratios[:, ::-1], tokens[:, ::-1], self.beta)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * swapped_losses
        pairs = _counting(tokens)
        pair_weights = pairs / (self.count(batch) if count is None else count)
        auxiliary, routers = self._of_routers([body.infos[i] for i in sorted(body.infos)], share)
        rewards = self.beta * ratios
        measured = {
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margins": rewards[:, 0] - rewards[:, 1],
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).astype(jnp.float32),
            "logps/chosen": logps[:, 0],
            "logps/rejected": logps[:, 1],
        }
        total = jnp.sum(losses * pair_weights) + auxiliary
        means = {name: jnp.sum(value * pair_weights) for name, value in measured.items()}
        return total, Losses(total, None, jnp.sum(pairs), *routers, measured=means)

    def logps(self, model: CausalLM, rows: Batch, key: Any) -> tuple[Pairs, Body]:
        """Return the log-probability of the completion in each row ``[2 B, T]``, and the outputs of the layers."""
        body, (targets, weights) = self._body(model, rows, key), targets_of(rows)
        token_logps = log_probabilities(body.x, model.head_weight(), targets, model.mesh)
        return jnp.sum(token_logps * weights, axis=1).reshape(-1, 2), body


def check_pairs(batch: Batch) -> None:
    """Raise ValueError if a batch does not have the arrays of pairs, all int ``[B, 2, T]``."""
    for name in FIELDS[:2]:
        if name not in batch:
            raise ValueError(f"a batch of pairs needs {name} [B, 2, T], got {', '.join(batch) or 'no fields'}")
    if unknown := [name for name in batch if name not in FIELDS]:
        raise ValueError(f"unknown field {unknown[0]!r} in a batch of pairs: the fields are {', '.join(FIELDS)}")
    for name, array in batch.items():
        if len(shape := jnp.shape(array)) != 3 or shape[1] != 2:
            raise ValueError(f"{name} has the shape {list(shape)}: pairs are [B, 2, T], with the chosen row first")
    flat = {n: jax.ShapeDtypeStruct((2 * len(a), jnp.shape(a)[2]), a.dtype) for n, a in batch.items()}
    check_batch(flat)
    check_masks(batch)


def _rows(batch: Batch) -> dict[str, Array]:
    """Reshape ``[B, 2, T] -> [2 B, T]``. The rows of a pair stay adjacent, so no data moves between devices."""
    return {n: jnp.reshape(batch[n], (-1, jnp.shape(batch[n])[-1])) for n in FIELDS if n in batch}


def _tokens_of(rows: Batch) -> Pairs:
    """Count the unmasked tokens of each completion."""
    return jnp.sum(targets_of(rows)[1], axis=1).reshape(-1, 2)


def _counting(tokens: Pairs) -> Float[Array, "B"]:
    """Return 1 for pairs with unmasked tokens in both completions, else 0."""
    return jnp.all(tokens > 0, axis=1).astype(jnp.float32)


def with_reference(batches: Iterable[Batch], model: CausalLM) -> Iterable[Batch]:
    """Add ``reference_logps [B, 2]``, a model's log-probabilities of the completions, to batches of pairs.

    The values are computed when a batch is read. To compute them only once for a few batches, use
    ``list(with_reference(…))``. The model stays in memory and must not be changed. On a mesh, the rows
    are sharded. The iterators can resume if the iterators of ``batches`` can. Raises ValueError if a
    batch does not contain pairs.
    """
    return Restartable(lambda: _Referenced(iter(batches), model))


class _Referenced(Iterator[Batch]):
    def __init__(self, batches: Iterator[Batch], model: CausalLM) -> None:
        self._batches, self._model = batches, model

    def __next__(self) -> Batch:
        batch = as_arrays(next(self._batches))
        check_pairs(batch)
        check_ids(batch, ("tokens", "targets"), self._model.config.vocab_size)
        logps = model_program(self._model, _reference)(put_rows(batch, self._model.mesh))
        return batch | {REFERENCE: rows_of_process(logps, len(batch["tokens"]))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)  # get_state and set_state, if available


def _reference(model: CausalLM, batch: dict[str, Array]) -> Pairs:
    return shard_constraint(DPO().logps(model, _rows(batch), None)[0], model.mesh, batch_axes(model.mesh))
