"""What a model needs held against what a checkpoint stores, before any of it is read."""

import dataclasses
import math
import re
from collections.abc import Callable, Container, Mapping, Set

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.convert.place import Reader
from nnxmoe.convert.report import LoadError, LoadReport
from nnxmoe.convert.table import Entry, Piece
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import logger
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.errors import CheckpointError

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_LAYER, _EXPERT = re.compile(r"model\.layers\.([0-9]{1,9})\."), re.compile(r".*\.experts\.([0-9]{1,9})\.")
_PREDICTION = re.compile(_LAYER.pattern + r"(enorm|hnorm|eh_proj|shared_head|embed_tokens)\.")


def refuse_unjustified(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuses a config that asks for more layers or experts than the files can hold, before any are laid out."""
    stored = [shape for shape in shapes.values() if math.prod(shape)]
    fused = [shape[0] for shape in stored if len(shape) == 3]  # experts in one tensor
    layers, experts = config.num_hidden_layers, config.experts
    # 16: where nearly all layers are dense, all of them together have that many more experts than are stored.
    if layers > len(stored) or layers * experts > 16 * (len(stored) + sum(fused)):
        count = f" of {experts} experts each" if experts else ""
        raise CheckpointError(
            f"{where}: num_hidden_layers is {layers}{count}, and the files hold {len(stored)} tensors in all: check "
            "that config.json belongs to these files and that all of them are here"
        )


def head_for_embedding(plan: list[Entry], names: Container[str]) -> list[Entry]:
    """A tied model whose file holds only the head: the embedding takes it."""
    if EMBED in names or HEAD not in names or any(entry.key == "head.kernel" for entry in plan):
        return plan
    swap = (Piece((), HEAD),)
    return [dataclasses.replace(entry, pieces=swap) if entry.key == "embed.table" else entry for entry in plan]


def account(model: CausalLM, checkpoint: Checkpoint, plan: list[Entry], reader: Reader, notes: list[str]) -> LoadReport:
    """Compare what the model needs with what is stored, before any of it is read. Raises LoadError for misfits."""
    needed = {piece.name for entry in plan for piece in entry.pieces}
    missing = sorted(needed - checkpoint.tensors.keys())
    scales = {f"{name}_scale_inv" for name in needed if _is_fp8(checkpoint, name)} & checkpoint.tensors.keys()
    left = checkpoint.tensors.keys() - needed - scales
    skipped: dict[str, tuple[str, ...]] = {}
    for rule, test in _skip_rules(model.config, left).items():
        names = tuple(sorted(name for name in left if test(name)))
        left -= set(names)
        if names:
            skipped[rule] = names
    report = LoadReport(
        str(checkpoint.folder),
        loaded=tuple(sorted((needed & checkpoint.tensors.keys()) | scales)),
        missing=tuple(missing),
        unexpected=tuple(sorted(left)),
        skipped=skipped,
        notes=(*notes, *_beyond(model.config, left)),
    )
    faults = [f"{name} is missing" for name in missing] + reader.faults()
    if faults:
        shown = "\n  ".join(faults[:20] + ([f"… and {len(faults) - 20} more"] if len(faults) > 20 else []))
        raise LoadError(
            f"{checkpoint.folder}: the tensors do not fit config.json ({model.config.model_type}):\n  {shown}\n"
            "Check that config.json belongs to these files and that the download is complete.",
            report,
        )
    if report.unexpected:
        logger.warning(
            "%s: %d tensors belong to no parameter of the model and were not read: %s",
            checkpoint.folder,
            len(report.unexpected),
            "; ".join((some(list(report.unexpected), 5), *report.notes)),
        )
    return report


def _is_fp8(checkpoint: Checkpoint, name: str) -> bool:
    return name in checkpoint.tensors and checkpoint.tensors[name].dtype == "F8_E4M3"


def _skip_rules(config: DecoderConfig, left: Set[str]) -> dict[str, Callable[[str], bool]]:
    """Rules for tensors that are left out on purpose: name -> test of a tensor's name."""
    first = config.num_hidden_layers
    numbers = range(first, first + getattr(config, "num_nextn_predict_layers", 0))
    # What sets a prediction layer apart from one layer too many: it joins the hidden state with an embedding.
    marked = {number for name in left if (number := _number(name, _PREDICTION)) in numbers}
    return {
        "multi-token prediction layers (not part of the model)": lambda name: _number(name, _LAYER) in marked,
        "rotary frequencies (computed)": lambda name: name.endswith("rotary_emb.inv_freq"),
        "head tied to the embedding": lambda name: name == HEAD and config.tie_word_embeddings,
    }


def _beyond(config: DecoderConfig, left: Set[str]) -> list[str]:
    """What the names nobody asked for have in common."""
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
