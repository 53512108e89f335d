"""Sample the next token from logits. Options are applied in the same order as in transformers."""

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_python, check_type, whole_number
from nnxmoe.generation.ids import eos_ids, stop_ids
from nnxmoe.generation.rules import Rules
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import logger

# Fields of generation_config.json that change what transformers generates -> the values without effect. Fields in
# the second table have an effect only with do_sample.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "repetition_penalty": (1,),
    **dict.fromkeys(("no_repeat_ngram_size", "min_new_tokens", "min_length"), (0,)),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), ([], ())),
    "forced_eos_token_id": (),
}
_SAMPLED: dict[str, tuple[Any, ...]] = {"temperature": (1,), "top_k": (), "top_p": (1,), "min_p": (0,)}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("stop_strings", "exponential_decay_length_penalty", "watermarking_config"), ([], ())),
    "encoder_no_repeat_ngram_size": (0,),
    "token_healing": (False,),
}
_UNSUPPORTED_SAMPLED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    "top_h": (),
}
_TOP_K = 50  # default of transformers with do_sample
_warned: weakref.WeakSet[CausalLM] = weakref.WeakSet()


# Fields of `Sampling` that command-line options and requests may set individually.
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _whole(value: Any) -> bool:
    return 0 <= value < 2**63 and value == value // 1


# Field of `Sampling` -> description of its valid values, and function that validates a value.
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number >= 0 (0: greedy)", lambda value: 0 <= value < 1e38),
    "top_k": ("an integer >= 0 (0 or None: off)", _whole),
    "top_p": ("a number in (0, 1]", lambda value: 0 < value <= 1),
    "min_p": ("a number in [0, 1]", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a positive number", lambda value: 0 < value < 2**63),
    "presence_penalty": ("a number in [-2, 2] (0: off)", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("a number in [-2, 2] (0: off)", lambda value: -2 <= value <= 2),
    "min_new_tokens": ("an integer >= 0", _whole),
    "min_length": ("an integer >= 0", _whole),
}


@dataclasses.dataclass(frozen=True)
class Sampling(KnownFields):
    """Sampling options. Each option is disabled by default.

    Attributes:
        temperature: divides the logits after the penalties. 0 means greedy decoding.
        top_k: sample from the k most likely tokens. 0 or None disables the limit.
        top_p: sample from the fewest most likely tokens whose probabilities sum to at least p.
        min_p: sample from tokens that are at least p times as likely as the most likely token.
        repetition_penalty: values above 1 reduce the probability of tokens in the prompt and the new text.
        presence_penalty: subtracted once from the logit of each generated token. As in the OpenAI API
            and vLLM, tokens of the prompt do not count.
        frequency_penalty: subtracted per occurrence of a generated token. Tokens of the prompt do not
            count.
        min_new_tokens: minimum number of new tokens before an EOS id can be sampled.
        min_length: like ``min_new_tokens``, but includes the tokens of the prompt.
        rules: rules that restrict the next id, or None.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    min_length: int = 0
    rules: Rules | None = None

    def __post_init__(self) -> None:
        for name, (description, is_valid) in _CHECKS.items():
            value = as_python(getattr(self, name))
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and is_valid(value)) and not (name == "top_k" and value is None):
                raise ValueError(f"{name}={short(value).removesuffix('.0')}: it must be {description}")
            object.__setattr__(self, name, value)
        check_type("rules", self.rules, Rules | None, "a nnxmoe.generation.rules.Rules, or None")

    @classmethod
    def from_checkpoint(cls, model: CausalLM) -> Self:
        """Read the sampling options in generation_config.json, with the same meaning as in transformers.

        Without sampling fields, decoding is greedy. A warning lists unsupported fields.

        Raises:
            ValueError: if a field has a wrong type or value.
        """
        fields, ignored = effective_fields(model.generation_config)
        if ignored and model not in _warned:
            _warned.add(model)
            logger.warning("generation_config.json: %s: not supported, so ignored", format_fields(ignored))
        try:
            options = {name: fields[name] for name in ("temperature", "top_p", "min_p") if name in fields}
            if fields.get("do_sample"):
                top_k = max(whole_number("top_k", fields.get("top_k", _TOP_K), -(2**63)), 0)
                options = {"temperature": 1.0, "top_k": top_k, **options}
            minimums = {name: fields[name] for name in ("min_new_tokens", "min_length") if name in fields}
            if model.generation_config.get("min_new_tokens") is not None:  # takes precedence in transformers, even if 0
                minimums.pop("min_length", None)
            penalty = fields.get("repetition_penalty", 1)
            sampling_options: dict[str, Any] = {
                "temperature": 0.0,
                "repetition_penalty": penalty,
                **options,
                **minimums,
            }
            return cls(rules=_rules(fields, model), **sampling_options)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise ValueError(f"generation_config.json: {format_fields(fields)}: {error}") from None

    def min_new_tokens_after(self, prompt: int) -> int:
        """Return the minimum number of new tokens after a prompt of ``prompt`` tokens."""
        return max(self.min_new_tokens, self.min_length - prompt)


def effective_fields(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of generation_config.json that change what transformers generates.

    Returns:
        Supported fields and unsupported fields.
    """
    do_sample = bool(config.get("do_sample"))
    tables = [_FIELDS | (_SAMPLED if do_sample else {}), _UNSUPPORTED | (_UNSUPPORTED_SAMPLED if do_sample else {})]
    results = []
    for table in tables:
        set_fields = {name: config[name] for name in table if config.get(name) is not None}
        results.append({name: value for name, value in set_fields.items() if value not in table[name]})
    return results[0], results[1]


def warn_of_unused(model: CausalLM, sampling: Sampling | None) -> None:
    """Warn once per model if generation_config.json has fields that are not applied.

    No-op with sampling options. Without options, decoding is greedy, but transformers would apply the
    fields.
    """
    if sampling is None and model not in _warned:
        fields, ignored = effective_fields(model.generation_config)
        if fields or ignored:
            _warned.add(model)
            text = "generation_config.json sets %s, which is not applied. To apply the supported fields, pass "
            logger.warning(text + "sampling=Sampling.from_checkpoint(model)", format_fields(fields | ignored))


def format_fields(fields: Mapping[str, Any]) -> str:
    """Format fields for a message."""
    return ", ".join(f"{name}={short(value, 60)}" for name, value in fields.items())


def _rules(fields: Mapping[str, Any], model: CausalLM) -> Rules | None:
    """Read the rules in the fields of generation_config.json. Returns None if there are no rules."""
    end_ids = eos_ids(model, ...)
    bad_words = [tuple(ids) for ids in fields.get("bad_words_ids", ())]
    # transformers also removes the EOS ids from the bad words.
    bad_words = [ids for ids in bad_words if ids not in [(i,) for i in end_ids]]
    biases = [(tuple(ids), bias) for ids, bias in fields.get("sequence_bias", ())]
    rules = Rules(
        fields.get("no_repeat_ngram_size", 0),
        tuple(biases + [(ids, -math.inf) for ids in bad_words]),
        *(_ids(name, fields.get(name)) for name in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")),
    )
    return None if rules == Rules() else rules


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Read the ids in a field of generation_config.json. Drops negative ids, which mean "no id"."""
    return tuple(i for i in stop_ids(value, name, -(2**63)) if i >= 0)


class StaticSampling(NamedTuple):
    """Sampling operations that any row needs: the static part of the options.

    Attributes:
        random: whether any row is not greedy.
        penalty: whether any row has a repetition penalty.
        cut: whether any row has top-k, top-p or min-p.
        counts: whether any row has a presence or frequency penalty.
        rules: rules of all rows.
    """

    random: bool = True
    penalty: bool = True
    cut: bool = True
    counts: bool = True
    rules: tuple[Rules, ...] = ()

    def __or__(self, other: "StaticSampling") -> "StaticSampling":  # type: ignore[override]
        flags = (flag or other_flag for flag, other_flag in zip(self[:4], other[:4], strict=True))
        return StaticSampling(
            *flags, rules=self.rules + tuple(rules for rules in other.rules if rules not in self.rules)
        )


class DynamicSampling(NamedTuple):
    """Option values per row, which can change without recompilation.

    See `Sampling`. A ``temperature`` of 0 means greedy. ``rules`` is an index into `StaticSampling.rules`,
    or -1 without rules.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    presence: Any
    frequency: Any
    rules: Any


def split_sampling(
    sampling: Sampling | None, vocab: int, known: tuple[Rules, ...] = ()
) -> tuple[StaticSampling, DynamicSampling]:
    """Split sampling options into the static part and the values for one row, without a row dimension.

    Args:
        sampling: the options. If None, decoding is greedy.
        vocab: size of the vocabulary.
        known: ``StaticSampling.rules`` of the compiled step.
    """
    s = sampling or Sampling(temperature=0.0)
    top_k = min(s.top_k or vocab, vocab)
    random = s.temperature > 0
    cut = random and (top_k < vocab or s.top_p < 1 or s.min_p > 0)
    numbers = (s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    temperature = np.float32(max(s.temperature, 1e-20) if random else 0)
    rules = () if s.rules is None else (s.rules,)
    index = np.int32(known.index(s.rules) if s.rules in known else -1)
    counts = s.presence_penalty != 0 or s.frequency_penalty != 0
    steps = StaticSampling(random, s.repetition_penalty != 1, cut, counts, rules)
    top_p, min_p, penalty, presence, frequency = map(np.float32, numbers)
    return steps, DynamicSampling(temperature, np.int32(top_k), top_p, min_p, penalty, presence, frequency, index)


def sample_ids(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    steps: StaticSampling,
    dynamic: DynamicSampling,
    keys: Key[Array, "B"],
    counts: Int[Array, "B V"] | None = None,
) -> Int[Array, "B"]:
    """Sample the next token of each row.

    Args:
        logits: logits of the next token.
        seen: mask of the tokens in the prompt and the new text. None without repetition penalties.
        steps: operations to apply.
        dynamic: option values per row.
        keys: random key per row.
        counts: number of occurrences of each generated token. None without presence and frequency
            penalties.
    """
    logits = _apply_penalties(logits, seen, counts, steps, dynamic)
    greedy_ids, is_random = jnp.argmax(logits, axis=-1).astype(jnp.int32), dynamic.temperature > 0
    if not steps.random:
        return greedy_ids

    def draw() -> Int[Array, "B"]:
        sampled_ids = jax.vmap(jax.random.categorical)(keys, _scale_and_filter(logits, steps, dynamic))
        return jnp.where(is_random, sampled_ids.astype(jnp.int32), greedy_ids)

    return jax.lax.cond(jnp.any(is_random), draw, lambda: greedy_ids)


def generated_counts(
    ids: Int[Array, "B C"], count: Int[Array, "B"], new_count: Int[Array, "B"], dynamic: DynamicSampling, vocab: int
) -> Int[Array, "B V"]:
    """Count the occurrences of each id among the last ``new_count`` of ``count`` ids.

    Returns zeros if no row has a presence or frequency penalty.
    """
    row, positions = jnp.arange(len(ids))[:, None], jnp.arange(ids.shape[1])[None]
    zeros = jnp.zeros((len(ids), vocab), jnp.int32)

    def add() -> Int[Array, "B V"]:
        is_new = (positions < count[:, None]) & (positions >= (count - new_count)[:, None])
        return zeros.at[row, ids].add(is_new.astype(jnp.int32))

    return jax.lax.cond(jnp.any((dynamic.presence != 0) | (dynamic.frequency != 0)), add, lambda: zeros)


def _apply_penalties(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    counts: Int[Array, "B V"] | None,
    steps: StaticSampling,
    dynamic: DynamicSampling,
) -> Float[Array, "B V"]:
    """Apply the penalties to the logits, in the same order as vLLM."""
    if steps.penalty:
        assert seen is not None
        penalty = dynamic.penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if steps.counts:
        assert counts is not None
        logits = logits - dynamic.frequency[:, None] * counts - dynamic.presence[:, None] * (counts > 0)
    return logits


def _scale_and_filter(
    logits: Float[Array, "B V"], steps: StaticSampling, dynamic: DynamicSampling
) -> Float[Array, "B V"]:
    """Divide the logits by the temperature, and set the logits of excluded tokens to -inf."""
    logits = logits / jnp.where(dynamic.temperature > 0, dynamic.temperature, 1)[:, None]
    return jnp.where(logits < _threshold(logits, dynamic)[:, None], -jnp.inf, logits) if steps.cut else logits


def _threshold(logits: Float[Array, "B V"], dynamic: DynamicSampling) -> Float[Array, "B"]:
    """Compute the smallest logit that passes top-k, then top-p, then min-p."""
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None, :]
    kth_logit = jnp.take_along_axis(ordered, dynamic.top_k[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered < kth_logit, -jnp.inf, ordered)  # keeps ties with the k-th logit, as in transformers
    probabilities = jax.nn.softmax(ordered, axis=-1)
    preceding = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = dynamic.top_p[:, None]
    is_kept = ((preceding < top_p) | (top_p == 1) | (rank == 0)) & (ordered >= kth_logit)
    is_kept &= (probabilities >= dynamic.min_p[:, None] * probabilities[:, :1]) | (rank == 0)
    return jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1)
