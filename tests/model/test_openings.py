"""Layers of forms that no family has yet go through every path of a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import models
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.request import RequestOptions
from nnxmoe.layers.context import OutputRequest
from nnxmoe.model.layer import LayerOutput
from nnxmoe.models import registry
from nnxmoe.moe.router import Router
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.openings import OPENINGS, WINDOW, OpenConfig, Openings, Parallel
from tests.support.running import PART_TOLERANCE, feed, randomise
from tests.support.tiny import random_tokens

CONFIG = OpenConfig(
    vocab_size=59, hidden_size=24, intermediate_size=20, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rope_theta=1e4,
)  # fmt: skip
TOKENS = random_tokens(2, 13) % 59


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "REGISTERED", {})
    models.register(OPENINGS)
    yield


@pytest.fixture(scope="module")
def model() -> Openings:
    return randomise(Openings(CONFIG, rngs=nnx.Rngs(0)))


class Layered(Parallel):
    """The two branches in turn."""

    def __call__(self, x: Any, context: Any, cache: Any = None) -> Any:
        more, cache = self.attention_branch(x.x, context, cache)
        x = x._replace(x=x.x + more)
        return LayerOutput(x._replace(x=x.x + self.feed_forward_branch(x.x, context).y), cache, None)


@pytest.mark.slow
def test_every_opening_changes_the_output(model: Openings) -> None:
    """Rotations, gate, post norms, second stream, state, and the ids that the router reads."""
    wanted, graph = model(TOKENS).logits, nnx.split(model)
    assert len(model.ropes) == 2 and [stack.depth for stack in model.stacks] == [2, 1, 1, 2]
    rotary = model.stacks[0].layers[0].attention.rotary
    changes: list[Any] = [
        lambda m: setattr(m.stacks[0].layers[0].attention, "rotary", None),
        lambda m: setattr(m.stacks[2].layers[0].attention, "rotary", rotary),
        lambda m: setattr(m.stacks[1].layers[0].attention, "gate", None),
        lambda m: setattr(m.stacks[1].layers[0], "feed_forward_post_norm", None),
        lambda m: setattr(m.stacks[3].layers[0], "__class__", Layered),
        lambda m: setattr(m.stacks[0].layers[1].moe.router, "__class__", Router),
    ]
    for number, change in enumerate(changes):
        other = nnx.merge(*graph)
        change(other)
        assert max_error(other(TOKENS).logits, wanted) > 1e-4, number


@pytest.mark.slow
def test_a_recurrence_is_what_it_says(model: Openings) -> None:
    layer, x = model.stacks[3].layers[0].attention, jax.random.normal(jax.random.key(0), (2, 7, 24))
    taps, decay = np.asarray(layer.taps(x)), 1 / (1 + np.exp(-np.asarray(layer.decay(x))))
    h, states = np.zeros((2, 24)), []
    for t in range(7):
        conv = sum(taps[:, t - i, WINDOW - 1 - i] for i in range(WINDOW) if t >= i)
        h = decay[:, t] * h + (1 - decay[:, t]) * np.tanh(conv)
        states.append(h)
    ours, _ = layer(x, nnxmoe.Context.from_lengths(CONFIG.rope, 2, 7))
    assert max_error(ours, layer.o(jnp.asarray(np.stack(states, 1), jnp.float32))) < PART_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_openings_hold_in_chunks_padding_and_segments(model: Openings, scan: bool) -> None:
    """Cached chunks, rows of different length with padding on either side, packed documents, and the last token."""
    whole = model(TOKENS, return_hidden=True)
    assert [h.shape for h in whole.hidden] == [(2, 13, 24)] * 8
    if scan:
        scanned = Openings(CONFIG, nnxmoe.Strategy(stacking=nnxmoe.Scanned()), rngs=nnx.Rngs(0))
        for name in ("embed", "norm", "head"):
            nnx.update(getattr(scanned, name), nnx.state(getattr(model, name)))
        for stack, ours in zip(scanned.stacks, model.stacks, strict=True):
            values = [nnx.to_flat_state(nnx.state(layer)) for layer in ours.layers]
            for (_, variable), *same in zip(nnx.to_flat_state(nnx.state(stack.layer)), *values, strict=True):
                variable.set_value(jnp.stack([one.get_value() for _, one in same]))
        model = scanned
        assert max_error(model(TOKENS).logits, whole.logits) < PART_TOLERANCE
        assert max_error(nnxmoe.unscan(model)(TOKENS).logits, whole.logits) < PART_TOLERANCE
    logits, _ = feed(model, TOKENS, [5, 1, 4, 3], mask=None, capacity=20)
    assert max_error(logits, whole.logits) < 5 * PART_TOLERANCE
    for mask in (np.arange(13)[None] < [[13], [9]], np.arange(13)[None] >= [[0], [4]]):
        alone = model(TOKENS[1:, mask[1]]).logits
        chunks, _ = feed(model, TOKENS, [6, 7], mask=mask.astype(np.int32), capacity=20)
        for found in (model(TOKENS, attention_mask=mask).logits, chunks):
            assert max_error(found[1][mask[1]], alone[0]) < 5 * PART_TOLERANCE
    halves = np.concatenate([model(TOKENS[:, :6]).logits, model(TOKENS[:, 6:]).logits], axis=1)
    segment, places = (np.arange(13) >= 6)[None].repeat(2, 0), np.r_[:6, :7][None].repeat(2, 0)
    packed = model(TOKENS, segment_ids=segment.astype(np.int32), positions=places).logits
    assert max_error(packed, halves) < 5 * PART_TOLERANCE
    last = model.body(jnp.asarray(TOKENS), request=OutputRequest(last_token_only=True)).x
    assert max_error(last, model.body(jnp.asarray(TOKENS)).x[:, -1:]) < PART_TOLERANCE


@pytest.mark.slow
def test_openings_are_generated(model: Openings) -> None:
    """Greedy ids are those of whole passes: alone, in an engine, and with drafts taken back."""
    prompts, new = [[3, 4, 5, 3, 4, 5, 3, 4], [7, 1, 30]], 8
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new):
            ids.append(int(jnp.argmax(model(np.asarray([ids])).logits[0, -1])))
        wanted.append(ids[len(prompt) :])
    for draft in (None, nnxmoe.PromptLookup(3)):
        engine = Engine(model, slots=2, capacity=40, draft=draft)
        requests = [engine.submit(prompt, RequestOptions(new, stop_ids=None)) for prompt in prompts]
        engine.run()
        assert [request.ids for request in requests] == wanted, draft


@pytest.mark.slow
def test_openings_are_adapted_and_saved(model: Openings, tmp_path: Path) -> None:
    before, adapted = model(TOKENS).logits, nnx.merge(*nnx.split(model))
    lora.add(adapted, 2, rngs=nnx.Rngs(0))
    randomise(adapted, seed=1)
    changed = adapted(TOKENS).logits
    assert max_error(changed, before) > 1e-2
    lora.merge(adapted, keep=False)
    assert max_error(adapted(TOKENS).logits, changed) < 1e-4
    nnxmoe.save_pretrained(adapted, tmp_path / "hf")
    nnxmoe.save(adapted, tmp_path / "ours")
    for loaded in (nnxmoe.from_pretrained(tmp_path / "hf"), nnxmoe.load(tmp_path / "ours")):
        assert max_error(loaded(TOKENS).logits, adapted(TOKENS).logits) == 0
