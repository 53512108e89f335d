"""MaxText's Linen layout: nested dicts with its names and shapes, and models made of them.

Nearly all arrays have our own shape. Scanned layers are stacked on axis 1, vectors too; grouped-query attention has its
queries divided by sqrt(head width); where rope is Llama 3.1's, the two halves of a head's features are interleaved.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from nnxmoe.axes import axes_of
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.config.rope import Llama3Rope
from nnxmoe.convert import orbax_folder
from nnxmoe.convert.leaves import QUERY, Later, Leaf, collect, float_dtype, made_of
from nnxmoe.convert.report import LoadReport
from nnxmoe.convert.restore import abstract, restore
from nnxmoe.convert.side_files import read_config, read_generation_config, write_side_files
from nnxmoe.convert.table import Path, TableError, label_of, parameters
from nnxmoe.layers.gqa import attentions, query_divisor
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import bytes_bar, logger
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import absolute
from nnxmoe.storage.multihost import shared_folder
from nnxmoe.strategy import Strategy

Tree = Mapping[str, Any]
_TRAINING = frozenset({"opt_state", "step"})  # beside params in a training's state
_AROUND = re.compile(r"^(params/){0,2}(nnx_aux/(model/)?)?(?=(decoder|token_embedder)/)")
_ROTATED = ("layer.attention.q.", "layer.attention.k.")


def layout(model: CausalLM, scan_layers: bool) -> dict[str, Leaf]:
    """MaxText's name -> what it is made of, for every parameter of a model. TableError for one without a name there."""
    variables: dict[Path, nnx.Variable] = dict(parameters(model))
    layers = [(stack, layer) for _, layer, stack in itertools.starmap(label_of, variables.items()) if stack is not None]
    firsts = {stack: layer for stack, layer in sorted(layers, reverse=True)}
    sparse = {label_of(path, v)[2] for path, v in variables.items() if "expert" in axes_of(v)}

    def describe(key: str, path: Path, number: int | None, inner: tuple[int, ...]) -> tuple[str, Leaf]:
        if key not in model.maxtext_table:
            raise TableError(f"the parameter {key} has no name in MaxText's layout")
        name, labels = model.maxtext_table[key]
        inner = variables[path].get_metadata().get("outs", inner)  # biases of heads are flat here
        if number is None:
            return name, Leaf(key, inner, None, (), labels)
        stack = label_of(path, variables[path])[2]
        assert stack is not None, key
        group = model.maxtext_layers[stack in sparse]
        name = name.format(layer=group if scan_layers else f"{group}_{number - firsts[stack]}")
        return name, Leaf(key, inner, group if scan_layers else None, (), labels)

    return collect(model, describe)


def arrays(model: CausalLM, scan_layers: bool, dtype: Any = None) -> dict[str, Later]:
    """MaxText's name -> array, made of a model's parameters when it is asked for."""
    dtype = float_dtype(dtype)
    return made_of(model, layout(model, scan_layers), ToMaxText.of(model, dtype), dtype)


def _tell_of_rounding(model: CausalLM, found: Mapping[str, Later]) -> None:
    narrow = {a.dtype for a in found.values()} - {np.dtype(np.float32)}
    if narrow and math.frexp(ToMaxText.of(model).divide)[0] != 0.5:
        logger.warning(
            "queries divided by sqrt(%d) are rounded to %s, as MaxText does: in float32 they lose nothing",
            model.config.head_width,
            ", ".join(sorted(map(str, narrow))),
        )


def to_tree(model: CausalLM, scan_layers: bool = True, dtype: Any = None) -> dict[str, Any]:
    """``{"params": {"decoder": …, "token_embedder": …}}``, arrays of NumPy (of JAX where several processes hold the
    model); ``dtype`` None: in the model's own. Arrays that are the same in both layouts are not copied.

    Queries are divided in float32 and rounded once. That is exact where sqrt(head width) is a power of two; from
    bfloat16 it loses nothing with ``dtype=float32``.
    """
    found = arrays(model, scan_layers, dtype)
    _tell_of_rounding(model, found)
    return {"params": unflatten_dict({name: a.make(None) for name, a in found.items()}, sep="/")}


def from_tree(
    tree: Tree,
    config: DecoderConfig,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
) -> CausalLM:
    """A model with the arrays of a tree, scanned or not, boxed or not, with ``params`` around it once, twice or never.

    Heads and rope are the config's; ``dtype`` None: as in the tree. Of a training state the optimizer's part is left,
    which ``load_report`` says. Raises CheckpointError (a ValueError) that lists every array that is missing, too much,
    or of another shape than the config asks for.
    """
    tops = _TRAINING & tree.keys() if "params" in tree else set()
    found = {"/".join(path): leaf for path, leaf in _leaves(tree, ()) if path[0] not in tops}
    if empty := [name for name, leaf in found.items() if isinstance(leaf, jax.ShapeDtypeStruct)]:
        raise CheckpointError(f"the tree holds shapes without values: {some(empty)}")
    skipped = {"state of a training": tuple(sorted(tops))} if tops else {}
    report = LoadReport("the tree", skipped=skipped)
    return _model({name: Later.of(leaf) for name, leaf in found.items()}, report, config, strategy, mesh, dtype)


def _model(
    found: Mapping[str, Later],
    report: LoadReport,
    config: DecoderConfig,
    strategy: Strategy | None,
    mesh: Mesh | None,
    dtype: Any,
) -> CausalLM:
    model, names = abstract(config, strategy, mesh), _names(found)
    scanned = any(name.startswith(f"decoder/{group}/") for name in names for group in model.maxtext_layers)
    wanted = layout(model, scanned)
    # Beside its parameters MaxText 0.2.5 keeps other things as well, such as the state of its random numbers.
    aside = tuple(name for name, (_, aux) in names.items() if aux and name not in wanted)
    skipped = {**report.skipped, "no parameter of the model (nnx_aux)": aside} if aside else report.skipped
    restore(
        model,
        wanted,
        {name: _from_aux(a) if aux and scanned else a for name, (a, aux) in names.items() if name not in aside},
        FromMaxText(ToMaxText.of(model).interleave),
        carried=True,
        dtype=float_dtype(dtype),
        misfit=f"{report.source} does not fit the config ({config.model_type})",
        report=dataclasses.replace(report, skipped=skipped),
    )
    return model


def save(
    model: CausalLM, folder: str | os.PathLike[str], scan_layers: bool = True, *, parameters_only: bool = False
) -> None:
    """Writes an Orbax checkpoint as MaxText's converter does: ``0/items`` with ``step``, ``params`` and ``opt_state``;
    beside it config.json and the other small files of a Hugging Face folder, which `load` can do without.

    ``parameters_only``: the parameters in the folder itself, MaxText's form for inference. One array at a time is in
    memory. The folder must be new or empty, and appears whole or not at all. Raises CheckpointError (a ValueError).
    """
    found = arrays(model, scan_layers)
    _tell_of_rounding(model, found)
    with shared_folder(folder) as stage, bytes_bar(sum(a.nbytes for a in found.values()), "writing") as bar:
        params = {"params": {"params": unflatten_dict(found, sep="/")}}
        if parameters_only:
            orbax_folder.write(stage, params, bar)
        else:
            orbax_folder.write_step(stage, {"step": 0, **params, "opt_state": {}}, bar)
        if jax.process_index() == 0:
            write_side_files(stage, model, folder)


def load(
    folder: str | os.PathLike[str],
    config: DecoderConfig | None = None,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
) -> CausalLM:
    """A model from an Orbax checkpoint of MaxText's, in either form, scanned or not; the optimizer's state is left.

    ``folder``: the checkpoint, one of its steps, or ``items``. ``config`` None: the folder's config.json, which
    MaxText does not write. Raises CheckpointError as `from_tree`.
    """
    where = absolute(folder)
    if config is None and not os.path.lexists(where / "config.json"):
        raise CheckpointError(
            f"{where} has no config.json, MaxText writes none: pass the model's config (nnxmoe convert: --config)"
        )
    config = read_config(where) if config is None else config
    model = _model(read(where), LoadReport(str(where), files=str(where)), config, strategy, mesh, dtype)
    model.generation_config = read_generation_config(where, config)
    return model


def read(folder: str | os.PathLike[str]) -> dict[str, Later]:
    """Name -> array of the parameters in an Orbax checkpoint of MaxText's."""
    return orbax_folder.read(items(absolute(folder)), ("params", "nnx_aux"))


def items(folder: pathlib.Path) -> pathlib.Path:
    """Where the arrays are: the folder itself, its ``items``, or those of its last step."""
    steps = sorted(
        (path for path in folder.glob("*") if path.name.isdecimal()), key=lambda p: int(p.name), reverse=True
    )
    for where in (folder, folder / "items", *(step / "items" for step in steps)):
        if (where / "_METADATA").is_file():
            if (step := where.parent) in steps[1:]:
                logger.warning("%s is not whole: step %s is read", steps[0], step.name)
            return where
    raise CheckpointError(f"{folder} holds no Orbax checkpoint: neither _METADATA, items nor a step such as 0/items")


def _names(found: Mapping[str, Later]) -> dict[str, tuple[Later, bool]]:
    """Name -> array, without what is around ``decoder``, and whether MaxText 0.2.5 keeps it beside its parameters."""
    names: dict[str, tuple[Later, bool]] = {}
    for name, later in found.items():
        short = _AROUND.sub("", name)
        if short in names:
            raise CheckpointError(f"there are two arrays {short}, one of them at {name}: leave out what is not meant")
        names[short] = later, name.startswith("nnx_aux/")
    return names


def _from_aux(later: Later) -> Later:
    """What MaxText 0.2.5 keeps beside its parameters has its layers first."""
    shape = (*later.shape[1:2], later.shape[0], *later.shape[2:])
    return Later(shape, later.dtype, lambda place: Later.of(np.moveaxis(later.make(None), 0, 1)).make(place))


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _leaves(branch, (*path, str(name)))
    elif isinstance(tree, meta.AxisMetadata):
        yield path, tree.unbox()
    else:
        yield path, tree.get_value() if isinstance(tree, nnx.Variable) else tree


@dataclasses.dataclass(frozen=True)
class ToMaxText:
    """``(leaf, our layer's values) -> MaxText's``. ``divide``: what queries are divided by; ``interleave``: whether the
    halves of a query or key head alternate there; ``dtype`` None: as in the model."""

    divide: float
    interleave: bool
    dtype: Any = None

    @classmethod
    def of(cls, model: CausalLM, dtype: Any = None) -> "ToMaxText":
        """The transform for a model."""
        grouped = bool(attentions(model))
        divide = model.config.head_width**0.5 if grouped and query_divisor(model) == 1 else 1.0
        return cls(divide, grouped and isinstance(model.config.rope, Llama3Rope), dtype)

    def alters(self, leaf: Leaf) -> bool:
        """Whether an array has other numbers, or another order, in the two layouts."""
        turned = self.interleave and leaf.key.startswith(_ROTATED)
        return turned or (self.divide != 1 and leaf.key.startswith(QUERY))

    def __call__(self, leaf: Leaf, array: Any) -> Any:
        xp, dtype = array.__array_namespace__(), jnp.dtype(self.dtype or array.dtype)
        if self.interleave and leaf.key.startswith(_ROTATED):
            half = array.shape[-1] // 2
            array = xp.stack([array[..., :half], array[..., half:]], axis=-1).reshape(array.shape)
        if self.divide != 1 and leaf.key.startswith(QUERY):
            array = array.astype(np.float32) / np.float32(self.divide)
        return array if array.dtype == dtype else array.astype(dtype)


@dataclasses.dataclass(frozen=True)
class FromMaxText:
    """``(leaf, MaxText's values of a layer) -> ours``; the queries' scale is `restore`'s to undo."""

    interleave: bool

    def __call__(self, leaf: Leaf, array: Any) -> Any:
        if self.interleave and leaf.key.startswith(_ROTATED):
            array = array.__array_namespace__().concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        return array
