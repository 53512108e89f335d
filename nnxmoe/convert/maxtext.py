"""MaxText's Linen layout: nested dicts with its names and shapes, and models made of them.

Nearly all arrays have our own shape. Scanned layers are stacked on axis 1, vectors too; grouped-query attention has its
queries divided by sqrt(head width); where rope is Llama 3.1's, the two halves of a head's features are interleaved.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from flax.core import meta
from jax.sharding import Mesh

from nnxmoe.config import DecoderConfig
from nnxmoe.convert.new_folder import new_folder
from nnxmoe.convert.source import CheckpointError
from nnxmoe.convert.table import Path, TableError, first_layers, table_key
from nnxmoe.layers.causal_lm import CausalLM
from nnxmoe.layers.gqa import attentions, query_divisor
from nnxmoe.models import model_class
from nnxmoe.moe.router import RouterBias
from nnxmoe.strategy import Strategy

Tree = Mapping[str, Any]
_QUERY, _ROTATED = ("layer.attention.q.",), ("layer.attention.q.", "layer.attention.k.")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of MaxText's: our key, its shape without layers, and what it is made of: (parameter, layer in it).

    ``stacked``: the name of a group, all layers of which lie on axis 1; else one part. The layer is None for a
    parameter of one layer. ``labels``: the logical axes without layers.
    """

    key: str
    inner: tuple[int, ...]
    stacked: str | None
    parts: tuple[tuple[Path, int | None], ...]
    labels: tuple[str | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As MaxText has it."""
        return (self.inner[0], len(self.parts), *self.inner[1:]) if self.stacked else self.inner

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Its logical axes, as MaxText names them."""
        return (self.labels[0], self.stacked, *self.labels[1:]) if self.stacked else self.labels


def layout(model: CausalLM, scan_layers: bool) -> dict[str, Leaf]:
    """MaxText's name -> what it is made of, for every parameter of a model. TableError for one without a name there."""
    firsts, found = first_layers(model), dict[str, Leaf]()
    variables: dict[Path, nnx.Variable] = dict(nnx.to_flat_state(nnx.state(model)))
    for path, variable in variables.items():
        key, first = table_key(path, firsts)
        if key not in model.maxtext_table:
            raise TableError(f"the parameter {key} has no name in MaxText's layout")
        own = "layers" in variable.get_metadata()["axes"]
        shape = tuple(variable.shape[1:] if own else variable.shape)
        if key.endswith(".bias") and not isinstance(variable, RouterBias):  # flat here, by heads there
            kernel = variables[(*path[:-1], "kernel")]
            shape = tuple(kernel.shape[own + kernel.get_metadata()["inputs"] :])
        name, labels = model.maxtext_table[key]
        if first is None:
            found[name] = Leaf(key, shape, None, ((path, None),), labels)
            continue
        group = model.maxtext_layers[_has_experts(model, path)]
        for i in range(variable.shape[0]) if own else [None]:
            number = first - firsts[path[1]] + (i or 0)
            full = name.format(layer=group if scan_layers else f"{group}_{number}")
            before = found[full].parts if full in found else ()
            found[full] = Leaf(key, shape, group if scan_layers else None, (*before, (path, i)), labels)
    return found


def to_tree(model: CausalLM, scan_layers: bool = True, dtype: Any = None) -> dict[str, Any]:
    """``{"params": {"decoder": …, "token_embedder": …}}``, arrays of NumPy; ``dtype`` None: in the model's own.

    Queries are divided in float32 and rounded once. That is exact where sqrt(head width) is a power of two; from
    bfloat16 it loses nothing with ``dtype=float32``.
    """
    values = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    change, tree = Change(model), dict[str, Any]()
    for name, leaf in layout(model, scan_layers).items():
        arrays = [np.asarray(values[path] if i is None else values[path][i]) for path, i in leaf.parts]
        arrays = [change.to_maxtext(leaf, array.reshape(leaf.inner), dtype) for array in arrays]
        _insert(tree, name, np.stack(arrays, axis=1) if leaf.stacked else arrays[0])
    return {"params": tree}


def from_tree(
    tree: Tree, config: DecoderConfig, strategy: Strategy | None = None, mesh: Mesh | None = None
) -> CausalLM:
    """A model with the arrays of a tree, scanned or not, boxed or not, with ``params`` around it once, twice or never.

    Heads and rope are the config's. Raises CheckpointError (a ValueError) that lists every array that is missing, too
    much, or of another shape than the config asks for.
    """
    strategy = strategy or Strategy.auto()
    strategy = dataclasses.replace(strategy, mesh=strategy.mesh if mesh is None else mesh)
    kind = model_class(config)
    model = kind(config, strategy, rngs=None)  # pyright: ignore[reportCallIssue]
    arrays = arrays_of(tree)
    scanned = any(name.startswith(f"decoder/{group}/") for name in arrays for group in model.maxtext_layers)
    wanted = layout(model, scanned)
    # Beside its parameters MaxText 0.2.5 keeps other things as well, such as the state of its random numbers.
    kept = {name: a for name, a in arrays.items() if name in wanted or not isinstance(a, _Aux)}
    arrays = {name: _from_aux(array, scanned) for name, array in kept.items()}
    _refuse(arrays, wanted, config)
    for attention in attentions(model):
        attention.scale = 1.0  # the queries carry it
    change, parts = Change(model), dict[tuple[Path, int | None], np.ndarray]()
    for name, leaf in wanted.items():
        for at, part in enumerate(leaf.parts):
            array = arrays[name][:, at] if leaf.stacked else arrays[name]
            parts[part] = change.from_maxtext(leaf, array)
    filled = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        stacked = "layers" in variable.get_metadata()["axes"]
        pieces = [parts[path, i].reshape(variable.shape[1:]) for i in range(variable.shape[0])] if stacked else []
        value = np.stack(pieces) if stacked else parts[path, None].reshape(variable.shape)
        filled.append((path, variable.replace(jax.device_put(value, strategy.sharding_of(variable)))))
    nnx.update(model, nnx.from_flat_state(filled))
    model.dtype = jnp.dtype(strategy.compute_dtype or model.embed.table.get_value().dtype)
    return model


def save(
    model: CausalLM, folder: str | os.PathLike[str], scan_layers: bool = True, *, parameters_only: bool = False
) -> None:
    """Writes an Orbax checkpoint as MaxText's converter does: ``0/items`` with ``step``, ``params`` and ``opt_state``.

    ``parameters_only``: the parameters in the folder itself, MaxText's form for inference. The folder must be new or
    empty, and appears whole or not at all. Raises CheckpointError (a ValueError).
    """
    params = {"params": to_tree(model, scan_layers)}
    with new_folder(folder, overwrite=False) as stage:
        if parameters_only:
            with ocp.Checkpointer(_handler()) as checkpointer:
                checkpointer.save(stage, args=ocp.args.PyTreeSave(params), force=True)
        else:
            with ocp.CheckpointManager(stage, item_handlers={"items": _handler()}) as manager:
                items = {"step": 0, **params, "opt_state": {}}
                manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(items)))


def load(
    folder: str | os.PathLike[str], config: DecoderConfig, strategy: Strategy | None = None, mesh: Mesh | None = None
) -> CausalLM:
    """A model from an Orbax checkpoint of MaxText's, in either form, scanned or not; the optimizer's state is left.

    ``folder``: the checkpoint, one of its steps, or ``items``. Raises CheckpointError as `from_tree`.
    """
    return from_tree(read(folder), config, strategy, mesh)


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parameters of an Orbax checkpoint of MaxText's as a tree of NumPy arrays."""
    where = _items(pathlib.Path(folder).absolute())
    with ocp.Checkpointer(_handler()) as checkpointer:
        stored = _handler().metadata(where).tree
        wanted = {name: stored[name] for name in ("params", "nnx_aux") if name in stored}
        if "params" not in wanted:
            raise CheckpointError(f"{where} has no 'params', only {', '.join(map(repr, stored)) or 'nothing'}")
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        return checkpointer.restore(
            where, args=ocp.args.PyTreeRestore(item=wanted, restore_args=plain, partial_restore=True)
        )


def _handler() -> Any:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)  # as MaxText's converter


def _items(folder: pathlib.Path) -> pathlib.Path:
    """Where the arrays are: the folder itself, its ``items``, or those of its last step."""
    steps = sorted((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), reverse=True)
    for where in (folder, folder / "items", *(folder / str(step) / "items" for step in steps)):
        if (where / "_METADATA").is_file():
            return where
    raise CheckpointError(f"{folder} holds no Orbax checkpoint: neither _METADATA, items nor a step such as 0/items")


def arrays_of(tree: Tree) -> dict[str, Any]:
    """Name -> array, without boxes and what is around ``decoder``; of MaxText 0.2.5 also what it keeps apart."""
    found: dict[str, Any] = {}
    for path, leaf in _leaves(tree, ()):
        name = "/".join(path)
        aux = name.startswith("nnx_aux/")
        for top in ("decoder/", "token_embedder/"):
            if top in f"{name}/":
                name = name[name.index(top) :]
                break
        found[name] = _Aux(leaf) if aux else leaf
    return found


@dataclasses.dataclass(frozen=True)
class _Aux:
    """An array that MaxText 0.2.5 keeps beside its parameters; stacked layers come first there."""

    array: Any


def _from_aux(array: Any, scanned: bool) -> np.ndarray:
    if isinstance(array, _Aux):
        return np.moveaxis(np.asarray(array.array), 0, 1) if scanned else np.asarray(array.array)
    return np.asarray(array)


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _leaves(branch, (*path, str(name)))
    elif isinstance(tree, meta.AxisMetadata):
        yield path, tree.unbox()
    else:
        yield path, tree.get_value() if isinstance(tree, nnx.Variable) else tree


def _insert(tree: dict[str, Any], name: str, value: Any) -> None:
    *folders, last = name.split("/")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[last] = value


def _refuse(arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Leaf], config: DecoderConfig) -> None:
    faults = [f"{name} is missing, {list(leaf.shape)}" for name, leaf in wanted.items() if name not in arrays]
    faults += [f"{name} {list(array.shape)} is no parameter" for name, array in arrays.items() if name not in wanted]
    for name in sorted(wanted.keys() & arrays.keys()):
        have, want = arrays[name].shape, wanted[name].shape
        if have != want:
            turned = " (it looks transposed)" if have == want[::-1] else ""
            faults.append(f"{name} has shape {list(have)}, the config asks for {list(want)}{turned}")
        elif not jnp.issubdtype(arrays[name].dtype, jnp.floating):
            faults.append(f"{name} is {arrays[name].dtype}: weights are floating-point")
    if faults:
        lines = "\n  ".join(faults)
        raise CheckpointError(f"the tree does not fit the config ({config.model_type}):\n  {lines}")


def _has_experts(model: Any, path: Path) -> bool:
    stack = model.stacks[path[1]]
    return hasattr(stack.layers[0] if path[2] == "layers" else stack.layer, "moe")


class Change:
    """What is done to queries and keys between the layouts of one model; to MaxText's also to arrays under a trace."""

    def __init__(self, model: CausalLM):
        grouped = bool(attentions(model))
        self.divide = model.config.head_width**0.5 if grouped and query_divisor(model) == 1 else 1.0
        self.interleave = grouped and model.config.rope_fields.get("rope_type") == "llama3"

    def alters(self, leaf: Leaf) -> bool:
        """Whether an array has other numbers, or an other order, in the two layouts."""
        turned = self.interleave and leaf.key.startswith(_ROTATED)
        return turned or (self.divide != 1 and leaf.key.startswith(_QUERY))

    def to_maxtext(self, leaf: Leaf, array: Any, dtype: Any) -> Any:
        dtype = jnp.dtype(dtype or array.dtype)
        if self.interleave and leaf.key.startswith(_ROTATED):
            *lead, width = array.shape
            array = array.reshape(*lead, 2, width // 2).swapaxes(-1, -2).reshape(array.shape)
        if self.divide != 1 and leaf.key.startswith(_QUERY):
            array = array.astype(np.float32) / np.float32(self.divide)
        return array.astype(dtype)

    def from_maxtext(self, leaf: Leaf, array: np.ndarray) -> np.ndarray:
        if self.interleave and leaf.key.startswith(_ROTATED):
            array = np.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        return array
