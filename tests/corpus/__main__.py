"""``python -m tests.corpus [PART OF A NAME]``: every case, one line each."""

import sys
from collections import Counter

from tests.corpus.runner import CASES, judge


def main() -> int:
    """Runs the cases and returns the exit code."""
    wrong, count = 0, Counter[str]()
    for case in CASES.values():
        if not all(part in case.name for part in sys.argv[1:]):
            continue
        outcome, fault = judge(case)
        count[case.verdict] += 1
        wrong += fault is not None
        text = " ".join((fault or outcome.text).split())
        print(
            f"{'ok  ' if fault is None else 'FAIL'} {case.verdict:6} {case.name:60} {outcome.seconds:5.2f} s  {text[:300]}"
        )
    print(f"{sum(count.values())} cases ({', '.join(f'{n} {verdict}' for verdict, n in count.items())}), {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
