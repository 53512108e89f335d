"""Unknown arguments, answered with the name that they have here, or with the nearest one."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Self, TypeVar, get_args

from nnxmoe.config.printable import did_you_mean

P = ParamSpec("P")  # two lines: type checkers refuse a tuple
R = TypeVar("R")

_SAMPLING = "give sampling=nnxmoe.Sampling(temperature=…, top_k=…, top_p=…); without it decoding is greedy"
_HINTS = {
    "device_map": "give mesh=nnxmoe.make_mesh(tensor=…) for several devices; a single one is used without it",
    "torch_dtype": "give dtype=",
    "load_in_8bit": "give quantize=nnxmoe.Int8()",
    "load_in_4bit": "give quantize=nnxmoe.Int4()",
    "quantization_config": "give quantize=nnxmoe.Int8(), or keep_quantized=True for codes that the files have",
    "attn_implementation": "give strategy=nnxmoe.Strategy(attend=…)",
    "trust_remote_code": "code of checkpoints is never run: leave it out",
    "ignore_unknown": "fields of config.json that change nothing are dropped without it: leave it out",
    "low_cpu_mem_usage": "weights are always read into their place: leave it out",
    "token": "run `hf auth login`, or set HF_TOKEN",
    "cache_dir": "set HF_HOME",
    "max_length": "give max_new_tokens=, which does not count the prompt",
    "max_tokens": "give max_new_tokens=",
    "do_sample": _SAMPLING,
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), _SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _SAMPLING),
    "num_return_sequences": "use nnxmoe.complete(model, prompts, n=…)",
    "num_beams": "there is no beam search: leave it out",
    "stop_strings": "use nnxmoe.complete(model, prompts, stop=[…])",
    "streamer": "use nnxmoe.stream(model, tokenizer, prompt)",
    "past_key_values": "give cache=model.empty_cache(batch, capacity)",
    "use_cache": "give cache=model.empty_cache(batch, capacity) to a call; generation always has one",
    "position_ids": "give positions=",
    "output_hidden_states": "give return_hidden=True",
    "output_router_logits": "give return_routing=True",
    "labels": "use nnxmoe.train.fit, or train.Objective for the loss alone",
    **dict.fromkeys(("lr", "learning_rate"), "give it to the optimizer, such as optimizer=optax.adamw(1e-4)"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "give steps=; train.batches has epochs="),
    **dict.fromkeys(("train_dataset", "dataset"), "give data=, such as train.batches(…)"),
    "eval_dataset": "give evaluate=",
    "max_steps": "give steps=",
    "gradient_accumulation_steps": "give accumulate=",
    "output_dir": "give checkpoint=",
    "capacity": "the cache has room for the prompt and max_new_tokens; nnxmoe.Engine has capacity=",
    **dict.fromkeys(("training", "train", "deterministic"), "training computes the same: leave it out"),
}


class UnknownArgument(TypeError, ValueError):
    """Raised for an unknown keyword argument: a TypeError as Python's own, a ValueError as all errors here."""


def _unknown(name: str, keyword: str, known: Iterable[str]) -> UnknownArgument:
    near = did_you_mean(keyword, known)
    return UnknownArgument(f"{name}() has no argument {keyword!r}{near or ': it has ' + ', '.join(known)}")


def refuses_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its error for an unknown keyword names the argument to use instead.

    Its ``**options``, if it has some, must be annotated with a TypedDict.
    """
    known = list[str]()
    for parameter in inspect.signature(function).parameters.values():
        open_ended = parameter.kind is parameter.VAR_KEYWORD
        known += get_args(parameter.annotation)[0].__annotations__ if open_ended else [parameter.name]
    shown = [name for name in known if name != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                if name in _HINTS:
                    raise UnknownArgument(f"{function.__name__}() has no argument {name!r}: {_HINTS[name]}")
                raise _unknown(function.__name__, name, shown)
        return function(*args, **kwargs)

    return call


class KnownFields:
    """A base of dataclasses whose error for an unknown field names the field that was meant."""

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        known = [each.name for each in dataclasses.fields(cls) if each.init]  # pyright: ignore[reportArgumentType]
        for name in fields:
            if name not in known:
                raise _unknown(cls.__name__, name, known)
        return super().__new__(cls)
