"""Every malformed checkpoint of the corpus meets its verdict, each in its own process."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.corpus import families
from tests.corpus.case import FAMILIES
from tests.corpus.runner import CASES, judge


def _cases() -> Iterator[Any]:
    """All cases. A fault that exists for several families runs by default for one of them, in turn."""
    faults: dict[str, list[str]] = {}
    for name, case in CASES.items():
        faults.setdefault(case.fault, []).append(name)
    for i, names in enumerate(faults.values()):
        for j, name in enumerate(names):
            yield pytest.param(name, marks=pytest.mark.slow if j != i % len(names) else [])


@pytest.mark.parametrize("name", list(_cases()))
def test_case_meets_its_verdict(name: str) -> None:
    _, fault = judge(CASES[name])
    assert fault is None, fault


def test_the_corpus_is_large_and_covers_every_family() -> None:
    malformed = Counter(case.family for case in CASES.values() if case.verdict != "accept")
    assert sum(malformed.values()) >= 150 and all(malformed[family] >= 50 for family in FAMILIES)
    assert all(malformed[family] >= 4 for family in families.FAMILIES)
    assert all(case.names for case in CASES.values() if case.verdict != "accept")
