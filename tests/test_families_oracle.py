"""Random configurations of every row of `tests.support.families` against a live transformers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxmoe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file  # noqa: E402

from tests.support.arrays import max_error  # noqa: E402
from tests.support.families import FAMILIES, NEW, PROMPT, fused, load, tokens_of, write_config  # noqa: E402
from tests.support.freeze import frozen  # noqa: E402
from tests.support.reference import (  # noqa: E402
    CLOSE,
    MARGIN,
    Seen,
    greedy_theirs,
    load_theirs,
    run_theirs,
    write_theirs,
)
from tests.support.running import MODEL_TOLERANCE, feed  # noqa: E402
from tests.support.tiny import Fields, write_checkpoint  # noqa: E402

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

EACH = max(4, -(-45 // len(FAMILIES)))  # configurations per family: at least 45 in all
CASES = [(kind, number) for kind in FAMILIES for number in range(EACH)]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def hub_style(fields: Fields, kind: Any) -> Fields:
    """config.json of transformers 5 as the hub has it: the older names, without fields that have their defaults."""
    defaults = kind().to_dict()
    left = {k: v for k, v in fields.items() if k == "model_type" or v != defaults.get(k, ...)}
    rope = dict(left.pop("rope_parameters", defaults["rope_parameters"]))
    left["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        left["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    turned = rope.pop("rope_type")
    left["rope_scaling"] = None if turned == "default" else {"type": turned, **rope}
    left["torch_dtype"] = left.pop("dtype", "float32")
    if "num_local_experts" in left:
        left["num_experts"] = left.pop("num_local_experts")
    return left


def unsettled(ours: Any, model: nnxmoe.CausalLM, theirs: Seen, mask: np.ndarray) -> np.ndarray:
    """Tokens ``[B, T]`` from the first choice between experts on that rounding decides; asserts that all other choices
    and all weights are equal."""
    odd = np.zeros(mask.shape, bool)
    layers = [layer for stack in model.stacks for layer in stack.layers]
    assert ours.routing.keys() == theirs.experts.keys()
    for number, routing in ours.routing.items():
        experts, order = np.asarray(routing.experts), np.argsort(np.asarray(routing.experts), axis=-1)
        experts = np.take_along_axis(experts, order, -1)
        bias = layers[number].moe.router.bias
        choice = np.asarray(routing.scores) + (0 if bias is None else np.asarray(bias[...]))
        for row in np.argwhere((experts != theirs.experts[number]).any(-1) & (mask > 0) & ~odd):
            swapped = set(experts[tuple(row)]) ^ set(theirs.experts[number][tuple(row)])
            scores = choice[tuple(row)][list(swapped)]
            assert np.ptp(scores) < CLOSE, (number, row, scores)
            odd[tuple(row)] = True
        odd = np.logical_or.accumulate(odd, axis=1)
        weights = np.take_along_axis(np.asarray(routing.weights), order, -1)
        assert np.abs(weights - theirs.weights[number])[(mask > 0) & ~odd].max(initial=0) < 5e-5, number
    return odd


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_random_configurations(kind: str, number: int, tmp_path: Path, record_property: Any) -> None:
    """Logits and routing, padded or not, in both styles of config.json and from fused experts; single steps with a
    cache; greedy tokens; and what is saved, which transformers loads again."""
    family, rng = FAMILIES[kind], random.Random(f"{kind} {number}")
    given = family.draw(rng)
    folder = tmp_path / "theirs"
    weights = write_theirs(folder, family.theirs, given, seed=number)
    reference = load_theirs(folder, family.theirs)
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    if number % 2:
        fields = hub_style(fields, transformers.CONFIG_MAPPING[family.theirs])
    write_config(folder, fields)
    if number % 3 == 2:
        write_checkpoint(folder, fields, fused(weights))
    scanned = number % 4 == 3
    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned()) if scanned else nnxmoe.Strategy()
    model = nnxmoe.from_pretrained(folder, strategy=strategy)
    assert not model.load_report.unexpected
    tokens, mask = tokens_of(given["vocab_size"], seed=number)
    unrolled = nnxmoe.unscan(model)
    for name, used in (("unpadded", np.ones_like(mask)), ("padded", mask)):
        theirs = run_theirs(reference, tokens, used)
        out = model(tokens, used, return_routing=True)
        settled = (used > 0) & ~unsettled(out, unrolled, theirs, used)
        assert settled.sum() > 0.5 * used.sum(), "too close to call: change the seed"
        error = max_error(out.logits, theirs.logits, settled)
        record_property(f"logits error, {name}", error)
        assert error < MODEL_TOLERANCE, name
        stepwise, _ = feed(model, tokens, [1] * tokens.shape[1], mask=used, capacity=tokens.shape[1])
        assert max_error(stepwise, out.logits, settled) < MODEL_TOLERANCE, name
        wanted, margins = greedy_theirs(reference, tokens, used)
        ids = nnxmoe.generate(model, tokens[:, :PROMPT], used[:, :PROMPT], NEW, eos_token_id=None)
        clear = np.logical_and.accumulate(margins > MARGIN, axis=1) & settled[:, PROMPT - 1 : PROMPT]
        assert np.array_equal(ids[:, PROMPT:][clear], wanted[clear]), name
    nnxmoe.save_pretrained(model, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(saved[name].tobytes() == weights[name].tobytes() for name in weights)
    again = load_theirs(tmp_path / "again", family.theirs)
    assert max_error(run_theirs(again, tokens, mask).logits, theirs.logits, mask) < MODEL_TOLERANCE / 4


def test_enough_configurations() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("kind", FAMILIES)
def test_frozen_cases_are_current(kind: str) -> None:
    """The installed transformers gives the stored outputs."""
    arrays, _ = frozen(kind)
    stored = load(kind).arrays
    assert arrays.keys() == stored.keys()
    for name, array in arrays.items():
        assert np.allclose(array, stored[name], atol=1e-5), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_of_absent_fields(kind: str) -> None:
    """Fields that both configs have are equal where config.json is empty."""
    required = FAMILIES[kind].required
    theirs = transformers.CONFIG_MAPPING[FAMILIES[kind].theirs](**required)
    ours = nnxmoe.config_from_hf({"model_type": kind} | required)
    own = "head_dim layer_types mlp_layer_types mlp_only_layers rope_parameters rope_theta rope_scaling dtype"
    skipped = {"architectures", "model_type", "num_key_value_heads", *own.split()}
    for name in vars(ours).keys() - skipped:
        if hasattr(theirs, name) and not (name == "sliding_window" and theirs.sliding_window is None):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.kv_heads == theirs.num_key_value_heads
