"""Hugging Face's names for a model's parameters, and the tensors of a checkpoint that may be skipped."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Set

import numpy as np

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.convert.core.check import Faults, check
from nnxmoe.convert.core.layout import Change, Leaf, Parameter, Part, TableError, add_part, parameters
from nnxmoe.convert.core.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.core.report import LoadReport
from nnxmoe.convert.hf.module_tensors import OF_ACTIVATIONS
from nnxmoe.layers.quantized import ARRAYS
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models.tables import HF_MTP, HF_MTP_COPIES
from nnxmoe.storage.errors import CheckpointError

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_PART = re.compile(r"^(?P<name>.*)\[(?P<part>\d+)/(?P<parts>\d+)\]$")
_LAYER, _EXPERT = re.compile(r"model\.layers\.([0-9]{1,9})\."), re.compile(r".*\.experts\.([0-9]{1,9})\.")
_OF_MTP = {name.split(".")[3] for name in [*itertools.chain(*HF_MTP.values()), *HF_MTP_COPIES]}
_PREDICTION = re.compile(rf"{_LAYER.pattern}({'|'.join(sorted(_OF_MTP))})\.")


def layout(model: CausalLM, names: Container[str] | None = None, times: float = 1.0) -> dict[str, Leaf]:
    """Tensor name -> `Leaf` for every parameter. If the table has several names, the first one in ``names`` is used
    (per layer), else the first. ``times``: a factor on the queries, see `DecoderConfig.query_scalar`."""
    found: dict[str, Leaf] = {}
    for parameter in parameters(model, codes=True):
        key = parameter.key.removesuffix(parameter.ending)
        if key not in model.hf_table:
            raise TableError(f"the parameter {key} has no row in the table of {type(model).__name__}")
        change = Change(times=times if parameter.takes_query_scalar else 1.0)
        rows = [_with_ending(template, parameter.ending) for template in model.hf_table[key]]
        for layer, at in parameter.layers():
            templates = rows if names is not None else rows[:1]
            options = [_named(template, layer, at, parameter, change) for template in templates]
            chosen = [o for o in options if names is not None and any(name in names for name, _, _ in o)]
            for name, leaf, part in (chosen or options)[0]:
                add_part(found, name, leaf, part)
    swap = names is not None and EMBED not in names and HEAD in names and HEAD not in found
    # A tied model may be stored with the head only; the embedding is then read from it.
    return {HEAD if swap and name == EMBED else name: leaf for name, leaf in found.items()}


def copies(model: CausalLM, names: Container[str]) -> dict[str, str]:
    """The tensors of prediction layers that repeat the embedding and the output head -> the name in ``names`` of what
    they repeat, the arrays of a quantised head each. They are written for readers that expect them, and never read."""
    found = {}
    for k in range(len(model.mtp)):
        for name, main in HF_MTP_COPIES.items():
            copy = name.format(layer=model.config.num_hidden_layers + k)
            endings = [ending for ending in ("", *(f".{array}" for array in ARRAYS)) if main + ending in names]
            found |= {copy + ending: main + ending for ending in endings} or {copy: EMBED}
    return found


def empty(model: CausalLM) -> dict[str, LazyArray]:
    """The tensors without values that transformers stores for shared experts where ``n_shared_experts`` is 0."""
    if getattr(model.config, "n_shared_experts", None) != 0:
        return {}
    routers = [p for p in parameters(model) if p.key == "layer.moe.router.kernel"]
    found = {}
    for part in ("gate", "up", "down"):
        (name,) = model.hf_table[f"layer.moe.shared.{part}.kernel"]
        shape = (model.config.hidden_size, 0) if part == "down" else (0, model.config.hidden_size)
        for router in routers:
            array = LazyArray.of(np.empty(shape, router.variable.dtype))
            found |= {name.format(layer=layer): array for layer, _ in router.layers()}
    return found


def _with_ending(template: str, ending: str) -> str:
    """``name`` or ``name[i/n]`` with an ending of the name, such as ``.codes``."""
    match = _PART.match(template)
    return f"{match['name']}{ending}[{match['part']}/{match['parts']}]" if match else template + ending


def _named(
    template: str, layer: int | None, at: tuple[int, ...], parameter: Parameter, change: Change
) -> list[tuple[str, Leaf, Part]]:
    """The tensors of one layer of a parameter, named by one template; ``name[i/n]``: the i-th of n equal row ranges."""
    match = _PART.match(template)
    name, i, n = (match["name"], int(match["part"]), int(match["parts"])) if match else (template, 0, 1)
    inner, inputs, experts = parameter.inner, parameter.inputs, parameter.experts
    flat = inner if inputs is None else (math.prod(inner[:-inputs]), math.prod(inner[-inputs:]))
    shape, rows = (flat[0] * n, *flat[1:]), (slice(i * flat[0], (i + 1) * flat[0]),) if n > 1 else ()
    if experts is None:
        leaf = Leaf(parameter.key, shape, (), flat, True, change)
        return [(name.format(layer=layer), leaf, Part(parameter, at, rows))]
    if "{expert}" not in name:  # one tensor for all experts
        leaf, name = Leaf(parameter.key, (experts, *shape), (), flat, True, change), name.format(layer=layer)
        return [(name, leaf, Part(parameter, (*at, e), (e, *rows))) for e in range(experts)]
    leaf = Leaf(parameter.key, shape, (), flat, True, change)
    return [(name.format(layer=layer, expert=e), leaf, Part(parameter, (*at, e), rows)) for e in range(experts)]


def refuse_unjustified(config: DecoderConfig, arrays: LazyArrays, where: str) -> None:
    """Raise CheckpointError if config.json has far more layers or experts than the files, before building a layout."""
    stored = [array.shape for array in arrays.values() if math.prod(array.shape)]
    fused = [shape[0] for shape in stored if len(shape) == 3]  # all experts in one tensor
    layers, experts = config.num_hidden_layers, config.experts
    # The margin of 16 allows for models in which most layers are dense, so that layers * experts overcounts.
    if layers > len(stored) or layers * experts > 16 * (len(stored) + sum(fused)):
        count = f" with {experts} experts each" if experts else ""
        raise CheckpointError(
            f"{where}: num_hidden_layers is {layers}{count}, and the files hold {len(stored)} tensors in all: check "
            "that config.json belongs to these files and that all of them are here"
        )


def judge(
    config: DecoderConfig, leaves: Mapping[str, Leaf], arrays: LazyArrays, report: LoadReport
) -> tuple[Faults, LoadReport]:
    """The faults of a checkpoint, and a report of each of its tensors."""
    faults = check(leaves, arrays)
    left = set(faults.unexpected)
    skipped: dict[str, tuple[str, ...]] = {}
    for rule, test in _skip_rules(config, left, leaves, arrays).items():
        names = tuple(sorted(name for name in left if test(name)))
        left -= set(names)
        if names:
            skipped[rule] = names
    return faults, dataclasses.replace(
        report,
        loaded=tuple(sorted(file_names(leaves.keys() & arrays.keys(), arrays))),
        missing=faults.missing,
        unexpected=tuple(sorted(left)),
        skipped=skipped,
        notes=(*report.notes, *_beyond(config, left)),
    )


def file_names(names: Iterable[str], arrays: LazyArrays) -> set[str]:
    """The tensors of the files that some arrays are read from."""
    return {tensor for name in names for tensor in (arrays[name].tensors or (name,))}


def _skip_rules(
    config: DecoderConfig, left: Set[str], leaves: Iterable[str], arrays: LazyArrays
) -> dict[str, Callable[[str], bool]]:
    """Rules for tensors that are skipped on purpose: description -> predicate of a tensor's name."""
    first = config.num_hidden_layers
    numbers = range(first, first + getattr(config, "num_nextn_predict_layers", 0))
    # Only prediction layers have tensors that combine the hidden state with an embedding; a surplus layer has not.
    marked = {number for name in left if (number := _number(name, _PREDICTION)) in numbers}
    built = {number for name in leaves if (number := _number(name, _PREDICTION)) in numbers}
    repeated = {name.format(layer=number) for number in built for name in HF_MTP_COPIES}
    return {
        "multi-token prediction layers (not part of the model)": lambda name: _number(name, _LAYER) in marked - built,
        "copies of the embedding and the head (those of the model are used)": lambda name: name in repeated,
        "empty tensors": lambda name: 0 in arrays[name].shape,
        "rotary frequencies (computed)": lambda name: name.endswith("rotary_emb.inv_freq"),
        "scales of activations and caches (neither is quantised)": lambda name: name.endswith(OF_ACTIVATIONS),
        "head tied to the embedding": lambda name: name == HEAD and config.tie_word_embeddings,
    }


def _beyond(config: DecoderConfig, left: Set[str]) -> list[str]:
    """Likely reasons for unused tensors, from their names."""
    found = []
    for what, pattern, asked in (("layers", _LAYER, config.num_hidden_layers), ("experts", _EXPERT, config.experts)):
        numbers = {n for name in left if (n := _number(name, pattern)) is not None and n >= asked}
        if numbers:
            more = some([str(number) for number in sorted(numbers)])
            found.append(f"config.json asks for {asked} {what}, and the files have more: {more}")
    if any(name.endswith(".bias") and (_number(name, _LAYER) or 0) < config.num_hidden_layers for name in left):
        found.append("the files have biases that config.json does not ask for")
    return found


def _number(name: str, pattern: re.Pattern[str]) -> int | None:
    match = pattern.match(name)
    return int(match[1]) if match else None
