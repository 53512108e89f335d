"""Generation requests: options, engine limits and results."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_python, check_type, whole_number
from nnxmoe.generation.grammar import Constraint, ConstraintState
from nnxmoe.generation.ids import EosIds, as_token_ids, check_ids, stop_ids
from nnxmoe.generation.rows import BROKEN, FULL, RUNNING, STOPPED, RowParams
from nnxmoe.generation.sampling import Sampling, StaticSampling, split_sampling

Finish = Literal["stop", "length", "cancelled", "error"]  # "error" means that the logits were NaN or infinite
FINISH_REASONS: Mapping[int, Finish | None] = {RUNNING: None, STOPPED: "stop", FULL: "length", BROKEN: "error"}
_MAX_BIAS = float(np.finfo(np.float32).max)
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """Maximum sizes of request options that an `Engine` is compiled for.

    Attributes:
        max_stop_ids: maximum number of stop ids.
        max_logit_biases: maximum number of ids in ``logit_bias``.
        max_logprobs: maximum number of most likely ids whose log-probabilities are reported. If None, no
            log-probabilities are computed.
        sampling: sampling operations that requests may use.
        tempered_logprobs: whether log-probabilities are computed from the logits divided by the request's
            temperature, as for sampling. For greedy requests, the logits are not divided.
        return_routing: whether requests may return their routing. If True, every pass returns the experts of its
            tokens, and the prefix cache stores their routing.
    """

    max_stop_ids: int = 16
    max_logit_biases: int = 0
    max_logprobs: int | None = None
    sampling: StaticSampling = StaticSampling()
    tempered_logprobs: bool = False
    return_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("max_stop_ids", "max_logit_biases", "max_logprobs"):
            if (value := getattr(self, name)) is not None or name != "max_logprobs":
                object.__setattr__(self, name, whole_number(name, value, 0, 2**31))
        check_type(
            "sampling", self.sampling, StaticSampling, "the sampling of RequestOptions(…).required_limits(vocab)"
        )
        for name in ("tempered_logprobs", "return_routing"):
            check_type(name, getattr(self, name), bool, "True or False")


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Options of one request.

    The new ids depend on the prompt and these options, not on other requests of the engine.

    Attributes:
        max_new_tokens: maximum number of new ids.
        min_new_tokens: minimum number of new ids before a stop id can be sampled.
        sampling: sampling options. If None, decoding is greedy.
        stop_ids: ids that end the request. The stop id is the last id of the request. Defaults to the
            checkpoint's EOS tokens. If None, no id ends the request.
        seed: seed of the random keys.
        sample: index of the sample among the samples of one prompt.
        logit_bias: maps ids to values that are added to their logits.
        logprobs: number of most likely ids to report per position, in addition to the log-probabilities
            of the new ids. If None, no log-probabilities are reported.
        constraint: restricts the ids, for example a `Grammar`. Takes precedence over all other options.
        return_routing: whether to return the experts of each token (`Request.routing`).
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    sampling: Sampling | None = None
    stop_ids: EosIds = ...
    seed: int = 0
    sample: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    constraint: Constraint | None = None
    return_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("seed", "sample", "max_new_tokens", "min_new_tokens", "logprobs"):
            if (value := getattr(self, name)) is not None or name != "logprobs":
                minimum, below = (-(2**63), 2**63) if name == "seed" else (0, 2**31 if name == "sample" else 2**63)
                object.__setattr__(self, name, whole_number(name, value, minimum, below))
        if self.stop_ids is not ... and self.stop_ids is not None:
            object.__setattr__(self, "stop_ids", stop_ids(self.stop_ids, "stop_ids"))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        check_type("sampling", self.sampling, Sampling | None, "nnxmoe.Sampling(…), or None")
        has_start = callable(getattr(self.constraint, "start", None)) and not isinstance(self.constraint, type)
        if self.constraint is not None and not has_start:
            raise ValueError(f"constraint={short(self.constraint)}: pass an object such as nnxmoe.Grammar, or None")
        check_type("return_routing", self.return_routing, bool, "True or False")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")

    @property
    def _stop_ids(self) -> tuple[int, ...]:
        return self.stop_ids if isinstance(self.stop_ids, tuple) else ()

    def start_constraint(self, vocab_size: int) -> ConstraintState | None:
        """Return the constraint's state before the first new id, or None without a constraint.

        Raises:
            ValueError: if the constraint is invalid.
        """
        return None if self.constraint is None else self.constraint.start(vocab_size, self._stop_ids)

    def required_limits(self, vocab_size: int) -> EngineLimits:
        """Return the engine limits that this request requires. `Engine` adds the checkpoint's EOS tokens."""
        static = split_sampling(self.sampling, vocab_size)[0]
        max_stop_ids = max(1, len(self._stop_ids))
        max_biases, routing = len(self.logit_bias), self.return_routing
        return EngineLimits(max_stop_ids, max_biases, self.logprobs, static, return_routing=routing)

    def row_params(self, limits: EngineLimits, vocab_size: int, prompt_length: int = 0) -> RowParams:
        """Convert the options to NumPy arrays for one row, without a row dimension.

        Raises:
            ValueError: if an option exceeds the limits or an id is outside the vocabulary.
        """
        self._check(limits, vocab_size)
        dynamic = split_sampling(self.sampling, vocab_size, limits.sampling.rules)[1]
        stop_ids = np.full(limits.max_stop_ids, -1, np.int32)
        stop_ids[: len(self._stop_ids)] = self._stop_ids
        biased_ids = np.full(limits.max_logit_biases, vocab_size, np.int32)
        biases = np.zeros(limits.max_logit_biases, np.float32)
        count = len(self.logit_bias)
        biased_ids[:count], biases[:count] = list(self.logit_bias), list(self.logit_bias.values())
        min_new_tokens = self.min_new_tokens
        if self.sampling is not None:
            min_new_tokens = max(min_new_tokens, self.sampling.min_new_tokens_after(prompt_length))
        return RowParams(
            dynamic=dynamic,
            key=_key_data(self.seed),
            sample=np.int32(self.sample),
            max_new_tokens=np.int32(min(self.max_new_tokens, _MAX_INT32)),
            min_new_tokens=np.int32(min(min_new_tokens, _MAX_INT32)),
            stop_ids=stop_ids,
            biased=biased_ids,
            biases=biases,
            logprobs=np.int32(_or_minus_one(self.logprobs)),
        )

    def _check(self, limits: EngineLimits, vocab_size: int) -> None:
        for name, count, limit in (
            ("stop_ids", len(self._stop_ids), limits.max_stop_ids),
            ("logit_bias", len(self.logit_bias), limits.max_logit_biases),
            ("logprobs", _or_minus_one(self.logprobs), _or_minus_one(limits.max_logprobs)),
            ("return_routing", self.return_routing, limits.return_routing),
        ):
            if count > limit:
                raise ValueError(f"{name}: {count} exceeds the maximum of {max(limit, 0)} in this engine's {limits}")
        static = split_sampling(self.sampling, vocab_size)[0]
        if limits.sampling | static != limits.sampling:
            raise ValueError(f"{self.sampling} needs {static}, but this engine has {limits}")
        check_ids(self._stop_ids, vocab_size, "stop_ids")
        check_ids(self.logit_bias, vocab_size, "ids of logit_bias")
        if (self.logprobs or 0) > vocab_size:
            raise ValueError(f"logprobs={self.logprobs} is more than the {vocab_size} ids of the vocabulary")


@dataclasses.dataclass(eq=False)
class Prefix:
    """Prompt prefix that several requests share. An engine prefills it once while the object is in use.

    Attributes:
        ids: ids of the prefix.
        start: a shorter prefix that this prefix starts with, or None.
    """

    ids: tuple[int, ...]
    start: "Prefix | None" = None

    def __post_init__(self) -> None:
        self.ids = as_token_ids(self.ids)
        if not self.ids:
            raise ValueError("a prefix needs at least one id")
        check_type("start", self.start, Prefix | None, "a Prefix, or None")
        if self.start is not None and self.ids[: len(self.start.ids)] != self.start.ids:
            raise ValueError(f"the prefix does not start with the {len(self.start.ids)} ids of its start prefix")


@dataclasses.dataclass(eq=False)
class Request:
    """Request and its results so far. Created by `Engine.submit`.

    Attributes:
        prompt: ids of the prompt.
        options: options of the request.
        row_params: the options as arrays.
        prefix: the prefix whose cache is reused. None after the prompt has been prefilled.
        ids: new ids so far.
        logprobs: log-probability of each new id under the model's distribution, before options are applied (see
            `EngineLimits.tempered_logprobs`).
        top: most likely ids per position, with their log-probabilities.
        steps: number of steps started for the request.
        accepted: ``accepted[n]`` is the number of steps in which n ids of the draft were accepted.
        finish: why the request ended, or None while it runs.
        progress: state of the constraint, or None.
        drafts: ids that the draft proposed for the next step.
        routing_parts: experts of consecutive tokens. Empty unless `EngineLimits.return_routing` is set.
    """

    prompt: tuple[int, ...]
    options: RequestOptions
    row_params: RowParams
    prefix: Prefix | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    steps: int = 0
    accepted: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    finish: Finish | None = None
    progress: ConstraintState | None = None
    drafts: list[int] = dataclasses.field(default_factory=list)
    routing_parts: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def routing(self) -> Integer[np.ndarray, "tokens L X"] | None:
        """Experts of the prompt and of the new ids except the last, which was never an input of the model.

        Contains X experts per token for each of the L MoE layers, in the smallest unsigned dtype. None if the options
        do not request the routing, no id has been generated yet, or the model is dense.
        """
        return np.concatenate(self.routing_parts) if self.options.return_routing and self.routing_parts else None

    @property
    def done(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self.finish is not None


class Event(NamedTuple):
    """New ids of a request from one step.

    Attributes:
        request: request that the ids belong to.
        ids: new ids, in order.
        finish: why the request ended, or None.
    """

    request: Request
    ids: list[int]
    finish: Finish | None


def _key_data(seed: int) -> np.ndarray:
    """Create random key data from a 64-bit seed. `jax.random.key` alone uses only the low 32 bits."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    key = jax.random.key(low)
    return np.asarray(jax.random.key_data(jax.random.fold_in(key, high) if high else key))


def _or_minus_one(count: int | None) -> int:
    return -1 if count is None else count


def _biases(biases: Any) -> dict[int, float]:
    """Copy ``logit_bias``. Raises ValueError if a key is not an id or a value is neither finite nor -inf."""
    check_type("logit_bias", biases, Mapping, "a dict from token ids to values that are added to their logits")
    ids = as_token_ids(list(biases), "an id of logit_bias")
    values = [as_python(bias) for bias in biases.values()]
    for i, bias in zip(ids, values, strict=True):
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not (bias == -math.inf or -_MAX_BIAS <= bias <= _MAX_BIAS):
            raise ValueError(f"logit_bias[{i}]={short(bias)}: pass a finite number, or -inf to exclude the id")
    return dict(zip(ids, map(float, values), strict=True))


def unusable_logits(model: Any) -> str:
    """Return a possible cause of NaN or infinite logits and a remedy, for messages."""
    if jnp.dtype(model.dtype) == jnp.float16:
        return "float16 overflows beyond 65504: load the model with dtype=jnp.bfloat16 or jnp.float32"
    return "look for NaN and huge values in the weights, and in the logits after biases, rules and logits_processor"
