"""Every malformed checkpoint of the corpus meets its verdict, in a process of its own."""

from collections import Counter

import pytest

from tests.corpus.case import FAMILIES
from tests.corpus.runner import CASES, judge


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    _, fault = judge(CASES[name])
    assert fault is None, fault


def test_the_corpus_is_large_and_covers_every_family() -> None:
    malformed = Counter(case.family for case in CASES.values() if case.verdict != "accept")
    assert sum(malformed.values()) >= 150 and all(malformed[family] >= 50 for family in FAMILIES)
    assert all(case.names for case in CASES.values() if case.verdict != "accept")
