"""MaxText's Linen layout, read and written, against logits, gradients and files computed by MaxText."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp_v1
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.convert.conversion import detect_format
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.maxtext import layout
from nnxmoe.convert.maxtext.array_trees import flatten_arrays
from nnxmoe.linen import LinenCausalLM
from nnxmoe.models import model_class
from nnxmoe.moe import balance
from tests.support.arrays import Flat, flat, identical, max_error, nested
from tests.support.maxtext_cases import (
    CASES,
    KINDS,
    LLAMA_3,
    NAMES,
    NEWER,
    config_of,
    newer_tokens,
    newer_weights,
    params_of,
)
from tests.support.running import compiled_in, forward, randomise
from tests.support.tiny import build_tiny, random_tokens, stacking_of


@pytest.mark.parametrize("other", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("mixtral_scanned", "llama3_unscanned") else [])
        for name in NAMES
    ],
)
def test_logits_loss_and_gradients_equal_maxtext(name: str, other: bool) -> None:
    """For whole and packed sequences. ``other``: our layer stacking differs from MaxText's."""
    scan = ("_scanned" in name) != other
    arrays = load_file(CASES / name / "io.safetensors")
    results = json.loads((CASES / name / "config.json").read_text())
    model = maxtext.from_tree(nested(params_of(name)), config_of(name), nnxmoe.Strategy(stacking=stacking_of(scan)))
    for start in ("", "packed_"):
        given = {kind: arrays[start + kind] for kind in ("positions", "segment_ids")}
        out, wanted = model(arrays[start + "tokens"], **given).logits, arrays[start + "logits_dense"]
        assert max_error(out, wanted, where=given["segment_ids"] != 0) < 2e-5
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    weight = results["resolved"]["load_balance_loss_weight"]

    def loss(params: Any) -> Any:
        given = {kind: arrays[kind] for kind in ("positions", "segment_ids")}
        out = nnx.merge(graph, params, rest)(arrays["tokens"], **given, return_routing=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, arrays["targets"])
        real = arrays["targets_segmentation"] != 0
        layers = [balance.maxtext_loss(routing) for routing in out.routing.values()] if weight else [jnp.zeros(())]
        extra = weight * sum(layers) / len(layers)
        return jnp.sum(losses * real) / jnp.sum(real) + extra, extra

    (total, extra), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert abs(total - results["results"]["loss_dense"]) < 1e-6
    assert abs(extra - results["results"]["moe_lb_loss_dense"]) < 1e-6
    bias = jax.tree.map(jnp.zeros_like, rest)  # the correction bias has no gradient
    ours = flat(maxtext.to_tree(nnx.merge(graph, grads, bias), scan_layers="_scanned" in name))
    theirs = load_file(CASES / name / "grads.safetensors")
    assert ours.keys() == theirs.keys()
    for path, gradient in theirs.items():
        assert max_error(ours[path], gradient) < 1e-5, path


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_bitwise_equal(name: str, scan: bool) -> None:
    """Also through the other layer stacking."""
    params, scanned = params_of(name), "_scanned" in name
    model = maxtext.from_tree(nested(params), config_of(name), nnxmoe.Strategy(stacking=stacking_of(scan)))
    identical(flat(maxtext.to_tree(model, scan_layers=scanned)), params)
    other = maxtext.from_tree(maxtext.to_tree(model, scan_layers=not scanned), config_of(name))
    identical(flat(maxtext.to_tree(other, scan_layers=scanned)), params)


def newer(kind: str) -> tuple[Any, Flat, Any]:
    """The config, parameters and stored shapes of a family that MaxText has since 0.2.5."""
    told = json.loads((CASES / f"{kind}.json").read_text())
    return nnxmoe.config_from_hf(told["config"]), newer_weights(told["scanned"]), told


def with_layers_second(tree: Flat) -> Flat:
    """Names and arrays of parameters without collections; stacked ones of nnx_aux have layers on axis 0."""
    return {
        name.partition("/")[2]: np.moveaxis(value, 0, 1) if name.endswith("gate/bias") else value
        for name, value in tree.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NEWER))
def test_newer_families_equal_maxtext(kind: str) -> None:
    """Logits; names, shapes and values there and back, scanned and not."""
    config, stored, told = newer(kind)
    model = maxtext.from_tree(nested(stored), config)
    # The norm after a recurrence amplifies rounding: with these numbers, chunks and steps differ by 1.6e-3.
    bound = 1e-3 if kind.startswith("qwen3") else 1e-4
    wanted = load_file(CASES / f"{kind}.safetensors")["logits"]
    assert max_error(model(newer_tokens(kind)).logits, wanted) < bound
    assert max_error(model(newer_tokens(kind)[:, ::-1]).logits[:, ::-1], wanted) > 100 * bound
    for name, array in flat(maxtext.to_tree(model)["params"]).items():
        if not name.endswith(("mhc_norm/scale", "_alpha")):  # these norms are multiplied into the weights after them
            assert max_error(array, with_layers_second(stored)[name]) <= ROUNDED.get(kind, 0), name
    tree = maxtext.to_tree(model, scan_layers=False)
    shapes = {name.partition("/")[2]: tuple(shape) for name, shape in told["unscanned"].items()}
    assert {name: array.shape for name, array in flat(tree["params"]).items()} == shapes
    equal_states(maxtext.from_tree(tree, config), model, kind)


ROUNDED = dict.fromkeys(("gemma4", "gemma4_moe"), 1e-6)  # embeddings are divided, and multiplied again


def equal_states(one: Any, other: Any, kind: str) -> None:
    states = [nnx.to_flat_state(nnx.state(model)) for model in (one, other)]
    for (path, mine), (_, theirs) in zip(*states, strict=True):
        assert max_error(np.asarray(mine.get_value()), np.asarray(theirs.get_value())) <= ROUNDED.get(kind, 0), path


def newer_files_on_a_mesh(folder: Path, kinds: list[str]) -> None:
    """Heads, columns and layers that MaxText has in one dimension are read in parts."""
    for kind in kinds:
        config, stored, _ = newer(kind)
        tensor = 1 if kind.startswith("gemma4") else 2  # one head for keys
        mesh = nnxmoe.make_mesh(fsdp=4 // tensor, expert=2, tensor=tensor)
        model = maxtext.from_tree(nested(stored), config)
        for scan in (False, True):
            where = folder / f"{kind} {scan}"
            maxtext.save(maxtext.from_tree(nested(stored), config, mesh=mesh), where, scan)
            equal_states(maxtext.load(where, mesh=mesh), model, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [["qwen3_5_moe"], ["deepseek_v32", "deepseek_v4", "gemma4", "gemma4_moe", "qwen3_next"]]
)
def test_newer_files_of_maxtext_on_a_mesh(eight: Callable[..., Any], tmp_path: Path, kinds: list[str]) -> None:
    eight(newer_files_on_a_mesh, tmp_path, kinds)


@pytest.mark.slow
def test_scanned_biases_of_routers_are_those_of_any_release(tmp_path: Path) -> None:
    """Until 0.2.4 in ``params``, with layers on axis 1; since then in a collection of their own, on axis 0."""
    config, stored, _ = newer("deepseek_v32")
    maxtext.save(maxtext.from_tree(nested(stored), config), tmp_path / "saved")
    found = {name: np.asarray(array) for name, array in maxtext.read(tmp_path / "saved").items()}
    name = "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"
    before, since = f"params/params/{name}", f"params/MoEBiasVar/{name}"
    assert np.array_equal(found[since], stored[f"nnx_aux/{name}"]) and np.array_equal(found[before], found[since].T)
    for without in (before, since):
        again = maxtext.from_tree(nested({n: a for n, a in found.items() if n != without}), config)
        assert np.array_equal(again.stacks[1].layers[0].moe.router.bias[...], found[since][0]), without
    trained = maxtext.from_tree(nested(found | {since: found[since] + 1}), config)  # as MaxText reads both
    assert np.array_equal(trained.stacks[1].layers[0].moe.router.bias[...], found[since][0] + 1)


def test_what_newer_families_of_maxtext_do_not_have_is_refused() -> None:
    config, stored, _ = newer("qwen3_next")
    tree = maxtext.to_tree(maxtext.from_tree(nested(stored), config), scan_layers=False)
    conv = tree["params"]["decoder"]["layers_0"]["attention"]["conv1d"]
    conv["kernel"] = conv["kernel"].T  # as Hugging Face has it
    with pytest.raises(
        CheckpointError, match=r"layers_0/attention/conv1d/kernel has shape \[40, 1, 4\], .* \[4, 1, 40\]"
    ):
        maxtext.from_tree(tree, config)
    config, stored, _ = newer("deepseek_v4")
    del (tree := nested(stored))["params"]["decoder"]["layers_0"]["mhc_mlp"]["post_beta"]
    layer = tree["params"]["decoder"]["layers_0"]
    layer["mhc_attention"]["mhc_norm"]["scale"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError, match=r"layers_0/mhc_mlp/post_beta is missing") as raised:
        maxtext.from_tree(tree, config)
    assert "decoder/layers_0/mhc_attention/mhc_norm/scale has shape [3]" in str(raised.value)
    for kind, changes, message in (
        ("deepseek_v4", {"compress_ratios": [0, 0, 4, 4, 128, 4, 128]}, "blocks of hca, csa layers.* csa, hca"),
        ("qwen3_next", {"num_hidden_layers": 6}, "scans qwen3_next in blocks of 4 layers, but this model has 6 layers"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "or differ in other ways"),
        ("qwen3_5_moe", {"layer_types": ["full_attention"] * 8}, "layers are global, global, .*: choose another"),
        ("gemma4", {"num_hidden_layers": 11}, "repeats blocks of local, local, local, local, local, global layers"),
        ("gemma4", {"hidden_size_per_layer_input": 4}, "gemma4_text has no counterpart of embed.norm.scale"),
    ):
        fields = json.loads((CASES / f"{kind}.json").read_text())["config"] | changes
        with pytest.raises(CheckpointError, match=message):
            config = nnxmoe.config_from_hf(fields)
            layout.maxtext_layout(model_class(config)(config, nnxmoe.Strategy(), rngs=None), True)


def test_accepted_tree_formats() -> None:
    """Boxed, ``params`` nested twice or absent, flat, JAX arrays, and MaxText 0.2.5 with a separate bias collection."""
    params, config = params_of("deepseek3_unscanned"), config_of("deepseek3_unscanned")
    tree = nested(params)
    boxed = jax.tree.map(lambda a: nn.LogicallyPartitioned(jnp.asarray(a), (None,) * a.ndim), tree)
    for form in (boxed, {"params": tree}, tree["params"], params, {"params": {"params": tree["params"]}, "step": 3}):
        form = {name: branch for name, branch in form.items() if name != "step"}
        identical(flat(maxtext.to_tree(maxtext.from_tree(form, config), scan_layers=False)), params)
    model = maxtext.from_tree(tree, config)
    for scan in (False, True):
        whole = flat(maxtext.to_tree(model, scan_layers=scan))
        apart = {name: array for name, array in whole.items() if not name.endswith("gate/bias")}
        aux = {name: array for name, array in whole.items() if name.endswith("gate/bias")}
        apart |= {name.replace("params/", "nnx_aux/model/"): array.T for name, array in aux.items()}
        assert aux and len(apart) == len(whole)
        apart["nnx_aux/model/decoder/dropout/rngs/params/count"] = np.uint32(7)
        identical(flat(maxtext.to_tree(maxtext.from_tree(nested(apart), config), scan_layers=scan)), whole)


def test_training_states_are_reduced_to_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """Optimizer moments have the same names and are skipped; other copies such as EMA weights are refused."""
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    tree = {"params": nested(params)}
    moments = jax.tree.map(np.zeros_like, tree["params"])
    state = {**tree, "opt_state": {"mu": moments, "count": np.int32(3)}, "step": np.int32(3)}
    model = maxtext.from_tree(state, config)
    identical(flat(maxtext.to_tree(model)), params)
    assert model.load_report is not None and model.load_report.skipped == {"state of training": ("opt_state", "step")}
    with pytest.raises(CheckpointError, match=r"ema/params/decoder/decoder_norm/scale \[32\] is not a parameter"):
        maxtext.from_tree({**tree, "ema": moments}, config)
    with pytest.raises(
        CheckpointError, match="two arrays are named decoder/decoder_norm/scale, one of them at params/params/"
    ):
        maxtext.from_tree({**tree["params"]["params"], "params": moments}, config)


@pytest.mark.parametrize("boxes", [0, 1, 2])
@pytest.mark.parametrize(
    "around",
    [
        *("", "params/", "params/params/", "model/", "state/model/", "model/params/", "train_state/params/"),
        *("items/params/params/", "default/train_state/model/", "target/model_params/", "train_state/items/"),
    ],
)
def test_nested_training_states_are_skipped_and_reported(around: str, boxes: int) -> None:
    """States of random generators and optimizers are skipped. Other arrays, such as EMA weights, raise by name."""
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    moments = {f"{name}/params/decoder/decoder_norm/scale": np.zeros(32, np.float32) for name in ("mu", "nu")}
    random = {
        "decoder/dropout/rngs/params/count": np.uint32(7),
        "decoder/layers/dropout/rngs/dropout/key": jax.random.key(0),
        "decoder/layers/self_attention/rngs/default/key": np.zeros((2, 2), np.uint32),
        "token_embedder/key": jax.random.key(1),
        "decoder/layers/dropout_key": jax.random.key(2),
        "decoder/count": np.uint32(3),
    }
    state = {around + name.removeprefix("params/"): array for name, array in params.items()}
    state |= {around + name: array for name, array in random.items()}
    state |= {f"optimizer/opt_state/0/{name}": array for name, array in moments.items()}
    state |= {f"{around}{name}": array for name, array in moments.items()}
    state |= {"opt_state": (1, "a tuple of Optax"), "optimizer/step": 3, "step": np.int32(3), "rngs/default/count": 1}
    state = {name + boxes * "/value": array for name, array in state.items()}
    model = maxtext.from_tree(nested(state), config)
    identical(flat(maxtext.to_tree(model)), params)
    assert model.load_report is not None
    skipped, generators = model.load_report.skipped, "state of random number generators"
    trained = {"opt_state", "optimizer", "step", f"{around}mu", f"{around}nu", f"{around}decoder/count"}
    assert set(skipped["state of training"]) == trained
    places = (
        "decoder/dropout/rngs",
        "decoder/layers/dropout/rngs",
        "decoder/layers/self_attention/rngs",
        "token_embedder/key",
        "decoder/layers/dropout_key",
    )
    assert set(skipped[generators]) == {"rngs", *(around + place for place in places)}
    for name in ("ema/decoder/decoder_norm/scale", "decoder/layers/rng_scale"):
        with pytest.raises(CheckpointError, match=f"{name} .* is not a parameter"):
            maxtext.from_tree(nested(state | {around + name: np.zeros(32)}), config)


@pytest.mark.parametrize("layers", [None, "equal"])
def test_pure_nnx_states_stack_router_biases_on_axis_0(layers: str | None) -> None:
    """``nnx.to_pure_dict`` drops the variable classes."""
    config, stored = config_of("deepseek3_unscanned"), params_of("deepseek3_unscanned")
    config = dataclasses.replace(config, num_hidden_layers=9 if layers else 3)
    model = randomise(model_class(config)(config, nnxmoe.Strategy(), rngs=nnx.Rngs(0))) if layers else None
    model = model or maxtext.from_tree(nested(stored), config)
    tree = flat(maxtext.to_tree(model))
    (bias,) = (name for name in tree if name.endswith("gate/bias"))
    assert (tree[bias].shape[0] == tree[bias].shape[1]) == bool(layers)
    state = nested({"model/" + name.removeprefix("params/"): a.T if name == bias else a for name, a in tree.items()})
    identical(flat(maxtext.to_tree(maxtext.from_tree(state, config))), tree)


def test_training_states_in_checkpoints_are_reported(tmp_path: Path) -> None:
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    state = {"step": np.int32(1), "opt_state": {"count": np.int32(1)}, "rngs": {"default": {"count": np.uint32(2)}}}
    tree = nested({name.removeprefix("params/"): array for name, array in params.items()})
    for around in ({"params": {"params": tree}}, {"model": tree | {"rngs": {"key": np.uint32(1)}}}, tree):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(folder, {**around, **state})
        model = maxtext.load(folder, config)
        identical(flat(maxtext.to_tree(model)), params)
        assert model.load_report is not None
        skipped = model.load_report.skipped
        assert set(skipped["state of training"]) == {"step", "opt_state"}
        assert set(skipped["state of random number generators"]) == {
            "rngs",
            *(["model/rngs"] if "model" in around else []),
        }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ema", {"params": tree, "ema": tree})
    with pytest.raises(CheckpointError, match="holds ema in addition to the parameters"):
        maxtext.load(tmp_path / "ema", config)


def test_variables_of_nnx_and_values_in_boxes_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """MaxText's own modules are NNX: an ``nnx.State`` has random keys, and biases of routers with layers on axis 0."""
    config, stored, _ = newer("deepseek_v32")
    wanted = maxtext.from_tree(nested(stored), config)

    class MoEBiasVar(nnx.Variable):
        """As MaxText's."""

    variables = {
        tuple(name.split("/")[1:]): (MoEBiasVar if name.startswith("nnx_aux") else nnx.Param)(array)
        for name, array in stored.items()
    }
    rngs = nnx.state(nnx.Rngs(0))
    state = nnx.merge_state(nnx.from_flat_state(variables), nnx.State({"decoder": {"dropout": {"rngs": rngs}}}))
    for tree in (state, {"params": state}):
        equal_states(maxtext.from_tree(tree, config), wanted, "deepseek_v32")
    boxed = jax.tree.map(lambda a: {"value": a}, nested(params_of("mixtral_scanned")))
    model = maxtext.from_tree(boxed, config_of("mixtral_scanned"))
    identical(flat(maxtext.to_tree(model)), params_of("mixtral_scanned"))


BOXES: dict[str, Callable[[Any], Any]] = {
    "value": lambda a: {"value": a, "sharding": None},
    "raw_value": lambda a: {"raw_value": a, "sharding": None},
    "names": lambda a: {"value": a, "names": ("embed", None), "mesh": None},
    "text": lambda a: {"value": {"raw_value": a, "sharding_names": "embed"}, "sharding": None},
    "rules": lambda a: {"value": a, "type": "Param", "sharding": jax.sharding.PartitionSpec("fsdp"), "rules": None},
    "both": lambda a: {"value": a, "raw_value": a + 1, "sharding": ("embed", None)},
    "nested": lambda a: {"value": {"raw_value": a}, "raw_value": a + 1},
}


def without_specs(tree: Any) -> Any:
    """Replace partition specs, which Orbax does not save, by texts."""
    spec = jax.sharding.PartitionSpec
    return jax.tree.map(lambda leaf: str(leaf) if isinstance(leaf, spec) else leaf, tree)


@pytest.mark.parametrize("box", BOXES)
def test_box_metadata_is_skipped(box: str, tmp_path: Path) -> None:
    """Boxes of old NNX releases, in trees and in files."""
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    boxed = jax.tree.map(lambda a: BOXES[box](jnp.asarray(a)), nested(params))
    state = {"params": boxed, "step": jnp.int32(3), "opt_state": (None, [{"mu": boxed, "count": jnp.int32(3)}])}
    wrapped = {"train_state": state, "batch_stats": {}, "global_step": jnp.int32(3)}
    key = {"dropout_rng": jnp.zeros(2, jnp.uint32)}
    tree = {"items": wrapped, "ema": None, "epoch": 3} | key
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", without_specs(wrapped) | key | {"name": "run", "ema": None})
    for model in (maxtext.from_tree(tree, config), maxtext.load(tmp_path / "run", config)):
        identical(flat(maxtext.to_tree(model)), params)
        assert model.load_report is not None
        skipped = {state: {name.removeprefix("items/") for name in n} for state, n in model.load_report.skipped.items()}
        training = {"train_state/step", "train_state/opt_state", "global_step"}
        assert skipped.pop("state of training") - {"epoch"} == training
        assert skipped.pop("state of random number generators") == set(key)
        assert set(skipped) == ({"raw_value of boxes that also have value"} if box in ("both", "nested") else set())


def test_text_beside_a_value_is_metadata() -> None:
    array, spec = np.ones(2), jax.sharding.PartitionSpec("fsdp")
    for text in ("embed", ("embed", None), None, spec):
        assert flatten_arrays({"x": {"value": {}, "sharding": text}}) == {}
        found = flatten_arrays({"x": {"value": {"qvalue": array, "scale": array}, "sharding": text}})
        assert found.keys() == {"x/value/qvalue", "x/value/scale"}
    with pytest.raises(ValueError, match=r"not JAX or NumPy arrays: x/bias \(object\)"):
        flatten_arrays({"x": {"value": {"kernel": array}, "bias": object()}})


def test_layers_scanned_on_the_first_axis() -> None:
    """MaxText's ``param_scan_axis: 0``; a part of them so is an error."""
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    first = {name: np.moveaxis(a, 1, 0) if "/layers/" in name else a for name, a in params.items()}
    identical(flat(maxtext.to_tree(maxtext.from_tree(nested(first), config))), params)
    name = "params/decoder/layers/MoeBlock_0/wo"
    with pytest.raises(CheckpointError, match="has shape"):
        maxtext.from_tree(nested(first | {name: params[name]}), config)


def test_prediction_layers_of_maxtext_are_skipped() -> None:
    params, config = params_of("deepseek3_unscanned"), config_of("deepseek3_unscanned")
    name, bias = "mtp_block/mtp_layer_1/mtp_1_projection/kernel", "mtp_block/mtp_layer_1/gate/bias"
    tree = nested(params | {f"params/{name}": np.ones((4, 2)), f"nnx_aux/{bias}": np.ones(3)})
    model = maxtext.from_tree(tree, config)
    identical(flat(maxtext.to_tree(model, scan_layers=False)), params)
    assert set(*model.load_report.skipped.values()) == {name, bias}


@pytest.mark.wrong_types
def test_what_is_no_tree_of_arrays_is_refused() -> None:
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    for tree in (None, [params], nnx.Rngs(0), np.ones(3)):
        with pytest.raises(ValueError, match=rf"the tree is a {type(tree).__name__}: pass nested dicts of arrays"):
            maxtext.from_tree(tree, config)
    name = "params/decoder/decoder_norm/scale"
    query = next(name for name in params if name.endswith("/query/kernel"))
    with pytest.raises(ValueError, match=rf"not JAX or NumPy arrays: {query} \(object\)"):
        maxtext.from_tree(nested(params | {query: object()}), config)
    with pytest.raises(ValueError, match=rf"not JAX or NumPy arrays: {name}/value \(object\)"):
        maxtext.from_tree(params | {name: {"value": object(), "sharding": None}}, config)
    for leaf in (None, "x", [1.0] * 32, nnx.relu):
        with pytest.raises(ValueError, match=rf"not JAX or NumPy arrays: {name} \({type(leaf).__name__}\)"):
            maxtext.from_tree(params | {name: leaf}, config)


def mixed(params: Flat, narrow: str) -> Flat:
    return {name: a.astype(jnp.bfloat16) if narrow in name else a for name, a in params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_layers_with_different_dtypes_stack_in_the_wider_one(scan: bool, tmp_path: Path) -> None:
    """One layer is bfloat16, the others float32."""
    params, config = params_of("mixtral_lbloss_unscanned"), config_of("mixtral_lbloss_unscanned")
    params = mixed(params, "layers_0/")
    model = maxtext.from_tree(nested(params), config, nnxmoe.Strategy(stacking=stacking_of(scan)))
    for stacked in (False, True):
        maxtext.save(model, tmp_path / f"{stacked}", stacked)
        again = maxtext.load(tmp_path / f"{stacked}", strategy=nnxmoe.Strategy(stacking=stacking_of(not scan)))
        found = flat(maxtext.to_tree(again, scan_layers=False, dtype="float32"))
        identical(found, {name: array.astype(np.float32) for name, array in params.items()})


@pytest.mark.slow
def test_activation_dtype_is_that_of_the_kernels(tmp_path: Path) -> None:
    """The dtype of the embedding has no influence."""
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    model = maxtext.from_tree(nested(mixed(params, "token_embedder")), config)
    assert model.dtype == jnp.float32 and model.embed.table.get_value().dtype == jnp.bfloat16
    nnxmoe.save(model, tmp_path / "a")
    nnxmoe.save_pretrained(model, tmp_path / "b")
    assert nnxmoe.load(tmp_path / "a").dtype == nnxmoe.from_pretrained(tmp_path / "b").dtype == jnp.float32
    tokens, tree = random_tokens(2, 5), maxtext.to_tree(model)
    bridged = LinenCausalLM(config, model.strategy, scan_layers=True).apply(tree, tokens).logits
    assert max_error(bridged, model(tokens).logits) < 1e-5


def test_second_load_onto_a_mesh_does_not_compile() -> None:
    model, mesh = build_tiny("llama", nnxmoe.Strategy(), rope_scaling=LLAMA_3), nnxmoe.make_mesh(fsdp=1)
    tree = maxtext.to_tree(model)
    for dtype in (None, "bfloat16"):
        maxtext.from_tree(tree, model.config, mesh=mesh, dtype=dtype)
        assert compiled_in(lambda dtype=dtype: maxtext.from_tree(tree, model.config, mesh=mesh, dtype=dtype)) == 0


# Wrong trees


def test_error_lists_every_mismatch() -> None:
    params, config = params_of("mixtral_lbloss_unscanned"), config_of("mixtral_lbloss_unscanned")
    layer = "params/decoder/layers_0/"
    del params[layer + "MoeBlock_0/wo"]
    params[layer + "extra/kernel"] = np.zeros((3, 4), np.float32)
    params[layer + "MoeBlock_0/gate/kernel"] = params[layer + "MoeBlock_0/gate/kernel"].T
    params[layer + "self_attention/query/kernel"] = np.zeros((32, 8, 6), np.float32)
    params["params/decoder/decoder_norm/scale"] = np.ones(32, np.int32)
    with pytest.raises(CheckpointError) as caught:
        maxtext.from_tree(nested(params), config)
    for fault in (
        "decoder/layers_0/MoeBlock_0/wo is missing, [8, 48, 32]",
        "decoder/layers_0/extra/kernel [3, 4] is not a parameter",
        "decoder/layers_0/MoeBlock_0/gate/kernel has shape [8, 32], but the config requires [32, 8] "
        "(it looks transposed)",
        "decoder/layers_0/self_attention/query/kernel has shape [32, 8, 6], but the config requires [32, 4, 12]",
        "decoder/decoder_norm/scale is int32; supported dtypes: float32, bfloat16, float16, float64",
    ):
        assert fault in str(caught.value)


def test_errors_list_at_most_twenty_arrays() -> None:
    params, config = params_of("mixtral_lbloss_unscanned"), config_of("mixtral_lbloss_unscanned")
    more = {f"params/decoder/layers_0/extra_{i}": np.zeros(2, np.float32) for i in range(25)}
    with pytest.raises(CheckpointError) as caught:
        maxtext.from_tree(nested(params | more), config)
    assert str(caught.value).count("is not a parameter") == 20 and "and 5 more" in str(caught.value)


def test_arrays_with_equal_layouts_are_not_copied() -> None:
    model = build_tiny("llama", nnxmoe.Strategy())
    table = np.asarray(model.embed.table.get_value())
    tree = maxtext.to_tree(model, scan_layers=False)["params"]
    assert np.shares_memory(tree["token_embedder"]["embedding"], table)
    assert np.shares_memory(
        tree["decoder"]["layers_0"]["mlp"]["wo"]["kernel"], np.asarray(model.stacks[0].layers[0].mlp.down.kernel[...])
    )


@pytest.mark.wrong_types
def test_invalid_arrays_and_configs() -> None:
    params, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    name = "params/token_embedder/embedding"
    with pytest.raises(CheckpointError, match=f"shapes without values: {name}"):
        maxtext.from_tree(params | {name: jax.ShapeDtypeStruct((3, 4), jnp.float32)}, config)
    with pytest.raises(
        CheckpointError, match="embedding is float8_e4m3fn; supported dtypes: float32, bfloat16, float16"
    ):
        maxtext.from_tree(params | {name: params[name].astype(jnp.float8_e4m3fn)}, config)
    for wrong in (None, {}):
        with pytest.raises(ValueError, match=r"pass the result of nnxmoe\.config_from_hf"):
            maxtext.from_tree(params, wrong)
    wide = {path: array.astype(np.float64) for path, array in params.items()}
    identical(flat(maxtext.to_tree(maxtext.from_tree(wide, config))), params)


def test_scanned_arrays_with_unscanned_names_are_refused() -> None:
    params = params_of("mixtral_scanned")
    renamed = {name.replace("/layers/", "/layers_0/"): array for name, array in params.items()}
    with pytest.raises(
        CheckpointError, match=r"layers_0/MoeBlock_0/wi_0 has shape \[8, 2, 32, 48\], but the config requires"
    ):
        maxtext.from_tree(nested(renamed), config_of("mixtral_scanned"))


# Hugging Face and back


def saved(model: nnxmoe.CausalLM, folder: Path) -> Flat:
    """Save in Hugging Face format and return the stored tensors."""
    nnxmoe.save_pretrained(model, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "scan"),
    [
        pytest.param(kind, scan, marks=pytest.mark.slow if scan != bool(i % 2) else [])
        for i, kind in enumerate(KINDS)
        for scan in (False, True)
    ],
)
def test_from_hugging_face_to_maxtext_and_back(kind: str, scan: bool, tmp_path: Path) -> None:
    """Tensors are bitwise equal, except grouped queries in float32: head width 6 divides them by sqrt(6), which rounds
    once per direction. From bfloat16 through a float32 tree these are equal too."""
    name, changes = KINDS[kind]
    start = build_tiny(name, nnxmoe.Strategy(), **changes)
    theirs = saved(start, tmp_path / "start")
    narrow = nnxmoe.from_pretrained(tmp_path / "start", dtype="bfloat16")
    for label, model, wanted in (("f32", start, theirs), ("bf16", narrow, saved(narrow, tmp_path / "narrow"))):
        tree = maxtext.to_tree(model, scan_layers=scan, dtype="float32")
        back = maxtext.from_tree(tree, model.config)
        if label == "f32":
            tokens = random_tokens(2, 9)
            assert max_error(forward(back, tokens).logits, forward(model, tokens).logits) < 2e-5
        ours = saved(back, tmp_path / f"back {label}")
        assert ours.keys() == wanted.keys()
        for tensor, array in wanted.items():
            if label == "f32" and "q_proj" in tensor and name != "deepseek_v3":
                assert np.all(np.abs(ours[tensor] - array) <= 2**-23 * np.abs(array)), tensor
            else:
                np.testing.assert_array_equal(ours[tensor].astype(array.dtype), array, err_msg=tensor)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama_3_rope_under_either_key_is_interleaved(key: str) -> None:
    """transformers 4 called the field ``type``; both spellings must give MaxText's arrangement of queries and keys."""
    fields = {name: value for name, value in LLAMA_3.items() if name != "rope_type"}
    model, tokens = build_tiny("llama", nnxmoe.Strategy(), rope_scaling=fields | {key: "llama3"}), random_tokens(2, 9)
    found = LinenCausalLM(model.config).apply(maxtext.to_tree(model, scan_layers=False), tokens).logits
    assert max_error(found, forward(model, tokens).logits) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [5.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_query_pre_attn_scalar_is_saved_or_folded_into_queries(scalar: float, tmp_path: Path) -> None:
    """The native format stores it in config.json; other formats scale the queries, with equal logits."""
    start, tokens = build_tiny("mixtral", nnxmoe.Strategy()), random_tokens(2, 5)
    nnxmoe.save(start, tmp_path / "ours")
    fields = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps(fields | {"query_pre_attn_scalar": scalar}))
    model = nnxmoe.load(tmp_path / "ours")
    wanted = model(tokens).logits
    assert model.config.query_pre_attn_scalar == scalar and max_error(wanted, start(tokens).logits) > 1e-2
    saved(model, tmp_path / "hub")
    assert "query_pre_attn_scalar" not in json.loads((tmp_path / "hub" / "config.json").read_text())
    back = maxtext.from_tree(maxtext.to_tree(model), start.config)
    for other in (nnxmoe.from_pretrained(tmp_path / "hub"), back):
        assert max_error(other(tokens).logits, wanted) < 2e-5
    with pytest.raises(ValueError, match="query_pre_attn_scalar is not supported for deepseek_v3"):
        build_tiny("deepseek_v3", nnxmoe.Strategy(), query_pre_attn_scalar=scalar)


def test_tree_has_the_model_dtypes_and_rounding_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A warning is logged if dividing the queries rounds them."""
    exact = build_tiny("mixtral", nnxmoe.Strategy(), head_dim=4)
    maxtext.to_tree(exact, dtype="bfloat16")
    model = build_tiny("mixtral", nnxmoe.Strategy())
    maxtext.to_tree(model)
    assert not caplog.text
    assert {str(a.dtype) for a in flat(maxtext.to_tree(model, dtype="bfloat16")).values()} == {"bfloat16"}
    assert "queries divided by sqrt(8) are rounded to bfloat16" in caplog.text
    narrow = maxtext.from_tree(maxtext.to_tree(model, dtype="bfloat16"), model.config)
    assert narrow.dtype == jnp.bfloat16
    identical(flat(maxtext.to_tree(narrow)), flat(maxtext.to_tree(model, dtype="bfloat16")))


# Files


@pytest.mark.parametrize(
    "where", ["orbax_to_maxtext", "orbax_to_maxtext/0", "orbax_to_maxtext/0/items", "orbax_param_only"]
)
def test_load_checkpoints_written_by_maxtext(where: str) -> None:
    case = CASES / "mixtral_scanned"
    model = maxtext.load(case / where, config_of(case.name))
    identical(flat(maxtext.to_tree(model)), params_of(case.name))


@pytest.mark.slow
@pytest.mark.parametrize("parameters_only", [False, True])
def test_saved_checkpoints_have_maxtext_structure(tmp_path: Path, parameters_only: bool) -> None:
    """Orbax's tree metadata and the file names are equal."""
    case = CASES / "mixtral_scanned"
    model = maxtext.from_tree(params_of(case.name), config_of(case.name))
    maxtext.save(model, tmp_path / "new", parameters_only=parameters_only)
    place = "" if parameters_only else "0/items"
    ours, theirs = (
        tmp_path / "new" / place,
        case / ("orbax_param_only" if parameters_only else "orbax_to_maxtext/0/items"),
    )
    assert json.loads((ours / "_METADATA").read_text()) == json.loads((theirs / "_METADATA").read_text())
    files = {path.name for path in theirs.iterdir()} | ({"config.json"} if parameters_only else set())
    assert {path.name for path in ours.iterdir()} == files and (tmp_path / "new" / "config.json").is_file()
    for config in (model.config, None):  # None: read from the config.json saved with it
        identical(flat(maxtext.to_tree(maxtext.load(tmp_path / "new", config))), params_of(case.name))
    path = tmp_path / "new" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_value": 3}))
    assert "mask_value 3" in maxtext.load(tmp_path / "new").load_report.notes[0]
    with pytest.raises(CheckpointError, match="new"):
        maxtext.save(model, tmp_path / "new")


def test_items_of_any_name_and_trees_without_params(tmp_path: Path) -> None:
    """Orbax calls an item ``default`` if its caller does not name it; MaxText's NNX format has no ``params``."""
    case, wanted = CASES / "mixtral_scanned", params_of("mixtral_scanned")
    config = config_of(case.name)
    for where in ("step/4/default", "item/state", "bare/4"):
        shutil.copytree(case / "orbax_to_maxtext" / "0" / "items", tmp_path / where)
        folder = tmp_path / where.split("/")[0]
        assert detect_format(str(folder)) == "maxtext"
        identical(flat(maxtext.to_tree(maxtext.load(folder, config))), wanted)
    shutil.copytree(tmp_path / "item/state", tmp_path / "item/other")
    for read in (lambda folder: maxtext.load(folder, config), lambda folder: detect_format(str(folder))):
        with pytest.raises(CheckpointError, match="item holds other, state: pass the folder of one of these"):
            read(tmp_path / "item")
    tree = jax.tree.map(lambda a: {"value": jnp.asarray(a)}, nested(wanted)["params"])
    ocp.PyTreeCheckpointer().save(tmp_path / "nnx", tree)
    identical(flat(maxtext.to_tree(maxtext.load(tmp_path / "nnx", config))), wanted)
    count = {"decoder": {"dropout": {"rngs": {"count": jnp.uint32(7)}}}}  # a scalar, which has no chunks
    ocp.PyTreeCheckpointer().save(tmp_path / "run", {"params": nested(wanted)["params"], "nnx_aux": count})
    identical(flat(maxtext.to_tree(maxtext.load(tmp_path / "run", config))), wanted)
    ocp.PyTreeCheckpointer().save(tmp_path / "odd", {"weights": np.ones(3)})
    with pytest.raises(CheckpointError, match="odd has no 'params', only 'weights'"):
        maxtext.load(tmp_path / "odd", config)


@pytest.mark.parametrize("chunked", [False, True])
def test_checkpoints_written_by_orbax_v1(chunked: bool, tmp_path: Path) -> None:
    """MaxText 0.2.5 saves parameters with ``ocp.save``, and the states of a run with a ``Checkpointer``."""
    wanted, config = params_of("mixtral_scanned"), config_of("mixtral_scanned")
    params = {"params": jax.tree.map(jnp.asarray, nested(wanted))}
    rngs = {"model": {"decoder": {"rngs": {"dropout": {"count": jnp.uint32(7), "key": jnp.ones(2, jnp.uint32)}}}}}
    moments = {"mu": params["params"], "nu": params["params"], "count": jnp.int32(8)}
    state = {"step": jnp.int32(8), **params, "nnx_aux": rngs, "opt_state": {"0": moments, "1": {}}}
    context = ocp_v1.Context()
    context.array.saving.use_ocdbt = context.array.saving.use_zarr3 = not chunked
    if chunked:
        context.array.saving.storage_options.chunk_byte_size = 512
    with context:
        ocp_v1.save(tmp_path / "parameters", params, checkpointable_name="items")
        ocp_v1.save(tmp_path / "unnamed", params)
    with ocp_v1.training.Checkpointer(tmp_path / "run", context=context) as checkpointer:
        for step in (8, 12):
            checkpointer.save_checkpointables(step, {"items": state}, custom_metadata={"scan_layers": True})
    for folder in ("parameters", "parameters/items", "unnamed", "run", "run/8", "run/8/items"):
        assert detect_format(str(tmp_path / folder)) == "maxtext"
        identical(flat(maxtext.to_tree(maxtext.load(tmp_path / folder, config))), wanted)


def test_orbax_v1_reads_saved_checkpoints(tmp_path: Path) -> None:
    """As MaxText 0.2.5 reads them: a step by the name of its item, and the parameter-only form as a flat tree."""
    model = maxtext.from_tree(nested(params_of("mixtral_scanned")), config_of("mixtral_scanned"))
    maxtext.save(model, tmp_path / "run")
    maxtext.save(model, tmp_path / "parameters", parameters_only=True)
    wanted = maxtext.to_tree(model)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"params": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), wanted)}
    context = ocp_v1.Context()
    context.pytree.loading.partial_load = True
    with context, ocp_v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.latest is not None and checkpointer.latest.step == 0
        step = ocp_v1.load(tmp_path / "run" / "0", abstract, checkpointable_name="items")
        parameters: Any = ocp_v1.load(tmp_path / "parameters", abstract, checkpointable_name=None)
    for loaded in (step, parameters):
        identical(flat(loaded["params"]), flat(wanted))


def test_urls_are_no_paths_below_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, url = build_tiny("llama", nnxmoe.Strategy()), "gs://bucket/run"
    saves = [lambda save=save: save(model, url) for save in (maxtext.save, nnxmoe.save, nnxmoe.save_pretrained)]
    loads = [lambda: maxtext.load(url, model.config), lambda: nnxmoe.load(url), lambda: nnxmoe.from_pretrained(url)]
    for call in (*saves, *loads, lambda: detect_format(url)):
        with pytest.raises(ValueError, match="gs://bucket/run is a URL: pass a local path"):
            call()
    with pytest.raises(ValueError, match="is a URL: pass the repository's id, such as 'org/name'"):
        nnxmoe.from_pretrained("https://huggingface.co/org/name")
    assert not list(tmp_path.iterdir())


def test_incomplete_step_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES / "mixtral_scanned"
    shutil.copytree(case / "orbax_to_maxtext" / "0", tmp_path / "007")
    identical(flat(maxtext.to_tree(maxtext.load(tmp_path, config_of(case.name)))), params_of(case.name))
    assert not caplog.text
    (tmp_path / "12" / "items").mkdir(parents=True)
    identical(flat(maxtext.to_tree(maxtext.load(tmp_path, config_of(case.name)))), params_of(case.name))
    assert "reading step 007; incomplete steps: 12" in caplog.text


DAMAGES: dict[str, Any] = {
    "_METADATA": [b"{}", b"[]", b"null", b"", b"{", b"\xff\x00", b'{"tree_metadata": null}', b'{"tree_metadata": 5}'],
    "manifest.ocdbt": [b"", b"\x00" * 40],
}


@pytest.mark.parametrize("file", DAMAGES)
def test_damaged_files_are_named(file: str, tmp_path: Path) -> None:
    where = shutil.copytree(CASES / "mixtral_scanned" / "orbax_param_only", tmp_path / "a")
    for damage in DAMAGES[file]:
        (where / file).write_bytes(damage)
        with pytest.raises(CheckpointError, match=f"{where} ") as caught:
            maxtext.load(where, config_of("mixtral_scanned"))
        assert len(str(caught.value)) < 600


def test_missing_array_files_are_reported(tmp_path: Path) -> None:
    where = shutil.copytree(CASES / "mixtral_scanned" / "orbax_param_only", tmp_path / "a")
    for path in where.rglob("d/*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="is damaged, or not an Orbax checkpoint"):
        maxtext.load(where, config_of("mixtral_scanned"))


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no Orbax checkpoint"):
        maxtext.load(tmp_path, config_of("mixtral_scanned"))
