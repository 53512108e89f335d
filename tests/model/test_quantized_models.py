"""Quantised models: in memory, while loading, on meshes; their memory, caches, adapters and commands."""

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.model.output import LOGITS_ONLY
from nnxmoe.model.quantization.methods import parse_method
from nnxmoe.model.quantization.quantized_kernels import quantizable_kernels, quantized_kernels
from nnxmoe.train import lora
from nnxmoe.train.loop.fit import fit
from tests.support.arrays import identical, max_error
from tests.support.quantised import FIELDS, deepseek, write_quantised
from tests.support.running import MODEL_TOLERANCE, compiled_in, variables
from tests.support.tiny import build, random_tokens, tiny_weights, write_checkpoint

METHODS = {"int8": nnxmoe.Int8(), "int4": nnxmoe.Int4(16), "fp8": nnxmoe.Float8(32)}
KINDS = tuple(FIELDS)
SLOW = pytest.mark.slow


def arrays(model: nnxmoe.CausalLM) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable[...]) for path, variable in variables(model)}


PLAIN, SCANNED = nnxmoe.Strategy(), nnxmoe.Strategy(stacking=nnxmoe.Scanned())


@functools.cache
def floats(kind: str, strategy: nnxmoe.Strategy = PLAIN) -> nnxmoe.CausalLM:
    """A tiny model, which callers must not modify."""
    return build(FIELDS[kind], tiny_weights(FIELDS[kind]), strategy)


# Models


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_models(kind: str, name: str) -> None:
    """Logits are those of the dequantised model; embedding, head, router and norms are shared, kernels are not."""
    model, tokens = floats(kind, SCANNED), random_tokens(2, 7, 48)
    made = nnxmoe.quantize(model, METHODS[name])
    plain = nnxmoe.dequantize(made)
    assert max_error(made(tokens).logits, plain(tokens).logits) < MODEL_TOLERANCE
    same = {path for path, array in arrays(plain).items() if np.array_equal(array, arrays(model)[path])}
    assert {"embed.table", "norm.scale", "head.kernel"} <= same
    keys = {place.path for place in quantizable_kernels(model) if not place.head}
    assert all(
        ("router" in path or "norm" in path or "bias" in path)
        for path in same - {"embed.table", "norm.scale", "head.kernel"}
    )
    assert len(quantized_kernels(made)) == len(keys) and not quantized_kernels(model)
    with pytest.raises(ValueError, match="already"):
        nnxmoe.quantize(made, METHODS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name) if (kind, name) == ("deepseek_v3", "int8") else pytest.param(kind, name, marks=SLOW)
        for kind in KINDS
        for name in METHODS
    ],
)
def test_generation(kind: str, name: str) -> None:
    made, tokens = nnxmoe.quantize(floats(kind), METHODS[name]), random_tokens(2, 7, 48)
    out = nnxmoe.generate(made, tokens, max_new_tokens=4)
    np.testing.assert_array_equal(out, nnxmoe.generate(nnxmoe.dequantize(made), tokens, max_new_tokens=4))


WAYS = {
    "dense": nnxmoe.Dense(),
    "capacity": nnxmoe.Capacity(2.0),
    "chunked": nnxmoe.Chunked(nnxmoe.Sorted(), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_dispatch(way: str) -> None:
    strategy = nnxmoe.Strategy(dispatch=WAYS[way], stacking=nnxmoe.Scanned())
    made = nnxmoe.quantize(floats("mixtral", strategy), nnxmoe.Mixed(experts=nnxmoe.Int4(16), others=nnxmoe.Int8()))
    tokens = random_tokens(2, 9, 48)
    assert max_error(made(tokens).logits, nnxmoe.dequantize(made)(tokens).logits) < MODEL_TOLERANCE


ON_EIGHT, NARROW = FIELDS["mixtral"] | {"vocab_size": 54}, METHODS | {"fp8": nnxmoe.Float8(16)}
EIGHT_ROWS = random_tokens(8, 6, 48)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["RaggedAllToAll", "RingOfExperts", "Sorted", "tensor"])
def test_on_eight_devices(eight: Callable[..., Any], exchange: str) -> None:
    for name, error in eight(on_eight_devices, exchange).items():
        assert error < MODEL_TOLERANCE, name


def on_eight_devices(exchange: str) -> dict[str, float]:
    """Errors against the dequantised model on one device, by method."""
    axes = {"Sorted": {"fsdp": 2, "expert": 4}, "tensor": {"tensor": 2, "expert": 4}}.get(
        exchange, {"data": 2, "expert": 4}
    )
    mesh = nnxmoe.make_mesh(**axes)
    dispatch: Any = nnxmoe.Sorted()
    if exchange not in ("Sorted", "tensor"):
        dispatch = nnxmoe.ExpertParallel(nnxmoe.Sorted(), getattr(nnxmoe, exchange)())
    weights, found = tiny_weights(ON_EIGHT), {}
    for name, method in NARROW.items():
        model = build(ON_EIGHT, weights, nnxmoe.Strategy(dispatch=dispatch, mesh=mesh), quantize=method)
        assert all(len(w.weight.codes.get_value().sharding.device_set) == 8 for w in quantized_kernels(model))
        found[name] = max_error(model(EIGHT_ROWS).logits, of_one_device(name))
    return found


@functools.cache
def of_one_device(name: str) -> Any:
    """The logits of the dequantised model."""
    model = nnxmoe.quantize(build(ON_EIGHT, tiny_weights(ON_EIGHT), PLAIN), NARROW[name])
    return np.asarray(nnxmoe.dequantize(model)(EIGHT_ROWS).logits)


@pytest.mark.slow
def test_meshes_that_split_tiles_are_refused(eight: Callable[..., Any]) -> None:
    assert re.search(
        r"attention\.k\.kernel: 8 devices .*'tensor' .*128 outputs .* tile of 32", eight(splitting, "tensor")
    )
    assert re.search(r"kernel: 8 devices of the mesh axis 'fsdp' .*64 inputs", eight(splitting, "fsdp"))


def splitting(axis: str) -> str:
    mesh = nnxmoe.make_mesh(**{axis: 8})
    fields = FIELDS["mixtral"] | {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128}
    fields["vocab_size"] = 64
    try:
        build(fields, tiny_weights(fields), nnxmoe.Strategy(mesh=mesh), quantize=nnxmoe.Float8(32))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.slow
def test_mesh_that_splits_tiles_of_experts_is_refused_with_the_expert_axis(
    eight: Callable[..., Any], tmp_path: Path
) -> None:
    """Experts of width 96 with FP8 blocks of 32 do not divide over two devices, but whole experts do."""
    codes, floats_folder = write_quantised(
        tmp_path, "mixtral", deepseek((32, 32)), more={"num_key_value_heads": 4, "vocab_size": 64}
    )
    refusal, logits = eight(kept_on_meshes, str(codes))
    assert re.search(
        r"layer\.moe\.experts\.\w+: 2 devices of the mesh axis 'tensor' .*96 \w+ within a tile of 32 .* \(expert=2\)",
        refusal,
    )
    model = nnxmoe.from_pretrained(floats_folder)
    assert max_error(logits, model(random_tokens(8, 7, 64)).logits) < MODEL_TOLERANCE


def kept_on_meshes(folder: str) -> tuple[str, np.ndarray]:
    """Return the error for two tensor shards, and the logits of two expert shards."""
    refusal = "nothing was refused"
    try:
        nnxmoe.from_pretrained(folder, keep_quantized=True, mesh=nnxmoe.make_mesh(data=4, tensor=2))
    except ValueError as error:
        refusal = str(error)
    model = nnxmoe.from_pretrained(folder, keep_quantized=True, mesh=nnxmoe.make_mesh(data=4, expert=2))
    return refusal, np.asarray(model(random_tokens(8, 7, 64)).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantising_while_loading_equals_quantising_in_memory(tmp_path: Path, kind: str, dtype: str) -> None:
    weights = {name: array.astype(jnp.dtype(dtype)) for name, array in tiny_weights(FIELDS[kind]).items()}
    folder = write_checkpoint(tmp_path / "m", FIELDS[kind], weights)
    method = nnxmoe.Mixed(experts=nnxmoe.Int4(16), others=nnxmoe.Float8(24))
    made = nnxmoe.from_pretrained(folder, quantize=method)
    whole = nnxmoe.from_pretrained(folder)
    identical(arrays(made), arrays(nnxmoe.quantize(whole, method)))
    report, error = made.load_report, 0.0
    pairs = [(a, arrays(whole)[p]) for p, a in arrays(nnxmoe.dequantize(made, "float32")).items()]
    changed = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if not np.array_equal(a, b)]
    error = np.sqrt(sum(((a - b) ** 2).sum() for a, b in changed) / sum((b**2).sum() for _, b in changed))
    np.testing.assert_allclose(report.quantization_error, error, rtol=1e-3)
    assert 0.005 < report.quantization_error < 0.1 and "root mean square error" in str(report)
    nnxmoe.save_pretrained(made, tmp_path / "again")
    identical(arrays(nnxmoe.from_pretrained(tmp_path / "again", keep_quantized=True)), arrays(made))


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [nnxmoe.Int8(), pytest.param(nnxmoe.Int4(16), marks=SLOW), pytest.param(nnxmoe.Float8(24), marks=SLOW)],
    ids=str,
)
def test_the_head_is_quantised_by_name(tmp_path: Path, head: Any) -> None:
    """In memory, while loading, saved in both formats, as floats again, and under a loss with gradients."""
    folder = write_checkpoint(tmp_path / "m", FIELDS["mixtral"], tiny_weights(FIELDS["mixtral"]))
    floating, tokens = nnxmoe.from_pretrained(folder), random_tokens(2, 9, 48)
    method = nnxmoe.Mixed(None, nnxmoe.Int8(), head)
    made = nnxmoe.quantize(floating, method)
    assert {place.key for place in quantized_kernels(made)} > {"head.kernel"}
    identical(arrays(nnxmoe.from_pretrained(folder, quantize=method)), arrays(made))
    restored = nnxmoe.dequantize(made)
    assert max_error(restored.head.kernel.get_value(), floating.head.kernel.get_value()) > 0
    assert max_error(made(tokens).logits, restored(tokens).logits) < MODEL_TOLERANCE
    nnxmoe.save_pretrained(made, tmp_path / "published")
    nnxmoe.save(made, tmp_path / "native")
    again = nnxmoe.from_pretrained(tmp_path / "published", keep_quantized=True), nnxmoe.load(tmp_path / "native")
    for model in again:
        identical(arrays(model), arrays(made))

    tuned = []
    for model in (made, restored):
        lora.add(model, 2, rngs=nnx.Rngs(0))
        run = fit(model, [{"tokens": tokens}], optimizer=optax.sgd(0.1), steps=2)
        tuned.append([metrics["loss"] for metrics in run.history])
    np.testing.assert_allclose(*tuned, rtol=1e-5)


def test_a_tied_head_cannot_be_quantised(tmp_path: Path) -> None:
    fields = FIELDS["llama"] | {"tie_word_embeddings": True}
    folder = write_checkpoint(tmp_path / "m", fields, tiny_weights(fields))
    method = nnxmoe.Mixed(None, None, nnxmoe.Int8())
    for attempt in (
        lambda: nnxmoe.from_pretrained(folder, quantize=method),
        lambda: nnxmoe.quantize(nnxmoe.from_pretrained(folder), method),
    ):
        with pytest.raises(ValueError, match="head is the embedding"):
            attempt()


def test_nan_cannot_be_quantised(tmp_path: Path) -> None:
    weights = tiny_weights(FIELDS["llama"])
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    folder = write_checkpoint(tmp_path / "m", FIELDS["llama"], weights)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: NaN and infinite weights cannot be"):
        nnxmoe.from_pretrained(folder, quantize=nnxmoe.Int8())
    with pytest.raises(ValueError, match=r"layer\.mlp\.up\.kernel: NaN"):
        nnxmoe.quantize(nnxmoe.from_pretrained(folder), nnxmoe.Int8())


def test_groups_must_divide_the_inputs() -> None:
    with pytest.raises(
        ValueError, match=r"int4: groups of 40 do not divide a kernel's \d+ inputs\. Use groups of 8 \(int4:8\)"
    ):
        nnxmoe.quantize(floats("llama"), nnxmoe.Int4(40))


def test_groups_of_int4_are_smaller_if_they_do_not_divide_the_inputs() -> None:
    method = nnxmoe.Int4()
    assert [method.for_inputs(ins).group for ins in (1536, 576, 192, 96)] == [128, 64, 64, 32]
    assert method.for_inputs(48) == method, "groups of 16 are too small to be chosen"
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
    model = abstract("llama", method, num_attention_heads=9, num_key_value_heads=3, **sizes)
    layer = model.stacks[0].layers[0]
    assert [part.kernel.format.tile[1] for part in (layer.attention.q, layer.mlp.down)] == [64, 128]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("int8", nnxmoe.Int8()),
        ("int4", nnxmoe.Int4(128)),
        ("int4:32", nnxmoe.Int4(32)),
        ("fp8:64", nnxmoe.Float8(64)),
        ("experts=int4:32,others=int8", nnxmoe.Mixed(nnxmoe.Int4(32), nnxmoe.Int8())),
        ("experts=fp8", nnxmoe.Mixed(nnxmoe.Float8(128), None)),
        ("head=int8", nnxmoe.Mixed(None, None, nnxmoe.Int8())),
    ],
)
def test_methods_on_the_command_line(text: str, wanted: Any) -> None:
    assert parse_method(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "int5", "int4:", "int8:2", "int4:0", "float", "experts=int8,experts=int8", "a=int8", "int4,int8"]
)
def test_methods_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_method(text)


# Memory


def abstract(kind: str, method: Any, **changes: Any) -> nnxmoe.CausalLM:
    """A wide model of shapes, quantised."""
    from nnxmoe.model.quantization.rounding import quantize_structure
    from nnxmoe.models import config_from_hf, model_class

    config = config_from_hf(FIELDS[kind] | changes)  # each family has some of the fields
    model = model_class(config)(config, rngs=None, dtype="bfloat16")
    quantize_structure(model, method, "bfloat16")
    return model


WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "moe_intermediate_size": 512}
WIDER = {
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "num_attention_heads": 8,
}
WIDEST = WIDE | WIDER | {"num_key_value_heads": 8, "qk_rope_head_dim": 64}


@pytest.mark.program
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "share"), [("int8", 0.53), ("int4", 0.29)])
def test_bytes_of_a_decode_step(kind: str, name: str, share: float) -> None:
    """Parameter bytes from the compiled program, and no float array of a kernel's size in it."""
    method = nnxmoe.Int8() if name == "int8" else nnxmoe.Int4(128)
    sizes = {}
    for given_method in (None, method):
        model = abstract(kind, given_method, **WIDEST)
        graph, state = nnx.split(model)

        def step(state: Any, tokens: Any, graph: Any = graph) -> Any:
            made = nnx.merge(graph, state)
            out = made(tokens, cache=made.empty_cache(1, 8))
            return out.logits, out.cache

        kernels = [leaf for leaf in jax.tree.leaves(nnx.state(model.stacks))]
        sizes[given_method] = sum(leaf.size * leaf.dtype.itemsize for leaf in kernels)
        if given_method is not None:
            program = jax.jit(step).lower(state, jax.ShapeDtypeStruct((1, 1), jnp.int32)).compile()
            least = min(math.prod(w.weight.ins + w.weight.outs) for w in quantized_kernels(model))
            made = re.findall(r"= (?:f32|bf16|f16)\[([0-9,]+)\]", program.as_text())
            counts = {int(np.prod([int(n) for n in dims.split(",")])) for dims in made}
            inputs = {leaf.size for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
            assert not {count for count in counts - inputs if count >= least}, "a kernel became floats"
            arguments = program.memory_analysis().argument_size_in_bytes
            assert arguments >= sizes[given_method]
    assert sizes[method] <= share * sizes[None]


MEASURE = """
import sys
import nnxmoe
from tests.benchmarks.engine import memory
from tests.support.running import variables
nnxmoe.from_pretrained(sys.argv[1] + "/small", quantize=nnxmoe.Int4(128))
before = memory("VmRSS")
model = nnxmoe.from_pretrained(sys.argv[1] + "/large", quantize=nnxmoe.Int4(128))
size = sum(v.get_value().nbytes for _, v in variables(model))
print(memory("VmHWM") - before, size)
"""


@pytest.mark.slow
def test_peak_memory_of_quantising_while_loading(tmp_path: Path) -> None:
    """At most 1.05 times the result and one tensor; buffers of the reading threads are 16 MB."""
    small = FIELDS["mixtral"] | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    large = FIELDS["mixtral"] | {"hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 6, "head_dim": 64}
    for name, fields in (("small", small), ("large", large)):
        write_checkpoint(tmp_path / name, fields, tiny_weights(fields))
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, size = map(int, run.stdout.split()[-2:])
    assert peak <= 1.05 * size + 1024 * 3584 * 4 + (24 << 20), (peak, size)


# Caches


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["mistral", *(pytest.param(kind, marks=SLOW) for kind in ("llama", "mixtral")), "deepseek_v3"]
)
def test_int8_caches(kind: str) -> None:
    """A quarter of the bytes of float32 and a small error, also in rings; scanned or not the same codes."""
    unbiased = {name: value for name, value in FIELDS["llama"].items() if not name.endswith("_bias")}
    fields = FIELDS.get(kind) or unbiased | {"model_type": "mistral", "sliding_window": 5}
    strategy = nnxmoe.Strategy(cache=nnxmoe.Int8Cache())
    weights, tokens = tiny_weights(fields), random_tokens(2, 9, 48)
    exact, rough = build(fields, weights, nnxmoe.Strategy()), build(fields, weights, strategy)
    found = [np.asarray(decoded(model, tokens)) for model in (exact, rough)]
    error = np.abs(found[0] - found[1]).max() / np.abs(found[0]).max()
    assert 1e-5 < error < 0.05
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(m.empty_cache(2, 64).layers)) for m in (exact, rough)]
    width = 40 if kind == "deepseek_v3" else 16
    assert sizes[1] * 4 * width == sizes[0] * (width + 4)
    scanned = build(fields, weights, dataclasses.replace(strategy, stacking=nnxmoe.Scanned()))
    np.testing.assert_allclose(decoded(scanned, tokens), found[1], atol=1e-4)
    if kind == "mistral":
        assert nnxmoe.generate(rough, tokens, max_new_tokens=3).shape == (2, 12)


def decoded(model: nnxmoe.CausalLM, tokens: np.ndarray) -> Any:
    """The logits of the last token after a prefill and three steps."""
    out = model(tokens[:, :-3], cache=model.empty_cache(2, 12))
    for i in range(3):
        out = model(tokens[:, i - 3 : tokens.shape[1] + i - 2], cache=out.cache)
    return out.logits


# Adapters


def adapted(kind: str, method: Any = METHODS["int4"]) -> nnxmoe.CausalLM:
    model = nnxmoe.quantize(floats(kind, SCANNED), method)
    lora.add(model, 4, rngs=nnx.Rngs(1))
    return model


@pytest.mark.slow
def test_qlora_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Only adapters change; gradients are those on the dequantised model."""
    kw: dict[str, Any] = {"optimizer": optax.adam(1e-2), "steps": 4}
    data = [{"tokens": random_tokens(4, 9, seed=i)} for i in range(4)]
    model = adapted("mixtral")
    straight = fit(model, data, **kw)
    fit(model, data, **kw, checkpoint=tmp_path / "c", callbacks=[lambda told: told.step == 2])
    again = fit(adapted("mixtral"), data, **kw, checkpoint=tmp_path / "c")
    assert [metrics["step"] for metrics in again.history] == [3, 4]
    identical(arrays(again.model), arrays(straight.model))
    assert all("lora" in name for name in straight.state.params)
    before, after = arrays(model), arrays(straight.model)
    assert {name for name in before if not np.array_equal(before[name], after[name])} <= {
        n for n in before if "lora" in n
    }
    plain = nnxmoe.dequantize(model)
    other = fit(plain, data, **kw)
    for ours, theirs in zip(straight.history, other.history, strict=True):
        np.testing.assert_allclose(ours["cross_entropy"], theirs["cross_entropy"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", pytest.param("deepseek_v3", marks=SLOW)])
def test_merging_into_codes(tmp_path: Path, kind: str) -> None:
    """A float model with the same logits; unmerging restores every bit; requantised by name."""
    model, tokens = adapted(kind), random_tokens(2, 7, 48)
    for path, variable in variables(model):
        if path.endswith(".b"):
            variable.set_value(jnp.full(variable.shape, 0.02, variable.dtype))
    before, wanted = arrays(model), np.asarray(model(tokens).logits)
    lora.save(model, tmp_path / "adapter")
    lora.merge(model)
    assert not quantized_kernels(model) and max_error(model(tokens).logits, wanted) < MODEL_TOLERANCE
    nnxmoe.save_pretrained(model, tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    lora.unmerge(model)
    identical(arrays(model), before)
    with pytest.raises(ValueError, match="pass keep=False"):
        lora.merge(model, quantize=nnxmoe.Int8())
    lora.merge(model, keep=False, quantize=nnxmoe.Int8())
    assert {place.key for place in quantizable_kernels(model)} - {place.key for place in quantized_kernels(model)} == {
        "head.kernel"
    }
    assert max_error(model(tokens).logits, wanted) / np.abs(wanted).max() < 0.05
    base = nnxmoe.quantize(floats(kind, SCANNED), METHODS["int4"])
    lora.load(base, tmp_path / "adapter")
    assert max_error(base(tokens).logits, wanted) < MODEL_TOLERANCE


def test_codes_cannot_be_trained_and_other_layouts_refuse_them() -> None:
    from nnxmoe.convert.maxtext import layout

    model = nnxmoe.quantize(floats("mixtral", SCANNED), nnxmoe.Int8())
    with pytest.raises(ValueError, match=r"kernels are quantized and cannot be trained: add adapters"):
        fit(model, [{"tokens": random_tokens(2, 5)}], optimizer=optax.adam(1e-3), steps=1)
    with pytest.raises(ValueError, match=r"quantized kernels .* nnxmoe\.dequantize"):
        layout.maxtext_arrays(model, True)


# The command line and the demo


@pytest.mark.slow
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    from nnxmoe.apps.cli import main

    assert main(["generate", "demo", "Once upon a time", "--max-new-tokens", "4", "--quantize", "int8"]) == 0
    assert capsys.readouterr().out.strip()
    assert "quantized   root mean square error" in caplog.text and "int8" in caplog.text
    assert main(["convert", "demo", str(tmp_path / "int4"), "--to", "hf", "--quantize", "int4:16", "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "int4"), "--keep-quantized"]) == 0
    assert "int4" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "int4"), "Once", "--max-new-tokens", "2", "--keep-quantized"]) == 0
    assert main(["generate", "demo", "Once", "--quantize", "int8", "--keep-quantized"]) == 1
    assert "keep-quantized cannot be combined with --quantize" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "demo", "Once", "--quantize", "int5"])
    assert "'int5' is not one of int8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "weights", "fits"),
    [
        ("int4", (24e9, 27e9), "24 GiB no, 48 GiB yes, H100 yes, H200 yes"),
        ("int8", (46e9, 49e9), "24 GiB no, 48 GiB yes, H100 yes, H200 yes"),
    ],
)
def test_inspect_of_mixtral(capsys: pytest.CaptureFixture[str], method: str, weights: Any, fits: str) -> None:
    from nnxmoe.apps.cli import main
    from nnxmoe.apps.cli.summary import summarize

    found = summarize("mixtral-8x7b", "bfloat16", quantize=parse_method(method))
    assert weights[0] < found.weight_bytes < weights[1] and set(found.weights) == {method, "bfloat16"}
    main(["inspect", "mixtral-8x7b", "--quantize", method, "--context", "4096", "--dtype", "bfloat16"])
    out = capsys.readouterr().out
    assert fits in out
    low, high = map(int, re.search(r"on h100 (\d+) to (\d+)", out).groups())  # pyright: ignore[reportOptionalMemberAccess]
    step = found.active_bytes / 3.35e12  # the cache adds little
    assert 0.2 < low * step < 0.4 < high * step < 0.9


LIMITS = {"int8": 1e-3, "fp8": 3e-2, "int4:16": 0.2, "experts=int4:16,others=int8": 0.05}


@pytest.mark.slow
def test_the_demo_keeps_its_predictions() -> None:
    """Mean KL divergence of next-token distributions to the float model, in nats."""
    from nnxmoe.convert.files.hub import DEMO

    text = "Once upon a time there was a little fox who lived in the forest. What is the capital of Italy?"
    ids = np.array([nnxmoe.Tokenizer.from_pretrained(DEMO).encode(text)])
    model = nnxmoe.from_pretrained(DEMO, strategy=SCANNED)
    exact = jax.nn.log_softmax(model(ids).logits)
    for method, limit in LIMITS.items():
        rough = jax.nn.log_softmax(nnxmoe.quantize(model, parse_method(method))(ids).logits)
        divergence = float(jnp.mean(jnp.sum(jnp.exp(exact) * (exact - rough), axis=-1)))
        assert 0 < divergence < limit, (method, divergence)


@pytest.mark.slow
def test_the_demo_passes_its_exam_in_int8() -> None:
    from nnxmoe.convert.files.hub import DEMO
    from tests.demo import exam

    tokenizer = nnxmoe.Tokenizer.from_pretrained(DEMO)
    strategy = nnxmoe.Strategy(compute_dtype="float32")
    asked = exam.sample(20)
    for method in ("int8", "int4:16"):
        results = exam.sit(
            nnxmoe.from_pretrained(DEMO, strategy=strategy, quantize=parse_method(method)), tokenizer, asked
        )
        shares = {subject: np.mean([right for *_, right in found]) for subject, found in results.items()}
        print(method, {subject: round(float(share), 2) for subject, share in shares.items()})
        if method == "int8":
            assert all(shares[subject] >= exam.PASS[subject] for subject in shares), shares


@pytest.mark.slow
def test_mixtral_8x7b_in_int4_fits_40_gb() -> None:
    """Its decode step and a prefill of 4096 tokens, compiled for one device from shapes alone."""
    from nnxmoe.model.quantization.rounding import quantize_structure
    from nnxmoe.models import PRESETS, Mixtral

    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned())
    model = Mixtral(PRESETS["mixtral-8x7b"], strategy, rngs=None, dtype="bfloat16")
    quantize_structure(model, nnxmoe.Int4(), "bfloat16")
    graph, state = nnx.split(model)
    cache = jax.eval_shape(lambda: model.empty_cache(1, 4096 + 64))

    def run(state: Any, tokens: Any, cache: Any, fresh: bool) -> Any:
        made = nnx.merge(graph, state)
        body = made.body(
            tokens, cache=cache, fresh=fresh, request=dataclasses.replace(LOGITS_ONLY, last_token_only=True)
        )
        return made.logits(body.x), body.cache

    for length, fresh in ((1, False), (4096, True)):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(run, static_argnums=3, donate_argnums=2).lower(state, tokens, cache, fresh)
        found = lowered.compile().memory_analysis()
        needed = found.argument_size_in_bytes + found.temp_size_in_bytes
        print(f"{length} tokens: {found.argument_size_in_bytes / 1e9:.2f} GB + {found.temp_size_in_bytes / 1e9:.2f} GB")
        assert 24e9 < found.argument_size_in_bytes < 27e9 and needed < 40e9


def test_dequantizing_compiles_once_per_form_of_kernel() -> None:
    """Not once per kernel, nor again for an equal model."""
    fields = FIELDS["llama"] | {"intermediate_size": 44}  # sizes for which no other test has compiled programs
    model = nnxmoe.quantize(build(fields, tiny_weights(fields), PLAIN), METHODS["int8"])
    forms = {(w.lead, w.ins, w.outs) for w in (place.weight for place in quantized_kernels(model))}
    assert 0 < compiled_in(lambda: nnxmoe.dequantize(model)) <= len(forms) < len(quantized_kernels(model))
    assert compiled_in(lambda: nnxmoe.dequantize(model)) == 0
