"""LoRA adapters: forward pass, training, merging, files, and parity across strategies and meshes."""

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import nnxmoe
from nnxmoe import Capacity, Chunked, Dense, ExpertParallel, RaggedAllToAll, RingOfExperts, Sorted, Strategy
from nnxmoe.convert import maxtext
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.files.safetensors import dtype_code
from nnxmoe.convert.peft.adapter_slots import adapted_slots, adapter_slots
from nnxmoe.convert.storage.write_safetensors import write_sharded
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.linear.matmul import matmul
from nnxmoe.model.program import strip_metadata
from nnxmoe.models import Mixtral, config_from_hf
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.grouped_matmul import batched_matmul
from nnxmoe.train import lora
from nnxmoe.train.loop.fit import fit
from nnxmoe.train.lora.merge import merger
from tests.support.adapters import fill
from tests.support.arrays import max_error
from tests.support.fp8 import FP8, quantise
from tests.support.tiny import TINY, build, build_tiny, random_tokens, stacking_of, tiny_weights

KINDS = ("llama", "mixtral", "deepseek_v3")
EVERYTHING = {
    "llama": ["attention", "mlp"],
    "mixtral": ["attention", "experts", "router"],
    "deepseek_v3": ["attention", "mlp", "shared", "experts", "router"],
    "gpt_oss": ["attention", "experts", "router"],
}
SOME = [("llama", False), ("mixtral", True), ("deepseek_v3", True)]  # both kinds of stacks, for tests that compile
TOKENS = random_tokens(2, 7)
WAYS: dict[str, Any] = {
    "dense": Dense(),
    "sorted": Sorted(),
    "capacity": Capacity(16.0),
    "ragged": ExpertParallel(Sorted(), RaggedAllToAll()),
    "ring": ExpertParallel(Sorted(), RingOfExperts()),
}


def with_adapters(kind: str, strategy: Strategy | None = None, **changes: Any) -> Any:
    """Tiny two-layer model with adapters on every projection and the router."""
    model = build_tiny(kind, strategy or Strategy(), num_hidden_layers=2, **changes)
    lora.add(model, 4, alpha=6, targets=EVERYTHING[kind], rngs=nnx.Rngs(0))
    return fill(model)


@functools.cache
def _ready(kind: str, scan: bool) -> Any:
    return with_adapters(kind, Strategy(stacking=stacking_of(scan)))


def ready(kind: str, scan: bool = False) -> Any:
    """Copy of a cached model with adapters; the caller may modify it."""
    return nnx.clone(_ready(kind, scan))


def logits(model: Any, tokens: Any = TOKENS) -> np.ndarray:
    return np.asarray(model(tokens).logits)


def kernels(model: Any) -> list[np.ndarray]:
    return [np.asarray(kernel.get_value()) for slot in adapter_slots(model) for kernel in slot.base]


def values(model: Any) -> list[np.ndarray]:
    return [np.asarray(v.get_value()) for slot in adapted_slots(model) for v in (slot.adapter.a, slot.adapter.b)]


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


# Forward pass


@pytest.mark.parametrize(("kind", "scan"), SOME)
def test_fresh_adapters_do_not_change_the_logits(kind: str, scan: bool) -> None:
    """Removing them restores the graphdef, so the compiled program is reused."""
    model = ready(kind, scan)
    lora.remove(model)
    plain = build_tiny(kind, Strategy(stacking=stacking_of(scan)), num_hidden_layers=2)
    assert nnx.graphdef(strip_metadata(model)) == nnx.graphdef(strip_metadata(plain))
    lora.add(model, 4, alpha=6, targets=EVERYTHING[kind], rngs=nnx.Rngs(7))
    assert (logits(model) == logits(plain)).all()


@pytest.mark.program
def test_program_without_adapters_has_no_extra_operations() -> None:
    """The lowered program equals the one of the formula without adapters."""
    linear = Linear((4,), (3, 2), ("embed", "heads", "head"), bias=True, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    experts = Experts(4, 6, 2, matmul=nnxmoe.MaskedMatmul(), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    kernel, bias = linear.kernel[...], linear.bias[...]

    def projection(x: Any) -> Any:
        y = matmul(x, kernel.reshape(6, 4), True)
        return (y + jnp.broadcast_to(bias, y.shape)).reshape(5, 3, 2)

    def feed_forward(x: Any) -> Any:
        gate, up = (batched_matmul(x, DenseKernel(kernel[...])) for kernel in (experts.gate, experts.up))
        return batched_matmul(jax.nn.silu(gate) * up, DenseKernel(experts.down[...]))

    def program(run: Any, shape: tuple[int, ...]) -> str:
        return jax.jit(lambda x: run(x)).lower(jnp.ones(shape)).as_text()

    assert program(linear, (5, 4)) == program(projection, (5, 4))
    assert program(lambda x: experts(x, None), (2, 5, 4)) == program(feed_forward, (2, 5, 4))
    assert (linear.weight().dense() == kernel.reshape(6, 4).T).all()


@pytest.mark.parametrize("kind", KINDS)
def test_default_targets_exclude_the_router(kind: str) -> None:
    """Adapters are float32 for a bfloat16 base. Without ``rngs`` they have shapes only."""
    model = build(TINY[kind], tiny_weights(TINY[kind]), Strategy(), dtype="bfloat16")
    lora.add(model, 3, rngs=None)
    assert {slot.name for slot in adapted_slots(model)} == {slot.name for slot in adapter_slots(model)} - {
        "router",
        "embed",
        "head",
    }
    for slot in adapted_slots(model):
        assert slot.adapter.a.dtype == slot.adapter.b.dtype == jnp.float32 and slot.adapter.scale == 1
        assert slot.adapter.b.shape[-1] == slot.adapter.rank == 3


def test_initial_values_follow_peft() -> None:
    """``a`` is uniform up to 1 / sqrt(ins), distinct per projection, layer, expert and seed; ``b`` is 0."""
    model, drawn = build_tiny("mixtral", Strategy(stacking=nnxmoe.Scanned())), []
    for seed in range(2):
        lora.add(model, 16, rngs=nnx.Rngs(seed), dtype=None)
        for slot in adapted_slots(model):
            a, bound = np.asarray(slot.adapter.a.get_value()), 28**-0.5 if slot.name == "experts.down" else 24**-0.5
            bound = 32**-0.5 if slot.name == "attention.o" else bound
            assert a.dtype == np.float32 and not np.asarray(slot.adapter.b.get_value()).any()
            assert 0.98 * bound < np.abs(a).max() <= bound and abs(a.std() * 3**0.5 / bound - 1) < 0.05
            assert abs(a.mean()) < 0.1 * bound
            drawn += [one.ravel()[:16].tolist() for one in a.reshape(-1, *a.shape[-2:])]
        lora.remove(model)
    assert len({tuple(one) for one in drawn}) == len(drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_equal_kernels_plus_scaled_a_b(kind: str) -> None:
    """The reference adds ``alpha / rank * b @ a`` to the kernels in float64, separately for gate and up."""
    model, plain = ready(kind), build_tiny(kind, Strategy(), num_hidden_layers=2)
    for slot, other in zip(adapted_slots(model), adapter_slots(plain), strict=False):  # embedding and head are last
        a, b = (np.asarray(v.get_value(), np.float64) for v in (slot.adapter.a, slot.adapter.b))
        if slot.name == "experts.gate_up":
            deltas = [np.einsum("erd,efr->efd", a, b[:, i]) for i in range(2)]
        else:
            deltas = [np.einsum("erf,edr->edf", a, b) if slot.name == "experts.down" else np.tensordot(b, a, 1)]
        for kernel, delta in zip(other.base, deltas, strict=True):
            kernel.set_value(jnp.asarray(np.asarray(kernel.get_value(), np.float64) + 1.5 * delta, jnp.float32))
    assert [slot.kernels for slot in adapter_slots(model) if len(slot.base) > 1][:1] in ([], [("gate", "up")])
    assert max_error(logits(model), logits(plain)) < 1e-5


@pytest.mark.slow
def test_only_adapters_have_gradients() -> None:
    """Every adapter array gets a non-zero gradient."""
    graph, adapters, rest = nnx.split(ready("mixtral"), nnx.LoRAParam, ...)

    def loss(adapters: Any) -> Any:
        return jnp.mean(jnp.sin(nnx.merge(graph, adapters, rest)(TOKENS).logits))

    grads = nnx.to_flat_state(jax.jit(jax.grad(loss))(adapters))
    assert len(grads) == 2 * len(adapted_slots(ready("mixtral")))
    for path, grad in grads:
        assert path[-1] in "ab" and isinstance(grad, nnx.LoRAParam)
        assert float(jnp.abs(grad.get_value()).max()) > 0, path
    assert not any(isinstance(v, nnx.LoRAParam) for _, v in nnx.to_flat_state(rest))


@pytest.mark.parametrize(("way", "scan"), [("dense", False), ("sorted", False), ("capacity", True)])
def test_expert_adapter_affects_only_tokens_routed_to_it(way: str, scan: bool) -> None:
    """Checked for every expert of a one-layer model."""
    model = build_tiny("mixtral", Strategy(dispatch=WAYS[way], stacking=stacking_of(scan)), num_hidden_layers=1)
    lora.add(model, 2, targets="experts", rngs=nnx.Rngs(0))
    out = model(TOKENS, return_routing=True)
    for slot in adapted_slots(model):
        fresh = slot.adapter.b.get_value()
        for expert in range(6):
            mine = (np.asarray(out.routing[0].experts) == expert).any(axis=-1)
            assert mine.any() and not mine.all()
            slot.adapter.b.set_value(fresh.at[(0, expert) if scan else expert].set(0.3))
            moved = np.abs(np.asarray(model(TOKENS, return_routing=True).logits - out.logits)).max(axis=-1) > 1e-6
            assert (moved == mine).all(), (slot.name, expert)
        slot.adapter.b.set_value(fresh)


STRATEGIES: dict[str, dict[str, Any]] = {
    "dense": {"dispatch": Dense()},
    "capacity": {"dispatch": Capacity(16.0)},
    "chunked": {"dispatch": Chunked(Sorted(), 3)},
    "masked": {"matmul": nnxmoe.MaskedMatmul()},
    "ragged dot": {"matmul": nnxmoe.RaggedDotMatmul()},
    "aligned": {"matmul": nnxmoe.AlignedMatmul(nnxmoe.BlockedMatmul(), 8)},
}


@functools.cache
def one_layer(kind: str, **choices: Any) -> np.ndarray:
    """Logits of a one-layer model with adapters under a strategy."""
    model = build_tiny(kind, Strategy(**choices), num_hidden_layers=1)
    lora.add(model, 4, alpha=6, rngs=nnx.Rngs(0))
    return logits(fill(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[] if name in ("capacity", "chunked", "ragged dot") else pytest.mark.slow)
        for name in STRATEGIES
    ],
)
def test_expert_strategies_agree(strategy: str) -> None:
    """Expert parallelism is tested below, on meshes."""
    assert max_error(one_layer("mixtral", **STRATEGIES[strategy]), one_layer("mixtral")) < 1e-5


def test_naive_and_absorbed_latent_attention_agree() -> None:
    naive, absorbed = (one_layer("deepseek_v3", mla=latent) for latent in (nnxmoe.NaiveMLA(), nnxmoe.AbsorbedMLA()))
    assert max_error(naive, absorbed) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_scanned_equals_unrolled(kind: str) -> None:
    """Initial values are bitwise equal too."""
    ours, theirs = ready(kind), ready(kind, True)
    stacked = {
        (s.name, s.first + i): s.adapter.a.get_value()[i] for s in adapted_slots(theirs) for i in range(s.depth or 0)
    }
    for slot in adapted_slots(ours):
        assert (np.asarray(stacked.pop((slot.name, slot.first))) == np.asarray(slot.adapter.a.get_value())).all()
    assert not stacked
    assert max_error(logits(ours), logits(theirs)) < 1e-5


@pytest.mark.slow
def test_generation_equals_that_of_the_merged_model() -> None:
    model = build_tiny("deepseek_v3", Strategy(), num_hidden_layers=1)
    lora.add(model, 4, alpha=6, targets="attention", rngs=nnx.Rngs(0))
    ids = np.asarray(nnxmoe.generate(fill(model), TOKENS, max_new_tokens=3, eos_token_id=None))
    lora.merge(model, keep=False)
    assert (np.asarray(nnxmoe.generate(model, TOKENS, max_new_tokens=3, eos_token_id=None)) == ids).all()


# Merging


@pytest.mark.parametrize(("kind", "scan"), SOME)
def test_merge_keeps_logits_and_unmerge_restores_bits(kind: str, scan: bool) -> None:
    model = ready(kind, scan)
    before, bits = logits(model), kernels(model) + values(model)
    lora.merge(model)
    assert max_error(logits(model), before) < 1e-5
    assert not adapted_slots(model) and not same(kernels(model), bits[: len(kernels(model))])
    kept = [v for path, v in nnx.to_flat_state(nnx.state(model)) if path[0] == "merged"]
    assert kept and not any(isinstance(v, nnx.Param) for v in kept)  # so an optimizer does not update them
    lora.unmerge(model)
    assert same(kernels(model) + values(model), bits) and (logits(model) == before).all()
    lora.merge(model, keep=False)
    assert max_error(logits(model), before) < 1e-5 and model.merged is None
    plain = build_tiny(kind, Strategy(stacking=stacking_of(scan)), num_hidden_layers=2)
    assert nnx.graphdef(strip_metadata(model)) == nnx.graphdef(strip_metadata(plain))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_unmerge_restores_bfloat16_bits(scan: bool) -> None:
    """Merging adds in float32 and rounds once."""
    model = build(
        TINY["mixtral"], tiny_weights(TINY["mixtral"]), Strategy(stacking=stacking_of(scan)), dtype="bfloat16"
    )
    lora.add(model, 4, rngs=nnx.Rngs(0))
    fill(model)
    bits, deltas = kernels(model) + values(model), {slot.place: slot.adapter.delta() for slot in adapted_slots(model)}
    lora.merge(model)
    for slot in (slot for slot in adapter_slots(model) if slot.name in ("attention.k", "experts.down")):
        base = model.merged[slot.place].base[0].get_value().astype(jnp.float32)
        wanted = (base + jnp.swapaxes(deltas[slot.place], -1, -2).reshape(base.shape)).astype(jnp.bfloat16)
        assert same([np.asarray(wanted)], [np.asarray(slot.base[0].get_value())])
    lora.unmerge(model)
    assert same(kernels(model) + values(model), bits)


@pytest.mark.program
def test_merging_needs_memory_for_one_expert_at_a_time() -> None:
    """The float32 sum is never materialised for all experts at once."""
    experts, dim, width = 32, 64, 96
    kernels, a, b = (
        [jnp.zeros((experts, width, dim))] * 2,
        jnp.zeros((experts, 4, dim)),
        jnp.zeros((experts, 2, width, 4)),
    )
    compiled = merger(1, 2, 1.0, kernels[0].dtype, kernels[0].sharding).lower(kernels, a, b).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * dim * width)


WRITERS: dict[str, tuple[Any, Any]] = {
    "hf": (nnxmoe.save_pretrained, nnxmoe.from_pretrained),
    "native": (nnxmoe.save, nnxmoe.load),
    "maxtext": (maxtext.save, maxtext.load),
    "tree": (lambda model, _: maxtext.to_tree(model), None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "scan"), [("hf", True), ("native", True), ("maxtext", True), ("tree", False)])
def test_saving_the_model_requires_merging(tmp_path: Path, way: str, scan: bool) -> None:
    """No model format drops adapters silently; after merging, the saved weights include them."""
    save, load = WRITERS[way]
    model = ready("mixtral", scan)
    with pytest.raises(ValueError, match=r"the model has adapters .*lora\.merge\(model\)"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    lora.merge(model)
    save(model, tmp_path / "out")
    if load is not None:
        assert max_error(logits(load(tmp_path / "out", strategy=model.strategy)), logits(model)) < 1e-5


# Training


def quantised(folder: Path) -> Path:
    """A tiny DeepSeek-V3 whose projections are stored in FP8."""
    fields = TINY["deepseek_v3"] | {"num_hidden_layers": 2}
    stored: dict[str, np.ndarray] = {}
    for name, weight in tiny_weights(fields).items():
        if "_proj" in name and weight.ndim == 2:
            stored[name], stored[name + "_scale_inv"] = quantise(weight, (24, 40))
        else:
            stored[name] = weight if "bias" in name else weight.astype(jnp.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": FP8}))
    tensors = [(n, dtype_code(t.dtype), t.shape, lambda t=t: t) for n, t in stored.items()]
    write_sharded(folder, [(0, tensors)], 10**9, process=0)
    return folder


@pytest.mark.slow
def test_fit_trains_adapters_on_an_fp8_checkpoint(tmp_path: Path) -> None:
    """The bfloat16 base stays bitwise equal, and the optimizer has moments for adapters only."""
    folder, strategy = quantised(tmp_path / "base"), Strategy(stacking=nnxmoe.Scanned())
    model = nnxmoe.from_pretrained(folder, strategy=strategy)
    assert {kernel.dtype for kernel in kernels(model)} == {np.dtype(jnp.bfloat16)}
    lora.add(model, 4, alpha=6, rngs=nnx.Rngs(0))
    fresh, base = values(model), kernels(model)
    done = fit(model, [{"tokens": TOKENS}], optimizer=optax.adam(2e-2), steps=4)
    assert done.history[-1]["loss"] < done.history[0]["loss"]
    assert len(done.state.params) == len(fresh) and all("lora" in name for name in done.state.params)
    shapes = sorted(value.shape for value in fresh)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(done.state.moments) if leaf.ndim) == sorted(2 * shapes)
    trained = done.model
    assert same(kernels(trained), base) and all((a != b).any() for a, b in zip(values(trained), fresh, strict=True))
    lora.save(trained, tmp_path / "adapter")
    other = nnxmoe.from_pretrained(folder, strategy=strategy)
    lora.load(other, tmp_path / "adapter")
    assert same(values(other), values(trained)) and (logits(other) == logits(trained)).all()
    lora.merge(trained)
    nnxmoe.save_pretrained(trained, tmp_path / "merged")
    assert same(kernels(nnxmoe.from_pretrained(tmp_path / "merged", strategy=strategy)), kernels(trained))
    assert not same(kernels(trained), base)
    lora.unmerge(trained)
    assert same(kernels(trained), base) and same(values(trained), values(other))


# Files


@pytest.mark.parametrize(
    ("kind", "scan"), [*((kind, scan) for kind in KINDS for scan in (False, True)), ("gpt_oss", False)]
)
def test_save_and_load_are_bitwise_equal(tmp_path: Path, kind: str, scan: bool) -> None:
    """Also between scanned and unrolled layers."""
    model = ready(kind, scan)
    lora.save(model, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for other in (ready(kind, scan), ready(kind, not scan)):
        lora.remove(other)
        lora.load(other, tmp_path / "adapter")
        assert same(values(other), values(ready(kind, other.strategy.stacking == nnxmoe.Scanned())))
        assert {slot.adapter.alpha for slot in adapted_slots(other)} == {6.0}


@pytest.mark.parametrize(("kind", "scan"), [("mixtral", False), ("mixtral", True), ("gpt_oss", False)])
def test_files_follow_the_peft_layout(tmp_path: Path, kind: str, scan: bool) -> None:
    """PEFT's einsum over the stored tensors equals our deltas in transformers' fused layout ``[E, outs, ins]``, where
    gpt-oss has gate and up in turn."""
    model = ready(kind, scan)
    lora.save(model, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    deltas = {slot.name: np.asarray(slot.adapter.delta()) for slot in adapted_slots(model) if slot.first == 0}
    deltas = {name: delta[0] if scan else delta for name, delta in deltas.items()}
    if kind == "gpt_oss":
        both = deltas["experts.gate_up"]
        deltas["experts.gate_up"] = np.stack(np.split(both, 2, axis=-1), axis=-1).reshape(both.shape)
    layer = "base_model.model.model.layers.0."
    for name, module in (("experts.gate_up", "mlp.experts.base_layer"), ("experts.down", "mlp.experts")):
        a, b = (stored[f"{layer}{module}.lora_{x}.weight"] for x in "AB")
        a, b = a.reshape(6, -1, a.shape[-1]), b.reshape(b.shape[0], -1, 6)
        assert max_error(np.einsum("ore,eri->eoi", b, a) * 1.5, deltas[name].swapaxes(1, 2)) < 1e-6
    for name, module in (
        ("attention.o", "self_attn.o_proj"),
        ("router", "mlp.router" if kind == "gpt_oss" else "mlp.gate"),
    ):
        a, b = (stored[f"{layer}{module}.lora_{x}.weight"] for x in "AB")
        assert max_error(b @ a * 1.5, deltas[name].T) < 1e-6


def test_adapter_config_names_targets_for_peft(tmp_path: Path) -> None:
    """In MoE models, modules that PEFT would mistake for others are listed in ``target_parameters``."""
    lora.save(ready("deepseek_v3"), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6)
    attention = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
    assert config["target_modules"] == [f"self_attn.{name}" for name in attention]
    assert {"mlp.experts.gate_up_proj", "mlp.gate_proj.weight", "mlp.gate.weight"} < set(config["target_parameters"])
    lora.save(ready("gpt_oss"), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    moe = {name for name in config["target_parameters"] if name.startswith("mlp")}  # not names of quantised files
    assert moe == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"}


def test_adapters_name_the_base_that_was_asked_for(tmp_path: Path) -> None:
    """The hub id and revision, not a folder of the cache."""
    model = ready("llama")
    model.load_report = LoadReport("org/model", files=str(tmp_path), revision="v1")
    lora.save(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "v1")
    assert lora.base_model_name(tmp_path / "adapter") == "org/model"


def edited(folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    """Save the adapter of `ready("mixtral")` with its config and tensors changed."""
    lora.save(ready("mixtral"), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
    "missing": (lambda c, t: t.pop(Q), f"missing: {Q}"),
    "unexpected": (lambda c, t: t.update(other=np.ones(2, np.float32)), "unexpected: other"),
    "rank": (lambda c, t: c.update(r=3), r"shape: .* has \[4, 24\], the model and rank 3 require \[3, 24\]"),
    "dtype": (lambda c, t: t.update({Q: np.ones((4, 24), np.int32)}), "dtype: .* is I32"),
    "kind": (lambda c, t: c.update(peft_type="IA3"), "peft_type 'IA3' is not 'LORA'"),
    "dora": (lambda c, t: c.update(use_dora=True), "use_dora True is not supported"),
    "bias": (lambda c, t: c.update(bias="all"), "bias 'all' is not supported"),
    "init": (lambda c, t: c.update(init_lora_weights="pissa"), "init_lora_weights 'pissa' changes the base model"),
    "rank 0": (lambda c, t: c.update(r=0), "the rank 0 of .*self_attn.* is not a positive integer"),
    "alpha": (lambda c, t: c.update(lora_alpha="6"), "lora_alpha '6' of .* is not a positive number"),
    "pattern": (
        lambda c, t: c.update(rank_pattern={"(a+)+$": 2}),
        r"rank_pattern .* is not supported: it repeats a group",
    ),
    "no pattern": (
        lambda c, t: c.update(target_modules="(q_proj"),
        r"target_modules '\(q_proj' is not a valid regular",
    ),
    "list": (lambda c, t: c.update(alpha_pattern=[1]), r"alpha_pattern \[1\] is not an object"),
    "number": (lambda c, t: c.update(target_parameters=7), "target_parameters 7 is not a list of names"),
    "text": (lambda c, t: c.update(use_rslora="no"), "use_rslora 'no' is not true or false"),
    "layers": (lambda c, t: c.update(layers_to_transform=["1"]), r"layers_to_transform \['1'\] is not an integer"),
    "not a target": (lambda c, t: c.update(layers_to_transform=0), f"unexpected: {Q}"),
    "prompt": (lambda c, t: c.update(peft_type="PROMPT_TUNING"), "'PROMPT_TUNING' is not 'LORA'.*cannot merge it"),
    "invocation": (
        lambda c, t: c.update(use_dora=True, alora_invocation_tokens=[1]),
        r"alora_invocation_tokens \[1\] is not supported; peft cannot merge it",
    ),
    "added bias": (lambda c, t: c.update(lora_bias=True), "lora_bias True is not supported; peft cannot merge it"),
    "tokens": (lambda c, t: c.update(trainable_token_indices=[1]), "trainable_token_indices .*merge_and_unload"),
    "whole modules": (lambda c, t: c.update(modules_to_save=["lm_head"]), "modules_to_save .*merge_and_unload"),
    "mlx-lm": (lambda c, t: c.update(fine_tune_type="lora"), "mlx-lm's format"),
    "another embedding": (
        lambda c, t: t.update({"base_model.model.model.embed_tokens.weight": np.ones((53, 24), np.float32)}),
        r"embed_tokens.weight in .* differs from the model's tensor",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_invalid_adapters_are_refused(tmp_path: Path, what: str) -> None:
    """The model is left without adapters."""
    change, message = BROKEN[what]
    folder, model = edited(tmp_path / "adapter", change), ready("mixtral")
    lora.remove(model)
    with pytest.raises(nnxmoe.CheckpointError, match=message):
        lora.load(model, folder)
    assert not adapted_slots(model)


def test_whole_models_are_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(nnxmoe.CheckpointError, match="contains a whole model and no adapter: load it as the model"):
        lora.load(build_tiny("llama"), tmp_path)


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "no config": ("adapter_config.json", lambda data: None),
    "empty config": ("adapter_config.json", lambda data: b""),
    "half a config": ("adapter_config.json", lambda data: data[: len(data) // 2]),
    "list": ("adapter_config.json", lambda data: b"[]"),
    "no tensors": ("adapter_model.safetensors", lambda data: None),
    "empty tensors": ("adapter_model.safetensors", lambda data: b""),
    "half a header": ("adapter_model.safetensors", lambda data: data[:100]),
    "cut tensors": ("adapter_model.safetensors", lambda data: data[:-1]),
    "long header": ("adapter_model.safetensors", lambda data: b"\xff" * 8 + data[8:]),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_files_are_named_in_the_error(tmp_path: Path, what: str) -> None:
    model, (name, damage) = ready("llama"), DAMAGES[what]
    lora.save(model, tmp_path / "adapter")
    lora.remove(model)
    file = tmp_path / "adapter" / name
    data = damage(file.read_bytes())
    file.unlink() if data is None else file.write_bytes(data)
    with pytest.raises(nnxmoe.CheckpointError, match=re.escape(str(file))):
        lora.load(model, tmp_path / "adapter")
    assert not adapted_slots(model)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_adapters_of_some_layers(tmp_path: Path, scan: bool) -> None:
    """One layer without, one of lower rank and another alpha; stacks hold zeros, and files only what there is."""
    model = ready("llama")
    query, value = (next(s for s in adapter_slots(model) if (s.name, s.first) == (f"attention.{n}", 1)) for n in "qv")
    query.put(None)
    small = value.shapes(2, 6.0, np.dtype(np.float32))
    for which in "ab":
        old = getattr(value.adapter, which).get_value()
        getattr(small, which).set_value(old[:2] if which == "a" else old[..., :2])
    value.put(small)
    lora.save(model, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any("layers.1.self_attn.q_proj" in name for name in stored)
    other = build_tiny("llama", Strategy(stacking=stacking_of(scan)), num_hidden_layers=2)
    lora.load(other, tmp_path / "adapter")
    assert max_error(logits(other), logits(model)) < 1e-5
    moved = fit(other, [{"tokens": TOKENS}], optimizer=optax.adam(1e-2), steps=1).model if scan else other
    lora.save(moved, tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert {n: t.shape for n, t in again.items()} == {n: t.shape for n, t in stored.items()}
    if scan:
        again_unrolled = nnxmoe.unscan(moved)
        lora.save(again_unrolled, tmp_path / "unrolled")
        assert load_file(tmp_path / "unrolled" / "adapter_model.safetensors").keys() == stored.keys()
    before = logits(moved)
    lora.merge(moved)
    assert max_error(logits(moved), before) < 1e-5
    lora.unmerge(moved)
    assert (logits(moved) == before).all()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_embedding_and_head(tmp_path: Path, tied: bool) -> None:
    """They are trained, saved and, unless the two share a table, merged."""
    model = build_tiny("llama", Strategy(), tie_word_embeddings=tied)
    plain = logits(model)
    lora.add(model, 4, targets=["embed", "head"], rngs=nnx.Rngs(0))
    assert (logits(model) == plain).all()
    step = functools.partial(fit, data=[{"tokens": TOKENS}], optimizer=optax.adam(1e-2))
    chunked, whole = (
        step(model, steps=2, objective=nnxmoe.train.Objective(head=head)).model
        for head in (nnxmoe.train.ChunkedLoss(), nnxmoe.train.Whole())
    )
    assert max_error(logits(chunked), logits(whole)) < 1e-5 < max_error(logits(chunked), plain)
    lora.save(chunked, tmp_path / "adapter")
    other = build_tiny("llama", Strategy(), tie_word_embeddings=tied)
    lora.load(other, tmp_path / "adapter")
    assert same(values(other), values(chunked)) and (logits(other) == logits(chunked)).all()
    if tied:
        with pytest.raises(ValueError, match="share one table"):
            lora.merge(other)
    else:
        lora.merge(other)
        assert max_error(logits(other), logits(chunked)) < 1e-5
    for target in ("embed", "head"):
        one, other = (build_tiny("llama", Strategy(), tie_word_embeddings=tied) for _ in range(2))
        lora.add(one, 2, targets=target, rngs=nnx.Rngs(0))
        lora.save(fill(one), tmp_path / target)
        lora.load(other, tmp_path / target)
        assert max_error(logits(other), plain) > 1e-3 and (logits(other) == logits(one)).all()


def test_error_lists_every_mismatch(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["what"] = tensors.pop(Q)
        tensors[Q.replace("lora_A", "lora_B")] = np.ones((3, 4), np.float32)

    model = ready("mixtral")
    lora.remove(model)
    with pytest.raises(nnxmoe.CheckpointError) as caught:
        lora.load(model, edited(tmp_path / "adapter", change))
    assert len(re.findall("\n  (missing|shape|unexpected): ", str(caught.value))) == 3


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    lora.save(ready("mixtral"), tmp_path / "mixtral")
    for other in (build_tiny("llama", Strategy()), build_tiny("mixtral", Strategy(), num_local_experts=4)):
        with pytest.raises(nnxmoe.CheckpointError, match="does not fit this model"):
            lora.load(other, tmp_path / "mixtral")


def test_alpha_pattern_and_rslora(tmp_path: Path) -> None:
    """Scales follow PEFT: the first matching pattern, divided by sqrt(rank) with rsLoRA."""

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        config |= {"use_rslora": True, "alpha_pattern": {r".*\.q_proj": 3, "q_proj": 4, "experts.down_proj": 5}}

    model = ready("mixtral")
    lora.remove(model)
    lora.load(model, edited(tmp_path / "adapter", change))
    scales = {slot.name: slot.adapter.scale for slot in adapted_slots(model)}
    assert scales["attention.q"] == 3 / 2 and scales["experts.down"] == 5 / 2 and scales["attention.k"] == 6 / 2
    lora.save(model, tmp_path / "again")
    other = ready("mixtral")
    lora.remove(other)
    lora.load(other, tmp_path / "again")
    assert {slot.name: slot.adapter.scale for slot in adapted_slots(other)} == scales


def test_save_refuses_a_non_empty_folder(tmp_path: Path) -> None:
    lora.save(ready("llama"), tmp_path / "adapter")
    with pytest.raises(nnxmoe.CheckpointError, match="is not an empty folder"):
        lora.save(ready("llama"), tmp_path / "adapter")


def test_overwriting_an_adapter_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    lora.save(ready("llama"), folder)
    (folder / "notes.txt").write_text("kept")
    before = (folder / "adapter_model.safetensors").read_bytes()
    model = ready("llama")
    for slot in adapted_slots(model):
        slot.adapter.b.set_value(2 * slot.adapter.b.get_value())
    lora.save(model, folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "kept"
    assert (folder / "adapter_model.safetensors").read_bytes() != before


def test_adapters_of_queries_with_a_folded_scale(tmp_path: Path) -> None:
    """A model in MaxText's form, whose queries include 1 / sqrt(head_dim), reads and writes the same adapter."""
    model = build_tiny("llama", Strategy(), num_hidden_layers=2)
    divided = maxtext.from_tree(maxtext.to_tree(model), model.config, Strategy())
    lora.add(divided, 4, targets="attention.q", rngs=nnx.Rngs(0))
    fill(divided)
    lora.save(divided, tmp_path / "adapter")
    lora.load(model, tmp_path / "adapter")
    assert max_error(logits(model), logits(divided)) < 1e-5
    again = maxtext.from_tree(
        maxtext.to_tree(build_tiny("llama", Strategy(), num_hidden_layers=2)), model.config, Strategy()
    )
    lora.load(again, tmp_path / "adapter")
    assert max_error(values(again)[1], values(divided)[1]) < 1e-6


# Ranks and alphas by target

BY_TARGET: dict[str, Any] = {"attention": 3, "attention.o": 5, "experts": 2, "experts.down": 4}
OTHERS = ("mlp", "shared", "experts")


def test_ranks_and_alphas_by_target() -> None:
    """The longest name decides; alpha is by default the rank of each adapter."""
    model = build_tiny("mixtral", Strategy())
    lora.add(model, BY_TARGET, {"attention": 6, "experts": 1.5}, rngs=None)
    ranks = {"attention.q": 3, "attention.k": 3, "attention.v": 3, "attention.o": 5}
    ranks |= {"experts.gate_up": 2, "experts.down": 4}
    assert {slot.name: slot.adapter.rank for slot in adapted_slots(model)} == ranks
    assert {slot.adapter.alpha for slot in adapted_slots(model)} == {6.0, 1.5}
    lora.remove(model)
    lora.add(model, BY_TARGET, rngs=None, targets=list(BY_TARGET))
    assert all(slot.adapter.alpha == ranks[slot.name] for slot in adapted_slots(model))


def test_split_ranks_keep_the_total_of_the_active_ranks() -> None:
    """Experts, of which 3 compute a token, get a third; the shared expert, which computes every token, does not."""
    ranks = lora.split_ranks(build_tiny("deepseek_v3", Strategy()), 6)
    assert {name for name, rank in ranks.items() if rank == 2} == {"experts.gate_up", "experts.down"}
    assert {rank for name, rank in ranks.items() if not name.startswith("experts.")} == {6}
    assert {"attention.o", "mlp.up", "shared.down"} < set(ranks) and "router" not in ranks


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_adapters_of_different_ranks_are_saved_merged_and_unmerged(tmp_path: Path, scan: bool) -> None:
    """Bitwise, with the patterns that peft reads."""
    model = build_tiny("deepseek_v3", Strategy(stacking=stacking_of(scan)), num_hidden_layers=2)
    lora.add(model, lora.split_ranks(model, 6), alpha={"attention": 4.5} | dict.fromkeys(OTHERS, 9), rngs=nnx.Rngs(0))
    fill(model)
    before, bits = logits(model), kernels(model) + values(model)
    lora.save(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (
        6,
        {r"mlp\.experts\.gate_up_proj": 2, r"mlp\.experts\.down_proj": 2},
    )
    assert config["lora_alpha"] in (4.5, 9) and config["alpha_pattern"]
    lora.merge(model)
    assert max_error(logits(model), before) < 1e-5 and not same(kernels(model), bits[: len(kernels(model))])
    lora.unmerge(model)
    assert same(kernels(model) + values(model), bits)
    lora.remove(model)
    lora.load(model, tmp_path / "adapter")
    assert same(values(model), bits[len(kernels(model)) :]) and (logits(model) == before).all()


# Invalid calls

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rank 0": (lambda m: lora.add(m, 0, rngs=None), "rank must be a 32-bit integer >= 1, got 0"),
    "alpha": (lambda m: lora.add(m, 4, alpha=-1, rngs=None), "alpha -1 is not a positive number"),
    "a target's rank": (lambda m: lora.add(m, {"attention": 2, "mlp": -1}, rngs=None), "rank must be .*, got -1"),
    "a target's alpha": (lambda m: lora.add(m, 2, {"attention": 2}, rngs=None), "alpha has no value .* mlp.*: add one"),
    "no rank": (lambda m: lora.add(m, {"mlp": 2}, targets="attention", rngs=None), "rank has no value .* attention.k"),
    "an idle rank": (
        lambda m: lora.add(m, {"attention": 2, "mlp": 4}, targets="attention", rngs=None),
        "rank has a value for mlp, which no adapter uses",
    ),
    "a misspelt rank": (lambda m: lora.add(m, {"expert": 2}, rngs=None), "expert matches no projection .* attention"),
    "no experts": (lambda m: lora.split_ranks(m, 4), "a llama model has no experts"),
    "indivisible": (
        lambda m: lora.split_ranks(build_tiny("deepseek_v3"), 8),
        "rank 8 cannot be split over the 3 experts per token: .* such as 9",
    ),
    "target": (
        lambda m: lora.add(m, 4, targets=["atention"], rngs=None),
        "atention matches no projection .* attention",
    ),
    "another's": (
        lambda m: lora.add(m, 4, targets=["experts"], rngs=None),
        "experts matches no projection of a llama model",
    ),
    "half a name": (lambda m: lora.add(m, 4, targets="attention.qk", rngs=None), "attention.qk matches no projection"),
    "no targets": (lambda m: lora.add(m, 4, targets=[], rngs=None), "an empty list matches no projection"),
    "dtype": (lambda m: lora.add(m, 4, dtype="int8", rngs=None), "dtype int8 is not supported"),
    "merge": (lora.merge, "cannot merge: the model has no adapters"),
    "unmerge": (lora.unmerge, "cannot unmerge: no adapters were merged"),
    "remove": (lora.remove, "cannot remove: the model has no adapters"),
    "save": (lambda m: lora.save(m, "/nowhere/at/all"), "cannot save: the model has no adapters"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_calls_are_refused(what: str) -> None:
    act, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        act(build_tiny("llama", Strategy()))


def test_a_second_adapter_is_refused(tmp_path: Path) -> None:
    model = ready("llama")
    lora.save(model, tmp_path / "adapter")
    for second in (lambda: lora.add(model, 4, rngs=nnx.Rngs(0)), lambda: lora.load(model, tmp_path / "adapter")):
        with pytest.raises(ValueError, match="the model already has 14 adapters"):
            second()
    lora.merge(model)
    for act in (
        lambda: lora.add(model, 4, rngs=None),
        lambda: lora.save(model, tmp_path / "b"),
        lambda: lora.merge(model),
    ):
        with pytest.raises(ValueError, match=r"merged.*lora\.unmerge\(model\)"):
            act()


@pytest.mark.wrong_types
@pytest.mark.parametrize("rank", [True, 4.5, "4", None])
def test_non_integer_ranks(rank: Any) -> None:
    with pytest.raises(ValueError, match="rank must be a 32-bit integer >= 1"):
        lora.add(build_tiny("llama", Strategy()), rank, rngs=None)


def test_models_without_values_are_not_saved_or_merged(tmp_path: Path) -> None:
    model = Mixtral(config_from_hf(TINY["mixtral"]), rngs=None)
    lora.add(model, 4, rngs=None)
    for act in (lambda: lora.merge(model), lambda: lora.save(model, tmp_path / "adapter")):
        with pytest.raises(ValueError, match="shapes only"):
            act()


# Meshes

MESHES: dict[str, dict[str, int]] = {
    "expert4 tensor2": {"expert": 4, "tensor": 2},
    "fsdp2 expert2 tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
WIDE = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_local_experts": 8}
ROWS = random_tokens(8, 5)


@functools.cache
def on_mesh(way: str, mesh: str | None, scan: bool) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """Logits and adapter gradients on one device or a mesh, the initial values, and the model."""
    fields = TINY["mixtral"] | WIDE
    where = None if mesh is None else nnxmoe.make_mesh(**MESHES[mesh])
    strategy = Strategy(dispatch=WAYS[way], stacking=stacking_of(scan))
    model = build(fields, tiny_weights(fields), strategy, mesh=where)
    lora.add(model, 4, alpha=6, targets=EVERYTHING["mixtral"], rngs=nnx.Rngs(0))
    fresh = [np.asarray(slot.adapter.a.get_value()) for slot in adapted_slots(model)]
    graph, adapters, rest = nnx.split(fill(model), nnx.LoRAParam, ...)

    def loss(adapters: Any, rest: Any) -> Any:
        out = nnx.merge(graph, adapters, rest)(ROWS).logits
        return jnp.mean(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapters, rest)
    return [np.asarray(leaf) for leaf in [out, *jax.tree.leaves(grads)]], fresh, model


def apart(way: str, mesh: str, scan: bool) -> tuple[float, bool, int]:
    """Largest error against one device, whether initial values agree, and the number of sharded arrays."""
    ours, fresh, model = on_mesh(way, mesh, scan)
    wanted, first, _ = on_mesh("sorted", None, scan)
    error = max(max_error(a, b) / max(1.0, float(np.abs(b).max())) for a, b in zip(ours, wanted, strict=True))
    split = sum(
        not v.get_value().sharding.is_fully_replicated for s in adapted_slots(model) for v in (s.adapter.a, s.adapter.b)
    )
    return error, same(fresh, first), split


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mesh", "scan"),
    [
        ("ring", "expert4 tensor2", False),
        ("capacity", "expert4 tensor2", False),
        ("ragged", "fsdp2 expert2 tensor2", True),
    ],
)
def test_meshes_match_one_device(eight: Callable[..., Any], way: str, mesh: str, scan: bool) -> None:
    """Compares logits and gradients; adapters are sharded like their kernels."""
    error, fresh, split = eight(apart, way, mesh, scan)
    assert error < 1e-5 and fresh and split >= (4 if scan else 8)


def files_of_a_mesh(folder: Path) -> tuple[float, bool, bool, bool]:
    """For a model on a mesh: the error after merging, whether kernels keep their sharding, whether unmerging restores
    their bits, and whether a saved and loaded adapter is equal."""
    model = nnx.clone(on_mesh("ragged", "fsdp2 expert2 tensor2", True)[2])
    before, bits = logits(model, ROWS), kernels(model)
    places = [kernel.get_value().sharding for slot in adapter_slots(model) for kernel in slot.base]
    lora.save(model, folder)
    lora.merge(model)
    error = max_error(logits(model, ROWS), before)
    still = [kernel.get_value().sharding for slot in adapter_slots(model) for kernel in slot.base] == places
    lora.unmerge(model)
    back, old = same(kernels(model), bits), values(model)
    placed = [slot.adapter.b.get_value().sharding for slot in adapted_slots(model)]
    lora.remove(model)
    lora.load(model, folder)
    again = same(values(model), old) and [s.adapter.b.get_value().sharding for s in adapted_slots(model)] == placed
    return error, still, back, again


@pytest.mark.slow
def test_merge_save_and_load_on_a_mesh(eight: Callable[..., Any], tmp_path: Path) -> None:
    error, still, back, again = eight(files_of_a_mesh, tmp_path / "adapter")
    assert error < 1e-5 and still and back and again


def collectives(adapters: bool) -> dict[str, int]:
    """Number of collectives by kind in a layer's program whose experts are sharded over two axes."""
    fields = TINY["mixtral"] | WIDE | {"num_hidden_layers": 1}
    mesh = nnxmoe.make_mesh(**MESHES["expert4 tensor2"])
    model = build(fields, tiny_weights(fields), Strategy(dispatch=WAYS["capacity"]), mesh=mesh)
    if adapters:
        lora.add(model, 4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    text = jax.jit(lambda state: nnx.merge(graph, state)(ROWS).logits).lower(state).compile().as_text()
    return Counter(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", text))


@pytest.mark.slow
@pytest.mark.program
def test_adapters_add_no_collectives(eight: Callable[..., Any]) -> None:
    """They are sharded like their kernels."""
    plain = eight(collectives, False)
    assert plain and eight(collectives, True) == plain


def trained_on_a_mesh(folder: Path) -> tuple[float, bool, bool]:
    """Train on a mesh and load on one device: the error, whether every adapter changed, and whether moments are
    sharded like adapters."""
    fields = TINY["mixtral"] | WIDE
    mesh, strategy = (
        nnxmoe.make_mesh(**MESHES["fsdp2 expert2 tensor2"]),
        Strategy(WAYS["ragged"], stacking=nnxmoe.Scanned()),
    )
    model = build(fields, tiny_weights(fields), strategy, mesh=mesh)
    lora.add(model, 4, alpha=6, rngs=nnx.Rngs(0))
    fresh = values(model)
    done = fit(model, [{"tokens": ROWS}], optimizer=optax.adam(2e-2), steps=2)
    moved = all((a != b).any() for a, b in zip(values(done.model), fresh, strict=True))
    places = [v.get_value().sharding for s in adapted_slots(done.model) for v in (s.adapter.a, s.adapter.b)]
    first = jax.tree.leaves(done.state.moments[0].mu)
    held = {(a.shape, a.sharding.spec) for a in first} == {
        (v.shape, place.spec) for v, place in zip(fresh, places, strict=True)
    }
    lora.save(done.model, folder)
    alone = build(fields, tiny_weights(fields), Strategy())
    lora.load(alone, folder)
    return max_error(logits(alone, ROWS), logits(done.model, ROWS)), moved, held


@pytest.mark.slow
def test_train_on_a_mesh_and_load_on_one_device(eight: Callable[..., Any], tmp_path: Path) -> None:
    error, moved, held = eight(trained_on_a_mesh, tmp_path / "adapter")
    assert error < 1e-5 and moved and held
