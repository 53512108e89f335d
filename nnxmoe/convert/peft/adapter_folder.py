"""Save and load adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names follow PEFT 0.21 with transformers 5. A layer's experts are two parameters, each with one adapter for all experts:
``lora_A [E * rank, ins]`` and ``lora_B [outs, rank * E]`` with the experts innermost, even if the base parameter is
transposed. The outputs have the order of the base parameter: gate before up, or alternating (gpt-oss). If both
parameters of a module have adapters, PEFT nests the first adapter in the second as ``base_layer``. `load` also reads
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
        ValueError: The model has no adapters, its adapters are merged, or the folder cannot be written.
    """
    check_model(model)
    require_values(jax.tree.leaves(nnx.state(model)))
    if model.merged is not None:
        raise ValueError("cannot save: the model's adapters are merged; call lora.unmerge(model) first")
    adapters = layer_adapters(
        (slot, layer, numbers, parameter_name(model, slot, layer))
        for slot in adapted_slots(model)
        for layer in slot.layers
        if slot.adapter is not None and (numbers := slot.adapter.rank_and_alpha(layer)) is not None
    )
    if not adapters:
        raise ValueError("cannot save: the model has no adapters; use nnxmoe.save_pretrained to save a whole model")
    report = model.load_report
    if report is not None and report.towers:
        logger.warning(
            "%s: the adapter fits only the text model that save_pretrained saves, not the multimodal model", folder
        )
    if unsupported_names := sorted(
        {adapter.slot.name for adapter in adapters if adapter.slot.name.startswith(family_of(model).peft_excluded)}
    ):
        logger.warning(
            "%s: peft does not support adapters of %s: use nnxmoe to load them", folder, ", ".join(unsupported_names)
        )
    if report is not None and report.files is not None and is_gguf(report.files):
        message = "%s: the base model is the GGUF file %s, which peft cannot load: pass the original model to peft"
        logger.warning(message, folder, report.source)
    base_fields = {"base_model_name_or_path": report and report.source, "revision": report and report.revision}
    with shared_folder(folder, overwrite, ADAPTER_FILES) as temporary_folder:
        if jax.process_index() == 0:
            write_json(temporary_folder / CONFIG_FILE, {**_settings(model, adapters), **base_fields})
        shares = [(None, _tensors(model, adapters))]
        write_sharded(temporary_folder, shares, 1 << 62, process=jax.process_index(), single=WEIGHTS_FILE)


def open_adapter(folder: str | os.PathLike[str]) -> tuple[Settings, AdapterFile]:
    """Return (settings, tensor headers) of the adapter in a folder.

    Commands call this function before loading a model. It raises CheckpointError if `load` would reject the adapter for
    every model.
    """
    path = absolute_path(folder)
    return Settings.read(path / CONFIG_FILE), AdapterFile(path)


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


def _settings(model: CausalLM, adapters: list[LayerAdapter]) -> dict[str, Any]:
    """Return the fields of adapter_config.json.

    Names are relative to the layer if all layers have equal ranks and alphas, and full names otherwise.
    """
    numbers = {(adapter.slot.name, adapter.layer): adapter.numbers for adapter in adapters}
    groups: dict[str, dict[str, Numbers | None]] = collections.defaultdict(dict)
    for slot in adapter_slots(model):
        for layer in slot.layers:
            groups[slot.name][parameter_name(model, slot, layer)] = numbers.get((slot.name, layer))
    named_numbers: dict[str, Numbers | None] = {}
    for group in groups.values():
        is_uniform = len(set(group.values())) == 1
        suffix = layer_of(next(iter(group)))[1].removeprefix("model.")
        named_numbers |= {suffix: next(iter(group.values()))} if is_uniform else group
    has_experts = any(slot.name == "router" for slot in adapter_slots(model))
    return settings_of(
        {name: values for name, values in named_numbers.items() if values is not None}, has_experts=has_experts
    )


def _tensors(model: CausalLM, adapters: list[LayerAdapter]) -> Tensors:
    for layer_adapter in adapters:
        adapter, (rank, alpha) = layer_adapter.slot.adapter, layer_adapter.numbers
        assert adapter is not None
        factor = 1.0 if adapter.layers is None else adapter.scale * rank / alpha
        for variable, tensor in zip((adapter.a, adapter.b), layer_adapter.stored(model), strict=True):
            value = variable.get_value()

            def compute(
                layer_adapter: LayerAdapter = layer_adapter,
                value: Any = value,
                tensor: AdapterTensor = tensor,
                factor: float = factor,
            ) -> Any:
                index = () if layer_adapter.slot.depth is None else (layer_adapter.layer - layer_adapter.slot.first,)
                values = gather(value, index) if spans_hosts(value) else np.asarray(value[index])
                values = values[tuple(map(slice, tensor.one))]  # remove the padding of a rank below the stack's maximum
                values = values if tensor.is_a else scale_b(values, factor)
                return tensor.store(values).astype(value.dtype)

            yield tensor.name, dtype_code(value.dtype), tensor.shape, compute


def load(model: CausalLM, folder: str | os.PathLike[str], dtype: Any = None) -> None:
    """Load adapters into a model, in place, sharded over the model's mesh.

    Reads folders written by `save` or ``peft``. Layers may lack adapters, and ranks and alphas may differ between
    layers.

    Args:
        model: Model without adapters.
        folder: Folder of the adapter.
        dtype: Dtype of the adapters. Defaults to the stored dtype.

    Raises:
        ValueError: The adapter type is not supported, or tensors are missing, unexpected or have a wrong shape. The
            message lists all these tensors. The model is unchanged.
    """
    refuse_adapters(model)
    adapter_dtype, (settings, file) = float_dtype(dtype), open_adapter(folder)
    values_by_slot = collections.defaultdict[str, dict[int, AdapterValues]](dict)
    for layer_adapter in layer_adapters(_targeted(model, settings, file)):
        a, b = (
            tensor.read(file.take(tensor.name, tensor.shape, tensor.rank)) for tensor in layer_adapter.stored(model)
        )
        values_by_slot[layer_adapter.slot.place][layer_adapter.layer] = AdapterValues(a, b, layer_adapter.numbers)
    slots = {slot.place: slot for slot in adapter_slots(model)}
    for slot in slots.values():
        for layer in slot.layers if slot.name.startswith("experts.") else ():
            if (values := read_expert_adapters(model, slot, layer, settings, file)) is not None:
                values_by_slot[slot.place][layer] = values
    _check_tables(model, file)
    file.check()
    adapters = []
    for place, layers in values_by_slot.items():
        adapter, *host_arrays = stack_layers(slots[place], layers)
        for variable, host_array in zip((adapter.a, adapter.b), host_arrays, strict=True):
            variable.set_value(
                put_array(host_array.astype(adapter_dtype or host_array.dtype), model.strategy.sharding_of(variable))
            )
        adapters.append((slots[place], adapter))
    for slot, adapter in adapters:
        slot.put(adapter)


def _targeted(
    model: CausalLM, settings: Settings, file: AdapterFile
) -> Iterator[tuple[AdapterSlot, int, Numbers, str]]:
    """Yield (slot, layer, (rank, alpha), parameter name) for each adapter in the settings.

    Older files use different parameter names. If several names match, prefer a name whose tensors are in the file.
    """
    for slot in adapter_slots(model):
        rows = () if slot.name == "head" else options(family_of(model).hf_names(model.config), slot.key)
        whole_rows = [w for w in rows if w.whole and not w.per_expert]
        for layer in slot.layers:
            matches, current_names = [], [parameter_name(model, slot, layer)]
            names = [w.tensor(layer if slot.key.startswith("layer.") else None) for w in whole_rows]
            for name in current_names + [name for name in names if name.endswith(".weight")]:
                base_name = file.in_base(name)
                module = base_name.removesuffix(".weight")
                if settings.has_parameter(base_name) or (module != base_name and settings.has_module(module)):
                    key = base_name if settings.has_parameter(base_name) else module
                    matches.append((slot, layer, settings.numbers(key), name))
            stored_matches = [
                match
                for match in matches
                if f"base_model.model.{match[3].removesuffix('.weight')}.lora_A.weight" in file
            ]
            yield from (stored_matches or matches)[:1]


def _check_tables(model: CausalLM, file: AdapterFile) -> None:
    """Raise CheckpointError if the file contains an embedding or head that differs from the model's tensor.

    peft stores embedding and head if they have adapters or were resized.
    """
    head = model.embed.table if model.head is None else model.head.kernel
    for module, variable in (("model.embed_tokens", model.embed.table), ("lm_head", head)):
        for name in (f"base_model.model.{module}{suffix}" for suffix in (".base_layer.weight", ".weight")):
            if name not in file or isinstance(variable, QuantizedWeight):
                file.skip(name)
                continue
            table = variable.get_value()
            stored_table = file.take(name, variable.shape).astype(table.dtype)
            if not file.faults and not bool(
                jnp.all(put_array(stored_table, model.strategy.sharding_of(variable)) == table)
            ):
                raise CheckpointError(
                    f"{name} in {file.folder} differs from the model's tensor: the adapter was trained with a "
                    "different base model, or with a resized or trained vocabulary. In the latter case, merge the "
                    "adapter with peft (merge_and_unload)"
                )


def put_array(array: np.ndarray, sharding: Any) -> jax.Array:
    """Put a host array on the devices with a sharding, or on the default device if the sharding is None."""
    return (
        jnp.asarray(array)
        if sharding is None
        else jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    )
