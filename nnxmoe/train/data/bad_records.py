"""Count unusable training records by reason, and limit the fraction that may be skipped."""

import dataclasses
import re

from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_number
from nnxmoe.runtime.progress import logger

MAX_BAD_FRACTION = 0.01
_LISTED_LINES, _LISTED_REASONS, _REASONS = 5, 8, 1000


class DataError(ValueError):
    """Raised if training data are unusable. The message names the file, the line and the remedy."""


class RecordError(DataError):
    """Raised if a single record is unusable.

    Args:
        reason: Text that groups records with the same fault, so it must not contain values of the
            record. Defaults to the message without numbers.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = re.sub(r"\d+", "#", message if reason is None else reason)


@dataclasses.dataclass
class _Fault:
    """Records with the same fault: the count, the first record numbers and the first message."""

    message: str
    count: int = 0
    numbers: list[int] = dataclasses.field(default_factory=list)

    def text(self, unit: str) -> str:
        numbers = ", ".join(map(str, self.numbers))
        if self.count == 1:
            return f"{unit} {numbers}: {self.message}"
        ellipsis = ", …" if self.count > len(self.numbers) else ""
        return f"{self.count} {unit}s ({numbers}{ellipsis}): {self.message}"


class BadRecords:
    """Counter of the unusable records of a data set.

    Every unusable record is skipped. `settle` raises if their fraction exceeds ``max_fraction``.
    """

    def __init__(self, max_fraction: float = MAX_BAD_FRACTION) -> None:
        if (number := as_number(max_fraction)) is None or not 0 <= number <= 1:
            raise ValueError(f"max_bad_fraction={short(max_fraction)}: pass a number from 0 (skip none) to 1")
        self.max_fraction, self.count = number, 0
        self._faults: dict[str, _Fault] = {}
        self._reported, self._early = 0, False

    def add(self, number: int, error: RecordError) -> None:
        """Count an unusable record. ``number`` is its position in the data."""
        reason = error.reason
        if reason not in self._faults and len(self._faults) >= _REASONS:
            reason = ""  # bounds the counter's memory
        fault = self._faults.setdefault(reason, _Fault(str(error) if reason else "other reasons"))
        fault.count += 1
        fault.numbers += [number] if len(fault.numbers) < _LISTED_LINES else []
        self.count += 1

    def exceeds(self, total: int) -> bool:
        """Check whether all of ``total`` records are unusable, or more than the allowed fraction."""
        allowed = self.max_fraction * total + 1e-6  # tolerance: 0.29 * 100 is less than 29 in floating point
        return self.count > allowed or 0 < total <= self.count

    def settle(self, source: object, unit: str, total: int, *, final: bool = True) -> None:
        """Log a warning about the skipped records.

        Raises DataError if too many of the ``total`` records are unusable. If ``final`` is False, more
        records will be read, and only the first call that finds skipped records logs a warning.
        """
        if self.exceeds(total):
            summary = f"{source} has {self.count} unusable record{'s' * (self.count != 1)} of {total}"
            if self.count >= total:
                raise DataError(f"{summary}, so there is nothing to train on: {self._text(unit)}")
            so_far = "" if final else " so far"
            raise DataError(
                f"{summary}{so_far}, more than max_bad_fraction={self.max_fraction:g} allows: {self._text(unit)}. "
                "Correct or remove them, or skip more with a larger max_bad_fraction (--max-bad-fraction)"
            )
        if self.count > self._reported and (final or not self._early):
            so_far = "" if final else " so far"
            logger.warning("%s: skipped %d of %d records%s: %s", source, self.count, total, so_far, self._text(unit))
            self._reported, self._early = self.count, not final

    def _text(self, unit: str) -> str:
        faults = sorted(self._faults.values(), key=lambda fault: -fault.count)
        listed, unlisted = faults[:_LISTED_REASONS], faults[_LISTED_REASONS:]
        summary = [f"{sum(fault.count for fault in unlisted)} for {len(unlisted)} other reasons"] if unlisted else []
        return "; ".join([*(fault.text(unit) for fault in listed), *summary])
