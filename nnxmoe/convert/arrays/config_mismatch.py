"""Check before saving that a model fits its config, because loading builds the model from config.json alone."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnxmoe.config.printable import short, some
from nnxmoe.convert.arrays.load_model import DTYPES, INTEGERS
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.layers.linear.lora import UnmergeValue
from nnxmoe.layers.linear.quantized import QuantizedArray, QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.models import is_registered

# Attributes set by a strategy. They affect how the model is computed and are not part of config.json.
_OF_STRATEGIES = frozenset("attention_fn dispatch matmul mesh mla product recurrence remat rules".split())
_OF_MODELS = frozenset("cache_format config dtype load_report merged reduce_dtype ropes strategy".split())
_SHOWN = 5


def refuse_config_mismatch(model: CausalLM) -> None:
    """Raise CheckpointError if a model differs from the model that loading its config would build.

    Compares modules, parameter shapes, and all attributes except attributes set by a strategy. Parameters may have any
    supported dtype. Adapters are not compared, because each layout checks whether it can store adapters.
    """
    check_model(model)
    family, config = type(model), model.config
    if not is_registered(model):
        raise CheckpointError(
            f"{family.__name__} with {type(config).__name__} is not the family registered for {config.model_type!r}, "
            "so it would load as a different model or not at all. Set a new model_type in its config, and call "
            f"nnxmoe.models.register(Family(model={family.__name__}, hf=…)) first"
        )
    config_model = family(config, model.strategy, rngs=None, dtype=model.dtype, mtp=bool(model.mtp))
    if differences := list(_differences(model, config_model)):
        raise CheckpointError(
            f"the model does not fit its {type(config).__name__}, so it would load as a different model or not at "
            f"all: {some(differences, _SHOWN)}. Set model.config = dataclasses.replace(model.config, …), or undo these "
            "changes"
        )


def _differences(model: CausalLM, config_model: CausalLM) -> Iterator[str]:
    """Yield a description of each difference.

    If a module is missing, unexpected or of a different class, its submodules are skipped.
    """
    depth, config_depth = (sum(stack.depth for stack in candidate.stacks) for candidate in (model, config_model))
    if depth != config_depth:
        yield f"it has {depth} layers, but num_hidden_layers is {config_depth}"
    model_parts, config_parts = _parts(model), _parts(config_model)
    reported_prefixes = tuple[str, ...]()  # prefixes of the modules whose submodules are skipped
    for name in sorted(model_parts | config_parts, key=lambda name: [part.zfill(9) for part in name.split(".")]):
        actual, expected = model_parts.get(name), config_parts.get(name)
        if name.startswith(reported_prefixes) or actual == expected:
            continue
        if isinstance(actual, nnx.Module) and type(actual) is type(expected):
            yield from _attributes(name, actual, expected)
            continue
        reported_prefixes = (*reported_prefixes, f"{name}.")
        if actual is None or expected is None:
            yield f"{name} is {'missing' if actual is None else 'unexpected'}"
        else:
            yield f"{name} is {_noun(actual)}, not {_noun(expected)}"


def _parts(model: CausalLM) -> dict[str, Any]:
    """Return modules and parameter shapes by path. Quantized kernels have the shape of float kernels."""
    parts = dict[str, Any]()
    for path, node in nnx.iter_graph(model):
        name = ".".join(map(str, path))
        is_adapter = path[:1] == ("merged",) or any(str(part).startswith("lora") for part in path)
        if is_adapter or isinstance(node, UnmergeValue | nnx.LoRAParam | QuantizedArray):
            continue
        if isinstance(node, QuantizedWeight):
            parts[name] = (*node.lead, *node.outs, *node.ins)
        elif isinstance(node, nnx.Variable):
            dtype = getattr(node, "dtype", None)  # a variable's value can also be a random key or another object
            parts[name] = tuple(node.shape) if dtype in DTYPES + INTEGERS else f"of dtype {dtype}"
        elif isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
            parts[name] = node
    return parts


def _noun(part: Any) -> str:
    if isinstance(part, nnx.Module):
        return f"a {type(part).__name__}"
    return str(list(part)) if isinstance(part, tuple) else str(part)


def _attributes(name: str, actual: Any, expected: Any) -> Iterator[str]:
    """Yield the attributes that differ between two modules, except submodules and attributes set by a strategy."""
    ignored = _OF_STRATEGIES if name else _OF_STRATEGIES | _OF_MODELS
    for attribute in vars(actual) | vars(expected):
        values = [vars(module).get(attribute) for module in (actual, expected)]
        if attribute in ignored or attribute.startswith(("_", "lora")):
            continue
        if any(isinstance(value, nnx.Module | nnx.Variable) for value in values) or _equal(*values):
            continue
        yield f"{name}.{attribute} is {short(values[0])}, not {short(values[1])}".removeprefix(".")


def _equal(a: Any, b: Any) -> bool:
    """Compare attributes by value, including arrays in lists, tuples and dicts."""
    if a is b:
        return True
    leaves, structure = jax.tree.flatten(a)
    other_leaves, other_structure = jax.tree.flatten(b)
    return structure == other_structure and all(map(np.array_equal, leaves, other_leaves))
