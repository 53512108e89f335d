"""Model construction: initial values, invalid arguments, user parameters and graph definitions."""

import copy
import dataclasses
import pickle
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import models, train
from nnxmoe.convert import maxtext
from nnxmoe.generation import decode, passes
from nnxmoe.layers.cache import Cache
from nnxmoe.model import program as programs
from nnxmoe.model.program import strip_metadata
from nnxmoe.models import Llama, Mixtral, config_from_hf, model_class
from nnxmoe.train import fit, lora
from tests.support.arrays import max_error
from tests.support.running import compiled_in, tabulate, variables
from tests.support.tiny import TINY, build_tiny, random_tokens, stacking_of

KINDS = ("llama", "mixtral", "deepseek_v3")


def made(kind: str, rngs: nnx.Rngs | None = None, **strategy: Any) -> nnxmoe.CausalLM:
    """Tiny model with random values, or with shapes only if ``rngs`` is None."""
    config = config_from_hf(TINY[kind])
    return model_class(config)(config, nnxmoe.Strategy(**strategy), rngs=rngs)


# Scanned and unrolled


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_unscan(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The parameters and labels of a model made unrolled; `generate` does it by itself, if memory permits."""
    scanned, unrolled = (
        build_tiny(kind, nnxmoe.Strategy(stacking=nnxmoe.Scanned())),
        build_tiny(kind, nnxmoe.Strategy()),
    )
    found = nnxmoe.unscan(scanned)
    assert found.strategy.stacking == nnxmoe.Unrolled() and nnxmoe.unscan(unrolled) is unrolled
    for (path, ours), (other, theirs) in zip(
        *(nnx.to_flat_state(nnx.state(m)) for m in (found, unrolled)), strict=True
    ):
        assert path == other and ours.get_metadata() == theirs.get_metadata()
        np.testing.assert_array_equal(ours.get_value(), theirs.get_value())
    tokens = random_tokens(2, 5)
    wanted = nnxmoe.generate(unrolled, tokens, max_new_tokens=3)
    programs = passes._sizes.cache_info().misses
    np.testing.assert_array_equal(nnxmoe.generate(scanned, tokens, max_new_tokens=3), wanted)
    assert passes._sizes.cache_info().misses == programs, "the same programs"
    copy = passes.unroll_for_decoding(scanned)
    assert passes.unroll_for_decoding(scanned) is copy, "copied once"
    nnx.update(scanned, jax.tree.map(lambda a: 2 * a, nnx.state(scanned)))
    assert passes.unroll_for_decoding(scanned) is not copy, "new values"
    nnx.update(scanned, jax.tree.map(lambda a: a / 2, nnx.state(scanned)))
    if kind == "llama":
        passes._copies.clear()
        monkeypatch.setattr(passes, "memory_bytes", lambda: (1e3, "this little machine"))
        monkeypatch.setattr(decode, "_batch", lambda *_: 8)
        np.testing.assert_array_equal(nnxmoe.generate(scanned, tokens, max_new_tokens=3), wanted)
        assert "scanned layers decode slowly, and this little machine" in caplog.text
    shapes = nnxmoe.unscan(made(kind, stacking=nnxmoe.Scanned()))
    assert {leaf.shape for leaf in jax.tree.leaves(nnx.state(shapes))} == {
        leaf.shape for leaf in jax.tree.leaves(nnx.state(made(kind)))
    }


def quantized() -> nnxmoe.CausalLM:
    return nnxmoe.quantize(build_tiny("llama", nnxmoe.Strategy()), nnxmoe.Int8())


def adapted() -> nnxmoe.CausalLM:
    model = build_tiny("llama", nnxmoe.Strategy())
    lora.add(model, rank=2, rngs=nnx.Rngs(0))
    return model


@pytest.mark.parametrize(
    ("make", "derive"),
    [
        (lambda: build_tiny("llama", nnxmoe.Strategy(stacking=nnxmoe.Scanned())), nnxmoe.unscan),
        (lambda: build_tiny("llama", nnxmoe.Strategy()), lambda model: nnxmoe.quantize(model, nnxmoe.Int8())),
        (quantized, nnxmoe.dequantize),
        (adapted, lora.without),
    ],
    ids=["unscan", "quantize", "dequantize", "without"],
)
def test_derived_models_share_arrays_but_no_variables(
    make: Callable[[], nnxmoe.CausalLM], derive: Callable[[nnxmoe.CausalLM], nnxmoe.CausalLM]
) -> None:
    """Writing in place into one of the two models leaves the other unchanged."""
    original = make()
    derived = derive(original)
    ours, theirs = (
        {id(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
        for model in (original, derived)
    )
    assert not ours & theirs
    table = original.embed.table.get_value()
    assert derived.embed.table.get_value() is table
    derived.embed.table[...] *= 2
    assert original.embed.table.get_value() is table


# Scoring


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "deepseek_v3", "mixtral"])
def test_texts_are_scored_in_few_shapes(kind: str) -> None:
    """A forward pass of arrays is padded and cut: logits, routing and hidden states are those of the exact shape."""
    model = build_tiny(kind, nnxmoe.Strategy())
    exact = jax.jit(lambda tokens, **options: model(tokens, return_routing=True, return_hidden=True, **options))
    graph, state = nnx.split(strip_metadata(model))
    program = programs.jit_function(graph, jax.tree.structure(state), nnxmoe.CausalLM.forward, (6, 7, 8), ())
    shapes = program._cache_size()
    for length in (1, 5, 30):
        tokens = random_tokens(2, length)
        mask = np.ones((2, length), int)
        mask[1, : length // 2] = 0
        counts = np.arange(length)[None].repeat(2, 0)
        given: list[dict[str, Any]] = [
            {},
            {"attention_mask": mask},
            {"positions": counts + 3, "segment_ids": counts // 3},
        ]
        for options in given if length == 5 else given[:1]:
            ours, theirs = model(tokens, return_routing=True, return_hidden=True, **options), exact(tokens, **options)
            assert jax.tree.structure(ours) == jax.tree.structure(theirs)
            real = mask.astype(bool) if "attention_mask" in options else np.ones((2, length), bool)
            assert max_error(np.asarray(ours.logits)[real], np.asarray(theirs.logits)[real]) < 1e-4
            assert [x.shape for x in ours.hidden] == [x.shape for x in theirs.hidden]
            for layer, routing in (theirs.routing or {}).items():
                found = ours.routing[layer]
                np.testing.assert_array_equal(np.asarray(found.experts)[real], np.asarray(routing.experts)[real])
                assert (found.valid is None) == (routing.valid is None)
                np.testing.assert_array_equal(ours.dispatch[layer].load, theirs.dispatch[layer].load)
    assert program._cache_size() - shapes <= 2  # with positions and segments, and without
    for length in (2, 40, 50):  # padding takes no slots
        model(random_tokens(2, length), cache=model.empty_cache(2, 50))
    assert program._cache_size() - shapes <= 3


def test_tokens_are_padded_to_few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a mesh, for one token with a cache, or if tokens compete for experts."""

    class Called(Exception):
        pass

    def program(*_: Any, **__: Any) -> Callable[..., Any]:
        def call(tokens: Any, *_: Any) -> Any:
            raise Called(np.shape(tokens)[1])

        return call

    def width(model: nnxmoe.CausalLM, tokens: int, cached: bool = False) -> int:
        with pytest.raises(Called) as caught:
            model(random_tokens(1, tokens), cache=model.empty_cache(1, 8) if cached else None)
        return caught.value.args[0]

    monkeypatch.setattr("nnxmoe.model.causal_lm.layerwise_program", program)
    model = build_tiny("mixtral", nnxmoe.Strategy())
    assert [width(model, length) for length in (1, 5, 64, 65)] == [64, 64, 64, 96]
    assert width(model, 5, cached=True) == 64 and width(model, 1, cached=True) == 1
    mesh = nnxmoe.make_mesh(data=1, devices=jax.devices()[:1])
    for strategy in (nnxmoe.Strategy(mesh=mesh), nnxmoe.Strategy(dispatch=nnxmoe.Capacity(1.0))):
        assert width(build_tiny("mixtral", strategy), 5) == 5


@pytest.mark.parametrize("kinds", [["device"], ["device", "pinned_host"]])
def test_offloading_needs_pinned_host_memory(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(addressable_memories=lambda: [types.SimpleNamespace(kind=kind) for kind in kinds])
    monkeypatch.setattr(jax, "devices", lambda: [device])
    remat = nnxmoe.Remat(offload=("up",))
    if "pinned_host" in kinds:
        remat(lambda x: x, scanned=False)
        return
    with pytest.raises(ValueError, match=r"only \['device'\] memory, not pinned_host"):
        remat(lambda x: x, scanned=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        lambda model, n: {},
        lambda model, n: {"attention_mask": [[0] * (n > 1) + [1] * (n - (n > 1))]},
        lambda model, n: {"positions": [list(range(n))], "segment_ids": [[0] * n]},
        lambda model, n: {"return_hidden": True, "return_routing": True},
        lambda model, n: {"cache": model.empty_cache(1, 256)},
    ],
    ids=["tokens", "mask", "positions", "hidden", "cache"],
)
def test_prompts_of_similar_length_share_compiled_programs(options: Callable[..., dict[str, Any]]) -> None:
    """One program is compiled per bucket of lengths, also for the length of the bucket, and none for slices."""
    model = build_tiny("mixtral", max_position_embeddings=256)
    lengths = [*range(1, 250, 6), 64, 96, 128, 192, 250, 256]

    def run(lengths: Sequence[int]) -> None:
        for length in lengths:
            out = model(random_tokens(1, length), **options(model, length))
            assert out.logits.shape == (1, length, 53)

    run([2])
    counts = [compiled_in(lambda n=n: run([n])) for n in (70, 100, 129, 193)]
    assert sum(counts) <= 4, "one per bucket"
    assert compiled_in(lambda: run(lengths)) <= 1, "a step of one token with a cache"


@pytest.mark.wrong_types
def test_transformers_names_and_other_arrays() -> None:
    """Torch tensors are arrays by ``__array__``; ``input_ids`` is what tokenizers of transformers return."""

    class Tensor:
        def __init__(self, values: Any) -> None:
            self.values = np.asarray(values)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return self.values

    model, tokens = build_tiny("llama"), random_tokens(2, 5)
    wanted = model(tokens).logits
    for given in (tokens.tolist(), Tensor(tokens)):
        np.testing.assert_array_equal(model(given).logits, wanted)
        np.testing.assert_array_equal(model(input_ids=given, attention_mask=Tensor(np.ones((2, 5)))).logits, wanted)
    for wrong in ({}, {"tokens": tokens, "input_ids": tokens}):
        with pytest.raises(ValueError, match="pass either tokens or input_ids"):
            model(**wrong)
    assert str(model).startswith("Llama(2 layers, ") and repr(model).count("\n") == 0


@pytest.mark.wrong_types
def test_arguments_of_transformers_are_answered() -> None:
    """By every door, with what to give here; other unknown names are Python's own error."""
    model = build_tiny("llama")
    doors: list[tuple[Callable[..., Any], tuple[Any, ...], str, str]] = [
        (nnxmoe.from_pretrained, ("demo",), "device_map", "mesh="),
        (nnxmoe.from_pretrained, ("demo",), "torch_dtype", "dtype="),
        (Llama.from_pretrained, ("demo",), "load_in_8bit", "Int8"),
        (nnxmoe.generate, (model, [[1]]), "max_length", "max_new_tokens="),
        (nnxmoe.stream, (model, None, [1]), "do_sample", "Sampling"),
        (nnxmoe.complete, (model, [[1]]), "temperature", "Sampling"),
        (model, ([[1]],), "position_ids", "positions="),
    ]
    for call, given, name, remedy in doors:
        with pytest.raises(TypeError, match=f"has no argument '{name}': .*{remedy}"):
            call(*given, **{name: 1})
        with pytest.raises(TypeError, match="has no argument 'nonsense': it has"):
            call(*given, nonsense=1)


def test_misspelt_arguments_and_fields_are_answered_with_the_nearest_name() -> None:
    model = build_tiny("llama")
    batch, run = {"tokens": random_tokens(2, 5)}, {"optimizer": optax.sgd(0.1), "steps": 1}
    doors: list[tuple[Callable[[], Any], str]] = [
        (lambda: train.fit(model, [batch], lr=3, **run), "fit.. has no argument 'lr': .* optimizer"),
        (lambda: train.fit(model, [batch], acumulate=2, **run), "'acumulate'; did you mean accumulate"),
        (lambda: train.fit(model, [batch], checkpoints="run", **run), "'checkpoints'; did you mean checkpoint"),
        (lambda: nnxmoe.complete(model, [[1]], capacity=9), "'capacity': .*Engine"),
        (lambda: nnxmoe.complete(model, [[1]], loprobs=1), "'loprobs'; did you mean logprobs"),
        (lambda: models.MixtralConfig(hiden_size=8), "MixtralConfig.. has no argument 'hiden_size'; .* hidden_size"),
        (lambda: model([[1]], training=True), "'training': .*the same in training"),
        (lambda: model([[1]], atention_mask=[[1]]), "did you mean attention_mask"),
        (lambda: nnxmoe.Sampling(temprature=1.0), "Sampling.. .*did you mean temperature"),
        (lambda: nnxmoe.Strategy(dispach=None), "Strategy.. .*did you mean dispatch"),
        (lambda: train.Objective(zloss=1.0), "Objective.. .*did you mean z_loss"),
        (lambda: train.DPO(betta=1.0), "DPO.. .*did you mean beta"),
        (lambda: train.Evaluation([batch], evry=1), "Evaluation.. .*did you mean every"),
        (lambda: train.batches([], None, batchsize=1, seq_len=2), "did you mean batch_size"),
        (lambda: lora.add(model, 2, target="attention"), "did you mean targets"),
        (lambda: nnxmoe.Engine(model, slot=2), "Engine.. .*did you mean slots"),
        (lambda: train.Checkpoints("run", kep=2), "Checkpoints.. .*did you mean keep"),
    ]
    for call, message in doors:
        with pytest.raises(TypeError, match=message) as caught:
            call()
        assert isinstance(caught.value, ValueError)
    config = models.LlamaConfig(hidden_size=64)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config


# Initial values


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scanned_and_unrolled_models_draw_the_same_values(kind: str) -> None:
    unrolled, scanned = (made(kind, nnx.Rngs(0), stacking=stacking_of(scan)) for scan in (False, True))
    stacks: Any = zip(unrolled.stacks, scanned.stacks, strict=True)
    for stack, of_scan in stacks:
        for path, stacked in variables(of_scan.layer):
            each = [dict(variables(layer))[path].get_value() for layer in stack.layers]
            assert max_error(jnp.stack(each), stacked.get_value()) < 1e-6, path
            assert "norm" in path or path.endswith("bias") or max_error(each[0], each[-1]) > 0.01 or len(each) == 1
    assert max_error(unrolled.embed.table[...], scanned.embed.table[...]) == 0


def drawn_on_a_mesh(kind: str) -> list[list[np.ndarray]]:
    """Values of two models and one more draw from one ``Rngs``: on one device, on a mesh, and scanned on a mesh."""
    found = []
    for strategy in ({}, {"mesh": True}, {"mesh": True, "stacking": nnxmoe.Scanned()}):
        mesh = nnxmoe.make_mesh(fsdp=2, devices=jax.devices()[:2]) if strategy.pop("mesh", False) else None
        rngs = nnx.Rngs(0)
        models = [made(kind, rngs, mesh=mesh, **strategy) for _ in range(2)]
        values = [np.asarray(model.embed.table[...]) for model in models]
        stacks: list[Any] = [model.stacks[0] for model in models]
        for stack in stacks:
            scanned = hasattr(stack, "layer")
            gate = stack.layer.moe.experts.gate[...][1] if scanned else stack.layers[1].moe.experts.gate[...]
            values.append(np.asarray(gate))
        found.append([*values, np.asarray(jax.random.uniform(rngs.params()))])
    return found


@pytest.mark.slow
def test_initial_values_and_rngs_do_not_depend_on_the_mesh(eight: Callable[..., Any]) -> None:
    """Two models made from one ``Rngs`` differ."""
    alone, spread, scanned = eight(drawn_on_a_mesh, "mixtral")
    assert max_error(alone[0], alone[1]) > 0.01
    for other in (spread, scanned):
        assert max_error(alone[-1], other[-1]) == 0
        for one, same in zip(alone, other, strict=True):
            assert max_error(one, same) < 1e-6


# Arguments


@pytest.mark.wrong_types
def test_invalid_rngs() -> None:
    config = config_from_hf(TINY["llama"])
    for wrong in (0, jax.random.key(0), nnx.Rngs(0).params):
        with pytest.raises(ValueError, match=r"Llama\(config, rngs=nnx\.Rngs\(0\)\).*got rngs="):
            Llama(config, rngs=wrong)  # pyright: ignore
    with pytest.raises(ValueError, match=r"strategy=Rngs.*Llama\(config, rngs=nnx\.Rngs\(0\)\)"):
        Llama(config, nnx.Rngs(0), rngs=None)  # pyright: ignore
    with pytest.raises(TypeError, match="rngs"):
        Llama(config, nnx.Rngs(0))  # pyright: ignore


def test_models_without_values_raise_when_called() -> None:
    tokens, run = random_tokens(1, 3), {"optimizer": optax.sgd(0.1), "steps": 1}
    calls: list[Callable[[Any], Any]] = [
        lambda model: model(tokens),
        lambda model: nnxmoe.generate(model, tokens),
        lambda model: nnxmoe.complete(model, tokens.tolist()),
        lambda model: nnxmoe.score(model, tokens.tolist()),
        nnxmoe.ModelDraft.of,
        lambda model: nnxmoe.quantize(model, nnxmoe.Int8()),
        lambda model: fit(model, [{"tokens": tokens}], **run),
        lambda model: fit(model, [{"tokens": tokens}], mesh=nnxmoe.make_mesh(), **run),
    ]
    for call in calls:
        for scan in (False, True):
            with pytest.raises(ValueError, match=r"the model is abstract \(shapes only\)\. Load weights first"):
                call(made("llama", stacking=stacking_of(scan)))


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", ["attention_mask", "positions", "segment_ids"])
def test_masks_and_positions_may_be_lists(name: str, case_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists reuse the program compiled for arrays."""
    model, tokens, given = case_model("mixtral_basic"), [[0, 5, 9]], [[1, 1, 2]]
    expected = model(np.array(tokens), **{name: np.array(given)}).logits
    monkeypatch.setattr(type(model), "body", None)  # fails if the call is traced again
    assert max_error(model(tokens, **{name: given}).logits, expected) == 0


def test_a_generation_config_may_be_a_dict() -> None:
    model, tokens = made("llama", nnx.Rngs(0)), random_tokens(1, 3)
    model.generation_config = {"eos_token_id": [5, 6], "nested": {"a": [1]}}
    assert model.generation_config["eos_token_id"] == (5, 6)
    assert model(tokens).logits.shape == (1, 3, 53)
    again = nnx.merge(*nnx.split(model))
    assert again.generation_config == model.generation_config


@pytest.mark.wrong_types
def test_generation_config_must_be_a_mapping() -> None:
    model: Any = made("llama")
    with pytest.raises(ValueError, match="generation_config must be a mapping"):
        model.generation_config = 5


# Caches under transformations


@pytest.mark.parametrize("kind", ["mistral", "deepseek_v3"])
def test_full_cache_under_jit_gives_nan(kind: str) -> None:
    """Under jit the length is traced, so an overflow cannot raise."""
    model, tokens = made(kind, nnx.Rngs(0)), random_tokens(2, 4)
    step = jax.jit(lambda cache, tokens: model(tokens, cache=cache))
    out = step(model.empty_cache(2, 6), tokens)
    assert bool(jnp.isfinite(out.logits).all())
    full = step(out.cache, tokens)
    assert bool(jnp.isnan(full.logits).all())
    with pytest.raises(ValueError, match=r"6 tokens; 8 are cached and 4 more"):
        model(tokens, cache=full.cache)


# User parameters


@pytest.mark.slow
def test_user_parameter_without_axis_names(tmp_path: Path) -> None:
    """It is trained and replicated on a mesh. No format can store it, and each names it."""
    strategy = nnxmoe.Strategy(mesh=nnxmoe.make_mesh())
    model: Any = Mixtral(config_from_hf(TINY["mixtral"]), strategy, rngs=nnx.Rngs(0))
    model.extra = nnx.Param(jnp.ones((3, 5)))
    batch = {"tokens": random_tokens(2, 6)}
    trained: Any = fit(model, [batch], optimizer=optax.adamw(1.0, weight_decay=0.5), steps=1).model
    assert max_error(trained.extra[...], 0.5 * np.ones((3, 5))) < 1e-6
    for save in (nnxmoe.save, nnxmoe.save_pretrained):
        with pytest.raises(ValueError, match="extra"):
            save(trained, tmp_path / "folder")
    with pytest.raises(ValueError, match="extra"):
        maxtext.to_tree(trained)


# NNX introspection


@pytest.mark.slow
@pytest.mark.wrong_types  # flax rebuilds our dataclasses with array descriptions as fields
@pytest.mark.parametrize(("kind", "scan"), [("llama", True), ("mixtral", False), ("deepseek_v3", True)])
def test_tabulate_lists_every_module(kind: str, scan: bool) -> None:
    model = made(kind, nnx.Rngs(0), stacking=stacking_of(scan))
    table = tabulate(model, random_tokens(1, 4), console_kwargs={"width": 400, "force_terminal": False})
    layer = "stacks/0/layer" if scan else "stacks/0/layers/1"
    for row in ("embed", f"{layer}/attention/o", f"{layer}/{'moe' if kind == 'mixtral' else 'mlp'}", "head"):
        assert f" {row} " in table, row
    assert f"{sum(a.size for a in jax.tree.leaves(nnx.state(model))):,}" in table


def test_load_report_and_generation_config_do_not_recompile() -> None:
    """Models that differ only in these share compiled programs."""
    first, second = made("llama", nnx.Rngs(0)), made("llama", nnx.Rngs(1))
    second.load_report, second.generation_config = nnxmoe.LoadReport("elsewhere"), {"eos_token_id": 3}
    graphs = [nnx.split(strip_metadata(model))[0] for model in (first, second)]
    assert graphs[0] == graphs[1] and hash(graphs[0]) == hash(graphs[1])


@pytest.mark.slow
def test_a_model_is_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's share of a call does not grow with the number of layers: only the first call splits the model."""
    splits, split, known = [], nnx.split, Cache.lengths.fget
    monkeypatch.setattr(programs.nnx, "split", lambda *a, **k: splits.append(type(a[0]).__name__) or split(*a, **k))
    model = build_tiny("mixtral", nnxmoe.Strategy())
    cache = model(random_tokens(1, 5), cache=model.empty_cache(1, 16)).cache
    read: list[bool] = []  # the length of the cache is known without the device
    monkeypatch.setattr(Cache, "lengths", property(lambda self: read.append("_lengths" in vars(self)) or known(self)))
    for _ in range(3):
        cache = model(random_tokens(1, 1), cache=cache).cache
    assert read and all(read)
    nnxmoe.generate(model, random_tokens(1, 5), max_new_tokens=2)
    nnxmoe.score(model, random_tokens(1, 5).tolist())
    assert splits.count("Mixtral") == 1, splits


@pytest.mark.slow
def test_changed_models_are_split_again() -> None:
    """After any change the output is that of a new model with the same parts."""
    model, tokens = build_tiny("mixtral", nnxmoe.Strategy()), random_tokens(2, 6)

    class Doubled(nnx.Module):
        def __init__(self, inner: Any) -> None:
            self.inner, self.table = inner, nnx.data([jnp.float32(2.0)])

        def __call__(self, x: Any) -> Any:
            return self.inner(x) * self.table[0]

    def lora_with_values(model: Any) -> None:
        lora.add(model, 2, rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda a: a + 0.3, nnx.state(model, nnx.LoRAParam)))

    layers = model.stacks[0].layers
    changes: list[Callable[[], Any]] = [
        lambda: layers[0].attention_norm.scale.set_value(layers[0].attention_norm.scale[...] * 2),
        lambda: nnx.update(model, jax.tree.map(lambda a: a * 1.25, nnx.state(model, nnx.Param))),
        lambda: setattr(model.norm, "eps", 0.5),
        lambda: setattr(layers[1].attention, "rotary", dataclasses.replace(model.ropes[0], theta=7.0)),
        lambda: setattr(layers[1].feed_forward, "dispatch", nnxmoe.Capacity(0.3)),
        lambda: layers.__setitem__(0, nnx.clone(layers[1])),
        lambda: setattr(model, "norm", type(model.norm)(24, 1e-5, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))),
        lambda: lora_with_values(model),
        lambda: lora.merge(model, keep=False),
        lambda: setattr(layers[1], "attention_norm", Doubled(layers[1].attention_norm)),
        lambda: layers[1].attention_norm.table.__setitem__(0, jnp.float32(5.0)),
        lambda: setattr(layers[1], "attention_norm", layers[1].attention_norm.inner),
        lambda: layers.pop(),
        lambda: model.head.kernel.set_value(model.head.kernel[...].astype(jnp.bfloat16)),
    ]
    before = model(tokens).logits
    for number, change in enumerate(changes):
        change()
        ours, fresh = model(tokens).logits, nnx.merge(*nnx.split(model))(tokens).logits
        np.testing.assert_array_equal(ours, fresh, err_msg=f"change {number}")
        assert number == 8 or max_error(ours, before) > 1e-4, number  # merging an adapter keeps the output
        before = ours


def test_load_reports_compare_without_timings() -> None:
    report = nnxmoe.LoadReport("a", loaded=("x",), casts={"bfloat16 -> float32": ("x",)}, seconds=1.0)
    same = dataclasses.replace(report, seconds=2.0)
    assert report == same and hash(report) == hash(same)
    for changes in ({"source": "b"}, {"loaded": ("y",)}, {"casts": {}}, {"nonfinite": {"x": 1}}):
        assert dataclasses.replace(report, **changes) != report
