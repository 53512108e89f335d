"""Convert the rotary embeddings in a GGUF file's metadata to the rope fields of a config.json."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import Llama3Rope
from nnxmoe.convert.gguf.gguf_file import GGUF


def shortest(value: Any) -> Any:
    """Convert a float32 to the float with the shortest decimal form. Returns other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def rope_fields(model: GGUF, name: str, given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return the rope fields of config.json.

    Missing keys have llama.cpp's defaults: linear scaling by a factor of 1. llama.cpp stores Llama 3's scaling as one
    factor per frequency, in the tensor ``rope_freqs.weight``.

    Args:
        model: Headers of the file.
        name: Architecture in llama.cpp.
        given: Metadata of the architecture, by key without the prefix.
        theta: Base of the rotary frequencies.
    """
    scaling = {key.removeprefix("rope.scaling."): shortest(v) for key, v in given.items() if "rope.scaling." in key}
    kind = scaling.get("type", "linear")
    factor = scaling.get("factor", shortest(given.get("rope.scale_linear", 0.0))) or 1.0
    factors = model.tensors.get("rope_freqs.weight")

    def refuse(key: str, value: Any, why: str = "") -> None:
        raise model.error(
            f"{name}.rope.scaling.{key} {short(value)}{why} is not supported; linear and yarn are supported"
        )

    if kind not in ("none", "linear", "yarn"):
        refuse("type", kind)
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise model.error(f"{name}.rope.scaling.factor must be a positive number, got {short(factor)}")
    _refuse_unused(kind, scaling, refuse)
    if factors is not None:
        if kind == "yarn" or (kind == "linear" and factor != 1):
            refuse("type", kind, " with rope_freqs.weight")
        return _llama3(model, factors, theta)
    if kind == "none" or factor == 1:
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {"rope_scaling": _yarn(name, factor, scaling, refuse)}


def _refuse_unused(kind: str, scaling: Mapping[str, Any], refuse: Any) -> None:
    """Call ``refuse`` for values that change results in a way that no rope of nnxmoe supports."""
    if kind != "yarn" and scaling.get("attn_factor", 1) != 1:
        refuse("attn_factor", scaling["attn_factor"], f" with type {kind}")
    if scaling.get("alpha"):
        refuse("alpha", scaling["alpha"])
    if kind == "yarn" and scaling.get("yarn_ext_factor", 1) not in (-1, 1):
        refuse("yarn_ext_factor", scaling["yarn_ext_factor"])


def _yarn(name: str, factor: float, scaling: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    renamed = {"original_context_length": "original_max_position_embeddings"}
    renamed |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    found |= {field: scaling[key] for key, field in renamed.items() if key in scaling}
    if name == "gpt-oss":
        found["truncate"] = False
    attention = 1 + 0.1 * math.log(max(factor, 1))
    if (log := scaling.get("yarn_log_multiplier")) and name == "deepseek2":
        scale = round(10 * log, 6)  # deepseek2's converter stores mscale_all_dim / 10
        found |= {"mscale": scale, "mscale_all_dim": scale}
        attention = 1.0
    elif log:
        refuse("yarn_log_multiplier", log)
    # The converter stores transformers' attention_factor. llama.cpp replaces a different value with its own value.
    if not math.isclose(scaling.get("yarn_attn_factor", attention), attention, rel_tol=1e-5):
        if scaling["yarn_attn_factor"] != 1:
            refuse("yarn_attn_factor", scaling["yarn_attn_factor"])
    if (more := scaling.get("attn_factor", 1)) != 1:
        found["attention_factor"] = attention * more
    return found


def _llama3(model: GGUF, info: Any, theta: float) -> dict[str, Any]:
    if info.kind != "F32" or len(info.values) != 1 or not 1 <= info.values[0] <= 1 << 15:
        raise model.error(f"rope_freqs.weight is {info.kind} {list(info.values)}: it must be an F32 vector")
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        found = np.frombuffer(file.read(info.nbytes), "<f4")
    if (found == 1).all():
        return {}
    low, high, most = 1.0, 4.0, float(found.max())
    plain, ramp = theta ** (-np.arange(len(found)) / len(found)), (found > 1.001) & (found < 0.999 * most)
    kept = (1 / found[ramp] - 1 / most) / (1 - 1 / most)
    turns = (low + kept * (high - low)) * 2 * np.pi / plain[ramp]  # original context length, estimated per factor
    positions = round(float(np.median(turns))) if ramp.any() else 8192
    wanted = Llama3Rope(2 * len(found), theta, most, low, high, positions)
    if not np.allclose(plain / np.asarray(wanted.frequencies(jnp.int32(0))), found, rtol=1e-4):
        raise model.error(
            f"rope_freqs.weight has factors that differ from Llama 3's, which is not supported: {short(found.tolist())}"
        )
    rope = {"factor": most, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_scaling": {"rope_type": "llama3", **rope, "original_max_position_embeddings": positions}}
