"""Propose a mapping between our parameters and a Linen tree, without guesses.

Two parameters are a possible pair if they are in the same layers, their shapes fit (in order or
transposed), and their names do not contradict each other (`nnxmoe.linen.words`). A possible pair is
proposed if a rule in `nnxmoe.linen.matching` prefers it to all other pairs of both parameters.
Numbers and letters that an author appends to names are ignored (``ln1``, ``norm_b``, ``Dense_3``),
with three exceptions:

- GPT-2's ``ln_1``, ``ln_2`` and Flax's automatic ``RMSNorm_0``, ``RMSNorm_1``. They are numbered in
  order of execution, if a layer has exactly the norms before attention and before feed-forward.
- T5X's ``wi_0`` (gate) and ``wi_1`` (up).
- Meta's ``w1`` (gate), ``w3`` (up) and ``w2``, if ``w2`` has a different name or the shape of a
  down projection.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert import native
from nnxmoe.convert.arrays.load_model import abstract_model
from nnxmoe.layers.linear.kernel import flax_order
from nnxmoe.linen.mapping import LAYER, Source, flat, general_linen_name, general_name
from nnxmoe.linen.matching import OUTSIDE, Entry, Layers, Matching, Shape
from nnxmoe.linen.words import Words, read
from nnxmoe.model.causal_lm import CausalLM

_META = re.compile(r"(?:^|(?<=[/.]))w_?([123])(?=[/._]|$)")
_AUTOMATIC = re.compile(r"(?:^|(?<=[/.]))(ln|[A-Z][A-Za-z]*)_(\d+)(?=[/.][^/.]*$)")


class Proposal(dict[str, Source]):
    """Mapping from our names to theirs. ``print`` shows the names and shapes of both sides.

    Attributes:
        candidates: Our name -> their possible names, for parameters without a row. ``print`` shows
            them as ``?``.
    """

    def __init__(
        self,
        pairs: Mapping[str, Source],
        ours: Mapping[str, Shape],
        theirs: Mapping[str, tuple[Shape, ...]],
        candidates: Mapping[str, tuple[str, ...]],
    ):
        super().__init__(pairs)
        self.ours, self.theirs, self.candidates = ours, theirs, candidates

    def __or__(self, other: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self)({**self, **other}, self.ours, self.theirs, self.candidates)

    def __str__(self) -> str:
        lines, taken = list[str](), set[str]()
        for name, source in self.items():
            names, how = (source, "") if isinstance(source, str) else (source[0], " by a function")
            names = (names,) if isinstance(names, str) else names
            how = " transposed" if not isinstance(source, str) and source[1] is jnp.transpose else how
            lines.append(f"{name} {list(self.ours.get(name, ()))} <- {', '.join(map(self._shown, names))}{how}")
            taken.update(names)
        for name, shape in self.ours.items():
            if name not in self:
                lines.append(f"{name} {list(shape)} <- ? {' or '.join(self.candidates.get(name, ()))}".rstrip())
        return "\n".join(lines + [f"? <- {self._shown(name)}" for name in self.theirs if name not in taken])

    def _shown(self, name: str) -> str:
        return f"{name} {' or '.join(str(list(shape)) for shape in self.theirs.get(name, ()))}"


def propose_mapping(ours: DecoderConfig | nnx.Module, params: Mapping[str, Any]) -> Proposal:
    """Propose a mapping from our parameters to a Linen tree.

    The mapping is for `from_linen`, `nnxmoe.testing.load_linen` and
    `nnxmoe.testing.assert_module_parity`.

    Args:
        ours: The config of a model, or an NNX module.
        params: The Linen tree, of arrays or shapes (``jax.eval_shape(module.init, …)``).

    Returns:
        A dict with a row for each of our parameters whose counterpart is certain by shape and words.
        If the tree stores linear maps as ``[out, in]``, as in torch, the rows transpose them. Other
        parameters, such as parameters that the tree fuses, have no row. ``print`` shows them as ``?``
        with all candidates. Add rows with ``proposal | {…}``.
    """
    model = isinstance(ours, DecoderConfig | CausalLM)
    if isinstance(ours, DecoderConfig | CausalLM):
        layout = native.layout(abstract_model(ours, None, None) if isinstance(ours, DecoderConfig) else ours, False)
        here = {name: tuple(leaf.shape) for name, leaf in layout.items()}
    else:
        state = nnx.to_flat_state(nnx.state(ours, nnx.Not(nnx.RngState)))
        here = {"/".join(map(str, path)): tuple(flax_order(v, v.shape)) for path, v in state}
    there = {name: tuple(np.shape(array)) for name, array in flat(params).items()}
    mine = list(_entries(here, general_name if model else lambda name: (name, None), lambda name: read(name, model)))
    every: Layers = frozenset().union(*(entry.layers for entry in mine)) - {None}
    theirs = _known_layers(
        list(_entries(there, general_linen_name, read)), {entry.layers for entry in mine} | {every}, bool(every)
    )
    _read_keys(theirs)
    _read_meta(theirs)
    _read_automatic(mine, theirs)
    matching = Matching(mine, theirs, every)
    matching.run()
    pairs = {name: source for i, source in matching.sources().items() for name in mine[i].rows}
    names = [(i, name) for i, entry in enumerate(mine) for name in entry.rows]
    return Proposal(
        {name: pairs[name] for _, name in names if name in pairs},
        {name: mine[i].shape for i, name in names},
        {name: tuple(b.shape for b in theirs if b.name == name) for name in dict.fromkeys(b.name for b in theirs)},
        {name: matching.candidates(i) for i, name in names if name not in pairs},
    )


def _entries(
    shapes: Mapping[str, Shape], general: Callable[[str], tuple[str, int | None]], words: Callable[[str], Words]
) -> Iterator[Entry]:
    """Yield one entry per general name and shape."""
    groups: dict[tuple[str, Shape], dict[str, int | None]] = {}
    for name, shape in shapes.items():
        found, layer = general(name)
        groups.setdefault((found, shape), {})[name] = layer
    several = {found for found, count in collections.Counter(found for found, _ in groups).items() if count > 1}
    for (found, shape), names in groups.items():
        rows = tuple(names) if found in several else (found,)
        yield Entry(found, shape, frozenset(names.values()), words(found), tuple(names), rows)


def _known_layers(theirs: list[Entry], known: set[Layers], stacked: bool) -> list[Entry]:
    """Split their entries with ``{layer}`` into single parameters if the numbers are not our layer numbers.

    The numbers may start at 1, count layers of one kind, or number submodules.
    """
    numbers: dict[str, set[int | None]] = {}
    for entry in theirs:
        if entry.layers != OUTSIDE:
            numbers.setdefault(entry.name.split(LAYER)[0], set()).update(entry.layers)
    made: list[Entry] = []
    for entry in theirs:
        union = numbers.get(entry.name.split(LAYER)[0], set())
        if entry.layers == OUTSIDE or (entry.layers in known and union == set(range(len(union)))):
            made.append(entry)
            continue
        made += [Entry(n, entry.shape, OUTSIDE, read(n), (n,), (n,), hidden=stacked) for n in entry.members]
    return made


_PARTNERS = {"k": "v", "v": "k", "q": "k kv", "o": "q v"}


def _read_keys(theirs: list[Entry]) -> None:
    """Remove attention roles from names without a counterpart.

    Attention projections have similar names. For example, Grok's ``linear_v`` without a ``linear_k``
    belongs to a feed-forward.
    """
    stems = {entry.words.stem for entry in theirs}
    for entry in theirs:
        words, kinds = entry.words.stem[:-2], entry.words.stem[-2:]
        for role, partners in _PARTNERS.items():
            named = {(*sorted(p if word == role else word for word in words), *kinds) for p in partners.split()}
            known = entry.words.aspects[2] or (role == "o" and entry.words.aspects[0])  # a factor, or attention/o
            if entry.words.roles == {role} and role in words and not known and not named & stems:
                entry.words = dataclasses.replace(entry.words, roles=frozenset())


def _read_meta(theirs: list[Entry]) -> None:
    """Assign roles to Meta's ``w1``, ``w2`` and ``w3`` if the shapes confirm them."""
    groups: dict[str, dict[str, Entry]] = {}
    for entry in theirs:
        if match := _META.search(entry.name):
            groups.setdefault(_META.sub("w", entry.name), {})[match[1]] = entry
    for group in groups.values():
        if not {"1", "3"} <= group.keys() or any(len(entry.shape) < 2 for entry in group.values()):
            continue
        inward, outward = group["1"].shape, (*group["1"].shape[:-2], *group["1"].shape[:-3:-1])
        if group["3"].shape == inward and ("2" not in group or group["2"].shape == outward != inward):
            for number, entry in group.items():
                role = {"1": "gate", "2": "down", "3": "up"}[number]
                entry.words = dataclasses.replace(entry.words, roles=frozenset({role}))


def _read_automatic(ours: list[Entry], theirs: list[Entry]) -> None:
    """Assign roles to two norms that are numbered in order of execution."""
    norms = {entry.words.roles for entry in ours if entry.words.norm and entry.layers != OUTSIDE}
    if norms - {frozenset({role}) for role in "qkv"} != {frozenset({"attention_norm"}), frozenset({"mlp_norm"})}:
        return
    groups: dict[str, dict[tuple[bool, str], Entry]] = {}
    for entry in theirs:
        match = _AUTOMATIC.search(entry.name)
        if match and entry.words.norm and not entry.words.roles:
            groups.setdefault(_AUTOMATIC.sub(r"\1", entry.name), {})[match[1] == "ln", match[2]] = entry
    for group in groups.values():
        if group.keys() in ({(False, "0"), (False, "1")}, {(True, "1"), (True, "2")}):
            for key, role in zip(sorted(group), ("attention_norm", "mlp_norm"), strict=True):
                group[key].words = dataclasses.replace(group[key].words, roles=frozenset({role}))
