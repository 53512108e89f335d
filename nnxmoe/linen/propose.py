"""Propose a mapping between NNX parameters and a Linen tree, from unambiguous matches only.

Two parameters are a candidate pair if they are in the same layers, their shapes fit (in order or
transposed), and their names do not contradict each other (`nnxmoe.linen.words`). A candidate pair is
proposed if a rule in `nnxmoe.linen.matching` prefers it to all other pairs of both parameters.
Numbers and letters that an author appends to names are ignored (``ln1``, ``norm_b``, ``Dense_3``),
with three exceptions:

- GPT-2's ``ln_1``, ``ln_2`` and Flax's automatic ``RMSNorm_0``, ``RMSNorm_1`` are matched in execution
  order, if a layer has exactly two norms: one before attention and one before the feed-forward block.
- T5X's ``wi_0`` is gate, and ``wi_1`` is up.
- Meta's ``w1``, ``w2`` and ``w3`` are gate, down and up, if ``w2`` (if any) has the shape of a down
  projection.
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
    """Mapping from NNX names to Linen names. ``print`` shows the names and shapes of both sides.

    Attributes:
        candidates: NNX name -> candidate Linen names, for parameters without a row. ``print`` marks
            these parameters with ``?``.
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
        lines, used_names = list[str](), set[str]()
        for name, source in self.items():
            names, change = (source, "") if isinstance(source, str) else (source[0], " by a function")
            names = (names,) if isinstance(names, str) else names
            change = " transposed" if not isinstance(source, str) and source[1] is jnp.transpose else change
            lines.append(f"{name} {list(self.ours.get(name, ()))} <- {', '.join(map(self._shown, names))}{change}")
            used_names.update(names)
        for name, shape in self.ours.items():
            if name not in self:
                lines.append(f"{name} {list(shape)} <- ? {' or '.join(self.candidates.get(name, ()))}".rstrip())
        return "\n".join(lines + [f"? <- {self._shown(name)}" for name in self.theirs if name not in used_names])

    def _shown(self, name: str) -> str:
        return f"{name} {' or '.join(str(list(shape)) for shape in self.theirs.get(name, ()))}"


def propose_mapping(ours: DecoderConfig | nnx.Module, params: Mapping[str, Any]) -> Proposal:
    """Propose a mapping from NNX parameters to a Linen tree.

    The mapping is for `from_linen`, `nnxmoe.testing.load_linen` and
    `nnxmoe.testing.assert_module_parity`.

    Args:
        ours: The config of a model, or an NNX module.
        params: The Linen tree, of arrays or shapes (``jax.eval_shape(module.init, …)``).

    Returns:
        A dict with a row for each NNX parameter whose counterpart is unambiguous by shape and name.
        If the tree stores linear maps as ``[out, in]``, as in torch, the rows transpose them. Other
        parameters, such as parameters that the tree fuses, have no row. ``print`` marks them with
        ``?`` and lists all candidates. Add rows with ``proposal | {…}``.
    """
    is_model = isinstance(ours, DecoderConfig | CausalLM)
    if isinstance(ours, DecoderConfig | CausalLM):
        layout = native.layout(abstract_model(ours, None, None) if isinstance(ours, DecoderConfig) else ours, False)
        nnx_shapes = {name: tuple(leaf.shape) for name, leaf in layout.items()}
    else:
        state = nnx.to_flat_state(nnx.state(ours, nnx.Not(nnx.RngState)))
        nnx_shapes = {"/".join(map(str, path)): tuple(flax_order(v, v.shape)) for path, v in state}
    linen_shapes = {name: tuple(np.shape(array)) for name, array in flat(params).items()}
    nnx_entries = list(
        _entries(nnx_shapes, general_name if is_model else lambda name: (name, None), lambda name: read(name, is_model))
    )
    all_layers: Layers = frozenset().union(*(entry.layers for entry in nnx_entries)) - {None}
    linen_entries = _known_layers(
        list(_entries(linen_shapes, general_linen_name, read)),
        {entry.layers for entry in nnx_entries} | {all_layers},
        bool(all_layers),
    )
    _read_keys(linen_entries)
    _read_meta(linen_entries)
    _read_automatic(nnx_entries, linen_entries)
    matching = Matching(nnx_entries, linen_entries, all_layers)
    matching.run()
    pairs = {name: source for i, source in matching.sources().items() for name in nnx_entries[i].rows}
    names = [(i, name) for i, entry in enumerate(nnx_entries) for name in entry.rows]
    return Proposal(
        {name: pairs[name] for _, name in names if name in pairs},
        {name: nnx_entries[i].shape for i, name in names},
        {
            name: tuple(b.shape for b in linen_entries if b.name == name)
            for name in dict.fromkeys(b.name for b in linen_entries)
        },
        {name: matching.candidates(i) for i, name in names if name not in pairs},
    )


def _entries(
    shapes: Mapping[str, Shape], general: Callable[[str], tuple[str, int | None]], words: Callable[[str], Words]
) -> Iterator[Entry]:
    """Yield one entry per shape and name, with layer numbers replaced by ``{layer}``."""
    groups: dict[tuple[str, Shape], dict[str, int | None]] = {}
    for name, shape in shapes.items():
        entry_name, layer = general(name)
        groups.setdefault((entry_name, shape), {})[name] = layer
    ambiguous = {
        entry_name
        for entry_name, count in collections.Counter(entry_name for entry_name, _ in groups).items()
        if count > 1
    }
    for (entry_name, shape), names in groups.items():
        rows = tuple(names) if entry_name in ambiguous else (entry_name,)
        yield Entry(entry_name, shape, frozenset(names.values()), words(entry_name), tuple(names), rows)


def _known_layers(linen_entries: list[Entry], nnx_layers: set[Layers], stacked: bool) -> list[Entry]:
    """Split Linen entries with ``{layer}`` into single parameters if the numbers are not NNX layer indices.

    The numbers may start at 1, count only layers of one type, or enumerate submodules.
    """
    numbers: dict[str, set[int | None]] = {}
    for entry in linen_entries:
        if entry.layers != OUTSIDE:
            numbers.setdefault(entry.name.split(LAYER)[0], set()).update(entry.layers)
    entries: list[Entry] = []
    for entry in linen_entries:
        all_numbers = numbers.get(entry.name.split(LAYER)[0], set())
        if entry.layers == OUTSIDE or (entry.layers in nnx_layers and all_numbers == set(range(len(all_numbers)))):
            entries.append(entry)
            continue
        entries += [Entry(n, entry.shape, OUTSIDE, read(n), (n,), (n,), hidden=stacked) for n in entry.members]
    return entries


_PARTNERS = {"k": "v", "v": "k", "q": "k kv", "o": "q v"}


def _read_keys(linen_entries: list[Entry]) -> None:
    """Remove the attention role of names that lack an analogous name for another projection.

    For example, Grok's ``linear_v`` belongs to a feed-forward block, because there is no ``linear_k``.
    """
    stems = {entry.words.stem for entry in linen_entries}
    for entry in linen_entries:
        words, suffix = entry.words.stem[:-2], entry.words.stem[-2:]
        for role, partners in _PARTNERS.items():
            partner_stems = {
                (*sorted(p if word == role else word for word in words), *suffix) for p in partners.split()
            }
            confirmed = entry.words.aspects[2] or (
                role == "o" and entry.words.aspects[0]
            )  # a low-rank factor, or attention/o
            if entry.words.roles == {role} and role in words and not confirmed and not partner_stems & stems:
                entry.words = dataclasses.replace(entry.words, roles=frozenset())


def _read_meta(linen_entries: list[Entry]) -> None:
    """Assign roles to Meta's ``w1``, ``w2`` and ``w3`` if the shapes confirm them."""
    groups: dict[str, dict[str, Entry]] = {}
    for entry in linen_entries:
        if match := _META.search(entry.name):
            groups.setdefault(_META.sub("w", entry.name), {})[match[1]] = entry
    for group in groups.values():
        if not {"1", "3"} <= group.keys() or any(len(entry.shape) < 2 for entry in group.values()):
            continue
        up_shape, down_shape = group["1"].shape, (*group["1"].shape[:-2], *group["1"].shape[:-3:-1])
        if group["3"].shape == up_shape and ("2" not in group or group["2"].shape == down_shape != up_shape):
            for number, entry in group.items():
                role = {"1": "gate", "2": "down", "3": "up"}[number]
                entry.words = dataclasses.replace(entry.words, roles=frozenset({role}))


def _read_automatic(nnx_entries: list[Entry], linen_entries: list[Entry]) -> None:
    """Assign roles to two norms that are numbered in order of execution."""
    norms = [entry for entry in nnx_entries if entry.words.norm and entry.layers != OUTSIDE]
    shapes = {entry.shape for entry in norms if entry.words.roles & {"attention_norm", "mlp_norm"}}
    roles = {entry.words.roles for entry in norms if entry.shape in shapes}
    if roles != {frozenset({"attention_norm"}), frozenset({"mlp_norm"})}:
        return
    groups: dict[str, dict[tuple[bool, str], Entry]] = {}
    for entry in linen_entries:
        match = _AUTOMATIC.search(entry.name)
        if match and entry.words.norm and not entry.words.roles:
            groups.setdefault(_AUTOMATIC.sub(r"\1", entry.name), {})[match[1] == "ln", match[2]] = entry
    for group in groups.values():
        if group.keys() in ({(False, "0"), (False, "1")}, {(True, "1"), (True, "2")}):
            for key, role in zip(sorted(group), ("attention_norm", "mlp_norm"), strict=True):
                group[key].words = dataclasses.replace(group[key].words, roles=frozenset({role}))
