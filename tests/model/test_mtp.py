"""Layers for multi-token prediction: logits, caches, loading and saving."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe import Engine, MTPDraft
from nnxmoe.convert import maxtext
from nnxmoe.convert.hf.tensor_layout import repeated_tensors, tensor_layout
from nnxmoe.generation.request import RequestOptions
from nnxmoe.model.program import strip_metadata
from nnxmoe.models import PRESETS, DeepSeekV3, Llama, config_from_hf, model_class
from nnxmoe.train import Objective, Step
from tests.support.arrays import max_error
from tests.support.families import FAMILIES, Frozen
from tests.support.mtp import APART, CASES, OWN, STREAMED, ahead, load_mtp, logits_ahead, tiny_mtp
from tests.support.numpy_decoder import reference_ahead
from tests.support.running import MODEL_TOLERANCE
from tests.support.tiny import ORACLE, TINY, build, random_tokens, write_checkpoint

TOLERANCE, NOTICED = 2e-5, 0.1
OF = dict.fromkeys(CASES, TOLERANCE) | dict.fromkeys(
    ("qwen3_next", "qwen4_exp_text"), MODEL_TOLERANCE
)  # recurrent layers round more
COPIES = "copies of the embedding and the head (the main model's tensors are used)"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Frozen, Path, nnxmoe.CausalLM]]:
    """A frozen case, its folder and its model, which must not be modified."""
    found: dict[str, Any] = {}

    def get(kind: str) -> tuple[Frozen, Path, nnxmoe.CausalLM]:
        if kind not in found:
            case, folder = load_mtp(kind), tmp_path_factory.mktemp(kind)
            write_checkpoint(folder, case.fields, case.weights)
            found[kind] = case, folder, nnxmoe.from_pretrained(folder, strategy=ORACLE, mtp=True)
        return found[kind]

    return get


Loaded = Callable[[str], tuple[Frozen, Path, nnxmoe.CausalLM]]


def same_state(one: nnxmoe.CausalLM, other: nnxmoe.CausalLM) -> None:
    mine, theirs = (dict(nnx.to_flat_state(nnx.state(model))) for model in (one, other))
    assert mine.keys() == theirs.keys()
    for path, variable in mine.items():
        assert np.array_equal(np.asarray(variable[...]), np.asarray(theirs[path][...])), path


# Logits


@pytest.mark.parametrize("kind", CASES)
def test_logits_equal_transformers(kind: str, loaded: Loaded) -> None:
    case, _, model = loaded(kind)
    assert len(model.mtp) == CASES[kind] and f"{CASES[kind]} prediction" in repr(model)
    for k, logits in enumerate(logits_ahead(model, case.arrays["tokens"])):
        assert max_error(logits, case.arrays[f"logits.{k}"]) < OF[kind], k


def state_beyond_the_norm(model: nnxmoe.CausalLM, patch: pytest.MonkeyPatch) -> None:
    """That before it, or in DeepSeek-V4, whose layers read the streams before it, that after it."""
    right = type(model).body

    def wrong(self: Any, *given: Any, **options: Any) -> Any:
        body = right(self, *given, **options)
        after = jnp.tile(body.x, body.mtp_hidden.shape[-1] // body.x.shape[-1])
        return dataclasses.replace(body, mtp_hidden=after if model.config.model_type in STREAMED else body.hidden[-2])

    patch.setattr(type(model), "body", wrong)


def state_first(model: nnxmoe.CausalLM, patch: pytest.MonkeyPatch) -> None:
    for depth in model.mtp:
        if model.config.model_type in STREAMED:
            depth.project.token, depth.project.state = depth.project.state, depth.project.token
            continue
        depth.project.kernel.set_value(jnp.roll(depth.project.kernel[...], model.config.hidden_size, axis=1))


def main_norm(model: nnxmoe.CausalLM, patch: pytest.MonkeyPatch) -> None:
    for depth in model.mtp:
        depth.norm.scale.set_value(model.norm.scale[...])


@pytest.mark.parametrize("plant", [state_beyond_the_norm, state_first, main_norm])
@pytest.mark.parametrize("kind", CASES)
def test_wrong_variants_are_noticed(
    kind: str, plant: Callable[..., None], loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each differs from transformers far beyond the tolerance, at every depth."""
    case, _, model = loaded(kind)
    model = nnx.clone(model)
    plant(model, monkeypatch)
    traced_anew = nnx.jit(lambda model, tokens: ahead(model, tokens))
    for k, logits in enumerate(traced_anew(model, case.arrays["tokens"])[1:], 1):
        assert max_error(logits, case.arrays[f"logits.{k}"]) > NOTICED, k


@pytest.mark.slow
def test_logits_equal_the_decoder_in_numpy() -> None:
    fields, weights = tiny_mtp(2)
    tokens = random_tokens(2, 9)
    ours = logits_ahead(build(fields, weights, mtp=True), tokens)
    for k, wanted in enumerate(reference_ahead(fields, weights, tokens)):
        assert max_error(ours[k], wanted) < TOLERANCE, k


def test_padding_does_not_change_real_positions(loaded: Loaded) -> None:
    """Pairs are masked like tokens: at the end, and before the others."""
    case, _, model = loaded("kimi_k2")
    tokens = case.arrays["tokens"]
    pad, wanted = np.zeros((2, 3), tokens.dtype), case.arrays["logits.1"]

    @nnx.jit
    def run(model: nnxmoe.CausalLM, wide: Any, mask: Any, positions: Any, there: Any) -> jax.Array:
        hidden = model.body(wide, mask, positions).mtp_hidden[:, :-1]
        return model.logits(model.mtp[0](model, hidden, wide[:, 1:], there, positions[:, :-1]).x)

    for before in (True, False):
        wide = np.concatenate([pad, tokens] if before else [tokens, pad], axis=1)
        mask = np.ones(wide.shape, np.int32)
        mask[:, :3] = 0 if before else 1
        mask[:, -3:] = 1 if before else 0
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        there = mask[:, :-1] * mask[:, 1:]
        logits = np.asarray(run(model, *map(jnp.asarray, (wide, mask, positions, there))))
        assert max_error(logits[there > 0].reshape(wanted.shape), wanted) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "kimi_k2")) for kind in CASES])
def test_a_cache_gives_what_the_whole_pass_gives(kind: str, loaded: Loaded) -> None:
    """Pairs in one chunk, with padding in it, then one at a time; a row that overflows is NaN, the other is not."""
    case, _, model = loaded(kind)
    tokens, depth, first = jnp.asarray(case.arrays["tokens"])[:, :10], model.mtp[0], 4
    hidden = model.body(tokens).mtp_hidden[:, :-1]
    given = tokens[:, 1:]
    wanted = depth(model, hidden, given).x
    cache = depth.empty_cache(model, 2, 8)
    start = jnp.array([0, 2])  # the second row's chunk begins with two pairs of padding
    offset = jnp.arange(first) - start[:, None]

    def pairs(array: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)

    index = jnp.maximum(offset, 0)
    out = depth(model, pairs(hidden, index), pairs(given, index), offset >= 0, cache=cache, fresh=True)
    for row in range(2):
        assert max_error(out.x[row, int(start[row]) :], wanted[row, : first - int(start[row])]) < 1e-5
    step = jax.jit(lambda hidden, tokens, cache: (lambda o: (o.x, o.cache))(depth(model, hidden, tokens, cache=cache)))
    cache = out.cache
    for at in range(5):
        index = first - start[:, None] + at
        x, cache = step(pairs(hidden, index), pairs(given, index), cache)
        fits = np.asarray(index[:, 0]) < 8
        assert not np.isfinite(np.asarray(x)[~fits]).any()
        assert max_error(x[fits, 0], pairs(wanted, index)[fits, 0]) < 1e-5, at
    assert not fits.all() and fits.any()
    with pytest.raises(ValueError, match="Pass an empty cache"):
        depth(model, hidden[:, :1], given[:, :1], cache=cache, fresh=True)


@pytest.mark.slow
def test_the_model_itself_does_not_change() -> None:
    """Prediction layers are drawn after all others, and without them a model has none."""
    config = config_from_hf(tiny_mtp(1)[0])
    one, other = (DeepSeekV3(config, rngs=nnx.Rngs(0), mtp=mtp) for mtp in (False, True))
    mine, theirs = (dict(nnx.to_flat_state(nnx.state(model))) for model in (one, other))
    assert {path for path in theirs if path not in mine} == {path for path in theirs if path[0] == "mtp"} != set()
    assert all(np.array_equal(np.asarray(v[...]), np.asarray(theirs[path][...])) for path, v in mine.items())
    assert len(one.mtp) == 0 and "prediction" not in repr(one)
    assert nnx.split(strip_metadata(one))[0] == nnx.split(strip_metadata(other))[0]  # they share their programs
    tokens = random_tokens(1, 7)
    assert np.array_equal(one(tokens).logits, other(tokens).logits)
    assert np.isfinite(logits_ahead(other, tokens)[1]).all()


def test_size_of_the_published_layer() -> None:
    """11.5 billion parameters without embedding and head (DeepSeek-V3, README_WEIGHTS.md), 0.1 in the projection."""
    config: Any = PRESETS["deepseek-v3"]
    model: Any = DeepSeekV3(config, rngs=None, mtp=True)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(nnx.state(part))) for part in (model.mtp, model.mtp[0].project)]
    assert round((sizes[0] - sizes[1]) / 1e9, 2) == 11.51 and sizes[1] == 2 * 7168**2


@pytest.mark.parametrize("kind", ["kimi_k2", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "dots1", "solar_open"])
def test_names_of_all_families(kind: str) -> None:
    """A prediction layer has the names of the last layer, and four of its own."""
    fields = FAMILIES[kind].frozen | {"num_nextn_predict_layers": 2}
    config = config_from_hf(fields)
    model = model_class(config)(config, rngs=None, mtp=True)
    names, last = set(tensor_layout(model)), config.num_hidden_layers - 1
    usual = {name for name in names if f".layers.{last}." in name}
    for k in (1, 2):
        own = {f"model.layers.{last + k}.{name}.weight" for name in OWN}
        assert own < {name for name in names if f".layers.{last + k}." in name}
        assert {n for n in names if f".layers.{last + k}." in n} - own == {
            name.replace(f".layers.{last}.", f".layers.{last + k}.") for name in usual
        }
    assert not repeated_tensors(model, names).keys() & names


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_names_apart_from_the_layers(kind: str) -> None:
    """A layer with attention, dense in a dense model, whichever kind the last layer of the model has."""
    config = config_from_hf(FAMILIES[kind].frozen)
    names = set(tensor_layout(model_class(config)(config, rngs=None, mtp=True)))
    like = [i for i, recurrent in enumerate(config.recurrent_layers) if not recurrent][-1]
    wanted = {n.replace(f"model.layers.{like}.", "mtp.layers.0.") for n in names if f".layers.{like}." in n}
    wanted |= {f"mtp.{name}.weight" for name in APART["qwen3_next"].values()}
    assert {name for name in names if name.startswith("mtp.")} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "glm_moe_dsa", *STREAMED])
def test_drafts_and_training(kind: str, loaded: Loaded) -> None:
    """An engine gives the same ids with drafts of the layer, which are taken back from recurrent states and from the
    keys of indexers; and the layer has a gradient."""
    case, _, model = loaded(kind)
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4, 5], [7, 1, 30], [9, 9, 2]]

    def ids(draft: Any) -> list[list[int]]:
        engine = Engine(model, slots=2, capacity=40, draft=draft)
        requests = [engine.submit(prompt, RequestOptions(8, stop_ids=None)) for prompt in prompts]
        engine.run()
        return [request.ids for request in requests]

    assert ids(None) == ids(MTPDraft.of(model, 2))
    step, tokens = Step(nnx.clone(model), optax.sgd(0.1), Objective(mtp=0.5)), np.asarray(case.arrays["tokens"])
    after, report = step(step.init(), {"tokens": tokens})
    before, projects = step.init().params, f"mtp.0.project.{'state.' * (kind in STREAMED)}kernel"
    moved = [name for name in before if name.startswith("mtp.") and max_error(after.params[name], before[name]) > 1e-7]
    assert float(report.losses.mtp) > 0 and {projects, "mtp.0.norm.scale"} <= set(moved)


# Loading and saving


def test_prediction_layers_with_entries_are_refused(loaded: Loaded) -> None:
    case, _, _ = loaded(STREAMED[0])
    fields = case.fields | {"compress_ratios": [*case.fields["compress_ratios"][:-1], 4]}
    config = config_from_hf(fields)
    model_class(config)(config, rngs=None)
    with pytest.raises(ValueError, match="compress_ratios: prediction layers with compressed entries"):
        model_class(config)(config, rngs=None, mtp=True)
    assert config.to_hf()["compress_ratios"][-1] == 4


def test_loading_without_them_reports_what_is_skipped(loaded: Loaded) -> None:
    case, folder, model = loaded("glm4_moe")
    plain = nnxmoe.from_pretrained(folder, strategy=ORACLE)
    own = {name for name in case.weights if ".layers.3." in name or ".layers.4." in name}
    assert [set(names) for names in plain.load_report.skipped.values()] == [own] and not plain.load_report.unexpected
    report = model.load_report
    assert set(report.skipped) == {COPIES} and set(report.loaded) == case.weights.keys() - set(report.skipped[COPIES])
    assert not report.unexpected and not report.notes


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", CASES)
def test_saved_and_loaded_again(kind: str, scanned: bool, loaded: Loaded, tmp_path: Path) -> None:
    """The file has the same bytes, copies included, and every format gives back the same model."""
    case, folder, model = loaded(kind)
    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned()) if scanned else ORACLE
    model = nnxmoe.from_pretrained(folder, strategy=strategy, mtp=True)
    nnxmoe.save_pretrained(model, tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert saved.keys() == case.weights.keys()
    assert all(saved[name].tobytes() == case.weights[name].tobytes() for name in saved)
    same_state(nnxmoe.from_pretrained(tmp_path / "hf", strategy=strategy, mtp=True), model)
    nnxmoe.save(model, tmp_path / "ours")
    same_state(nnxmoe.load(tmp_path / "ours", strategy=strategy), model)
    tokens = case.arrays["tokens"]
    assert max_error(logits_ahead(nnxmoe.unscan(model), tokens)[-1], case.arrays[f"logits.{CASES[kind]}"]) < OF[kind]


@pytest.mark.slow
def test_native_folders_without_them_load_without_them(loaded: Loaded, tmp_path: Path) -> None:
    model = nnxmoe.from_pretrained(loaded("kimi_k2")[1])
    nnxmoe.save(model, tmp_path / "ours")
    assert not nnxmoe.load(tmp_path / "ours").mtp


@pytest.mark.slow
def test_quantised_while_loading(loaded: Loaded, tmp_path: Path) -> None:
    """The kernels of the layer become codes, which are saved and read back; its own projection too."""
    case, folder, model = loaded("glm4_moe")
    codes = nnxmoe.from_pretrained(folder, strategy=ORACLE, mtp=True, quantize=nnxmoe.Int8())
    nnxmoe.save_pretrained(codes, tmp_path / "codes")
    again = nnxmoe.from_pretrained(tmp_path / "codes", strategy=ORACLE, mtp=True, keep_quantized=True)
    same_state(again, codes)
    floats = nnxmoe.dequantize(codes)
    error = max_error(floats.mtp[0].project.kernel[...], model.mtp[0].project.kernel[...])
    assert 0 < error < 0.02
    tokens = case.arrays["tokens"]
    assert max_error(logits_ahead(again, tokens)[2], logits_ahead(floats, tokens)[2]) < 2e-4


def changed(loaded: Loaded, folder: Path, drop: str = "", **fields: Any) -> Path:
    case, _, _ = loaded("kimi_k2")
    weights = {name: array for name, array in case.weights.items() if not drop or drop not in name}
    return write_checkpoint(folder, case.fields | fields, weights)


@pytest.mark.parametrize(
    "name", ["enorm.weight", "eh_proj.weight", "shared_head.norm.weight", "mlp.gate.weight", "self_attn.o_proj.weight"]
)
def test_missing_tensors_are_named(name: str, loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(nnxmoe.LoadError, match=rf"model\.layers\.3\.{name.replace('.', '[.]')} is missing"):
        nnxmoe.from_pretrained(changed(loaded, tmp_path, f"layers.3.{name}"), mtp=True)


def test_fewer_layers_than_the_config_says_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    folder = changed(loaded, tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(nnxmoe.LoadError, match=r"model\.layers\.4\.enorm\.weight is missing"):
        nnxmoe.from_pretrained(folder, mtp=True)
    assert not nnxmoe.from_pretrained(folder).load_report.unexpected  # only the other layers are asked for


def test_more_layers_than_the_config_says_are_reported(loaded: Loaded, tmp_path: Path) -> None:
    case, _, _ = loaded("glm4_moe")
    folder = write_checkpoint(tmp_path, case.fields | {"num_nextn_predict_layers": 1}, case.weights)
    report = nnxmoe.from_pretrained(folder, mtp=True).load_report
    assert set(report.unexpected) == {name for name in case.weights if ".layers.4." in name}


def test_wrong_tensors_are_named(loaded: Loaded, tmp_path: Path) -> None:
    case, _, _ = loaded("kimi_k2")
    turned = np.ascontiguousarray(case.weights["model.layers.3.eh_proj.weight"].T)
    odd = {"model.layers.3.eh_proj.weight": turned, "model.layers.3.more.weight": turned}
    folder = write_checkpoint(tmp_path, case.fields, case.weights | odd)
    with pytest.raises(nnxmoe.LoadError, match=r"model\.layers\.3\.eh_proj\.weight in .* looks transposed") as caught:
        nnxmoe.from_pretrained(folder, mtp=True)
    assert caught.value.report.unexpected == ("model.layers.3.more.weight",)


def test_copies_that_differ_are_reported(loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case, _, _ = loaded("kimi_k2")
    name = "model.layers.3.shared_head.head.weight"
    folder = write_checkpoint(tmp_path, case.fields, case.weights | {name: -case.weights[name]})
    report = nnxmoe.from_pretrained(folder, mtp=True).load_report
    assert report.notes == (f"{name} differs from lm_head.weight: the main model's tensor is used",)
    assert name in caplog.text
    without = {n: array for n, array in case.weights.items() if n not in (name, name.replace("shared_head.head", "x"))}
    report = nnxmoe.from_pretrained(write_checkpoint(tmp_path / "b", case.fields, without), mtp=True).load_report
    assert not report.notes and name not in report.skipped[COPIES]


def test_copies_of_a_quantised_head(loaded: Loaded, tmp_path: Path) -> None:
    """They have the codes of the head, not the values of the embedding, and are read as such."""
    _, folder, _ = loaded("kimi_k2")
    method = nnxmoe.Mixed(None, None, nnxmoe.Int8())
    model = nnxmoe.from_pretrained(folder, mtp=True, quantize=method)
    nnxmoe.save_pretrained(model, tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    for ending in ("weight_packed", "weight_scale", "weight_shape"):
        copy, head = saved[f"model.layers.3.shared_head.head.{ending}"], saved[f"lm_head.{ending}"]
        assert copy.tobytes() == head.tobytes()
    assert "model.layers.3.shared_head.head.weight" not in saved
    again = nnxmoe.from_pretrained(tmp_path / "hf", mtp=True, keep_quantized=True)
    same_state(again, model)
    assert not again.load_report.unexpected and not again.load_report.notes


def test_what_cannot_have_them_is_refused() -> None:
    fields, _ = tiny_mtp(1)
    with pytest.raises(nnxmoe.ConfigError, match="llama models have no multi-token prediction layers"):
        Llama(config_from_hf(TINY["llama"]), rngs=None, mtp=True)
    with pytest.raises(nnxmoe.ConfigError, match="num_nextn_predict_layers 0"):
        DeepSeekV3(config_from_hf(fields | {"num_nextn_predict_layers": 0}), rngs=None, mtp=True)
    with pytest.raises(nnxmoe.ConfigError, match="the last layer is dense"):
        DeepSeekV3(config_from_hf(fields | {"first_k_dense_replace": 3}), rngs=None, mtp=True)
    config: Any = config_from_hf(FAMILIES["qwen3_next"].frozen)
    with pytest.raises(nnxmoe.ConfigError, match="no layer has both the attention and the feed-forward of prediction"):
        model_class(config)(config, rngs=None, mtp=True)
    shared = {"num_nextn_predict_layers": 1, "indexer_types": ["full", *["shared"] * 3]}  # after a dense layer
    config = config_from_hf(FAMILIES["glm_moe_dsa"].frozen | shared)
    with pytest.raises(nnxmoe.ConfigError, match="no layer has both the attention and the feed-forward of prediction"):
        model_class(config)(config, rngs=None, mtp=True)


@pytest.mark.slow
def test_maxtext_has_no_place_for_them() -> None:
    model = DeepSeekV3(config_from_hf(tiny_mtp(1)[0]), rngs=nnx.Rngs(0), mtp=True)
    with pytest.raises(nnxmoe.CheckpointError, match=r"shared_head\.norm.*without mtp=True"):
        maxtext.to_tree(model)


# On a mesh


def on_a_mesh(folder: str, tokens: np.ndarray) -> list[np.ndarray]:
    mesh = nnxmoe.make_mesh(data=2, fsdp=2, expert=2)
    model = nnxmoe.from_pretrained(folder, mesh=mesh, mtp=True)
    kernel = model.mtp[0].project.kernel.get_value()
    assert not kernel.sharding.is_fully_replicated
    return logits_ahead(model, np.concatenate([tokens] * 4))


@pytest.mark.slow
def test_on_a_mesh(loaded: Loaded, eight: Callable[..., Any]) -> None:
    case, folder, _ = loaded("kimi_k2")
    for k, logits in enumerate(eight(on_a_mesh, str(folder), case.arrays["tokens"])):
        assert max_error(logits[2:4], case.arrays[f"logits.{k}"]) < 1e-4, k
