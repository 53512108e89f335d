"""Save and load adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names follow PEFT 0.21 with transformers 5. A layer's experts are two parameters, and one adapter covers all experts:
``lora_A [E * rank, ins]`` and ``lora_B [outs, rank * E]`` with the experts innermost, even if the base parameter is
transposed. The outputs are in the order of the base parameter: first gate, then up, or alternating (gpt-oss). If both
parameters of a module are adapted, PEFT nests the first adapter in the second as ``base_layer``. `load` also reads
transformers 4 files, with one adapter per expert and projection.
"""

import collections
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import dtype_code
from nnxmoe.convert.files.untrusted_files import absolute_path, is_gguf, read_object
from nnxmoe.convert.peft.adapter_file import WEIGHTS_FILE as WEIGHTS_FILE
from nnxmoe.convert.peft.adapter_file import AdapterFile, read_expert_adapters
from nnxmoe.convert.peft.adapter_slots import AdapterSlot, adapted_slots, adapter_slots, refuse_adapters
from nnxmoe.convert.peft.layer_adapters import (
    AdapterTensor,
    AdapterValues,
    LayerAdapter,
    layer_adapters,
    parameter_name,
    scale_b,
    stack_layers,
)
from nnxmoe.convert.peft.peft_config import CONFIG_FILE, Numbers, Settings, settings_of
from nnxmoe.convert.storage.atomic_dir import ADAPTER_FILES
from nnxmoe.convert.storage.multihost import gather, shared_folder
from nnxmoe.convert.storage.write_safetensors import Tensors, write_json, write_sharded
from nnxmoe.layers.linear.quantized import QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM, check_model
from nnxmoe.model.program import require_values
from nnxmoe.model.weight_names import layer_of, options
from nnxmoe.models import family_of
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding import spans_hosts


def save(model: CausalLM, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Save a model's adapters in PEFT's format, for `load` or ``peft``.

    The folder is written atomically.

    Args:
        model: Model with unmerged adapters.
        folder: New or empty folder, unless ``overwrite`` is set.
        overwrite: Whether to replace the adapter files in the folder. Other files remain.

    Raises:
        ValueError: The model has no adapters or merged adapters, or the folder cannot be written.
    """
    check_model(model)
    require_values(jax.tree.leaves(nnx.state(model)))
    if model.merged is not None:
        raise ValueError("cannot save: the model's adapters are merged; call lora.unmerge(model) first")
    pieces = layer_adapters(
        (slot, layer, numbers, parameter_name(model, slot, layer))
        for slot in adapted_slots(model)
        for layer in slot.layers
        if slot.adapter is not None and (numbers := slot.adapter.rank_and_alpha(layer)) is not None
    )
    if not pieces:
        raise ValueError("cannot save: the model has no adapters; use nnxmoe.save_pretrained to save a whole model")
    report = model.load_report
    if report is not None and report.towers:
        logger.warning("%s: the adapter fits the text model only, as loaded here or saved by save_pretrained", folder)
    if unknown := sorted({one.slot.name for one in pieces if one.slot.name.startswith(family_of(model).peft_excluded)}):
        logger.warning("%s: peft does not support adapters of %s: use nnxmoe to load them", folder, ", ".join(unknown))
    if report is not None and report.files is not None and is_gguf(report.files):
        text = "%s: the base model is the GGUF file %s, which peft cannot load: pass the original model to peft"
        logger.warning(text, folder, report.source)
    base = {"base_model_name_or_path": report and report.source, "revision": report and report.revision}
    with shared_folder(folder, overwrite, ADAPTER_FILES) as stage:
        if jax.process_index() == 0:
            write_json(stage / CONFIG_FILE, {**_settings(model, pieces), **base})
        shares = [(None, _tensors(model, pieces))]
        write_sharded(stage, shares, 1 << 62, process=jax.process_index(), single=WEIGHTS_FILE)


def open_adapter(folder: str | os.PathLike[str]) -> tuple[Settings, AdapterFile]:
    """Return (settings, tensor headers) of the adapter in a folder.

    Commands call this function before loading a model. It raises CheckpointError for adapters that `load` supports in
    no model.
    """
    where = absolute_path(folder)
    return Settings.read(where / CONFIG_FILE), AdapterFile(where)


def base_model_name(folder: str | os.PathLike[str]) -> str | None:
    """Return the name of an adapter's base model. `None` if the folder contains no adapter, or a whole model.

    Raises CheckpointError if the adapter does not specify a base model.
    """
    path = absolute_path(folder) / CONFIG_FILE
    if not path.is_file() or path.with_name("config.json").is_file():
        return None
    name = read_object(path, "an adapter folder must have this file", CheckpointError).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{path} specifies no base model: pass the base model, and this folder as --adapter")
    return name


def _settings(model: CausalLM, pieces: list[LayerAdapter]) -> dict[str, Any]:
    """Return the fields of adapter_config.json.

    Names are relative to the layer if all layers have equal ranks and alphas, and full names otherwise.
    """
    numbers = {(piece.slot.name, piece.layer): piece.numbers for piece in pieces}
    groups: dict[str, dict[str, Numbers | None]] = collections.defaultdict(dict)
    for slot in adapter_slots(model):
        for layer in slot.layers:
            groups[slot.name][parameter_name(model, slot, layer)] = numbers.get((slot.name, layer))
    found: dict[str, Numbers | None] = {}
    for group in groups.values():
        alike = len(set(group.values())) == 1
        end = layer_of(next(iter(group)))[1].removeprefix("model.")
        found |= {end: next(iter(group.values()))} if alike else group
    has_experts = any(slot.name == "router" for slot in adapter_slots(model))
    return settings_of({name: own for name, own in found.items() if own is not None}, has_experts=has_experts)


def _tensors(model: CausalLM, pieces: list[LayerAdapter]) -> Tensors:
    for piece in pieces:
        adapter, (rank, alpha) = piece.slot.adapter, piece.numbers
        assert adapter is not None
        times = 1.0 if adapter.layers is None else adapter.scale * rank / alpha
        for variable, stored in zip((adapter.a, adapter.b), piece.stored(model), strict=True):
            value = variable.get_value()

            def make(
                piece: LayerAdapter = piece, value: Any = value, stored: AdapterTensor = stored, times: float = times
            ) -> Any:
                at = () if piece.slot.depth is None else (piece.layer - piece.slot.first,)
                one = gather(value, at) if spans_hosts(value) else np.asarray(value[at])
                one = one[tuple(map(slice, stored.one))]  # remove the padding of a rank below the stack's maximum
                one = one if stored.is_a else scale_b(one, times)
                return stored.store(one).astype(value.dtype)

            yield stored.name, dtype_code(value.dtype), stored.shape, make


def load(model: CausalLM, folder: str | os.PathLike[str], dtype: Any = None) -> None:
    """Load adapters that `save` or ``peft`` wrote into a model, in place, sharded over the model's mesh.

    Layers may lack adapters, and ranks and alphas may differ between layers.

    Args:
        model: Model without adapters.
        folder: Folder of the adapter.
        dtype: Dtype of the adapters. Defaults to the stored dtype.

    Raises:
        ValueError: The adapter type is not supported, or tensors are missing, unexpected or have a wrong shape. The
            message lists all these tensors. The model is unchanged.
    """
    refuse_adapters(model)
    kind, (settings, file) = float_dtype(dtype), open_adapter(folder)
    found = collections.defaultdict[str, dict[int, AdapterValues]](dict)
    for piece in layer_adapters(_targeted(model, settings, file)):
        a, b = (one.read(file.take(one.name, one.shape, one.rank)) for one in piece.stored(model))
        found[piece.slot.place][piece.layer] = AdapterValues(a, b, piece.numbers)
    every = {slot.place: slot for slot in adapter_slots(model)}
    for slot in every.values():
        for layer in slot.layers if slot.name.startswith("experts.") else ():
            if (one := read_expert_adapters(model, slot, layer, settings, file)) is not None:
                found[slot.place][layer] = one
    _check_tables(model, file)
    file.check()
    made = []
    for place, layers in found.items():
        adapter, *hosts = stack_layers(every[place], layers)
        for variable, host in zip((adapter.a, adapter.b), hosts, strict=True):
            variable.set_value(put_array(host.astype(kind or host.dtype), model.strategy.sharding_of(variable)))
        made.append((every[place], adapter))
    for slot, adapter in made:
        slot.put(adapter)


def _targeted(
    model: CausalLM, settings: Settings, file: AdapterFile
) -> Iterator[tuple[AdapterSlot, int, Numbers, str]]:
    """Yield (slot, layer, (rank, alpha), parameter name) for each adapter in the settings.

    Older files use different parameter names. If several names match, prefer a name whose tensors are in the file.
    """
    for slot in adapter_slots(model):
        rows = () if slot.name == "head" else options(family_of(model).hf_names(model.config), slot.key)
        older = [w for w in rows if w.whole and not w.per_expert]
        for layer in slot.layers:
            asked, spellings = [], [parameter_name(model, slot, layer)]
            names = [w.tensor(layer if slot.key.startswith("layer.") else None) for w in older]
            for name in spellings + [name for name in names if name.endswith(".weight")]:
                own = file.in_base(name)
                module = own.removesuffix(".weight")
                if settings.has_parameter(own) or (module != own and settings.has_module(module)):
                    key = own if settings.has_parameter(own) else module
                    asked.append((slot, layer, settings.numbers(key), name))
            there = [one for one in asked if f"base_model.model.{one[3].removesuffix('.weight')}.lora_A.weight" in file]
            yield from (there or asked)[:1]


def _check_tables(model: CausalLM, file: AdapterFile) -> None:
    """Raise CheckpointError if the file contains an embedding or head that differs from the model's tensor.

    peft stores embedding and head if they have adapters or were resized.
    """
    head = model.embed.table if model.head is None else model.head.kernel
    for module, variable in (("model.embed_tokens", model.embed.table), ("lm_head", head)):
        for name in (f"base_model.model.{module}{end}" for end in (".base_layer.weight", ".weight")):
            if name not in file or isinstance(variable, QuantizedWeight):
                file.skip(name)
                continue
            ours = variable.get_value()
            given = file.take(name, variable.shape).astype(ours.dtype)
            if not file.faults and not bool(jnp.all(put_array(given, model.strategy.sharding_of(variable)) == ours)):
                raise CheckpointError(
                    f"{name} in {file.folder} differs from the model's tensor: the adapter was trained with a "
                    "different base model, or with a resized or trained vocabulary. In the latter case, merge the "
                    "adapter with peft (merge_and_unload)"
                )


def put_array(host: np.ndarray, place: Any) -> jax.Array:
    """Put a host array on the devices with a sharding, or on the default device if the sharding is None."""
    return jnp.asarray(host) if place is None else jax.make_array_from_callback(host.shape, place, host.__getitem__)
