"""Arguments of transformers, answered with the names that they have here."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
}


class UnknownArgument(TypeError, ValueError):
    """Raised for an argument of transformers: a TypeError as Python's own, a ValueError as all errors here."""


def answers_transformers(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its error for an argument of transformers names the argument to use instead."""
    known = set(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known and name in _HINTS:
                raise UnknownArgument(f"{function.__name__}() has no argument {name!r}: {_HINTS[name]}")
        return function(*args, **kwargs)

    return call
