"""Our own checkpoints: the parameters as Orbax keeps arrays, beside the small files of a Hugging Face folder.

``config.json``, ``nnxmoe.json`` (version; whether queries carry the scale of attention) and ``parameters/``: a plain
nested dict, ``layers/3/attention/q/kernel``, or ``stacks/0/attention/q/kernel`` with all layers of a stack first.
"""

import os
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from nnxmoe.config.printable import short
from nnxmoe.convert.leaves import Later, Leaf, collect, float_dtype, made_of
from nnxmoe.convert.report import LoadReport
from nnxmoe.convert.restore import abstract, restore
from nnxmoe.convert.side_files import read_config, read_generation_config, write_side_files
from nnxmoe.convert.table import label_of, parameters
from nnxmoe.layers.gqa import query_divisor
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import bytes_bar
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import absolute, read_object
from nnxmoe.storage.multihost import AnyArray, shared_folder
from nnxmoe.storage.source import NATIVE_FILE
from nnxmoe.storage.write import write_json
from nnxmoe.strategy import Strategy

PARAMETERS = "parameters"
_VERSION = 1


def layout(model: CausalLM, scan_layers: bool) -> dict[str, Leaf]:
    """Name -> what it is made of, for every parameter of a model."""

    stacks = {path: label_of(path, variable)[2] for path, variable in parameters(model)}

    def describe(key: str, path: Any, number: int | None, inner: tuple[int, ...]) -> tuple[str, Leaf]:
        name, labels = key.replace(".", "/"), (None,) * len(inner)
        if number is None:
            return name, Leaf(key, inner, None, (), labels)
        start = f"stacks/{stacks[path]}" if scan_layers else f"layers/{number}"
        return name.replace("layer", start, 1), Leaf(key, inner, "layers" if scan_layers else None, (), labels, axis=0)

    return collect(model, describe)


def arrays(model: CausalLM, scan_layers: bool) -> dict[str, Later]:
    """Name -> array, made of a model's parameters when it is asked for."""
    return made_of(model, layout(model, scan_layers), _same)


def save(model: CausalLM, folder: str | os.PathLike[str], *, scan_layers: bool | None = None) -> None:
    """Write a model for `load`: an Orbax checkpoint of its parameters, its config and its tokenizer's files.

    ``scan_layers``: whether the layers of a stack are one array there, which restores faster into models that scan;
    None: as in the model. Of several processes each writes its share. The folder must be new or empty, and appears
    whole or not at all. Raises CheckpointError (a ValueError).
    """
    from nnxmoe.convert import orbax_folder

    found = arrays(model, model.strategy.scan_layers if scan_layers is None else scan_layers)
    with shared_folder(folder) as stage, bytes_bar(sum(a.nbytes for a in found.values()), "writing") as bar:
        orbax_folder.write(stage / PARAMETERS, unflatten_dict(found, sep="/"), bar)
        if jax.process_index() == 0:
            write_side_files(stage, model, folder)
            write_json(stage / NATIVE_FILE, {"version": _VERSION, "queries_carry_scale": query_divisor(model) != 1})


def load(
    folder: str | os.PathLike[str], dtype: Any = None, mesh: Mesh | None = None, strategy: Strategy | None = None
) -> CausalLM:
    """The model that `save` wrote, on whatever mesh, its layers scanned or not as the strategy says.

    ``dtype`` None: as stored. Raises CheckpointError (a ValueError) that lists every array that does not fit.
    """
    where = absolute(folder)
    carried, config = _carried(where / NATIVE_FILE), read_config(where)
    model, found = abstract(config, strategy, mesh), read(where)
    restore(
        model,
        layout(model, any(name.startswith("stacks/") for name in found)),
        found,
        _same,
        carried=carried,
        dtype=float_dtype(dtype),
        misfit=f"{where / PARAMETERS} does not fit config.json",
        report=LoadReport(str(where), files=str(where)),
    )
    model.generation_config = read_generation_config(where, config)
    return model


def read(folder: str | os.PathLike[str]) -> dict[str, Later]:
    """Name -> array of the parameters in a folder that `save` wrote."""
    from nnxmoe.convert import orbax_folder

    return orbax_folder.read(absolute(folder) / PARAMETERS, None)


def _carried(path: Path) -> bool:
    """What nnxmoe.json says of the queries."""
    fields = read_object(path, "give a folder that nnxmoe.save wrote", CheckpointError)
    if fields.get("version") != _VERSION or fields["version"] is True:
        raise CheckpointError(f"{path}: version {short(fields.get('version'))} is not {_VERSION}: update nnxmoe")
    carried = fields.get("queries_carry_scale")
    if not isinstance(carried, bool):
        raise CheckpointError(f"{path}: queries_carry_scale must be true or false, got {short(carried)}")
    return carried


def _same(_: Leaf, array: AnyArray) -> AnyArray:
    return array
