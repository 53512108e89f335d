"""Policy gradients from groups of samples: GRPO (Shao et al. 2024), GSPO (Zheng et al. 2025) and their variants.

    train.GRPO(reward)                                                      # GRPO without a KL penalty
    train.GRPO(reward, kl=0.04, reference=train.lora.without)               # as published, with adapters
    train.GRPO(reward, clip=train.Clip(0.2, 0.28), aggregate=train.token_mean)           # DAPO
    train.GRPO(reward, advantages=train.dr_grpo, aggregate=train.FixedLengthMean(256))   # Dr. GRPO
    train.GSPO(reward)                                                      # ratio per sequence

A batch has rows ``[B, T]``, in which samples may be packed. In arrays with one value per token, the value at position t
belongs to token t, not to the prediction of token t + 1.

| field | values |
|---|---|
| ``tokens`` | prompts and answers |
| ``segment_ids``, ``positions`` | number of the sample in its row, 0 for padding; position in the sample |
| ``loss_mask`` | 1 for the tokens of answers |
| ``advantages``, ``rewards`` | value of the sample at its answer tokens, 0 elsewhere |
| ``sampler_logps`` | log-probabilities of the answer tokens in the sampler |
| ``old_logps`` | log-probabilities in the policy before the first update with these samples, see `GRPO.logps` |
| ``reference_logps`` | log-probabilities in the reference model |
| ``routing`` | expert ids ``[B, T, L, X]`` of the sampler, which the policy replays; -1 for tokens without replay |

``rewards`` and all later arrays are optional. Without ``old_logps``, the current policy is the old policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nnxmoe.config.validate import real_number, set_numbers
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import Body
from nnxmoe.moe.router import Routing
from nnxmoe.train.advantages import AdvantageFn, group_advantages
from nnxmoe.train.loop.batch import Batch, check_batch, targets_of, values_of
from nnxmoe.train.loop.loss import map_logits
from nnxmoe.train.loop.objective import Losses, RouterLosses
from nnxmoe.train.loop.policy_loss import (
    AggregateFn,
    Answers,
    Clip,
    Counts,
    ImportanceSampling,
    KLFn,
    PerToken,
    RatioFn,
    k3,
    sequence_mean,
    sequence_ratio,
    token_mean,
    token_ratio,
    unbiased_kl,
)
from nnxmoe.train.loop.rollouts import RolloutOptions, Rollouts
from nnxmoe.train.rewards import RewardFn, reward_functions

REFERENCE, ROUTING = "reference_logps", "routing"
SAMPLE_FIELDS = ("advantages", "rewards", "sampler_logps", "old_logps", REFERENCE)


@dataclasses.dataclass(frozen=True)
class GRPO(RolloutOptions, RouterLosses):
    """Clipped policy-gradient loss with advantages relative to a group of samples.

    The loss of a token is ``importance * clip(ratio, advantage) + kl * KL(policy || reference)``. Samples
    without answer tokens are excluded from all means. The router losses include prompt tokens.

    The metrics ``reward`` and ``length`` are means over samples, and ``samples`` is their number. ``clipped/low``,
    ``clipped/high``, ``entropy``, ``kl`` (to the reference) and ``kl/rollout`` (from the sampler to the policy before
    the first update) are means over answer tokens. ``routing/flipped`` is the share of tokens per layer whose replayed
    experts differ from the router's selection.

    `RolloutOptions` documents the sampling arguments, such as ``group_size``.

    Args:
        reward: One or several reward functions, see `evaluate_rewards`.
        reward_weights: Weight of each reward function. Defaults to 1.
        advantages: Function from rewards ``[prompts, samples]`` to advantages, such as `group_advantages`.
        ratio: Probability ratios, `token_ratio` or `sequence_ratio`.
        clip: Clipped surrogate loss.
        kl: Weight of the KL divergence to the reference.
        kl_estimator: Estimator of this divergence per token, `unbiased_kl` or `k3_kl`.
        reference: Function from the trained model to the reference model, such as `lora.without`. If
            None, the batch's ``reference_logps`` are used if present.
        reference_model: A different model as the reference. Rollouts add its log-probabilities to the batches.
        aggregate: Mean over the tokens' losses: `sequence_mean`, `token_mean` or `FixedLengthMean`.
        importance: Correction for differences in numerics between sampler and policy. Requires ``sampler_logps``.
        temperature: Sampling temperature. The policy is ``softmax(logits / temperature)``.

    Raises:
        ValueError: If ``kl`` or a router weight is negative, ``temperature`` is not positive, or
            ``reference`` is a model.
    """

    reward: RewardFn | Sequence[RewardFn] = dataclasses.field(compare=False)  # not part of the compiled step
    _: dataclasses.KW_ONLY
    reward_weights: Sequence[float] | None = None
    advantages: AdvantageFn = dataclasses.field(default=group_advantages, compare=False)
    ratio: RatioFn = token_ratio
    clip: Clip = Clip()
    kl: float = 0.0
    kl_estimator: KLFn = unbiased_kl
    reference: Callable[[CausalLM], CausalLM] | None = None
    reference_model: CausalLM | None = dataclasses.field(default=None, compare=False)
    aggregate: AggregateFn = sequence_mean
    importance: ImportanceSampling | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        RolloutOptions.__post_init__(self)
        RouterLosses.__post_init__(self)
        name, functions = type(self).__name__, reward_functions(self.reward)
        object.__setattr__(self, "reward", functions)
        weights = [1.0] * len(functions) if self.reward_weights is None else self.reward_weights
        if len(weights) != len(functions):
            raise ValueError(
                f"{name}(reward_weights=…) has {len(weights)} weights for {len(functions)} reward functions"
            )
        numbers = [real_number(f"{name}: reward_weights", weight, -1e30) for weight in weights]
        object.__setattr__(self, "reward_weights", tuple(numbers))
        set_numbers(self, "kl")
        set_numbers(self, "temperature", positive=True)
        if isinstance(self.reference, CausalLM):
            raise ValueError(f"{name}(reference=…) is a model: pass it as reference_model=…")
        if self.reference is not None and self.reference_model is not None:
            raise ValueError(f"{name} has both reference and reference_model: pass only one of them")

    def rollouts(self, prompts: Iterable[Any], seed: int, row_multiple: int) -> Rollouts:
        """Return batches of samples from the model that is being trained. `fit` calls this method."""
        return Rollouts(prompts, self, seed, row_multiple)

    def check(self, batch: Batch) -> None:
        """Raise ValueError if the batch is malformed or lacks log-probabilities that the loss requires."""
        name = type(self).__name__
        if "targets" in batch:
            raise ValueError(f"targets in a batch for {name}: remove them, because the targets are the answer tokens")
        check_batch({field: array for field, array in batch.items() if field not in (*SAMPLE_FIELDS, ROUTING)})
        required = ["loss_mask", "advantages", *(["sampler_logps"] if self.importance else [])]
        if missing := [field for field in required if field not in batch]:
            raise ValueError(f"a batch for {name} needs {missing[0]} [B, T], got {', '.join(batch)}")
        shape = list(jnp.shape(batch["tokens"]))
        for field in SAMPLE_FIELDS:
            field_shape = list(jnp.shape(batch.get(field, batch["tokens"])))
            if field_shape != shape:
                raise ValueError(f"{field} has the shape {field_shape}: it must be {shape}, the shape of tokens")
        if self.reference is not None and REFERENCE in batch:
            raise ValueError(f"the batch has {REFERENCE} and {name} has a reference function: remove one of them")
        if self.kl and self.reference is None and REFERENCE not in batch:
            raise ValueError(
                f"{name}(kl={self.kl}) needs a reference: pass reference=train.lora.without for new adapters, or "
                f"reference_model=… for a different model, or add {REFERENCE} to the batches"
            )
        if (largest := np.max(values_of(batch.get("segment_ids", 0)), initial=0)) > shape[1]:
            raise ValueError(f"segment_ids contains {largest}: number the samples of each row from 1")

    def count(self, batch: Batch) -> Counts:
        """Count the answer tokens, and the samples with answer tokens. Each count is at least 1."""
        return Answers.from_batch(batch).counts()

    def __call__(
        self, model: CausalLM, batch: Batch, key: Any = None, count: Any = None, share: float = 1.0
    ) -> tuple[Float[Array, ""], Losses]:
        """Compute the scalar to minimize, and the metrics; see `TrainingObjective`."""
        answers = Answers.from_batch(batch)
        counts = answers.counts() if count is None else count
        logps, entropy, body = self._policy(model, batch, key)
        inputs = {name: answers.align(jnp.asarray(batch[name])) for name in SAMPLE_FIELDS if name in batch}
        if self.reference is not None:
            unrouted_batch = {name: array for name, array in batch.items() if name != ROUTING}
            inputs[REFERENCE] = jax.lax.stop_gradient(self._policy(self.reference(model), unrouted_batch, key)[0])
        losses, metrics = self.token_losses(logps, inputs, answers)
        infos = [body.infos[i] for i in sorted(body.infos)]
        auxiliary, routers = self._of_routers(infos, share)
        total = self.aggregate(losses, answers, counts) + auxiliary
        metrics["entropy"] = entropy
        means = {name: token_mean(values, answers, counts) for name, values in metrics.items()}
        means["length"] = jnp.sum(answers.weights) / counts.samples
        means["samples"] = jnp.round(jnp.sum(answers.weights / answers.lengths))
        if ROUTING in batch:
            means["routing/flipped"] = share * jnp.mean(jnp.stack([info.routing[2] for info in infos]))
        if "rewards" in inputs:
            means["reward"] = sequence_mean(inputs["rewards"], answers, counts)
        return total, Losses(total, None, jnp.sum(answers.weights), *routers, measured=means)

    def token_losses(
        self, logps: PerToken, inputs: Mapping[str, PerToken], answers: Answers
    ) -> tuple[PerToken, dict[str, Any]]:
        """Compute the loss and the metrics of each answer token.

        Args:
            logps: Log-probabilities of the answer tokens in the policy, 0 elsewhere.
            inputs: Arrays of the batch, aligned with ``logps``.
        """
        advantages, old_logps = inputs["advantages"], inputs.get("old_logps", jax.lax.stop_gradient(logps))
        ratios = self.ratio(logps - old_logps, answers)
        losses = self.clip(ratios, advantages)
        low, high = self.clip.clipped(ratios, advantages)
        metrics: dict[str, Any] = {"clipped/low": low, "clipped/high": high}
        if self.importance is not None:
            losses *= self.importance(old_logps - inputs["sampler_logps"], answers)
        if REFERENCE in inputs:
            metrics["kl"] = self.kl_estimator(inputs[REFERENCE] - logps, ratios)
            losses += self.kl * metrics["kl"]
        if "sampler_logps" in inputs:
            metrics["kl/rollout"] = k3(old_logps - inputs["sampler_logps"])
        return losses, metrics

    def logps(self, model: CausalLM, batch: Batch) -> PerToken:
        """Compute the log-probabilities of answer tokens, as ``old_logps`` or ``reference_logps`` of a batch."""
        return jnp.roll(self._policy(model, batch, None)[0], 1, axis=1)

    def _summarise_routing(self, routing: Routing) -> tuple[Float[Array, ""], ...]:
        """Compute the auxiliary losses, and the share of tokens whose replayed experts differ from the selection."""
        losses = super()._summarise_routing(routing)
        if routing.flipped is None:
            return losses
        valid = jnp.ones_like(routing.flipped) if routing.valid is None else routing.valid
        return *losses, jnp.sum(routing.flipped) / jnp.maximum(jnp.sum(valid), 1)  # padding has no given experts

    def _policy(self, model: CausalLM, batch: Batch, key: Any) -> tuple[PerToken, PerToken, Body]:
        """Return log-probabilities and entropies at the positions that predict answer tokens, and the `Body`."""
        body, (targets, weights) = self._body(model, batch, key), targets_of(batch)
        function = functools.partial(logps_and_entropy, temperature=self.temperature)
        values = map_logits(function, body.x, model.head_weight(), targets, model.mesh) * weights[..., None]
        return values[..., 0], jax.lax.stop_gradient(values[..., 1]), body


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """`GRPO` with one ratio per sequence and narrow clipping (Zheng et al. 2025)."""

    ratio: RatioFn = sequence_ratio
    clip: Clip = Clip(3e-4, 4e-4)
    minibatches: int = 4


def logps_and_entropy(logits: Array, targets: Array, temperature: float) -> Float[Array, "B t 2"]:
    """Compute the log-probability of each target and the entropy of its distribution, stacked."""
    logits = logits / temperature
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    entropy = norm - jnp.sum(jnp.exp(logits - norm[..., None]) * logits, axis=-1)
    return jnp.stack([chosen - norm, jax.lax.stop_gradient(entropy)], axis=-1)
