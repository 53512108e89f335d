"""Requests for generation: their options, their limits and their results so far."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_python, check_type, whole_number
from nnxmoe.generation.grammar import Constraint, ConstraintState
from nnxmoe.generation.ids import EosIds, as_token_ids, check_ids, stop_ids
from nnxmoe.generation.rows import BROKEN, FULL, RUNNING, STOPPED, RowParams
from nnxmoe.generation.sampling import Sampling, StaticSampling, split_sampling

Finish = Literal["stop", "length", "cancelled", "error"]  # error: the logits were NaN or infinite
FINISH_REASONS: Mapping[int, Finish | None] = {RUNNING: None, STOPPED: "stop", FULL: "length", BROKEN: "error"}
_BIAS = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """The room of a batch, per row: ``stops`` ids that end it, ``biases`` of its logits, and log-probabilities of
    the ``top`` most likely ids (None: no log-probabilities). ``sampling``: the options it is compiled with."""

    max_stop_ids: int = 16
    max_logit_biases: int = 0
    max_logprobs: int | None = None
    sampling: StaticSampling = StaticSampling()

    def __post_init__(self) -> None:
        for name in ("max_stop_ids", "max_logit_biases", "max_logprobs"):
            if (value := getattr(self, name)) is not None or name != "max_logprobs":
                object.__setattr__(self, name, whole_number(name, value, 0, 2**31))
        check_type(
            "sampling", self.sampling, StaticSampling, "the sampling of RequestOptions(…).required_limits(vocab)"
        )


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Options of a request: up to ``max_new_tokens`` ids, none of ``stop_ids`` before ``min_new_tokens``; an id of
    ``stop_ids`` ends a request, as its last one. Default: the end tokens of the checkpoint; None: none.

    ``sampling`` None: greedy. Ids are drawn by ``seed`` and ``sample``, the number among the samples of one prompt;
    nothing else matters, such as other requests. ``logit_bias``: id -> what is added to its logit. ``logprobs`` n:
    also the log-probabilities of the ids made, and the n most likely ids at each place; None: none. ``constraint``:
    what the ids must follow, such as a `Grammar`; it counts before every other option.
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

    def __post_init__(self) -> None:
        for name in ("seed", "sample", "max_new_tokens", "min_new_tokens", "logprobs"):
            if (value := getattr(self, name)) is not None or name != "logprobs":
                least, below = (-(2**63), 2**63) if name == "seed" else (0, 2**31 if name == "sample" else 2**63)
                object.__setattr__(self, name, whole_number(name, value, least, below))
        if self.stop_ids is not ... and self.stop_ids is not None:
            object.__setattr__(self, "stop_ids", stop_ids(self.stop_ids, "stop_ids"))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        check_type("sampling", self.sampling, Sampling | None, "nnxmoe.Sampling(…), or None")
        starts = callable(getattr(self.constraint, "start", None)) and not isinstance(self.constraint, type)
        if self.constraint is not None and not starts:
            raise ValueError(f"constraint={short(self.constraint)}: give an object such as nnxmoe.Grammar, or None")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")

    @property
    def _stop_ids(self) -> tuple[int, ...]:
        return self.stop_ids if isinstance(self.stop_ids, tuple) else ()

    def start_constraint(self, vocab: int) -> ConstraintState | None:
        """The state of the constraint before the first id; None without one. Raises ValueError."""
        return None if self.constraint is None else self.constraint.start(vocab, self._stop_ids)

    def required_limits(self, vocab: int) -> EngineLimits:
        """The limits that a batch needs for this request; the checkpoint's end tokens are not counted."""
        steps = split_sampling(self.sampling, vocab)[0]
        return EngineLimits(max(1, len(self._stop_ids)), len(self.logit_bias), self.logprobs, steps)

    def row_params(self, limits: EngineLimits, vocab: int, prompt: int = 0) -> RowParams:
        """This as the NumPy arrays of one row, without a row dimension, after a prompt of so many ids. Raises
        ValueError beyond the limits."""
        for name, given, most in (
            ("stop_ids", len(self._stop_ids), limits.max_stop_ids),
            ("logit_bias", len(self.logit_bias), limits.max_logit_biases),
            (
                "logprobs",
                -1 if self.logprobs is None else self.logprobs,
                -1 if limits.max_logprobs is None else limits.max_logprobs,
            ),
        ):
            if given > most:
                raise ValueError(f"{name}: {given} is more than the {max(most, 0)} of this engine's {limits}")
        steps, dynamic = split_sampling(self.sampling, vocab, limits.sampling.rules)
        if limits.sampling | steps != limits.sampling:
            raise ValueError(f"{self.sampling} needs {steps}, and this engine has {limits}")
        check_ids(self._stop_ids, vocab, "stop_ids")
        check_ids(self.logit_bias, vocab, "ids of logit_bias")
        if (self.logprobs or 0) > vocab:
            raise ValueError(f"logprobs={self.logprobs} is more than the {vocab} ids of the vocabulary")
        stops = np.full(limits.max_stop_ids, -1, np.int32)
        stops[: len(self._stop_ids)] = self._stop_ids
        biased, biases = (
            np.full(limits.max_logit_biases, vocab, np.int32),
            np.zeros(limits.max_logit_biases, np.float32),
        )
        count = len(self.logit_bias)
        biased[:count], biases[:count] = list(self.logit_bias), list(self.logit_bias.values())
        low, high = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        random = jax.random.key(low)  # of a wider seed JAX would use these bits only
        key = np.asarray(jax.random.key_data(jax.random.fold_in(random, high) if high else random))
        fewest = max(self.min_new_tokens, 0 if self.sampling is None else self.sampling.min_new_tokens_after(prompt))
        most, least = (np.int32(min(count, 2**31 - 1)) for count in (self.max_new_tokens, fewest))
        sample = np.int32(self.sample)
        logprobs = np.int32(_or_minus_one(self.logprobs))
        return RowParams(dynamic, key, sample, most, least, stops, biased, biases, logprobs)


@dataclasses.dataclass(eq=False)
class Prefix:
    """Ids with which several requests begin, read once while the object is in use. ``start``: a shorter prefix, with
    which this one begins."""

    ids: tuple[int, ...]
    start: "Prefix | None" = None

    def __post_init__(self) -> None:
        self.ids = as_token_ids(self.ids)
        if not self.ids:
            raise ValueError("a prefix needs at least one id")
        check_type("start", self.start, Prefix | None, "a Prefix, or None")
        if self.start is not None and self.ids[: len(self.start.ids)] != self.start.ids:
            raise ValueError(f"the prefix does not begin with the {len(self.start.ids)} ids of its start")


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt that waits, is read, is continued, or is done; made by `Engine.submit`.

    ``asked``: what is wanted, as arrays. ``ids``: the new ones so far. ``logprobs``: of each of them, under the model's
    own distribution before any option; ``top``: the most likely ids at each place, with their log-probabilities.
    ``steps``: how many were started for it. ``accepted[n]``: in how many of them n ids of the draft were accepted.
    ``finish``: why it is done; None before. ``progress``: the state of its constraint; ``drafts``: what may follow.
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

    @property
    def done(self) -> bool:
        return self.finish is not None


class Event(NamedTuple):
    """New ids of a request, and why it is done if it is."""

    request: Request
    ids: list[int]
    finish: Finish | None


def _or_minus_one(count: int | None) -> int:
    return -1 if count is None else count


def _biases(biases: Any) -> dict[int, float]:
    """Copy ``logit_bias``. Raises ValueError for keys that are not ids and values that are neither finite nor -inf."""
    check_type("logit_bias", biases, Mapping, "a dict of token ids and what is added to their logits")
    ids = as_token_ids(list(biases), "an id of logit_bias")
    values = [as_python(bias) for bias in biases.values()]
    for i, bias in zip(ids, values, strict=True):
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not (bias == -math.inf or -_BIAS <= bias <= _BIAS):
            raise ValueError(f"logit_bias[{i}]={short(bias)}: give a finite number, or -inf to exclude the id")
    return dict(zip(ids, map(float, values), strict=True))


def unusable_logits(model: Any) -> str:
    """Error text: possible causes of NaN or infinite logits, and remedies."""
    if jnp.dtype(model.dtype) == jnp.float16:
        return "float16 overflows beyond 65504: load the model with dtype=jnp.bfloat16 or jnp.float32"
    return "look for NaN and for huge values in the weights, and in what biases, rules and process= do to the logits"
