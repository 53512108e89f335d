"""Runs models compiled, eagerly or chunk by chunk, and fills them with random parameters."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.generation import decode
from nnxmoe.generation.request import RequestOptions
from nnxmoe.layers.context import Context

MODEL_TOLERANCE = 2e-4
PART_TOLERANCE = 1e-5


def compiled_in(run: Callable[[], Any]) -> int:
    """Number of programs that a call compiles."""
    count = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            count.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(count)


def tabulate(model: nnx.Module, *inputs: Any, **options: Any) -> str:
    """`nnx.tabulate`, without the inherited methods that it leaves on classes (flax 0.12.8).

    With them, `super()` in a family with several base classes skips classes.
    """
    classes = {base for _, part in nnx.iter_modules(model) for base in type(part).__mro__}
    before = {base: {*vars(base)} for base in classes}
    try:
        return nnx.tabulate(model, *inputs, **options)
    finally:
        for base in classes:
            for name in {*vars(base)} - before[base]:
                delattr(base, name)


def of_valid(valid: Any) -> Context | None:
    """The context of a `MoE` alone, with these tokens real; None: all are."""
    if valid is None:
        return None
    return Context(jnp.arange(valid.shape[1]), jnp.asarray(valid))


def set_rope(model: nnxmoe.CausalLM, rope: Any) -> None:
    """Gives every attention another rotation."""
    for _, part in nnx.iter_graph(model):
        if hasattr(part, "rotary"):
            part.rotary = rope


def forward(model: nnxmoe.CausalLM, tokens: Any, **arrays: Any) -> nnxmoe.Output:
    """Calls the model under jit, compiled once per shape, and returns every output."""
    return model(tokens, **arrays, return_routing=True, return_hidden=True)


def eager_logits(model: nnxmoe.CausalLM, tokens: Any, mask: Any = None) -> jax.Array:
    """Logits without jit: faster for a model that is used once, and independent of jit caches."""
    return model.logits(model.body(tokens, mask).x)


def feed(
    model: nnxmoe.CausalLM, tokens: np.ndarray, chunks: Sequence[int], *, mask: np.ndarray | None, capacity: int
) -> tuple[np.ndarray, Any]:
    """Feeds tokens to an empty cache in chunks; returns the logits and the final cache."""
    assert sum(chunks) == tokens.shape[1], (chunks, tokens.shape)
    cache, start, logits = model.empty_cache(tokens.shape[0], capacity), 0, []
    mask = np.ones(tokens.shape, np.int32) if mask is None else mask
    for count in chunks:
        part = slice(start, start + count)
        out = model(tokens[:, part], attention_mask=mask[:, part], cache=cache)
        cache, start = out.cache, start + count
        logits.append(np.asarray(out.logits))
    return np.concatenate(logits, axis=1), cache


def variables(model: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """Yields the dotted path and the variable, for all variables of a model."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        yield ".".join(map(str, path)), variable


def randomise(model: Any, seed: int = 0) -> Any:
    """Fills every variable in place: kernels keep their input's scale, norms are around 1, biases are not zero."""
    rng, state = np.random.default_rng(seed), []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        inputs = variable.get_metadata()["inputs"]
        value = rng.standard_normal(variable.shape)
        if path[-1] == "scale":
            value = 1 + 0.3 * value
        elif path[-1] == "bias":
            value = 0.3 * value
        elif inputs is not None:
            value = value / math.sqrt(math.prod(variable.shape[-inputs:]))
        state.append((path, variable.replace(jnp.asarray(value, variable.dtype))))
    nnx.update(model, nnx.from_flat_state(state))
    return model


def greedy_ids(model: Any, tokens: np.ndarray, new: int) -> Iterator[np.ndarray]:
    """Yield the next id of every row ``new`` times, by the loop of ``generate`` and ``stream``."""
    engine, requests = decode._requests(model, tokens, None, RequestOptions(new, stop_ids=None))
    for place in range(new):
        while place >= min(len(request.ids) for request in requests):
            engine.step()
        yield np.array([request.ids[place] for request in requests], np.int32)
    decode._report_dropped(engine)
