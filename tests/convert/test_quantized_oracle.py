"""Quantised checkpoints beside compressed-tensors' own code, to the bit, and beside transformers' logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxmoe
from nnxmoe.model.quantization.methods import parse_method
from tests.support.arrays import max_error
from tests.support.quantised import FIELDS, FORMATS, read_tensors, write_deepseek_v4, write_quantised
from tests.support.running import MODEL_TOLERANCE
from tests.support.tiny import build, random_tokens, tiny_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.oracle

COMPRESSED = [name for name, form in FORMATS.items() if form.config["quant_method"] == "compressed-tensors"]


def decompressed(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a compressed-tensors checkpoint, computed by that library."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    fields = next(iter(config["config_groups"].values()))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fields["weights"]))
    compressor = BaseCompressor.get_value_from_registry(fields.get("format") or config["format"])
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        own = {key.removeprefix(f"{module}."): value for key, value in tensors.items() if key.startswith(f"{module}.")}
        found[f"{module}.weight"] = compressor.decompress(own, scheme)["weight"].float().numpy()
    return found


@pytest.mark.parametrize("name", COMPRESSED)
def test_our_floats_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    """The tests' own writer, and what we read, agree with the library to the bit."""
    codes, floats = write_quantised(tmp_path, "llama", FORMATS[name])
    wanted, written = decompressed(codes), read_tensors(floats)
    assert len(wanted) == 14
    for weight, values in wanted.items():
        np.testing.assert_array_equal(values, written[weight], err_msg=weight)
    model = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)
    nnxmoe.save_pretrained(nnxmoe.dequantize(model), tmp_path / "plain")
    ours = read_tensors(tmp_path / "plain")
    for weight, values in wanted.items():
        np.testing.assert_array_equal(values, ours[weight], err_msg=weight)


@pytest.mark.parametrize("method", ["int8", "int4:16", "fp8:16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compressed_tensors_reads_what_we_save(tmp_path: Path, method: str, dtype: str) -> None:
    model = build(FIELDS["mixtral"], tiny_weights(FIELDS["mixtral"]), dtype=dtype, quantize=parse_method(method))
    nnxmoe.save_pretrained(model, tmp_path / "codes")
    nnxmoe.save_pretrained(nnxmoe.dequantize(model, "float32"), tmp_path / "plain")
    wanted = read_tensors(tmp_path / "plain")
    found = decompressed(tmp_path / "codes")
    assert len(found) == 2 * (4 + 3 * 4)
    for weight, values in found.items():
        np.testing.assert_array_equal(values, wanted[weight].astype(np.float32), err_msg=weight)


def test_compressed_tensors_reads_the_mxfp4_that_we_save(tmp_path: Path) -> None:
    codes, floats = write_quantised(tmp_path, "llama", FORMATS["mxfp4-pack"])
    nnxmoe.save_pretrained(nnxmoe.from_pretrained(codes, keep_quantized=True), tmp_path / "again")
    found, wanted = decompressed(tmp_path / "again"), read_tensors(floats)
    assert len(found) == 14
    for weight, values in found.items():
        np.testing.assert_array_equal(values, wanted[weight], err_msg=weight)


def theirs(folder: Path, tokens: np.ndarray, **options: Any) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", FIELDS)
def test_logits_of_kept_codes_are_those_of_a_float_twin(tmp_path: Path, kind: str, name: str) -> None:
    codes, floats = write_quantised(tmp_path, kind, FORMATS[name], seed=3)
    tokens = random_tokens(2, 9, 48)
    ours = nnxmoe.from_pretrained(codes, dtype="float32", keep_quantized=True)(tokens).logits
    assert max_error(ours, theirs(floats, tokens)) < MODEL_TOLERANCE


def test_deepseek_v4_as_published(tmp_path: Path) -> None:
    """Transformers decodes FP8 blocks and FP4 experts itself."""
    codes, floats = write_deepseek_v4(tmp_path)
    tokens = random_tokens(2, 17, 48)
    ours = nnxmoe.from_pretrained(codes, dtype="float32")(tokens).logits
    assert max_error(ours, theirs(codes, tokens)) < MODEL_TOLERANCE
    assert max_error(ours, theirs(floats, tokens)) < MODEL_TOLERANCE


HEAD = "experts=int4:16,others=int8,head=int8"


@pytest.mark.parametrize(
    ("kind", "method"), [("llama", "int4:16"), ("llama", HEAD), ("mixtral", "int4:16"), ("mixtral", "int8")]
)
def test_transformers_loads_what_we_save(tmp_path: Path, kind: str, method: str) -> None:
    model = build(FIELDS[kind], tiny_weights(FIELDS[kind]), quantize=parse_method(method))
    nnxmoe.save_pretrained(model, tmp_path / "codes")
    tokens = random_tokens(2, 9, 48)
    assert max_error(model(tokens).logits, theirs(tmp_path / "codes", tokens)) < MODEL_TOLERANCE
