"""Comparison of a model with transformers reading the same checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import nnxmoe
from tests.support.arrays import max_error
from tests.support.families import NEW, PROMPT, positions_of, tokens_of
from tests.support.reference import CLOSE, MARGIN, Seen, greedy_theirs, load_theirs, run_theirs
from tests.support.running import MODEL_TOLERANCE, feed
from tests.support.tiny import Weights


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


def check_outputs(model: nnxmoe.CausalLM, reference: Any, seed: int, record: Callable[[str, object], None]) -> None:
    """Logits and routing, padded or not; single steps with a cache; greedy tokens."""
    tokens, mask = tokens_of(model.config.vocab_size, seed=seed)
    unrolled = nnxmoe.unscan(model)
    for name, used in (("unpadded", np.ones_like(mask)), ("padded", mask)):
        theirs = run_theirs(reference, tokens, used)
        out = model(tokens, used, positions_of(used), return_routing=True)
        settled = (used > 0) & ~unsettled(out, unrolled, theirs, used)
        assert settled.sum() > 0.5 * used.sum(), "too close to call: change the seed"
        error = max_error(out.logits, theirs.logits, settled)
        record(f"logits error, {name}", error)
        assert error < MODEL_TOLERANCE, name
        stepwise, _ = feed(model, tokens, [1] * tokens.shape[1], mask=used, capacity=tokens.shape[1])
        assert max_error(stepwise, out.logits, settled) < MODEL_TOLERANCE, name
        wanted, margins = greedy_theirs(reference, tokens, used)
        ids = nnxmoe.generate(model, tokens[:, :PROMPT], used[:, :PROMPT], NEW, eos_token_id=None)
        clear = np.logical_and.accumulate(margins > MARGIN, axis=1) & settled[:, PROMPT - 1 : PROMPT]
        assert np.array_equal(ids[:, PROMPT:][clear], wanted[clear]), name


def check_saved(model: nnxmoe.CausalLM, reference: Any, weights: Weights, theirs: str, folder: Path) -> None:
    """The saved tensors are those that transformers saved, and transformers loads them again. ``theirs`` is its
    model_type."""
    nnxmoe.save_pretrained(model, folder)
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(saved[name].tobytes() == weights[name].tobytes() for name in weights)
    tokens, mask = tokens_of(model.config.vocab_size)
    wanted, found = (run_theirs(each, tokens, mask).logits for each in (reference, load_theirs(folder, theirs)))
    assert max_error(found, wanted, mask) < MODEL_TOLERANCE / 4
