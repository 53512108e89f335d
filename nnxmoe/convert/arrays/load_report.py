"""The report of a load, tensor by tensor."""

import dataclasses
from collections.abc import Mapping

from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import bytes_text, plain, some
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.runtime.progress import logger


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Accounts for every tensor of a checkpoint and every parameter of a model.

    ``source``: the folder or hub id that was asked for, and ``revision`` the branch, tag or commit of the hub.
    ``skipped``: rule -> names skipped on purpose. ``unexpected``: other tensors that the model does not use.
    ``missing``: parameters without a tensor; ``wrong``: messages about tensors of another shape or dtype (both empty
    for a loaded model). ``casts``: "stored -> loaded dtype" -> names.
    ``towers``: the parts of a multimodal checkpoint beside the text model, whose tensors are skipped.
    ``nonfinite``: tensor -> number of NaN or infinite values after loading (on this process's devices).
    ``files``: the folder with the tokenizer files, which saving copies. ``weights``: bytes in memory by dtype or kind
    of code, scales included, without copies on several devices. ``quantization_error``: the root mean square of what
    ``quantize`` changed, relative to that of the weights.
    """

    source: str
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: Mapping[str, tuple[str, ...]] = FrozenDict({})
    casts: Mapping[str, tuple[str, ...]] = FrozenDict({})
    nonfinite: Mapping[str, int] = FrozenDict({})
    notes: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = dataclasses.field(default=0.0, compare=False)
    files: str | None = None
    revision: str | None = None
    weights: Mapping[str, int] = FrozenDict({})
    quantization_error: float | None = None
    towers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # The report is a static attribute of a model and must be hashable.
        for name in ("skipped", "casts", "nonfinite", "weights"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))

    @property
    def bytes_per_second(self) -> float:
        """Speed of reading, casting and placing on devices."""
        return self.bytes_read / max(self.seconds, 1e-9)

    def warn(self) -> None:
        """Log one warning with what the user must know: tensors that were not read, notes, and values that are NaN or
        infinite."""
        found = list(self.notes)
        if self.towers:
            found.insert(0, f"this is the text model of a multimodal checkpoint, without {', '.join(self.towers)}")
        if self.unexpected:
            count, names = len(self.unexpected), some(self.unexpected, 5)
            what = "1 tensor belongs" if count == 1 else f"{count} tensors belong"
            was = "was" if count == 1 else "were"
            found.insert(0, f"{what} to no parameter of the model and {was} not read: {names}")
        if self.nonfinite:
            count, names = sum(self.nonfinite.values()), sorted(self.nonfinite)
            found.append(f"{count} values of {len(names)} tensors are NaN or infinite: {some(names, 5)}")
        if found:
            logger.warning("%s: %s", self.source, "; ".join(found))

    def summary(self) -> str:
        """The report without what `warn` has logged."""
        lines = [
            f"{self.source}: {len(self.loaded)} tensors, {bytes_text(self.bytes_read)} "
            f"in {self.seconds:.2f} s ({bytes_text(self.bytes_per_second)}/s)"
        ]
        lines += [f"  skipped     {rule}: {some(names, 4)}" for rule, names in self.skipped.items()]
        lines += [f"  cast        {cast}: {len(names)} tensors" for cast, names in self.casts.items()]
        sizes = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in self.weights.items())
        lines += [f"  in memory   {sizes}"] if sizes else []
        if self.quantization_error is not None:
            lines.append(f"  quantised   root mean square error {self.quantization_error:.2%} of the weights")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  missing     {some(self.missing, 4)}"] if self.missing else []
        lines += [f"  unexpected  {some(self.unexpected, 4)}"] if self.unexpected else []
        lines += [f"  NaN or Inf  {plain(name)}: {count} values" for name, count in self.nonfinite.items()]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


class LoadError(CheckpointError):
    """Raised if weights do not fit the model; ``report`` has the details."""

    def __init__(self, message: str, report: LoadReport):
        super().__init__(message)
        self.report = report
