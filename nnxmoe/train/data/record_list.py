"""Training records in memory: of a list, a ``datasets.Dataset``, or another iterable of dicts."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.generation.chat_template import plain_values
from nnxmoe.train.data.bad_records import BadRecords, DataError, RecordError
from nnxmoe.train.data.records import FORMS, PAIR, Parse, record_of, tell_ignored, without_nulls

_USED = frozenset(name for names in FORMS.values() for name in names) | {*PAIR}


class RecordList:
    """The usable records of an iterable of dicts, all validated and kept in memory.

    Values may be arrays of NumPy or JAX where JSON has lists and numbers. NaN, with which pandas marks absent values,
    and the nulls with which a ``datasets.Dataset`` or a Parquet file fills its columns count as absent. Raises
    DataError if more records are unusable than ``bad`` allows.
    """

    unit = "record"

    def __init__(
        self, records: Iterable[Mapping[str, Any]], parse: Parse = record_of, bad: BadRecords | None = None
    ) -> None:
        if isinstance(records, Mapping) or not isinstance(records, Iterable):
            raise DataError(f"{short(records)} is no training data: pass a file of JSON lines, or an iterable of dicts")
        bad = BadRecords() if bad is None else bad
        digest, ignored, self._records, self._numbers = hashlib.sha256(), set[str](), list[Any](), list[int]()
        self.total, filled = 0, hasattr(records, "features")  # of a datasets.Dataset
        for number, value in enumerate(records):
            self.total += 1
            try:
                record, more = parse(_plain_record(value, filled) if isinstance(value, Mapping) else value)
            except RecordError as error:
                bad.add(number, error)
                continue
            ignored |= more
            digest.update(json.dumps(record, default=dataclasses.astuple).encode())
            self._records.append(record)
            self._numbers.append(number)
        if not self.total:
            raise DataError("there are no records: pass at least one")
        bad.settle(self, self.unit, self.total)
        self.size, self.digest = len(self._records), digest.hexdigest()
        tell_ignored(ignored, self)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]

    def __str__(self) -> str:
        return "the list of records"

    def number(self, index: int) -> int:
        """The place of a usable record among all records."""
        return self._numbers[index]

    def where(self, index: int) -> str:
        """The record's place, for messages."""
        return f"{self.unit} {self.number(index)}"


def _plain_record(record: Mapping[str, Any], filled: bool) -> dict[str, Any]:
    """The record with its used fields as JSON values. ``filled``: its nulls mean absent."""
    plain: dict[str, Any] = {}
    for name, value in record.items():
        if name in _USED:
            fills = filled or isinstance(value, np.ndarray)  # pandas reads lists of Parquet files as arrays
            value = plain_values(value, functools.partial(_refuse, name))
            value = without_nulls(value) if fills else value
            if isinstance(value, float) and value != value:
                value = None
        if value is not None or not filled:
            plain[name] = value
    return plain


def _refuse(name: str, value: object) -> NoReturn:
    kind = type(value).__name__
    raise RecordError(f"{name} holds {short(value)} of type {kind}: use values of JSON", f"{name} holds {kind}")
