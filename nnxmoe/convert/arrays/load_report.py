"""Report of loading a checkpoint, with the status of every tensor."""

import dataclasses
from collections.abc import Mapping

from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import bytes_text, plain, some
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.runtime.progress import logger


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Result of loading: the status of every tensor of a checkpoint and every parameter of a model.

    Attributes:
        source: Folder or hub id as passed by the caller.
        loaded: Names of the tensors that were read.
        missing: Names of tensors that the model needs and the checkpoint lacks. Empty for a loaded model.
        wrong: Messages about tensors with a wrong shape or dtype. Empty for a loaded model.
        unexpected: Tensors that the model does not use, except skipped tensors.
        skipped: Rule -> names of tensors skipped on purpose.
        casts: "stored -> loaded dtype" -> names of tensors.
        nonfinite: Tensor name -> number of NaN or infinite values after loading, on this process's devices.
        notes: Further messages for the user.
        bytes_read: Bytes read by this process.
        seconds: Duration of loading.
        files: Folder with the tokenizer files, or GGUF file. Saving the model copies these files.
        revision: Branch, tag or commit on the hub.
        weights: Dtype or quantization type -> bytes in memory, including scales. Replicas on several devices count
            once.
        quantization_error: RMS error of the weights due to ``quantize``, relative to the RMS of the weights.
        towers: Components of a multimodal checkpoint outside the text model, such as ``vision_tower``. Their tensors
            are skipped.
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
        """Loading speed in bytes per second, including casts and transfer to devices."""
        return self.bytes_read / max(self.seconds, 1e-9)

    def warn(self) -> None:
        """Log a single warning with the notes, unread tensors, and NaN or infinite values, if any."""
        messages = list(self.notes)
        if self.towers:
            messages.insert(
                0, f"this is only the text model of a multimodal checkpoint, without {', '.join(self.towers)}"
            )
        if self.unexpected:
            count, names = len(self.unexpected), some(self.unexpected, 5)
            subject = "1 tensor matches" if count == 1 else f"{count} tensors match"
            verb = "was" if count == 1 else "were"
            messages.insert(0, f"{subject} no parameter of the model and {verb} not read: {names}")
        if self.nonfinite:
            count, names = sum(self.nonfinite.values()), sorted(self.nonfinite)
            messages.append(f"{count} values of {len(names)} tensors are NaN or infinite: {some(names, 5)}")
        if messages:
            logger.warning("%s: %s", self.source, "; ".join(messages))

    def summary(self) -> str:
        """Return the report as text, without the messages that `warn` logs."""
        lines = [
            f"{self.source}: {len(self.loaded)} tensors, {bytes_text(self.bytes_read)} "
            f"in {self.seconds:.2f} s ({bytes_text(self.bytes_per_second)}/s)"
        ]
        lines += [f"  skipped     {rule}: {some(names, 4)}" for rule, names in self.skipped.items()]
        lines += [f"  cast        {cast}: {len(names)} tensors" for cast, names in self.casts.items()]
        sizes = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in self.weights.items())
        lines += [f"  in memory   {sizes}"] if sizes else []
        if self.quantization_error is not None:
            lines.append(f"  quantized   root mean square error {self.quantization_error:.2%} relative to the weights")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  missing     {some(self.missing, 4)}"] if self.missing else []
        lines += [f"  unexpected  {some(self.unexpected, 4)}"] if self.unexpected else []
        lines += [f"  NaN or Inf  {plain(name)}: {count} values" for name, count in self.nonfinite.items()]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


class LoadError(CheckpointError):
    """Error for weights that do not fit the model. ``report`` contains the details."""

    def __init__(self, message: str, report: LoadReport):
        super().__init__(message)
        self.report = report
