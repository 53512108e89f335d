"""Errors for unknown keyword arguments, with the nnxmoe equivalent or the most similar argument."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Self, TypeVar, get_args

import numpy as np

from nnxmoe.config.printable import did_you_mean
from nnxmoe.config.validate import check_object, check_type

P = ParamSpec("P")  # type checkers reject a tuple assignment
R = TypeVar("R")

_SAMPLING = "pass sampling=nnxmoe.Sampling(temperature=…, top_k=…, top_p=…). Without sampling=, decoding is greedy"
_HINTS = {
    "device_map": "pass mesh=nnxmoe.make_mesh(tensor=…) to use several devices. Without a mesh, one device is used",
    "torch_dtype": "pass dtype=",
    "load_in_8bit": "pass quantize=nnxmoe.Int8()",
    "load_in_4bit": "pass quantize=nnxmoe.Int4()",
    "quantization_config": "pass quantize=nnxmoe.Int8(), or keep_quantized=True for a quantized checkpoint",
    "attn_implementation": "pass strategy=nnxmoe.Strategy(attention_fn=…)",
    "trust_remote_code": "nnxmoe never runs code from a checkpoint, so remove the argument",
    "ignore_unknown": "config.json fields without effect are always ignored, so remove the argument",
    "low_cpu_mem_usage": "weights are always loaded directly into the model, so remove the argument",
    "token": "run `hf auth login`, or set HF_TOKEN",
    "cache_dir": "set HF_HOME",
    "max_length": "pass max_new_tokens=, which excludes the prompt",
    "max_tokens": "pass max_new_tokens=",
    "do_sample": _SAMPLING,
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), _SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _SAMPLING),
    "num_return_sequences": "use nnxmoe.complete(model, prompts, n=…)",
    "num_beams": "beam search is not supported, so remove the argument",
    "stop_strings": "use nnxmoe.complete(model, prompts, stop=[…])",
    "streamer": "use nnxmoe.stream(model, tokenizer, prompt)",
    "past_key_values": "pass cache=model.empty_cache(batch, capacity)",
    "use_cache": "pass cache=model.empty_cache(batch, capacity) to the model. Generation always uses a cache",
    "position_ids": "pass positions=",
    "output_hidden_states": "pass return_hidden=True",
    "output_router_logits": "pass return_routing=True",
    "labels": "use nnxmoe.train.fit, or train.Objective to compute only the loss",
    **dict.fromkeys(("lr", "learning_rate"), "pass it to the optimizer, for example optimizer=optax.adamw(1e-4)"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "pass steps=, or pass epochs= to train.batches"),
    **dict.fromkeys(("train_dataset", "dataset"), "pass data=, such as train.batches(…)"),
    "eval_dataset": "pass evaluate=",
    "max_steps": "pass steps=",
    "gradient_accumulation_steps": "pass accumulate=",
    "output_dir": "pass checkpoint=",
    "capacity": "the cache is sized for the prompt and max_new_tokens. Only nnxmoe.Engine has capacity=",
    **dict.fromkeys(
        ("training", "train", "deterministic"),
        "the forward pass is the same in training and inference, so remove the argument",
    ),
}


class UnknownArgument(TypeError, ValueError):
    """Raised for an unknown keyword argument. A TypeError, as in Python, and also a ValueError, as in nnxmoe."""


def _unknown(callee: str, keyword: str, names: Iterable[str]) -> UnknownArgument:
    suggestion = did_you_mean(keyword, names)
    return UnknownArgument(f"{callee}() has no argument {keyword!r}{suggestion or ': it has ' + ', '.join(names)}")


def reject_unknown_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise `UnknownArgument` for unknown keywords. The error names the argument to use instead.

    The annotation of ``**options`` must be ``Unpack`` of a TypedDict.
    """
    parameter_names = list[str]()
    for parameter in inspect.signature(function).parameters.values():
        variadic = parameter.kind is parameter.VAR_KEYWORD
        parameter_names += get_args(parameter.annotation)[0].__annotations__ if variadic else [parameter.name]
    argument_names = [name for name in parameter_names if name != "self"]
    callee = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]  # the class, for constructors

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameter_names:
                if name in _HINTS:
                    raise UnknownArgument(f"{callee}() has no argument {name!r}: {_HINTS[name]}")
                raise _unknown(callee, name, argument_names)
        return function(*args, **kwargs)

    return call


class KnownFields:
    """Base class of dataclasses that reject unknown fields and suggest the most similar field.

    Attributes:
        callee: Name in error messages. Defaults to the name of the class.
    """

    callee = ""

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        parameters = cls._parameters()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in keywords:
                if name not in parameters:
                    raise _unknown(cls.callee or cls.__name__, name, parameters)
        return super().__new__(cls)

    @classmethod
    def _parameters(cls) -> dict[str, inspect.Parameter]:
        """Return the constructor's parameters. They differ from the fields if a subclass defines ``__init__``."""
        _, *parameters = inspect.signature(cls.__init__).parameters.values()  # without self
        return {parameter.name: parameter for parameter in parameters}


class CheckedFields(KnownFields):
    """Base class of dataclasses that also validate flags and callables.

    A field whose default is a bool must be a bool. A field whose default is callable must be a callable that is not a
    class.
    """

    def __post_init__(self) -> None:
        where = type(self).__name__
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            name, default = field.name, field.default
            if isinstance(default, bool):
                check_type(f"{where}: {name}", getattr(self, name), bool | np.bool_, "True or False")
            elif callable(default):
                example = getattr(default, "__name__", f"{type(default).__name__}()")
                check_object(where, name, getattr(self, name), example)
