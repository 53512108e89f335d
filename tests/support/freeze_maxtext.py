"""Writes the cases of `NEWER` with MaxText 0.2.5, in an environment of Python 3.12 that has it:
``python -m tests.support.freeze_maxtext``."""

import importlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from tests.support.maxtext_cases import CASES, NEWER, newer_tokens, newer_weights


def built(fields: dict[str, Any], scan: bool) -> tuple[Any, Any]:
    """A mesh and MaxText's model of a preset with some fields changed."""
    maxtext, creation, utils = (
        importlib.import_module(f"maxtext.{name}")
        for name in ("configs.pyconfig", "utils.model_creation_utils", "utils.maxtext_utils")
    )
    usual = {"override_model_config": True, "run_name": "x", "enable_checkpointing": False, "dtype": "float32",
             "weight_dtype": "float32", "matmul_precision": "highest", "per_device_batch_size": 2,
             "max_target_length": 20, "max_prefill_predict_length": 4, "attention": "dot_product", "megablox": False,
             "sparse_matmul": False, "capacity_factor": -1.0, "skip_jax_distributed_system": True, "hardware": "cpu",
             "dataset_type": "synthetic", "scan_layers": scan}  # fmt: skip
    base = os.path.join(os.path.dirname(maxtext.__file__), "base.yml")
    config = maxtext.initialize(["", base, *(f"{name}={value}" for name, value in (usual | fields).items())])
    mesh = jax.sharding.Mesh(utils.create_device_mesh(config), config.mesh_axes)
    return mesh, creation.from_config(config, devices=jax.devices(), mesh=mesh, rngs=nnx.Rngs(0))


def variables(model: Any) -> dict[str, Any]:
    """Name -> variable of everything that a checkpoint needs, with the collection of its name."""
    flat = ((path, v) for path, v in nnx.to_flat_state(nnx.state(model)) if not isinstance(v, nnx.RngState))
    collection = {True: "params", False: "nnx_aux"}
    return {"/".join((collection[type(v) is nnx.Param], *map(str, path))): v for path, v in flat}


for case, (theirs, ours) in NEWER.items():
    shapes = {}
    for scan in (False, True):
        mesh, model = built(theirs, scan)
        found = variables(model)
        shapes[scan] = {name: list(v.get_value().shape) for name, v in found.items()}
    for name, value in newer_weights(shapes[True]).items():
        found[name].set_value(jnp.asarray(value))
    tokens = newer_tokens(case)
    rows = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (2, 1))
    with jax.set_mesh(mesh):
        given = {"decoder_positions": rows, "decoder_segment_ids": np.ones_like(rows), "model_mode": "train"}
        out = model(decoder_input_tokens=tokens, enable_dropout=False, **given)
    logits = np.asarray(out[0] if isinstance(out, tuple) else out, np.float32)
    print(case, logits.std(), np.abs(logits).max())
    told = {"config": ours, "scanned": shapes[True], "unscanned": shapes[False]}
    (CASES / f"{case}.json").write_text(json.dumps(told) + "\n")
    save_file({"logits": logits}, CASES / f"{case}.safetensors")
