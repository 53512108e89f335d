"""Requests for generation: their options, their limits and their results so far."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer

from nnxmoe.config.printable import short
from nnxmoe.generation.grammar import Constraint, ConstraintState
from nnxmoe.generation.rows import FULL, RUNNING, STOPPED, Asked
from nnxmoe.generation.sampling import Sampling, Steps, prepare

Finish = Literal["stop", "length", "cancelled"]
FINISHES: Mapping[int, Finish | None] = {RUNNING: None, STOPPED: "stop", FULL: "length"}  # by why a row ended
Ids = Sequence[int] | Integer[Any, "_"]  # of one text: a list, or an array of NumPy, JAX or torch
Eos = int | np.integer | Ids | None | EllipsisType  # ...: the end tokens of the checkpoint


@dataclasses.dataclass(frozen=True)
class Limits:
    """The room of a batch, per row: ``stops`` ids that end it, ``biases`` of its logits, and log-probabilities of
    the ``top`` most likely ids (None: no log-probabilities). ``sampling``: the options it is compiled with."""

    stops: int = 16
    biases: int = 0
    top: int | None = None
    sampling: Steps = Steps()


@dataclasses.dataclass(frozen=True)
class Wanted:
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
    stop_ids: Eos = ...
    seed: int = 0
    sample: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name in ("seed", "max_new_tokens", "min_new_tokens", "logprobs"):
            if (value := getattr(self, name)) is not None or name != "logprobs":
                object.__setattr__(self, name, whole_number(name, value, -(2**63) if name == "seed" else 0))
        whole_ids(list(self.logit_bias))
        for i, bias in self.logit_bias.items():
            if not (isinstance(bias, int | float | np.number) and bias < math.inf):  # false for NaN too
                raise ValueError(f"logit_bias[{i}]={short(bias)}: give a finite number, or -inf to exclude the id")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")

    @property
    def _stops(self) -> tuple[int, ...]:
        return () if self.stop_ids is ... or self.stop_ids is None else tuple(np.atleast_1d(self.stop_ids).tolist())

    def started(self, vocab: int) -> ConstraintState | None:
        """The state of the constraint before the first id; None without one. Raises ValueError."""
        return None if self.constraint is None else self.constraint.start(vocab, self._stops)

    def limits(self, vocab: int) -> Limits:
        """The limits that a batch needs for this request; the checkpoint's end tokens are not counted."""
        steps = prepare(self.sampling, vocab)[0]
        return Limits(max(1, len(self._stops)), len(self.logit_bias), self.logprobs, steps)

    def asked(self, limits: Limits, vocab: int, prompt: int = 0) -> Asked:
        """This as the NumPy arrays of one row, without a row dimension, after a prompt of so many ids. Raises
        ValueError beyond the limits."""
        for name, given, most in (
            ("stop_ids", len(self._stops), limits.stops),
            ("logit_bias", len(self.logit_bias), limits.biases),
            ("logprobs", -1 if self.logprobs is None else self.logprobs, -1 if limits.top is None else limits.top),
        ):
            if given > most:
                raise ValueError(f"{name}: {given} is more than the {max(most, 0)} of this engine's {limits}")
        steps, knobs = prepare(self.sampling, vocab, limits.sampling.rules)
        if limits.sampling | steps != limits.sampling:
            raise ValueError(f"{self.sampling} needs {steps}, and this engine has {limits}")
        refuse_ids(self.logit_bias, vocab)
        if (self.logprobs or 0) > vocab:
            raise ValueError(f"logprobs={self.logprobs} is more than the {vocab} ids of the vocabulary")
        stops = np.full(limits.stops, -1, np.int32)
        stops[: len(self._stops)] = self._stops
        biased, biases = np.full(limits.biases, vocab, np.int32), np.zeros(limits.biases, np.float32)
        count = len(self.logit_bias)
        biased[:count], biases[:count] = list(self.logit_bias), list(self.logit_bias.values())
        low, high = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        random = jax.random.key(low)  # of a wider seed JAX would use these bits only
        key = np.asarray(jax.random.key_data(jax.random.fold_in(random, high) if high else random))
        fewest = max(self.min_new_tokens, 0 if self.sampling is None else self.sampling.least(prompt))
        sample, most, least = np.int32(self.sample), np.int32(self.max_new_tokens), np.int32(fewest)
        logprobs = np.int32(-1 if self.logprobs is None else self.logprobs)
        return Asked(knobs, key, sample, most, least, stops, biased, biases, logprobs)


@dataclasses.dataclass(eq=False)
class Prefix:
    """Ids with which several requests begin, read once while the object is in use. ``start``: a shorter prefix, with
    which this one begins."""

    ids: tuple[int, ...]
    start: "Prefix | None" = None

    def __post_init__(self) -> None:
        self.ids = whole_ids(self.ids)
        if not self.ids:
            raise ValueError("a prefix needs at least one id")
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
    wanted: Wanted
    asked: Asked
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


def eos_ids(model: Any, eos_token_id: Eos) -> tuple[int, ...]:
    """The ids that end a sequence; ``...`` reads them from generation_config.json, else config.json."""
    from_files = eos_token_id is ...
    if from_files:
        eos_token_id = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    if eos_token_id is None:
        return ()
    found = [int(i) for i in np.atleast_1d(np.asarray(eos_token_id))]
    return tuple(i for i in found if not from_files or 0 <= i < model.config.vocab_size)


def whole_number(name: str, value: object, smallest: int) -> int:
    """``value``; raises ValueError unless it is an integer of at least ``smallest``."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    whole = whole or (isinstance(value, float | np.floating) and float(value).is_integer())
    if not whole or not smallest <= value < 2**63:  # pyright: ignore
        raise ValueError(f"{name} must be a 64-bit integer >= {smallest}, got {short(value)}")
    return int(value)  # pyright: ignore


def whole_ids(ids: Ids) -> tuple[int, ...]:
    """Token ids as a tuple of integers. Raises ValueError for a text and for numbers that are not whole."""
    if isinstance(ids, str):
        raise ValueError(f"{ids!r:.60} is a text: encode it with the tokenizer")
    given = ids if isinstance(ids, Sequence) else ids.tolist()
    return tuple(whole_number("a token id", one, 0) for one in given)


def refuse_ids(ids: Sequence[int] | Mapping[int, float] | np.ndarray, vocab: int) -> None:
    """Raise ValueError for ids outside of the vocabulary."""
    for bad in [i for i in ids if not 0 <= i < vocab][:1]:
        raise ValueError(f"token ids must lie in 0 … {vocab - 1}, got {bad}: is this the model's tokenizer?")
