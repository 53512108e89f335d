"""Convert the rope metadata of a GGUF file to the rope fields of a config.json."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import Llama3Rope
from nnxmoe.convert.gguf.gguf_file import GGUF


def shortest(value: Any) -> Any:
    """Convert a float32 to the Python float with the shortest decimal form. Returns other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def rope_fields(model: GGUF, name: str, metadata: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return the rope fields of config.json.

    Missing keys default to linear scaling with factor 1, as in llama.cpp. llama.cpp stores Llama 3's scaling in the
    tensor ``rope_freqs.weight``, with one factor per frequency.

    Args:
        model: Headers of the file.
        name: llama.cpp's architecture name.
        metadata: Metadata of the architecture, by key without the prefix ``{name}.``.
        theta: Base of the rotary frequencies.
    """
    scaling = {
        key.removeprefix("rope.scaling."): shortest(value) for key, value in metadata.items() if "rope.scaling." in key
    }
    scaling_type = scaling.get("type", "linear")
    factor = scaling.get("factor", shortest(metadata.get("rope.scale_linear", 0.0))) or 1.0
    factors = model.tensors.get("rope_freqs.weight")

    supported = "yarn with yarn_log_multiplier is" if name == "deepseek2" else "linear and yarn are"

    def refuse(key: str, value: Any, context: str = "") -> None:
        raise model.error(f"{name}.rope.scaling.{key} {short(value)}{context} is not supported; {supported} supported")

    if scaling_type not in ("none", "linear", "yarn"):
        refuse("type", scaling_type)
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise model.error(f"{name}.rope.scaling.factor must be a positive number, got {short(factor)}")
    _refuse_unused(scaling_type, scaling, refuse)
    is_scaled = scaling_type != "none" and factor != 1
    if name == "deepseek2":  # llama.cpp multiplies its attention scores by factors that config.json cannot express
        if is_scaled and scaling_type == "linear":
            refuse("type", scaling_type)
        if is_scaled and not scaling.get("yarn_log_multiplier"):
            refuse("type", scaling_type, " without yarn_log_multiplier")
        if scaling.get("attn_factor", 1) != 1:
            refuse("attn_factor", scaling["attn_factor"])
    # Without scaling keys, the config class defaults to YaRN, but llama.cpp applies no scaling.
    rope_scaling = {"rope_type": "default"} if name == "gpt-oss" else {}
    if factors is not None and (llama3 := _llama3(model, factors, theta)):
        if is_scaled:
            refuse("type", scaling_type, " with rope_freqs.weight")
        rope_scaling = llama3
    elif scaling_type == "yarn" and (is_scaled or scaling.get("attn_factor", 1) != 1):
        rope_scaling = _yarn(name, factor, scaling, refuse)
    elif is_scaled:
        rope_scaling = {"rope_type": "linear", "factor": factor}
    return {"rope_scaling": rope_scaling} if rope_scaling else {}


def _refuse_unused(scaling_type: str, scaling: Mapping[str, Any], refuse: Any) -> None:
    """Call ``refuse`` for scaling parameters that affect the outputs but are not supported."""
    if scaling_type != "yarn" and scaling.get("attn_factor", 1) != 1:
        refuse("attn_factor", scaling["attn_factor"], f" with type {scaling_type}")
    if scaling.get("alpha"):
        refuse("alpha", scaling["alpha"])
    if scaling_type == "yarn" and scaling.get("yarn_ext_factor", 1) not in (-1, 1):
        refuse("yarn_ext_factor", scaling["yarn_ext_factor"])


def _yarn(name: str, factor: float, scaling: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    field_names = {"original_context_length": "original_max_position_embeddings"}
    field_names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    # These fields describe the converted model. For most architectures, llama.cpp itself ignores yarn_beta_fast and
    # yarn_beta_slow (it uses 32 and 1), and it always truncates the range of interpolated frequencies.
    fields: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if not scaling.get("original_context_length"):
        del field_names["original_context_length"]  # as in llama.cpp, 0 means the model's context length
    fields |= {field: scaling[key] for key, field in field_names.items() if key in scaling}
    if name == "gpt-oss":
        fields["truncate"] = False
    attention_factor = 1 + 0.1 * math.log(max(factor, 1))
    if (log_multiplier := scaling.get("yarn_log_multiplier")) and name == "deepseek2":
        scale = round(10 * log_multiplier, 6)  # deepseek2's converter stores mscale_all_dim / 10
        fields |= {"mscale": scale, "mscale_all_dim": scale}
        attention_factor = 1.0
    elif log_multiplier:
        refuse("yarn_log_multiplier", log_multiplier)
    # llama.cpp's converter writes transformers' attention_factor. llama.cpp overrides values that differ from its own.
    if not math.isclose(scaling.get("yarn_attn_factor", attention_factor), attention_factor, rel_tol=1e-5):
        if scaling["yarn_attn_factor"] != 1:
            refuse("yarn_attn_factor", scaling["yarn_attn_factor"])
    if (extra_factor := scaling.get("attn_factor", 1)) != 1:
        fields["attention_factor"] = attention_factor * extra_factor
    return fields


def _llama3(model: GGUF, info: Any, theta: float) -> dict[str, Any]:
    if info.kind != "F32" or len(info.values) != 1 or not 1 <= info.values[0] <= 1 << 15:
        raise model.error(f"rope_freqs.weight is {info.kind} {list(info.values)}: it must be an F32 vector")
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        factors = np.frombuffer(file.read(info.nbytes), "<f4")
    if (factors == 1).all():
        return {}
    low_factor, high_factor, max_factor = 1.0, 4.0, float(factors.max())
    frequencies, mask = (
        theta ** (-np.arange(len(factors)) / len(factors)),
        (factors > 1.001) & (factors < 0.999 * max_factor),
    )
    weight = (1 / factors[mask] - 1 / max_factor) / (1 - 1 / max_factor)
    # Estimate the original context length from each factor.
    lengths = (low_factor + weight * (high_factor - low_factor)) * 2 * np.pi / frequencies[mask]
    original_length = round(float(np.median(lengths))) if mask.any() else 8192
    rope = Llama3Rope(2 * len(factors), theta, max_factor, low_factor, high_factor, original_length)
    if not np.allclose(frequencies / np.asarray(rope.frequencies(jnp.int32(0))), factors, rtol=1e-4):
        raise model.error(
            f"rope_freqs.weight has factors that differ from Llama 3's, which is not supported: "
            f"{short(factors.tolist())}"
        )
    fields = {"factor": max_factor, "low_freq_factor": low_factor, "high_freq_factor": high_factor}
    return {"rope_type": "llama3", **fields, "original_max_position_embeddings": original_length}
