"""Unusable records of training data: counted by reason, and skipped up to a share."""

import dataclasses
import re

from nnxmoe.config.printable import short
from nnxmoe.runtime.progress import logger

MAX_BAD_FRACTION = 0.01
_LISTED_LINES, _LISTED_REASONS, _REASONS = 5, 8, 1000


class DataError(ValueError):
    """Raised for unusable training data; the message names the file, the line and the remedy."""


class RecordError(DataError):
    """Raised for one unusable record. ``reason`` is equal for records with the same fault, unlike the message, which
    has their values; by default it is the message without numbers."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = re.sub(r"\d+", "#", message if reason is None else reason)


@dataclasses.dataclass
class _Fault:
    """The records with one fault: their count, the first numbers, and the message of the first."""

    message: str
    count: int = 0
    numbers: list[int] = dataclasses.field(default_factory=list)

    def text(self, unit: str) -> str:
        numbers = ", ".join(map(str, self.numbers))
        if self.count == 1:
            return f"{unit} {numbers}: {self.message}"
        more = ", …" if self.count > len(self.numbers) else ""
        return f"{self.count} {unit}s ({numbers}{more}): {self.message}"


class BadRecords:
    """Counts the unusable records of one data set, and skips them if they are at most ``max_fraction`` of all.

    Which records are skipped depends on the data alone, not on the fraction.
    """

    def __init__(self, max_fraction: float = MAX_BAD_FRACTION) -> None:
        number = isinstance(max_fraction, int | float) and not isinstance(max_fraction, bool)
        if not number or not 0 <= max_fraction <= 1:
            raise ValueError(f"max_bad_fraction={short(max_fraction)}: pass a number from 0 (skip none) to 1")
        self.max_fraction, self.count = max_fraction, 0
        self._faults: dict[str, _Fault] = {}
        self._reported, self._early = 0, False

    def add(self, number: int, error: RecordError) -> None:
        """Count the record with this number."""
        reason = error.reason
        if reason not in self._faults and len(self._faults) >= _REASONS:
            reason = ""  # a bound on memory
        fault = self._faults.setdefault(reason, _Fault(str(error) if reason else "other reasons"))
        fault.count += 1
        fault.numbers += [number] if len(fault.numbers) < _LISTED_LINES else []
        self.count += 1

    def exceeds(self, total: int) -> bool:
        """Whether more of ``total`` records are unusable than may be skipped, or all are."""
        allowed = self.max_fraction * total + 1e-6  # 0.29 * 100 is less than 29
        return self.count > allowed or 0 < total <= self.count

    def settle(self, source: object, unit: str, total: int, *, final: bool = True) -> None:
        """Report skipped records in a warning. Raises DataError if they are too many of ``total``.

        ``final``: whether all records were read. Until then only the first one is reported.
        """
        if self.exceeds(total):
            what = f"{source} has {self.count} unusable record{'s' * (self.count != 1)} of {total}"
            if self.count >= total:
                raise DataError(f"{what}, hence none to train on: {self._text(unit)}")
            so_far = "" if final else " so far"
            raise DataError(
                f"{what}{so_far}, more than max_bad_fraction={self.max_fraction:g} allows: {self._text(unit)}. Correct "
                "or remove them, or pass a larger max_bad_fraction (--max-bad-fraction), up to which they are skipped"
            )
        if self.count > self._reported and (final or not self._early):
            so_far = "" if final else " so far"
            logger.warning("%s: skipped %d of %d records%s: %s", source, self.count, total, so_far, self._text(unit))
            self._reported, self._early = self.count, not final

    def _text(self, unit: str) -> str:
        faults = sorted(self._faults.values(), key=lambda fault: -fault.count)
        listed, rest = faults[:_LISTED_REASONS], faults[_LISTED_REASONS:]
        more = [f"{sum(fault.count for fault in rest)} for {len(rest)} other reasons"] if rest else []
        return "; ".join([*(fault.text(unit) for fault in listed), *more])
