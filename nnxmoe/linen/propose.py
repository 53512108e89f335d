"""A first mapping between our parameters and a Linen tree, by shapes and words of the names."""

import difflib
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert import native
from nnxmoe.convert.core.restore import abstract
from nnxmoe.layers.kernel import flax_order
from nnxmoe.linen.mapping import LAYER, NUMBERED, Source, flat, general_name, splits
from nnxmoe.model.causal_lm import CausalLM

Shapes = dict[str, tuple[int, ...]]
Layers = dict[str, frozenset[Any]]  # general name -> layer numbers; None outside of layers
# Words that mean the same in the names of decoders.
_WORDS = {
    word: meaning
    for meaning, words in {
        "q": "query wq", "k": "key wk", "v": "value wv", "o": "out output", "gate": "wi_0 w1", "up": "wi_1 w3",
        "down": "wo w2", "embed": "embedding embeddings embedder wte tok token",
        "norm": "ln layernorm rmsnorm ln_f final", "head": "lm_head logits unembed",
        "attention": "attn self pre ln_1 rmsnorm_0 layernorm_0 input",
        "mlp": "ffn ff post ln_2 rmsnorm_1 layernorm_1 feed forward",
        "moe": "experts expert moeblock", "kernel": "weight w",
    }.items()
    for word in words.split()
}  # fmt: skip
# Parameters of different roles are never a pair.
_ROLES = {"q", "k", "v", "o", "gate", "up", "down", "norm", "embed", "head"}


class Proposal(dict[str, Source]):
    """A mapping from our names to theirs; ``print`` shows the names and shapes of both sides, also those left over."""

    def __init__(self, ours: Shapes, theirs: Shapes, layers: Layers, their_layers: Layers):
        super().__init__(_pairs(ours, theirs, layers, their_layers))
        self.ours, self.theirs = ours, theirs

    def __str__(self) -> str:
        lines, taken = list[str](), set[str]()
        for name, source in self.items():
            (there, how) = (source, "") if isinstance(source, str) else (str(source[0]), " transposed")
            lines.append(f"{name} {list(self.ours[name])} <- {there} {list(self.theirs[there])}{how}")
            taken.add(there)
        lines += [f"{name} {list(shape)} <- ?" for name, shape in self.ours.items() if name not in self]
        return "\n".join(lines + [f"? <- {name} {list(s)}" for name, s in self.theirs.items() if name not in taken])


def propose_mapping(ours: DecoderConfig | nnx.Module, params: Mapping[str, Any]) -> Proposal:
    """Propose a mapping for `from_linen` and `nnxmoe.testing.assert_module_parity`, to be checked and completed.

    Args:
        ours: the config of a model, or an NNX module.
        params: the Linen tree, of arrays or shapes (``jax.eval_shape(module.init, …)``).

    Returns:
        A dict with a row per parameter of ours for which one array of theirs has the same numbers of values, chosen by
        the words of the names where several do. If theirs stores linear maps as ``[out, in]``, as torch does, the rows
        transpose them. Arrays that theirs fuses get no row. Print it.
    """
    if isinstance(ours, DecoderConfig | CausalLM):
        layout = native.layout(abstract(ours, None, None) if isinstance(ours, DecoderConfig) else ours, False)
        here = {name: tuple(leaf.shape) for name, leaf in layout.items()}
        numbered = {name: general_name(name) for name in here}
    else:
        state = nnx.to_flat_state(nnx.state(ours, nnx.Not(nnx.RngState)))
        here = {"/".join(map(str, path)): tuple(flax_order(v, v.shape)) for path, v in state}
        numbered = {name: (name, None) for name in here}
    there = {name: tuple(np.shape(array)) for name, array in flat(params).items()}
    layers, theirs = _layers(numbered), _layers({name: _general(name) for name in there})
    known = {*layers.values(), frozenset().union(*layers.values()) - {None}}
    named = {name: general if theirs[(general := _general(name)[0])] in known else name for name in there}
    shapes = {numbered[name][0]: shape for name, shape in here.items()}
    return Proposal(shapes, {named[name]: shape for name, shape in there.items()}, layers, theirs)


def _general(name: str) -> tuple[str, int | None]:
    match = NUMBERED.search(name)
    return (NUMBERED.sub(rf"\1\2{LAYER}", name, count=1), int(match[3])) if match else (name, None)


def _layers(names: Mapping[str, tuple[str, int | None]]) -> Layers:
    """The numbers that ``{layer}`` stands for in each general name."""
    found: dict[str, set[int | None]] = {}
    for general, layer in names.values():
        found.setdefault(general, set()).add(layer)
    return {general: frozenset(layers) for general, layers in found.items()}


def _pairs(ours: Shapes, theirs: Shapes, layers: Layers, their_layers: Layers) -> dict[str, Source]:
    """Pairs of equal sizes, roles and layers, those with the most similar names first. An array of theirs without
    ``{layer}`` may have all layers on axis 0, and one of all layers may be several of ours, each of some layers."""
    every = frozenset().union(*layers.values()) - {None}
    scored, as_is, turned = list[tuple[float, str, str]](), set[tuple[str, str]](), set[tuple[str, str]]()
    for (a, shape), (b, other) in itertools.product(ours.items(), theirs.items()):
        if LAYER in a and LAYER not in b:
            own, fits = other[1:], other[:1] == (len(every),)
        else:
            own, fits = other, LAYER not in b or their_layers[b] in (layers[a], every)
        one, two = _words(a) & _ROLES, _words(b) & _ROLES
        if not fits or (one and two and not one & two):
            continue
        as_is |= {(a, b)} if splits(own, shape) else set()
        turned |= {(a, b)} if len(own) == 2 and one & two - {"embed"} and splits(own[::-1], shape) else set()
        scored.append((_similarity(a, b), a, b))
    torch = bool({a for a, _ in turned} - {a for a, _ in as_is})  # then square ones are [out, in], too
    usable = as_is - {(a, b) for a, b in as_is if torch and a in {x for x, _ in turned}} | (turned if torch else set())
    found, taken = dict[str, Source](), set[tuple[str, Any]]()
    for _, a, b in sorted(scored, key=lambda each: -each[0]):
        used = {(b, layer) for layer in layers[a]}
        if (a, b) in usable and a not in found and not used & taken:
            found[a] = (b, jnp.transpose) if torch and (a, b) in turned else b
            taken |= used
    return {name: found[name] for name in ours if name in found}


def _similarity(a: str, b: str) -> float:
    one, other = (_words(name) for name in (a, b))
    return len(one & other) / len(one | other) + 0.1 * difflib.SequenceMatcher(None, a, b).ratio()


def _words(name: str) -> set[str]:
    """Split a name into words of this package's vocabulary; an output or ``wo`` belongs to the attention, the
    feed-forward or the model."""
    words: list[str] = re.findall(r"w[i]?_?\d|ln_[\df]|(?:rms|layer)norm_[01]|[a-z]+", name.replace(LAYER, "").lower())
    found = {_WORDS.get(word, word) for word in words}
    if {"out", "output", "o", "wo"} & set(words):
        feed_forward = bool({"mlp", "moe"} & found) and "attention" not in found
        found = found - {"o", "down"} | {"o" if "attention" in found else "down" if feed_forward else "head"}
    return found
