"""In-memory training records, from a list, a ``datasets.Dataset`` or another iterable of dicts."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.tokenizer.chat_template import to_json_types
from nnxmoe.train.data.bad_records import BadRecords, DataError, RecordError
from nnxmoe.train.data.records import FORMS, PAIR, Parse, record_of, tell_ignored, without_nulls

_USED = frozenset(name for names in FORMS.values() for name in names) | {*PAIR}


class RecordList:
    """Usable records of an iterable of dicts, validated and stored in memory.

    Lists and numbers may also be NumPy or JAX arrays. NaN is treated as absent, since pandas marks
    missing values with NaN. Nulls that fill the columns of a ``datasets.Dataset`` or a Parquet file are
    also treated as absent. Raises DataError if more records are unusable than ``bad`` allows.
    """

    unit = "record"

    def __init__(
        self, records: Iterable[Mapping[str, Any]], parse: Parse = record_of, bad: BadRecords | None = None
    ) -> None:
        if isinstance(records, Mapping) or not isinstance(records, Iterable):
            raise DataError(f"{short(records)} is not training data: pass a file of JSON lines or an iterable of dicts")
        bad = BadRecords() if bad is None else bad
        digest, ignored, self._records, self._numbers = hashlib.sha256(), set[str](), list[Any](), list[int]()
        self.total, null_filled = 0, hasattr(records, "features")  # an attribute of datasets.Dataset
        for number, value in enumerate(records):
            self.total += 1
            try:
                record, unused = parse(_plain_record(value, null_filled) if isinstance(value, Mapping) else value)
            except RecordError as error:
                bad.add(number, error)
                continue
            ignored |= unused
            digest.update(json.dumps(record, default=dataclasses.astuple).encode())
            self._records.append(record)
            self._numbers.append(number)
        if not self.total:
            raise DataError("there are no records: pass at least one record")
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
        """Map an index into the usable records to an index into all records."""
        return self._numbers[index]

    def where(self, index: int) -> str:
        """Return the location of a record for messages."""
        return f"{self.unit} {self.number(index)}"


def _plain_record(record: Mapping[str, Any], null_filled: bool) -> dict[str, Any]:
    """Convert the used fields of a record to JSON values. If ``null_filled``, drop null fields."""
    plain: dict[str, Any] = {}
    for name, value in record.items():
        if name in _USED:
            drop_nulls = null_filled or isinstance(value, np.ndarray)  # pandas reads Parquet lists as arrays
            value = to_json_types(value, functools.partial(_refuse, name))
            value = without_nulls(value) if drop_nulls else value
            if isinstance(value, float) and value != value:
                value = None
        if value is not None or not null_filled:
            plain[name] = value
    return plain


def _refuse(name: str, value: object) -> NoReturn:
    type_name = type(value).__name__
    raise RecordError(
        f"{name} contains {short(value)} of type {type_name}: use JSON values", f"{name} contains {type_name}"
    )
