"""Names of a model's parameters, derived from their paths in the model."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx


class ParamName(NamedTuple):
    """Name of a parameter.

    Attributes:
        key: Key in tables of tensor names, such as ``layer.attention.q.kernel``.
        layer: Index of the layer, or of the first layer if the parameter is stacked. None outside of stacks.
        stack: Index of the stack. None outside of stacks.
    """

    key: str
    layer: int | None
    stack: int | None


def name_of(model: nnx.Module, path: Sequence[Any]) -> ParamName:
    """Return the name of the parameter at a path. Prediction layers are numbered after the main model's layers."""
    group, *rest = path
    stacks = getattr(model, "stacks", None)
    if stacks is None or group not in ("stacks", "mtp"):
        return ParamName(".".join(map(str, path)), None, None)
    layer, stack_index, *rest = sum(stack.depth for stack in stacks[: rest[0]]), *rest
    if group == "mtp":
        layer, stack_index = sum(stack.depth for stack in stacks) + stack_index, stack_index + len(stacks)
        if rest[0] != "layer":
            return ParamName(".".join(map(str, ("layer.mtp", *rest))), layer, stack_index)
    elif rest[0] == "rest":  # layers after the pipeline (`PipelinedStack.rest`)
        layer, rest = layer + stacks[stack_index].count, rest[1:]
    if rest[0] == "layers":
        layer, rest = layer + rest[1], rest[2:]
    else:
        rest = rest[1:]
    return ParamName(".".join(map(str, ("layer", *rest))), layer, stack_index)


def layer_modules(model: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and node of every graph node in the layers, including prediction layers."""
    for name in ("stacks", "mtp"):
        yield from (((name, *path), module) for path, module in nnx.iter_graph(getattr(model, name)))
