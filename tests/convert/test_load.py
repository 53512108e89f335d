"""Loading weights: every stored tensor reaches its parameter in the right dtype, and the report accounts for it."""

import _thread
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

import nnxmoe
from nnxmoe.axes import MESH_AXES, axes_of
from nnxmoe.convert.arrays import parameter_loader
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.convert.arrays.parameter_loader import ParameterLoader
from nnxmoe.convert.files import host_memory
from nnxmoe.convert.files.host_memory import reader_threads
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats import plain_array
from nnxmoe.convert.hf.tensor_arrays import tensor_arrays
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.convert.storage.write_safetensors import write_sharded
from nnxmoe.mesh import abstract_mesh
from nnxmoe.models import PRESETS, model_class
from nnxmoe.sharding_rules import check_mesh, partition_spec, sharding_of
from tests.benchmarks.checkpoints import write_random
from tests.benchmarks.models import MIDSIZE
from tests.benchmarks.processes import call
from tests.support.arrays import max_error
from tests.support.cases import load_case
from tests.support.families import load
from tests.support.fp8 import FP8, quantise
from tests.support.tiny import TINY, stacking_of, tiny_weights, write_checkpoint

CASES = Path(__file__).parents[1] / "data" / "hf"


def tensors_of(case: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted((CASES / case / "model").glob("*.safetensors")):
        found |= load_file(file)
    return found


def write(folder: Path, case: str, tensors: dict[str, np.ndarray], **changes: object) -> Path:
    """Write a case's checkpoint with other tensors and config fields."""
    folder.mkdir(parents=True)
    config = json.loads((CASES / case / "model" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    code = nnxmoe.convert.files.safetensors.dtype_code
    items = [(name, code(t.dtype), t.shape, lambda t=t: t) for name, t in tensors.items()]
    write_sharded(folder, [(0, items)], 10**9, process=0)
    return folder


def logits(model: nnxmoe.CausalLM, case: str) -> np.ndarray:
    ids = load_file(CASES / case / "reference.safetensors")["input_ids"]
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda s: nnx.merge(graph, s)(ids).logits)(state))


def reference(case: str) -> np.ndarray:
    return load_file(CASES / case / "reference.safetensors")["logits"]


def test_report_accounts_for_every_tensor() -> None:
    model = nnxmoe.from_pretrained(CASES / "mixtral_basic" / "model")
    report = model.load_report
    assert set(report.loaded) == set(tensors_of("mixtral_basic"))
    assert report.missing == report.unexpected == () and report.skipped == report.casts == {}
    assert report.bytes_read == sum(t.nbytes for t in tensors_of("mixtral_basic").values())
    assert "65 tensors" in str(report)


def test_demo_is_loaded_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    model, tokenizer = nnxmoe.from_pretrained("demo"), nnxmoe.Tokenizer.from_pretrained("demo")
    assert model.config.vocab_size >= max(tokenizer.encode("Lisbon is in Portugal."))
    with pytest.raises(nnxmoe.CheckpointError, match=r"config\.json"):
        nnxmoe.from_pretrained("./demo")


def test_every_parameter_is_loaded() -> None:
    model = nnxmoe.from_pretrained(CASES / "deepseek_basic" / "model")
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert total == sum(t.size for t in tensors_of("deepseek_basic").values())


def fused(tensors: dict[str, np.ndarray], names: tuple[str, str, str], block: str) -> dict[str, np.ndarray]:
    """transformers 5's in-memory layout: gate and up in one 3-D tensor, under the prefix mlp."""
    out = {n.replace(block, "mlp"): t for n, t in tensors.items() if ".experts." not in n or "shared" in n}
    layers = sorted({n.split(".experts.")[0] for n in tensors if ".experts." in n and "shared" not in n})
    for layer in layers:
        count = len([n for n in tensors if n.startswith(f"{layer}.experts.") and n.endswith(f"{names[0]}.weight")])
        each = [[tensors[f"{layer}.experts.{e}.{n}.weight"] for e in range(count)] for n in names]
        target = layer.replace(block, "mlp")
        out[f"{target}.experts.gate_up_proj"] = np.stack([np.concatenate(p) for p in zip(*each[:2], strict=True)])
        out[f"{target}.experts.down_proj"] = np.stack(each[2])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("case", "names", "block"),
    [
        ("mixtral_basic", ("w1", "w3", "w2"), "block_sparse_moe"),
        ("deepseek_basic", ("gate_proj", "up_proj", "down_proj"), "mlp"),
    ],
)
def test_load_fused_experts(tmp_path: Path, case: str, names: tuple[str, str, str], block: str, scan: bool) -> None:
    folder = write(tmp_path / "m", case, fused(tensors_of(case), names, block))
    model = nnxmoe.from_pretrained(folder, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    np.testing.assert_allclose(logits(model, case), reference(case), atol=2e-4)


@pytest.mark.slow
def test_renamed_prefix_with_separate_experts(tmp_path: Path) -> None:
    tensors = {n.replace("block_sparse_moe", "mlp"): t for n, t in tensors_of("mixtral_basic").items()}
    model = nnxmoe.from_pretrained(write(tmp_path / "m", "mixtral_basic", tensors))
    np.testing.assert_allclose(logits(model, "mixtral_basic"), reference("mixtral_basic"), atol=2e-4)


def test_stored_and_requested_dtypes(tmp_path: Path) -> None:
    tensors = tensors_of("deepseek_basic")
    half = {n: t if "correction_bias" in n else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    folder = write(tmp_path / "m", "deepseek_basic", half)
    model = nnxmoe.from_pretrained(folder)
    kinds = {str(v.dtype): type(v).__name__ for _, v in nnx.to_flat_state(nnx.state(model))}
    assert kinds == {"bfloat16": "Param", "float32": "RouterBias"}
    assert model.dtype == jnp.bfloat16 and model.load_report.casts == {}
    wide = nnxmoe.from_pretrained(folder, dtype="float32")
    assert {str(v.dtype) for v in jax.tree.leaves(nnx.state(wide))} == {"float32"}
    assert set(wide.load_report.casts) == {"bfloat16 -> float32"}
    halved = nnxmoe.from_pretrained(CASES / "deepseek_basic" / "model", dtype=jnp.float16)
    bias = halved.stacks[1].layers[0].moe.router.bias[...]
    first = next(name for name in tensors if name.endswith("correction_bias"))
    assert str(bias.dtype) == "float32" and np.array_equal(bias, tensors[first])  # never rounded to float16
    with pytest.raises(ValueError, match="int8"):
        nnxmoe.from_pretrained(folder, dtype="int8")


def test_mixed_dtypes_in_one_file(tmp_path: Path) -> None:
    tensors = tensors_of("llama_basic")
    mixed = {n: t.astype(ml_dtypes.bfloat16) if "down_proj" in n else t for n, t in tensors.items()}
    model = nnxmoe.from_pretrained(write(tmp_path / "m", "llama_basic", mixed))
    assert str(model.stacks[0].layers[0].feed_forward.down.kernel.dtype) == "bfloat16" and model.dtype == jnp.float32
    rounded = nnxmoe.from_pretrained(
        write(tmp_path / "n", "llama_basic", {n: t.astype(np.float32) for n, t in mixed.items()})
    )
    np.testing.assert_array_equal(logits(model, "llama_basic"), logits(rounded, "llama_basic"))


def by_the_rule(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Elementwise value[i, j] = float32(code) * scale[i // rows, j // cols]."""
    out = np.zeros(codes.shape, np.float32)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            out[i, j] = np.float32(codes[i, j]) * scales[i // block[0], j // block[1]]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_fp8_blocks_with_ragged_edges(tmp_path: Path, scan: bool) -> None:
    """Blocks of 24 x 40 divide none of the matrix dimensions 64, 48 and 96 evenly in both directions."""
    block, tensors = (24, 40), tensors_of("deepseek_basic")
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        quantised = "_proj" in name and tensor.ndim == 2
        if quantised:
            stored[name], stored[name + "_scale_inv"] = quantise(tensor, block)
            expected[name] = by_the_rule(stored[name], stored[name + "_scale_inv"], block)
        else:
            stored[name] = expected[name] = tensor
    strategy = nnxmoe.Strategy(stacking=stacking_of(scan))
    folder = write(tmp_path / "m", "deepseek_basic", stored, quantization_config=FP8)
    model = nnxmoe.from_pretrained(folder, dtype="float32", strategy=strategy)
    plain = nnxmoe.from_pretrained(write(tmp_path / "p", "deepseek_basic", expected), strategy=strategy)
    for (path, ours), (_, theirs) in zip(
        nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(nnx.state(plain)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours[...]), np.asarray(theirs[...]), err_msg=str(path))
    assert np.abs(logits(model, "deepseek_basic") - reference("deepseek_basic")).max() > 1e-3, "FP8 changes the weights"
    default = nnxmoe.from_pretrained(folder, strategy=strategy)
    assert str(jax.tree.leaves(nnx.state(default.stacks[0]))[0].dtype) in ("bfloat16", "float32")
    assert any(cast == "fp8 -> bfloat16" for cast in default.load_report.casts)


def test_fp8_requires_quantization_config_and_scales(tmp_path: Path) -> None:
    tensors = tensors_of("deepseek_basic")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name], scales = quantise(tensors[name], (24, 40))
    with pytest.raises(nnxmoe.LoadError, match=r"gate_proj.weight.*FP8.*quantization_config"):
        nnxmoe.from_pretrained(write(tmp_path / "a", "deepseek_basic", tensors))
    with pytest.raises(nnxmoe.LoadError, match=r"gate_proj\.weight_scale_inv is missing"):
        nnxmoe.from_pretrained(write(tmp_path / "b", "deepseek_basic", tensors, quantization_config=FP8))
    tensors[name + "_scale_inv"] = scales[:, :1]
    with pytest.raises(nnxmoe.LoadError, match=r"gate_proj.weight.*\[4, 1\].*\[4, 2\]"):
        nnxmoe.from_pretrained(write(tmp_path / "c", "deepseek_basic", tensors, quantization_config=FP8))
    with pytest.raises(ValueError, match="quantization_config lacks bits"):
        nnxmoe.from_pretrained(
            write(tmp_path / "d", "deepseek_basic", tensors, quantization_config={"quant_method": "gptq"})
        )


@pytest.mark.slow
def test_multi_token_prediction_layers_are_skipped_and_reported(tmp_path: Path) -> None:
    tensors = tensors_of("deepseek_basic")
    extra = {n.replace("layers.2.", "layers.3."): t for n, t in tensors.items() if ".layers.2." in n}
    extra["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    beyond = {"model.layers.4.enorm.weight": np.zeros(64, np.float32)}
    folder = write(tmp_path / "m", "deepseek_basic", tensors | extra | beyond, num_nextn_predict_layers=1)
    model = nnxmoe.from_pretrained(folder)
    (rule,) = model.load_report.skipped
    assert "prediction" in rule and set(model.load_report.skipped[rule]) == set(extra)
    assert model.load_report.unexpected == tuple(beyond)
    np.testing.assert_allclose(logits(model, "deepseek_basic"), reference("deepseek_basic"), atol=2e-4)


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "bailing_hybrid"])
def test_prediction_layers_that_a_family_cannot_have_are_skipped(kind: str, tmp_path: Path) -> None:
    """The file of GLM-5 has one more layer than ``num_hidden_layers`` says."""
    case = load(kind)
    fields = case.fields | {"num_nextn_predict_layers": 1}
    count, dim = fields["num_hidden_layers"], fields["hidden_size"]
    last, beyond = (f"model.layers.{number}." for number in (count - 1, count))
    more = {name.replace(last, beyond): tensor for name, tensor in case.weights.items() if name.startswith(last)}
    more |= {f"{beyond}{name}.weight": np.ones(dim, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{beyond}eh_proj.weight"] = np.ones((dim, 2 * dim), np.float32)
    report = nnxmoe.from_pretrained(write_checkpoint(tmp_path, fields, case.weights | more)).load_report
    assert not report.unexpected and [set(names) for names in report.skipped.values()] == [more.keys()]


def test_tied_heads(tmp_path: Path) -> None:
    tensors = tensors_of("llama_basic")
    embed, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    without = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    tied = nnxmoe.from_pretrained(write(tmp_path / "a", "llama_basic", without, tie_word_embeddings=True))
    assert tied.head is None
    same = without | {"lm_head.weight": embed}
    equal = nnxmoe.from_pretrained(write(tmp_path / "b", "llama_basic", same, tie_word_embeddings=True))
    assert equal.head is None and list(equal.load_report.skipped) == ["head tied to the embedding"]
    np.testing.assert_array_equal(logits(tied, "llama_basic"), logits(equal, "llama_basic"))
    untied = nnxmoe.from_pretrained(write(tmp_path / "c", "llama_basic", tensors, tie_word_embeddings=True))
    assert not untied.config.tie_word_embeddings and untied.load_report.notes
    np.testing.assert_allclose(logits(untied, "llama_basic"), reference("llama_basic"), atol=2e-4)
    swapped = {n: t for n, t in tensors.items() if "embed" not in n}
    only_head = nnxmoe.from_pretrained(write(tmp_path / "d", "llama_basic", swapped, tie_word_embeddings=True))
    np.testing.assert_array_equal(np.asarray(only_head.embed.table[...]), head)


def test_error_lists_every_mismatch(tmp_path: Path) -> None:
    tensors = tensors_of("mixtral_basic")
    del tensors["model.norm.weight"], tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"].T)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int32)
    with pytest.raises(nnxmoe.LoadError) as caught:
        nnxmoe.from_pretrained(write(tmp_path / "m", "mixtral_basic", tensors))
    message = str(caught.value)
    for part in ("model.norm.weight is missing", "experts.3.w2.weight is missing", "[64, 320]", "int32", str(tmp_path)):
        assert part in message
    assert set(caught.value.report.missing) == {
        "model.norm.weight",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    }


def test_model_class_must_match_the_checkpoint() -> None:
    with pytest.raises(ValueError, match="mixtral"):
        nnxmoe.models.Llama.from_pretrained(CASES / "mixtral_basic" / "model")
    assert isinstance(nnxmoe.models.Llama.from_pretrained(CASES / "mistral_basic" / "model"), nnxmoe.models.Llama)


def test_the_model_class_is_checked_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the config ties the head to the embedding, which compares the two stored tensors."""
    fields = TINY["llama"] | {"tie_word_embeddings": True}
    head = {"lm_head.weight": np.ones((fields["vocab_size"], fields["hidden_size"]), np.float32)}
    folder, reads = write_checkpoint(tmp_path / "m", fields, tiny_weights(fields) | head), list[str]()
    for module, name in (("convert.storage.checkpoint.Checkpoint", "same"), ("convert.hf.pretrained", "load_model")):
        monkeypatch.setattr(f"nnxmoe.{module}.{name}", lambda *_, name=name, **__: reads.append(name) or False)
    with pytest.raises(nnxmoe.CheckpointError, match=r"not Mixtral\.from_pretrained"):
        nnxmoe.from_pretrained(folder, expect=nnxmoe.models.Mixtral)
    assert not reads
    nnxmoe.from_pretrained(folder, expect=nnxmoe.models.Llama)
    assert reads == ["same", "load_model"]


def test_config_faults_name_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "llama_basic", {}, hidden_act="gelu")
    with pytest.raises(nnxmoe.ConfigError, match=r"config\.json.*gelu"):
        nnxmoe.from_pretrained(folder)


def test_hub_cache_with_links(tmp_path: Path) -> None:
    source, snapshot = CASES / "mixtral_basic" / "model", tmp_path / "snapshots" / "abc"
    (tmp_path / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, tmp_path / "blobs" / str(i))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(i))
    model = nnxmoe.from_pretrained(snapshot)
    np.testing.assert_allclose(logits(model, "mixtral_basic"), reference("mixtral_basic"), atol=2e-4)


def test_report_keeps_the_hub_id_and_revision(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--demo"
    shutil.copytree(CASES / "mixtral_basic" / "model", snapshot := cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "v1").write_text("a" * 40)
    with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path)):
        report = nnxmoe.from_pretrained("org/demo", revision="v1", local_files_only=True).load_report
    assert (report.source, report.revision, report.files) == ("org/demo", "v1", str(snapshot))


def test_empty_shared_experts_are_read_and_written(tmp_path: Path) -> None:
    """transformers stores three tensors without values per layer for ``n_shared_experts`` 0."""
    fields = TINY["deepseek_v3"] | {"n_shared_experts": 0}
    weights = {name: value for name, value in tiny_weights(fields).items() if "shared_experts" not in name}
    shapes = {"gate_proj": (0, 24), "up_proj": (0, 24), "down_proj": (24, 0)}
    empty = {
        f"model.layers.{layer}.mlp.shared_experts.{name}.weight": np.empty(shape, np.float32)
        for layer in (1, 2)
        for name, shape in shapes.items()
    }
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "a", fields, weights | empty))
    assert not model.load_report.unexpected and set(model.load_report.skipped["empty tensors"]) == set(empty)
    nnxmoe.save_pretrained(model, tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == weights.keys() | empty.keys()
    assert {name: saved[name].shape for name in empty} == {name: value.shape for name, value in empty.items()}


def test_adapter_beside_a_model_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "m", "llama_basic", tensors_of("llama_basic"))
    (folder / "adapter_config.json").write_text("{}")
    (note,) = nnxmoe.from_pretrained(folder).load_report.notes
    assert "nnxmoe.train.lora.load(model, folder)" in note and caplog.text.count(note) == 1


@pytest.mark.commands
def test_commands_and_scripts_warn_once(tmp_path: Path) -> None:
    demo = Path(nnxmoe.__file__).parent / "models" / "demo"
    folder = shutil.copytree(demo, tmp_path / "m")
    save_file(
        load_file(demo / "model.safetensors") | {"model.odd": np.ones(3, np.float32)}, folder / "model.safetensors"
    )
    script = "import sys, nnxmoe; nnxmoe.from_pretrained(sys.argv[1])"
    for line in (["-m", "nnxmoe", "generate", folder, "hi", "--max-new-tokens", "1"], ["-c", script, folder]):
        run = subprocess.run([sys.executable, *map(str, line)], capture_output=True, text=True, check=True)
        assert run.stderr.count("model.odd") == 1 and "model.odd" not in run.stdout


@pytest.mark.slow
def test_saved_models_load_again_bit_for_bit(tmp_path: Path) -> None:
    for case, scan in (("mixtral_basic", True), ("deepseek_yarn", False), ("llama3_rope", False)):
        model = nnxmoe.from_pretrained(CASES / case / "model", strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
        nnxmoe.save_pretrained(model, tmp_path / case, max_shard_size="300KB")
        saved: dict[str, np.ndarray] = {}
        for file in (tmp_path / case).glob("*.safetensors"):
            saved |= load_file(file)
        original = tensors_of(case)
        assert saved.keys() == original.keys()
        for name, tensor in original.items():
            np.testing.assert_array_equal(saved[name], tensor, err_msg=name)
        again = nnxmoe.from_pretrained(tmp_path / case)
        np.testing.assert_allclose(logits(again, case), reference(case), atol=2e-4)
        with pytest.raises(ValueError, match="empty"):
            nnxmoe.save_pretrained(model, tmp_path / case)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("case", ["mixtral_basic", "deepseek_yarn"])
def test_slice_of_a_parameter_reads_only_its_bytes(case: str, scan: bool) -> None:
    """Reading half of a parameter along any dimension that can be sharded equals the slice of the full read."""
    with Checkpoint.open(CASES / case / "model") as checkpoint, reader_threads() as pool:
        config = nnxmoe.config_from_hf(checkpoint.config)
        model = nnxmoe.models.model_class(config)(config, nnxmoe.Strategy(stacking=stacking_of(scan)), rngs=None)
        arrays = tensor_arrays(checkpoint.tensors, checkpoint.config, "config.json", checkpoint)
        leaves = tensor_layout(model, arrays)
        loader = ParameterLoader(leaves, arrays)
        for parameter in parameters(model):
            names = [name for name, leaf in leaves.items() if any(p.key == parameter.key for p in leaf.parts)]

            def read(ranges: list[tuple[int, int]], path: Any = parameter.path, names: Any = names) -> np.ndarray:
                out = np.empty([stop - start for start, stop in ranges], np.float32)
                loader.await_reads(loader.submit_reads(names, {path: {tuple(ranges): out}}, pool))
                return out

            every = [(0, n) for n in parameter.shape]
            whole = read(every)
            for dim, size in enumerate(parameter.shape):
                if size % 2 or parameter.axes[dim] == "head":
                    continue
                part = [*every[:dim], (size // 2, size), *every[dim + 1 :]]
                before = checkpoint.bytes_read
                got = read(part)
                wanted = whole[tuple(slice(*ends) for ends in part)]
                np.testing.assert_array_equal(got, wanted, err_msg=f"{parameter.key} {dim}")
                assert checkpoint.bytes_read - before == got.nbytes, parameter.key


def loaded_on_a_mesh(case: Path) -> None:
    mesh, ref = nnxmoe.make_mesh(fsdp=2, expert=2, tensor=2), load_file(case / "reference.safetensors")
    stored = sum(file.stat().st_size for file in (case / "model").glob("*.safetensors"))
    for scan in (False, True):
        model = nnxmoe.from_pretrained(case / "model", mesh=mesh, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
        leaves = dict(nnx.to_flat_state(nnx.state(model)))
        assert all(len(v[...].sharding.device_set) == 8 for v in leaves.values())
        gate = next(v for p, v in leaves.items() if p[-1] == "gate")
        assert gate[...].addressable_shards[0].data.size * 8 == gate[...].size, gate[...].sharding
        assert model.load_report is not None and model.load_report.bytes_read <= stored, "each part is read once"
        graph, state = nnx.split(model)
        out = jax.jit(lambda s, t, graph=graph: nnx.merge(graph, s)(t).logits)(state, ref["input_ids"])
        np.testing.assert_allclose(out, ref["logits"], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral_basic", "deepseek_yarn"])
def test_loading_onto_a_mesh(eight: Callable[..., Any], case: str) -> None:
    eight(loaded_on_a_mesh, CASES / case)


def test_partition_specs_and_invalid_meshes() -> None:
    mesh = nnxmoe.make_mesh(data=jax.device_count())
    assert partition_spec(("expert", "embed", "mlp"), (8, 64, 48), mesh) == jax.sharding.PartitionSpec()
    with pytest.raises(ValueError, match="no rule"):
        partition_spec(("nonsense",), (8,), mesh)
    with pytest.raises(ValueError, match=r"the rule .* names an axis that the mesh .* does not have"):
        partition_spec(("embed",), (8,), mesh, {"embed": ("fsdp", "stage")})
    with pytest.raises(ValueError, match="devices"):
        nnxmoe.make_mesh(data=jax.device_count() + 1)
    with pytest.raises(ValueError, match="One size may be -1"):
        nnxmoe.make_mesh(data=-1, fsdp=-1)
    model = nnxmoe.models.Llama(nnxmoe.models.LlamaConfig(num_hidden_layers=1, hidden_size=64), rngs=None)
    assert sharding_of(model.embed.table, mesh).is_fully_replicated


def test_rules_of_several_mesh_axes() -> None:
    """A rule with several axes leaves out those of size 1 and those that shard another dimension, in any order."""
    rules = {**nnxmoe.RULES, "embed": ("fsdp", "expert"), "mlp": ("tensor",)}
    mesh, spec = abstract_mesh({"fsdp": 4, "expert": 2, "tensor": 3}), jax.sharding.PartitionSpec
    assert partition_spec(("embed", "vocab"), (64, 9), mesh, rules) == spec(("fsdp", "expert"), "tensor")
    assert partition_spec(("expert", "mlp", "embed"), (8, 6, 64), mesh, rules) == spec("expert", "tensor", "fsdp")
    assert partition_spec(("embed", "expert"), (64, 8), mesh, rules) == spec("fsdp", "expert")
    assert partition_spec(("embed",), (64,), abstract_mesh({"expert": 2}), rules) == spec("expert")
    with pytest.raises(ValueError, match="fsdp x expert of size 8 does not divide 'embed' of size 12"):
        partition_spec(("embed",), (12,), mesh, rules)
    with pytest.raises(ValueError, match="same mesh axis"):
        partition_spec(("embed", "q_rank"), (64, 64), mesh, {**rules, "embed": "fsdp", "q_rank": "fsdp"})


def test_sizes_of_a_mesh_that_are_proposed_fit_the_model() -> None:
    for name in ("mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b"):
        model = model_class(PRESETS[name])(PRESETS[name], nnxmoe.Strategy(stacking=nnxmoe.Scanned()), rngs=None)
        for sizes in ({"tensor": 96}, {"fsdp": 7, "expert": 48, "tensor": 12}, {"expert": 5, "fsdp": 3}, {"fsdp": 11}):
            rules = {**nnxmoe.RULES, "embed": ("fsdp", "expert")}
            with pytest.raises(ValueError, match="does not divide") as refused:
                check_mesh(model, abstract_mesh(sizes), rules)
            proposed = re.search(r"; try ([a-z0-9=,]+)$", str(refused.value))
            if proposed is None:
                assert sizes == {"fsdp": 11}
                continue
            fits = {axis: int(size) for axis, size in (pair.split("=") for pair in proposed[1].split(","))}
            assert all(1 < size <= sizes[axis] for axis, size in fits.items())
            check_mesh(model, abstract_mesh(fits), rules)


def test_the_mesh_defaults_to_the_mesh_of_the_strategy(tmp_path: Path) -> None:
    mesh, fields = nnxmoe.make_mesh(data=1, devices=jax.devices()[:1]), TINY["llama"]
    folder = write_checkpoint(tmp_path / "m", fields, tiny_weights(fields))
    model = nnxmoe.from_pretrained(folder, strategy=nnxmoe.Strategy(mesh=mesh))
    assert model.mesh == mesh
    assert all(array.sharding.mesh == mesh for array in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.wrong_types  # no real mesh
def test_an_axis_of_the_mesh_may_cross_hosts() -> None:
    """Devices 0 to 3 are of the first host."""

    def laid(**options: Any) -> Any:
        return np.vectorize(lambda device: device.id)(
            nnxmoe.make_mesh(fsdp=4, expert=2, devices=eight, **options).devices
        )

    eight = [types.SimpleNamespace(id=i, platform="cpu") for i in range(8)]
    with mock.patch("nnxmoe.mesh.Mesh", lambda devices, *_, **__: types.SimpleNamespace(devices=devices)):
        assert laid().squeeze().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert laid(across="expert").squeeze().tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="across='host' is not a mesh axis"):
        nnxmoe.make_mesh(across="host")


@pytest.mark.wrong_types  # no real mesh
def test_the_first_axis_with_several_devices_spans_the_slices() -> None:
    """Unless ``across`` names an axis. The devices are in two slices of four TPUs."""
    eight = [types.SimpleNamespace(id=i, platform="tpu", slice_index=i // 4) for i in range(8)]
    made = mock.patch("nnxmoe.mesh.mesh_utils.create_hybrid_device_mesh")
    with made as hybrid, mock.patch("nnxmoe.mesh.Mesh"):
        for options, axis in (({}, "fsdp"), ({"across": "expert"}, "expert")):
            nnxmoe.make_mesh(fsdp=4, expert=2, devices=eight, **options)
            per_slice, slices = (dict(zip(MESH_AXES, shape, strict=True)) for shape in hybrid.call_args.args[:2])
            assert {name: count for name, count in slices.items() if count > 1} == {axis: 2}
            assert per_slice["fsdp"] * slices["fsdp"] == 4 and per_slice["expert"] * slices["expert"] == 2


def odd_checkpoint(tmp_path: Path) -> Path:
    """FP8, bfloat16 and float32 in one file, with values that are not finite or overflow float16."""
    tensors = tensors_of("deepseek_basic")
    stored: dict[str, np.ndarray] = {
        n: t.astype(ml_dtypes.bfloat16) if "o_proj" in n else t for n, t in tensors.items()
    }
    for name in [n for n in tensors if "gate_proj" in n]:
        stored[name], stored[f"{name}_scale_inv"] = quantise(tensors[name], (24, 40))
    stored["lm_head.weight"] = tensors["lm_head.weight"].copy()
    stored["lm_head.weight"][::7, 3] = 1e30
    stored["lm_head.weight"][2, :5] = np.nan
    return write(tmp_path / "m", "deepseek_basic", stored, quantization_config=FP8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_threads_and_chunk_size_do_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """One thread with whole tensors, and five threads with small chunks."""
    folder, found = odd_checkpoint(tmp_path), []
    for threads, chunk, ahead in ((1, 1 << 30, 1), (5, 1, 1 << 30), (5, 1, 20_000)):
        monkeypatch.setattr(
            host_memory.os, "sched_getaffinity", lambda _, threads=threads: range(threads), raising=False
        )
        monkeypatch.setattr(plain_array, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(parameter_loader, "AHEAD_BYTES", ahead)
        model = nnxmoe.from_pretrained(folder, dtype=dtype)
        report = vars(model.load_report) | {"seconds": 0}
        found.append(([np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))], report))
    for leaves, report in found[1:]:
        assert report == found[0][1]
        for one, other in zip(leaves, found[0][0], strict=True):
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    rows = len(range(0, len(tensors_of("deepseek_basic")["lm_head.weight"]), 7))
    assert found[0][1]["nonfinite"] == {"lm_head.weight": 5 + (rows if dtype else 0)}


def threads_of_a_load() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("nnxmoe-load")]


def test_error_in_a_reader_thread_is_raised_with_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file is truncated while it is being read."""
    folder, reads = write(tmp_path / "m", "mixtral_basic", tensors_of("mixtral_basic")), []
    real = Checkpoint.read_into

    def read_into(self: Checkpoint, tensor: TensorInfo, *args: Any) -> None:
        reads.append(threading.current_thread())
        if len(reads) == 5:
            os.truncate(tensor.file, tensor.begin)
        real(self, tensor, *args)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    with pytest.raises(nnxmoe.CheckpointError, match=r"model.*safetensors ends at byte \d+, within tensor"):
        nnxmoe.from_pretrained(folder)
    assert set(map(type, reads)) == {threading.Thread} and threading.main_thread() not in reads
    assert not threads_of_a_load()


def test_interrupt_stops_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C interrupts the waiting thread; running reads finish and pending ones are dropped."""
    real, reads = Checkpoint.read_into, []

    def read_into(self: Checkpoint, *args: Any) -> None:
        reads.append(1)
        if len(reads) == 3:
            _thread.interrupt_main()
        time.sleep(0.05)
        real(self, *args)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    monkeypatch.setattr(host_memory.os, "sched_getaffinity", lambda _: range(2), raising=False)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore the signal
    gc.disable()  # Python ignores exceptions raised in garbage collector callbacks
    try:
        with pytest.raises(KeyboardInterrupt):
            nnxmoe.from_pretrained(CASES / "mixtral_basic" / "model")
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, usual)
    assert len(reads) < 10 and not threads_of_a_load()


def test_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, most, limit = {}, [], 60_000
    submit, wait = ParameterLoader.submit_reads, ParameterLoader.await_reads

    def counted_submit(self: ParameterLoader, names: Any, buffers: Any, pool: Any) -> Any:
        reads = submit(self, names, buffers, pool)
        begun[id(reads)] = sum(buffer.nbytes for each in buffers.values() for buffer in each.values())
        most.append(sum(begun.values()))
        return reads

    def counted_wait(self: ParameterLoader, reads: Any) -> None:
        begun.pop(id(reads))
        wait(self, reads)

    monkeypatch.setattr(ParameterLoader, "submit_reads", counted_submit)
    monkeypatch.setattr(ParameterLoader, "await_reads", counted_wait)
    monkeypatch.setattr(parameter_loader, "AHEAD_BYTES", limit)
    model = nnxmoe.from_pretrained(CASES / "mixtral_basic" / "model")
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert limit / 2 < max(most) <= max(limit, largest) and not begun


@pytest.mark.slow
def test_peak_memory_of_loading(tmp_path: Path) -> None:
    write_random(tmp_path / "model", MIDSIZE["mixtral"] | {"torch_dtype": "bfloat16"}, 110_000_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 4
    found = call("ours", tmp_path / "model", "load")["values"]
    print(found)
    assert found["load peak memory, x checkpoint"] <= 1.2


def test_pickle_only_checkpoints_are_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(nnxmoe.CheckpointError, match=r"pytorch_model.bin.*safetensors"):
        nnxmoe.from_pretrained(tmp_path)


@pytest.mark.slow
def test_other_sharding_rules_keep_the_logits(eight: Callable[..., Any]) -> None:
    """MLP width sharded over ``fsdp`` and latents over ``expert``, for loaded and for randomly initialised models."""
    for name, way in (("mixtral_basic", "sorted"), ("deepseek_yarn", "ragged")):
        assert max(eight(elsewhere, name, way)) < 2e-4


def elsewhere(name: str, way: str) -> list[float]:
    """Logit errors of a model loaded with other rules and of one initialised on the mesh."""
    mesh = nnxmoe.make_mesh(fsdp=2, expert=2, devices=jax.devices()[:4])
    rules = {**nnxmoe.RULES, "embed": None, "mlp": "fsdp", "kv_rank": "expert"}
    dispatch = {
        "sorted": nnxmoe.Sorted(),
        "ragged": nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll()),
    }[way]
    strategy, arrays = nnxmoe.Strategy(dispatch=dispatch, rules=rules), load_case(name).arrays
    tokens = np.concatenate([arrays["input_ids"]] * 2)
    model = nnxmoe.from_pretrained(CASES / name / "model", mesh=mesh, strategy=strategy)
    kernels = {axes_of(v): v.get_value().sharding.spec for _, v in nnx.to_flat_state(nnx.state(model))}
    assert kernels["expert", "mlp", "embed"] == PartitionSpec("expert", "fsdp", None)
    assert ("kv_rank", "heads", "head") not in kernels or kernels["kv_rank", "heads", "head"][0] == "expert"
    errors = [max_error(model(tokens).logits, np.concatenate([arrays["logits"]] * 2))]
    made = [type(model)(model.config, s, rngs=nnx.Rngs(3)) for s in (model.strategy, nnxmoe.Strategy())]
    for _, variable in nnx.to_flat_state(nnx.state(made[0])):
        assert variable.get_value().sharding == model.strategy.sharding_of(variable)
    return [*errors, max_error(made[0](tokens).logits, made[1](tokens).logits)]
