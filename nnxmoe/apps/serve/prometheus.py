"""Metrics of a server in the Prometheus text format."""

import bisect
import collections
from collections.abc import Callable, Iterator

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
HELP = {
    "requests_total": "Requests by endpoint and HTTP status",
    "cancelled_total": "Requests cancelled because the client disconnected",
    "prompt_tokens_total": "Tokens of accepted prompts",
    "generated_tokens_total": "Tokens generated and sent",
    "slots": "Samples that can be generated concurrently",
    "slots_running": "Slots in use",
    "samples_waiting": "Samples waiting for a slot",
    "samples_admitted": "Samples of requests in progress",
    "prefixes_kept": "Prompt prefixes in the prefix cache",
    "prefix_hits": "Prompts that hit the prefix cache since the server started",
    "prefix_tokens": "Prompt tokens read from the prefix cache since the server started",
    "first_token_seconds": "Time from the arrival of a request to the first token",
    "request_seconds": "Time from the arrival of a request to the end of the response",
}


class Histogram:
    """Histogram of durations, with the bucket bounds `SECONDS`."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, value: float) -> None:
        """Add a duration in seconds to the histogram."""
        self.counts[bisect.bisect_left(SECONDS, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Yield lines with the cumulative counts, the sum and the total count."""
        total = 0
        for bound, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters, histograms and gauges.

    Args:
        gauges: Maps the name of a gauge to a function that returns the current value.
    """

    def __init__(self, gauges: dict[str, Callable[[], int]]) -> None:
        self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self.counters: collections.Counter[str] = collections.Counter(
            dict.fromkeys(("cancelled_total", "prompt_tokens_total", "generated_tokens_total"), 0)
        )
        self.first_token, self.seconds, self._gauges = Histogram(), Histogram(), gauges

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        lines = []

        def add_metric(name: str, metric_type: str, values: Iterator[str] | list[str]) -> None:
            lines.extend([f"# HELP nnxmoe_{name} {HELP[name]}.", f"# TYPE nnxmoe_{name} {metric_type}", *values])

        by_status = sorted(self.requests.items())
        counts = [
            f'nnxmoe_requests_total{{path="{path}",status="{status}"}} {count}' for (path, status), count in by_status
        ]
        add_metric("requests_total", "counter", counts)
        for name, value in self.counters.items():
            add_metric(name, "counter", [f"nnxmoe_{name} {value}"])
        for name, get_value in self._gauges.items():
            add_metric(name, "gauge", [f"nnxmoe_{name} {get_value()}"])
        for name, histogram in (("first_token_seconds", self.first_token), ("request_seconds", self.seconds)):
            add_metric(name, "histogram", histogram.lines(f"nnxmoe_{name}"))
        return "\n".join([*lines, ""])
