"""Names of a model's parameters, which follow from their paths: nothing is stored on a parameter."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax import nnx


class ParamName(NamedTuple):
    """``key``: of a parameter in the tables of tensor names, such as ``layer.attention.q.kernel``. ``layer``,
    ``stack``: the number of its (first) layer and of its stack; None outside of stacks."""

    key: str
    layer: int | None
    stack: int | None


def name_of(model: nnx.Module, path: Sequence[Any]) -> ParamName:
    """The name of the parameter at a path. Prediction layers are numbered after the others."""
    group, *rest = path
    stacks = getattr(model, "stacks", None)
    if stacks is None or group not in ("stacks", "mtp"):
        return ParamName(".".join(map(str, path)), None, None)
    number, index, *rest = sum(stack.depth for stack in stacks[: rest[0]]), *rest
    if group == "mtp":
        number, index = sum(stack.depth for stack in stacks) + index, index + len(stacks)
        if rest[0] != "layer":
            return ParamName(".".join(map(str, ("layer.mtp", *rest))), number, index)
    elif rest[0] == "rest":  # layers outside the pipeline
        number, rest = number + stacks[index].count, rest[1:]
    if rest[0] == "layers":
        number, rest = number + rest[1], rest[2:]
    else:
        rest = rest[1:]
    return ParamName(".".join(map(str, ("layer", *rest))), number, index)


def layer_modules(model: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and module of every module in the layers, those for multi-token prediction included."""
    for name in ("stacks", "mtp"):
        yield from (((name, *path), module) for path, module in nnx.iter_graph(getattr(model, name)))
