"""Explain why outputs differ: two swapped parameters, or the step of an MoE block that differs."""

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.linen.mapping import general_linen_name
from nnxmoe.moe.block import LatentMoE, MoE
from nnxmoe.moe.dispatch import Dense
from nnxmoe.moe.router import Routing
from nnxmoe.testing.differences import Pair, measure_gap
from nnxmoe.testing.sides import Arguments, LinenSide, NNXSide

_SWAPS = 24  # maximum number of pairs of parameters or modules to try
_TOKENS = 32  # maximum number of tokens whose routing is compared
_LARGE = 1 << 28  # bytes of parameters; larger modules are not rerun


def find_exchange(
    linen_side: LinenSide, params: Mapping[str, Any], arguments: Arguments, output: Any, tolerance: float
) -> list[str]:
    """Return a hint if Linen's output agrees after swapping two parameters or modules of equal shapes.

    Returns an empty list if no swap makes the outputs agree.
    """
    stored = {name: row(params) for name, row in linen_side.rows.items()}
    if sum(array.nbytes for array in stored.values()) > _LARGE:
        return []
    run = jax.jit(lambda stored, floats: linen_side.apply(stored, arguments.with_floats(floats)))
    for first, second, swap in itertools.islice(_swaps(stored), _SWAPS):
        leaves = jax.tree.leaves(run({name: stored[swap.get(name, name)] for name in stored}, arguments.floats))
        if all(measure_gap(a, b).error <= tolerance for a, b in zip(jax.tree.leaves(output), leaves, strict=True)):
            return [f"the outputs agree if Linen's {first} and {second} are exchanged: exchange them in the mapping"]
    return []


def _swaps(stored: Mapping[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    """List pairs of parameters or modules, each with the renaming that swaps them in all layers.

    The most similar names come first.
    """
    units: dict[str, dict[tuple[int | None, str], str]] = defaultdict(dict)
    for name in stored:
        general, layer = general_linen_name(name)
        folder, _, leaf = general.rpartition("/")
        units[general][layer, ""] = name
        if folder:
            units[folder][layer, leaf] = name
    swaps: list[tuple[str, str, dict[str, str]]] = []
    for (first, names), (second, second_names) in itertools.combinations(units.items(), 2):
        shapes = [{place: stored[name].shape for place, name in unit.items()} for unit in (names, second_names)]
        if shapes[0] == shapes[1] and not set(names.values()) & set(second_names.values()):
            swap = {name: second_names[place] for place, name in names.items()}
            swaps.append((first, second, swap | {b: a for a, b in swap.items()}))
    return sorted(swaps, key=lambda pair: -len(os.path.commonprefix(pair[:2])))


def explain_routing(nnx_side: NNXSide, params: Mapping[str, Any], pairs: list[Pair], tolerance: float) -> list[str]:
    """Describe routing, weights and experts of the first MoE block that differs despite equal inputs."""
    modules = {path: node for path, node in nnx.iter_graph(nnx_side.module(params)) if isinstance(node, MoE)}
    for call, their_call in pairs:
        moe = modules.get(call.path)
        if moe is None or isinstance(moe, LatentMoE) or call.given is None or their_call.given is None:
            continue
        equal_shapes = call.given.shape == their_call.given.shape == call.returned.shape
        if not equal_shapes or measure_gap(call.given, their_call.given).error > tolerance:
            continue
        if measure_gap(call.returned, their_call.returned).error > tolerance:
            return [
                f"inside the MoE block {call} = {their_call}:",
                *_steps(_of_layer(moe, call.number, call.of), call, their_call, tolerance),
            ]
    return []


def _of_layer(moe: MoE, number: int, num_layers: int) -> MoE:
    """Return the MoE block of one layer of a stack."""
    if num_layers == 1:
        return moe
    graph, state = nnx.split(moe)
    return nnx.merge(graph, jax.tree.map(lambda a: a[number], state))


def _steps(moe: MoE, call: Any, their_call: Any, tolerance: float) -> list[str]:
    """Compare the steps of an MoE block. Linen's expert weights are derived by least squares.

    The fit expresses Linen's output as a weighted sum of the NNX experts' outputs.
    """
    width, experts = call.given.shape[-1], moe.experts.count
    if width < experts:
        return [f"  {experts} experts with outputs of {width} values: Linen's weights cannot be derived"]
    x = jnp.asarray(call.given).reshape(1, -1, width)[:, :_TOKENS]
    routing = moe.router(x, context=None, mesh=moe.mesh)
    inputs = x if moe.norm is None else moe.norm(x)
    tokens = x.shape[1]
    expert_inputs = jnp.repeat(inputs, experts, axis=1)  # each token once per expert
    ids = jnp.tile(jnp.arange(experts, dtype=routing.experts.dtype), tokens)[None, :, None]
    scores = jnp.zeros((*ids.shape[:2], experts), routing.scores.dtype)
    one_expert_each = Routing(ids, jnp.ones(ids.shape, routing.weights.dtype), scores, scores)
    outputs = np.asarray(Dense()(expert_inputs, one_expert_each, moe.experts, moe.mesh)[0], np.float64).reshape(
        tokens, experts, width
    )
    shared = 0.0 if moe.shared is None else np.asarray(moe.shared(inputs)[0], np.float64)
    target = np.asarray(their_call.returned, np.float64).reshape(-1, width)[:tokens] - shared
    if not (np.isfinite(outputs).all() and np.isfinite(target).all()):
        return ["  some outputs are NaN or infinite: Linen's weights cannot be derived"]
    weights = np.stack([np.linalg.lstsq(f.T, y, rcond=None)[0] for f, y in zip(outputs, target, strict=True)])
    expert_ids, expert_weights = np.asarray(routing.experts[0]), np.asarray(routing.weights[0], np.float64)
    dense = np.zeros((tokens, experts))
    np.add.at(dense, (np.arange(tokens)[:, None], expert_ids), expert_weights)
    return [
        f"  {line}"
        for line in _lines(
            weights, dense, measure_gap(np.einsum("te,ted->td", weights, outputs), target).error, tolerance
        )
    ]


def _lines(linen_weights: np.ndarray, nnx_weights: np.ndarray, misfit: float, tolerance: float) -> list[str]:
    """Describe the differences between the weights ``[tokens, experts]`` of both sides."""
    if misfit > 10 * tolerance:
        return [
            f"expert outputs differ (or shared experts): Linen's output is not a weighted sum of NNX's, by {misfit:.1e}"
            "; compare the activation, and the order of gate and up"
        ]
    threshold = 1e-3 * np.abs(linen_weights).max(initial=1e-30)
    linen_used, nnx_used = np.abs(linen_weights) > threshold, nnx_weights != 0
    lines = ["expert outputs equal"]
    if (differing := np.flatnonzero((linen_used != nnx_used).any(-1))).size:
        token = int(differing[0])
        ids = [list(map(int, np.flatnonzero(side[token]))) for side in (nnx_used, linen_used)]
        return [
            *lines,
            f"routing differs in {differing.size} of {len(nnx_weights)} tokens: token {token} has the experts {ids[0]} "
            f"in NNX, {ids[1]} in Linen",
        ]
    lines.append("routing equal: the same experts are chosen")
    token = int(np.abs(linen_weights - nnx_weights).max(-1).argmax())
    weights = [", ".join(f"{w:.4g}" for w in side[token][nnx_used[token]]) for side in (nnx_weights, linen_weights)]
    sums = [side[token].sum() for side in (nnx_weights, linen_weights)]
    return [
        *lines,
        f"weights differ: token {token} has {weights[0]} (sum {sums[0]:.4g}) in NNX, {weights[1]} (sum {sums[1]:.4g}) "
        "in Linen",
    ]
