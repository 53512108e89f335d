"""NNX models from Linen parameters with names of their own, by a mapping from our names to theirs."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.convert import native
from nnxmoe.convert.core.lazy_array import LazyArray
from nnxmoe.convert.core.report import LoadReport
from nnxmoe.convert.core.restore import abstract, check_config, restore
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy

Source = str | tuple[str | tuple[str, ...], Callable[..., Any]]
Mapped = Mapping[str, Source]
_LAYER = "{layer}"


def from_mapping(
    params: Mapping[str, Any], config: DecoderConfig, mapping: Mapped, strategy: Strategy | None, mesh: Mesh | None
) -> CausalLM:
    """The model whose parameters ``mapping`` takes from a Linen tree; see `nnxmoe.linen.from_linen`."""
    check_config(config)
    model = abstract(config, strategy, mesh)
    tree = meta.unbox(params)
    tree = tree["params"] if tree.keys() == {"params"} else tree
    theirs: dict[str, Any] = {"/".join(names): array for names, array in flatten_dict(tree).items()}
    wanted, faults, used, found = native.layout(model, False), [], set[str](), dict[str, LazyArray]()
    for name, leaf in wanted.items():
        row, layer = _row(mapping, name)
        if row is None:
            faults.append(f"{name} {list(leaf.shape)} has no row in the mapping")
            continue
        sources, make = row
        named = [source.replace(_LAYER, str(layer)) for source in sources]
        if missing := [source for source in named if source not in theirs]:
            faults.append(f"{name}: the tree has no {', '.join(missing)}")
            continue
        used.update(named)
        stacked = [layer is not None and _LAYER not in source for source in sources]
        arrays = [jnp.asarray(theirs[s])[layer] if cut else theirs[s] for s, cut in zip(named, stacked, strict=True)]
        try:
            made = make(*arrays)
        except (TypeError, ValueError, IndexError) as error:
            faults.append(f"{name}: its function fails for {', '.join(map(_kind, arrays))}: {error}")
            continue
        if not _splits(np.shape(made), leaf.shape):
            faults.append(f"{name} is {list(leaf.shape)}, {' and '.join(named)} give {list(np.shape(made))}")
            continue
        found[name] = LazyArray.of(jnp.reshape(made, leaf.shape))
    faults += [
        f"{name} {list(np.shape(array))} of the tree is in no row" for name, array in theirs.items() if name not in used
    ]
    known = {*wanted, *(_general(name)[0] for name in wanted)}
    faults += [f"{name} of the mapping is no parameter of this model" for name in mapping if name not in known]
    if faults:
        lines = "\n  ".join([*faults[:20], *([f"… {len(faults) - 20} more"] if len(faults) > 20 else [])])
        raise ValueError(f"the mapping does not take this Linen tree to {type(model).__name__}:\n  {lines}")
    report = LoadReport(f"a Linen tree ({some(sorted(theirs), 2)})")
    restore(model, wanted, found, None, report, "the Linen tree does not fit the config")
    return model


def _row(mapping: Mapped, name: str) -> tuple[tuple[tuple[str, ...], Callable[..., Any]] | None, int | None]:
    """The row of a parameter, by its name or with ``{layer}`` for its layer's number, and that number."""
    general, layer = _general(name)
    source = mapping.get(name, mapping.get(general))
    if source is None:
        return None, layer
    names, make = (source, lambda array: array) if isinstance(source, str) else source
    return ((names,) if isinstance(names, str) else tuple(names), make), layer


def _general(name: str) -> tuple[str, int | None]:
    """A parameter's name with ``{layer}`` for its layer's number, and that number; None outside of layers."""
    parts = name.split("/")
    if parts[0] != "layers":
        return name, None
    return "/".join([parts[0], _LAYER, *parts[2:]]), int(parts[1])


def _splits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether one shape only splits or merges neighbouring dimensions of the other, so that no number moves."""
    one, other = (set(itertools.accumulate(s, lambda a, b: a * b)) for s in (shape, wanted))
    return np.prod(shape) == np.prod(wanted) and (one <= other or other <= one)


def _kind(array: Any) -> str:
    return f"{jax.dtypes.result_type(array)}{list(np.shape(array))}"
