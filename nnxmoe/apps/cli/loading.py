"""Functions that commands share: load models, select devices, sampling and drafts, and measure speed."""

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax

import nnxmoe
from nnxmoe.apps.cli.options import DraftChoice
from nnxmoe.convert.storage.find_checkpoint import gguf_in
from nnxmoe.generation.sampling import OPTIONS
from nnxmoe.runtime import processes
from nnxmoe.runtime.progress import say

_MODEL_FILES = ("config.json", "adapter_config.json")
GREEDY = nnxmoe.Sampling(temperature=0.0)


def load(options: argparse.Namespace) -> tuple[Any, nnxmoe.Tokenizer]:
    """Load the model and the tokenizer, and merge the adapter that ``--adapter`` or MODEL names."""
    from nnxmoe.convert.peft.adapter_folder import open_adapter
    from nnxmoe.train import lora

    path, adapter = refuse_without_weights(options.model), options.adapter
    base = lora.base_model_name(path) if adapter is None else None
    if base is not None:
        path, adapter = base, path
        say("%s is an adapter of %s", adapter, base)
    if adapter is not None:
        open_adapter(adapter)  # raises for a malformed adapter before the model is loaded
    hub = {"revision": options.revision, "local_files_only": options.local_files_only}
    tokenizer = nnxmoe.Tokenizer.from_pretrained(path, **hub)
    method, mesh = quantize_method(options), mesh_of(options.mesh)
    model = nnxmoe.from_pretrained(
        path,
        dtype=options.dtype,
        mesh=mesh,
        quantize=None if adapter else method,
        keep_quantized=options.keep_quantized,
        mtp=needs_mtp(getattr(options, "draft", None), path, options),
        **hub,
    )
    say("%s", model.load_report.summary())
    if adapter is not None:
        lora.merge_from(model, adapter, quantize=method)
    say("running on %s", devices_text(mesh))
    return model, tokenizer


def refuse_without_weights(model: str) -> str:
    """Return ``model``. Raises ValueError if it names a preset, or a folder without a model."""
    from nnxmoe.models import refuse_preset

    refuse_preset(model)
    empty = os.path.isdir(model) and not any(os.path.exists(os.path.join(model, name)) for name in _MODEL_FILES)
    if empty and model != "demo":
        raise ValueError(f"{model} does not contain a model: {gguf_in(Path(model)) or 'config.json is missing'}")
    return model


def mesh_of(shape: Any, *, connect: bool = False) -> Any:
    """Build the mesh of ``--mesh``.

    Args:
        shape: Abstract mesh, or `None` without the option.
        connect: Use all devices of the job, not only as many as the mesh needs. Initializes
            ``jax.distributed`` first if ``shape`` or ``JAX_NUM_PROCESSES`` is set.

    Returns:
        The mesh, or `None` if ``shape`` is `None`.
    """
    if connect and (shape is not None or "JAX_NUM_PROCESSES" in os.environ):
        processes.initialize()
    if shape is None:
        return None
    devices = jax.devices()
    if shape.size > len(devices):
        axes = ",".join(f"{axis}={size}" for axis, size in shape.shape.items() if size > 1)
        raise ValueError(
            f"--mesh {axes} needs {shape.size} devices, but JAX found {len(devices)} x {devices[0].device_kind}"
        )
    return nnxmoe.make_mesh(**shape.shape, devices=devices if connect else devices[: shape.size])


def devices_text(mesh: Any) -> str:
    """Describe the devices in use, such as ``8 x NVIDIA H100 80GB HBM3``."""
    device_kind, num_devices = jax.local_devices()[0].device_kind, jax.local_device_count()
    if mesh is not None:
        return f"{mesh.size} x {device_kind}"
    return device_kind if num_devices == 1 else f"{device_kind}, one of {num_devices} (--mesh uses more)"


def quantize_method(options: argparse.Namespace) -> Any:
    """Return the method of ``--quantize``, or `None` without the option."""
    from nnxmoe.model.quantization.methods import parse_method

    return parse_method(options.quantize) if options.quantize else None


def sampling_of(options: argparse.Namespace, default: nnxmoe.Sampling = GREEDY) -> nnxmoe.Sampling:
    """Return ``default`` updated with the sampling options. Logs options that have no effect."""
    changes = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    sampling = dataclasses.replace(default, **changes)
    if sampling.temperature == 0:
        if changes.keys() & {"top_k", "top_p", "min_p"}:
            say("temperature is 0 (greedy decoding): --top-k, --top-p and --min-p have no effect")
        if getattr(options, "samples", 1) > 1:
            say("temperature is 0 (greedy decoding): all --samples of a prompt are equal")
    return sampling


def needs_mtp(choice: DraftChoice | None, model: str, options: argparse.Namespace) -> bool:
    """Return whether ``--draft`` needs the multi-token prediction layers.

    ``auto`` needs the layers if the checkpoint has them.
    """
    if choice is None or choice.source != "auto":
        return choice is not None and choice.source == "mtp"
    from nnxmoe.apps.cli.tensor_headers import read_headers
    from nnxmoe.model.mtp import has_mtp
    from nnxmoe.model.weight_names import prefix_of
    from nnxmoe.models import family_of

    config, arrays = read_headers(model, options.revision, options.local_files_only)
    family = family_of(config)
    prefix = family.mtp_prefixes[0].format(0) if family.mtp_prefixes else prefix_of(config.num_hidden_layers)
    return has_mtp(config, family.hf) and any(name.startswith(prefix) for name in arrays)


def draft_of(choice: DraftChoice | None, model: nnxmoe.CausalLM) -> Any:
    """Convert the value of ``--draft`` to the ``draft`` argument of an engine."""
    if choice is None or choice.source == "auto":
        return None if choice is None else "auto"
    if choice.source == "prompt":
        return nnxmoe.PromptLookup(choice.drafts or 7)
    return nnxmoe.MTPDraft.of(model, choice.drafts or 1)


class Speed:
    """Speed of a stream in tokens per second.

    ``str()`` returns the end of a log message, or an empty string before the second token.
    """

    def __init__(self) -> None:
        self.tokens, self._first, self._started = 0, 0, 0.0

    def update(self, tokens: int) -> None:
        """Record the number of tokens generated so far."""
        self._started = self._started or time.perf_counter()
        self._first, self.tokens = self._first or tokens, tokens

    def __str__(self) -> str:
        seconds, tokens = time.perf_counter() - self._started, self.tokens - self._first
        return f"; {tokens / seconds:.1f} tokens per second after the first" if tokens and self._started else ""
