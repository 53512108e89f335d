"""Compares a model with its config before it is saved: a checkpoint holds no more than config.json describes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from nnxmoe.config.printable import short, some
from nnxmoe.convert.core.restore import DTYPES, INTEGERS
from nnxmoe.layers.lora import Kept
from nnxmoe.layers.quantized import QuantizedArray, QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models import is_registered
from nnxmoe.storage.errors import CheckpointError

# Attributes that a strategy chooses: they change how a model is computed, not which model it is.
_CHOSEN = frozenset("attend dispatch form matmul mesh product recurrence remat rules".split())
_OF_MODELS = frozenset("cache_format config dtype load_report merged ropes strategy".split())
_SHOWN = 5


def refuse_misfit(model: CausalLM) -> None:
    """Raise CheckpointError if a model differs from the one that its config describes, which is what loading builds.

    Compared are the parts, the shapes and dtypes of parameters, and all attributes that no strategy chooses. Adapters
    are not: each layout says whether it stores them.
    """
    if not isinstance(model, CausalLM):
        raise ValueError(f"model is a {type(model).__name__}: give a model of nnxmoe, and then the folder")
    kind, config = type(model), model.config
    if not is_registered(model):
        raise CheckpointError(
            f"{kind.__name__} with {type(config).__name__} is not the registered family of {config.model_type!r}, and "
            "would load as another model or not at all. Give it a model_type of its own, and call "
            f"nnxmoe.models.register({kind.__name__}) first"
        )
    described = kind(config, model.strategy, rngs=None, dtype=model.dtype, mtp=bool(model.mtp))
    if found := list(_differences(model, described)):
        raise CheckpointError(
            f"the model does not fit its {type(config).__name__}, and would load as another model or not at all: "
            f"{some(found, _SHOWN)}. Describe it with model.config = dataclasses.replace(model.config, …), or restore "
            "these parts"
        )


def _differences(model: CausalLM, described: CausalLM) -> Iterator[str]:
    """Descriptions of what differs; of a part that differs as a whole, not its content."""
    has, asked = (sum(stack.depth for stack in each.stacks) for each in (model, described))
    if has != asked:
        yield f"it has {has} layers and num_hidden_layers is {asked}"
    mine, wanted = _parts(model), _parts(described)
    below = tuple[str, ...]()
    for name in sorted(mine | wanted, key=lambda name: [part.zfill(9) for part in name.split(".")]):
        own, other = mine.get(name), wanted.get(name)
        if name.startswith(below) or own == other:
            continue
        if isinstance(own, nnx.Module) and type(own) is type(other):
            yield from _attributes(name, own, other)
            continue
        below = (*below, f"{name}.")
        if own is None or other is None:
            yield f"{name} is {'missing' if own is None else 'not in that model'}"
        else:
            yield f"{name} is {_noun(own)}, not {_noun(other)}"


def _parts(model: CausalLM) -> dict[str, Any]:
    """Modules and shapes of parameters by path. A quantised kernel counts as the float kernel that it replaces."""
    found = dict[str, Any]()
    for path, node in nnx.iter_graph(model):
        name = ".".join(map(str, path))
        adapter = path[:1] == ("merged",) or any(str(part).startswith("lora") for part in path)
        if adapter or isinstance(node, Kept | nnx.LoRAParam | QuantizedArray):
            continue
        if isinstance(node, QuantizedWeight):
            found[name] = (*node.lead, *node.outs, *node.ins)
        elif isinstance(node, nnx.Variable):
            dtype = getattr(node, "dtype", None)  # of arrays; there are random keys and other values too
            found[name] = tuple(node.shape) if dtype in DTYPES + INTEGERS else f"of dtype {dtype}"
        elif isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
            found[name] = node
    return found


def _noun(part: Any) -> str:
    if isinstance(part, nnx.Module):
        return f"a {type(part).__name__}"
    return str(list(part)) if isinstance(part, tuple) else str(part)


def _attributes(name: str, own: Any, other: Any) -> Iterator[str]:
    """The attributes of two modules that differ, neither parts nor chosen by a strategy."""
    left_out = _CHOSEN if name else _CHOSEN | _OF_MODELS
    for attribute in vars(own) | vars(other):
        values = [vars(each).get(attribute) for each in (own, other)]
        if attribute in left_out or attribute.startswith(("_", "lora")):
            continue
        if any(isinstance(value, nnx.Module | nnx.Variable) for value in values) or _equal(*values):
            continue
        yield f"{name}.{attribute} is {short(values[0])}, not {short(values[1])}".removeprefix(".")


def _equal(one: Any, other: Any) -> bool:
    return one is other or (np.array_equal(one, other) if hasattr(one, "shape") else bool(one == other))
