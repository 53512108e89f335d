"""Rollouts: training batches of samples from the current model of a training run."""

import collections
import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.printable import short
from nnxmoe.config.validate import set_positive
from nnxmoe.convert.storage.multihost import gather_texts
from nnxmoe.generation.complete import encode_prompt, load_tokenizer, map_numbered
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.ids import EosIds, stop_ids
from nnxmoe.generation.request import Prefix, Request, RequestOptions
from nnxmoe.generation.sampling import Sampling
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import model_program
from nnxmoe.sharding import batch_axes, shard_constraint
from nnxmoe.train.advantages import compute_advantages, weighted_sum
from nnxmoe.train.loop.batch import Batch
from nnxmoe.train.loop.feed import BatchSource, put_rows, rows_of_process
from nnxmoe.train.loop.sample_rows import ScoredSample, stack_samples
from nnxmoe.train.rewards import evaluate_rewards

_logger = logging.getLogger("nnxmoe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions(CheckedFields):
    """Options for sampling the training data of a policy gradient.

    Attributes:
        group_size: Number of samples per prompt.
        max_new_tokens: Maximum number of tokens of an answer.
        seq_len: Tokens per row of a batch. Prompts are limited to ``seq_len - max_new_tokens`` tokens.
        minibatches: Number of batches per rollout. Each batch is one training step.
        replay: Whether the trained model routes tokens to the experts that the sampler selected (R3; Ma et al. 2025).
        pack: Whether a row can contain several samples. The number of rows then varies, and the training step is
            compiled for each number.
        slots: Maximum number of samples that are decoded concurrently.
        eos_token_id: Ids that end an answer. Defaults to the checkpoint's EOS tokens.
    """

    group_size: int = 8
    max_new_tokens: int = 256
    seq_len: int = 1024
    minibatches: int = 1
    replay: bool = True
    pack: bool = False
    slots: int = 64
    eos_token_id: EosIds = ...

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "group_size", "max_new_tokens", "seq_len", "minibatches", "slots")
        if self.max_new_tokens >= self.seq_len:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in rows of seq_len={self.seq_len}: "
                "increase seq_len"
            )
        if self.eos_token_id is not ...:
            object.__setattr__(self, "eos_token_id", stop_ids(self.eos_token_id, "eos_token_id"))


class Rollouts(Iterator[Batch]):
    """Iterator over batches of samples from the current model.

    A sample depends only on the model, the prompt and its position in the list, ``seed`` and the number of the rollout.
    An iterator that is restored between two rollouts returns identical batches.

    Args:
        prompts: Iterable of lists of records with the field "prompt", such as `nnxmoe.train.prompts`.
        objective: The `GRPO` objective.
        seed: Seed of the samples.
        row_multiple: Batches are padded to a multiple of this number of rows.
    """

    def __init__(self, prompts: Iterable[Any], objective: Any, seed: int, row_multiple: int) -> None:
        self._prompts, self._objective = BatchSource(prompts), objective
        self._seed, self._row_multiple = seed, row_multiple
        self._tokenizer = getattr(getattr(prompts, "documents", None), "tokenizer", None)
        self._engine: Engine | None = None
        self._count = 0  # number of rollouts
        self._pending = collections.deque[Batch]()
        self.current_model: Callable[[], CausalLM] | None = None  # set by the training run

    def __next__(self) -> Batch:
        if not self._pending:
            self._pending.extend(self._roll_out())
        return self._pending.popleft()

    @property
    def stride(self) -> int:
        """Number of batches per rollout. The state can be saved only after whole rollouts."""
        return self._objective.minibatches

    def get_state(self) -> dict[str, Any]:
        """Return the number of rollouts and the position in the prompts, as a JSON value."""
        return {"rollouts": self._count, "prompts": self._prompts.position()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_state`."""
        self._count = state["rollouts"]
        self._prompts.restore(state["prompts"])

    def _roll_out(self) -> list[Batch]:
        """Sample answers to the next prompts, score them, and split them into minibatches."""
        assert self.current_model is not None
        records: Any = self._prompts.next()[0]
        if isinstance(records, str) or not isinstance(records, Sequence) or not records:
            raise ValueError(
                f"the data contain {short(records)}: pass lists of records with 'prompt', see train.prompts"
            )
        model, parts = self.current_model(), self._objective.minibatches
        samples = self._score(records, self._sample(model, records))
        samples += [None] * (-len(samples) % parts)
        order = np.random.RandomState(self._seed_words()).permutation(len(samples))
        order = sorted(order, key=lambda i: samples[i] is None)  # stable. Every minibatch needs a sample.
        self._count += 1
        return [self._batch([samples[i] for i in sorted(order[part::parts])], model) for part in range(parts)]

    def _seed_words(self) -> list[int]:
        """Return the seed of the next rollout, as integers for NumPy's generators."""
        return [self._seed & 0xFFFFFFFF, self._count]

    def _sample(self, model: CausalLM, records: Sequence[Mapping[str, Any]]) -> list[list[Request]]:
        """Sample ``group_size`` answers to each prompt. Returns one group of requests per prompt."""
        objective = self._objective
        self._tokenizer = self._tokenizer or load_tokenizer(model)
        prompts = map_numbered("prompt", records, self._encode)
        if len(set(gather_texts(json.dumps(prompts)))) > 1:
            raise ValueError("the processes have different prompts: pass all prompts to every process")
        options = RequestOptions(
            objective.max_new_tokens,
            sampling=Sampling(temperature=objective.temperature),
            stop_ids=objective.eos_token_id,
            logprobs=0,
            return_routing=objective.replay and bool(model.config.experts),
        )
        engine = self._update_engine(model, options, len(prompts) * objective.group_size)
        seeds = np.random.SeedSequence(self._seed_words()).generate_state(len(prompts))
        groups = []
        for ids, seed in zip(prompts, seeds, strict=True):
            prefix, requests = Prefix(ids), list[Request]()
            for sample in range(objective.group_size):
                sample_options = dataclasses.replace(options, seed=int(seed), sample=sample)
                requests.append(engine.submit(ids, sample_options, prefix))
            groups.append(requests)
        engine.run()
        return groups

    def _encode(self, record: Mapping[str, Any]) -> tuple[int, ...]:
        if not isinstance(record, Mapping) or "prompt" not in record:
            raise ValueError(f"{short(record)} is not a record: pass lists of dicts with 'prompt', see train.prompts")
        ids, objective = encode_prompt(record["prompt"], self._tokenizer), self._objective
        max_length = objective.seq_len - objective.max_new_tokens
        if len(ids) > max_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but seq_len={objective.seq_len} and "
                f"max_new_tokens={objective.max_new_tokens} leave {max_length}: increase seq_len, or skip long prompts "
                f"with train.prompts(…, seq_len={max_length})"
            )
        return ids

    def _update_engine(self, model: CausalLM, options: RequestOptions, samples: int) -> Engine:
        """Update the engine's model. The first rollout creates the engine."""
        if self._engine is None:
            limits = dataclasses.replace(options.required_limits(model.vocab_size), tempered_logprobs=True)
            slots, capacity = min(self._objective.slots, samples), self._objective.seq_len
            self._engine = Engine(model, slots=slots, capacity=capacity, limits=limits)
        else:
            self._engine.update_model(model)
        return self._engine

    def _score(self, records: Sequence[Mapping[str, Any]], groups: list[list[Request]]) -> list[ScoredSample | None]:
        """Compute rewards and advantages. A sample without a reward, or with NaN or infinite logits, becomes None."""
        objective, requests = self._objective, [request for group in groups for request in group]
        rewards = self._rewards(records, requests)
        rewards[:, [request.finish == "error" for request in requests]] = np.nan
        rewards = rewards.reshape(len(rewards), len(groups), -1)
        advantages = compute_advantages(objective.advantages, rewards, objective.reward_weights).reshape(-1)
        totals = weighted_sum(rewards, objective.reward_weights).reshape(-1)
        is_excluded = np.isnan(advantages)
        text = f"rollout {self._count}: {is_excluded.sum()} of {len(requests)} samples have no reward"
        if len(requests) - is_excluded.sum() < objective.minibatches:
            num_failed = sum(request.finish == "error" for request in requests)
            raise ValueError(
                f"{text} ({num_failed} of them due to NaN logits). The others cannot be divided into "
                f"minibatches={objective.minibatches}: check the reward function and the model, or use more prompts"
            )
        if is_excluded.any():
            _logger.warning(text)
        samples: list[ScoredSample | None] = []
        for i, request in enumerate(requests):
            sample = None if is_excluded[i] else _scored_sample(request, float(advantages[i]), float(totals[i]))
            samples.append(sample)
        return samples

    def _rewards(self, records: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> np.ndarray:
        """Call the reward functions in process 0. All processes get the same values ``[functions, samples]``."""
        result, failure = dict[str, Any](), None
        if jax.process_index() == 0:
            completions: list[Any] = [request.ids for request in requests]
            if self._tokenizer is not None:
                completions = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
            columns = _columns_per_sample(records, self._objective.group_size)
            try:
                rewards = evaluate_rewards(self._objective.reward, columns.pop("prompt"), completions, columns)
                result = {"rewards": rewards.tolist()}
            except ValueError as error:
                result, failure = {"error": str(error)}, error
        result = json.loads(gather_texts(json.dumps(result))[0])
        if "error" in result:
            raise failure or ValueError(result["error"])
        return np.asarray(result["rewards"])

    def _batch(self, samples: Sequence[ScoredSample | None], model: CausalLM) -> Batch:
        """Stack samples into a batch, and return this process's rows.

        Adds ``old_logps`` if the rollout has several minibatches, and ``reference_logps`` of a reference model.
        """
        objective = self._objective
        batch = stack_samples(samples, objective.seq_len, self._row_multiple, pack=objective.pack)
        rows = len(batch["tokens"]) // jax.process_count()
        batch = {name: array[jax.process_index() * rows :][:rows] for name, array in batch.items()}
        logps = dict[str, np.ndarray]()
        if objective.minibatches > 1:
            logps["old_logps"] = self._logps(model, batch)
        if objective.reference_model is not None:
            unrouted_batch = {name: array for name, array in batch.items() if name != "routing"}
            logps["reference_logps"] = self._logps(objective.reference_model, unrouted_batch)
        return batch | logps

    def _logps(self, model: CausalLM, batch: Batch) -> np.ndarray:
        logps = model_program(model, _token_logps, static=(0,))(self._objective, put_rows(batch, model.mesh))
        return rows_of_process(logps, len(batch["tokens"]))


def _columns_per_sample(records: Sequence[Mapping[str, Any]], group_size: int) -> dict[str, list[Any]]:
    """Convert the records to one column per field, with ``group_size`` equal values per record."""
    columns: dict[str, list[Any]] = {name: [] for record in records for name in record}
    for record in records:
        for name, column in columns.items():
            column += [record.get(name)] * group_size
    return columns


def _scored_sample(request: Request, advantage: float, reward: float) -> ScoredSample:
    values = request.prompt, tuple(request.ids), tuple(request.logprobs), request.routing
    return ScoredSample(*values, advantage, reward)


def _token_logps(model: CausalLM, objective: Any, batch: dict[str, Array]) -> Float[Array, "B T"]:
    return shard_constraint(objective.logps(model, batch), model.mesh, batch_axes(model.mesh))
