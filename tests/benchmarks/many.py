"""Many prompts of mixed lengths, and drafts by prompt lookup: one way per process, in turn.

    python -m tests.benchmarks.many FOLDER [--prompts 200] [--slots 8] [--repeats 3] [--ways complete,static,…]

FOLDER: a checkpoint, such as one of those that ``python -m tests.benchmarks --checkpoints DIR`` keeps. Prints a table
of the medians; a token counts if it was asked for. ``complete``: an `nnxmoe.Engine`. ``static``: `nnxmoe.generate` on
as many prompts at a time, each batch up to its longest answer. ``transformers``: the same batches. ``copy`` and
``free``: one prompt at a time with `PromptLookup`, where the answer repeats the prompt and where it does not; ``plain``
and ``plain copy``: the same without drafts.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("complete", "static", "transformers", "plain", "free", "plain copy", "copy")
Job = tuple[list[int], int]  # a prompt, and how many new ids it wants


def jobs(count: int, vocab: int) -> list[Job]:
    """Prompts of 16 to 128 ids that want 16 to 256 new ones."""
    rng = np.random.default_rng(0)
    lengths, wanted = rng.integers(16, 129, count), rng.integers(16, 257, count)
    return [(rng.integers(3, vocab, n).tolist(), int(most)) for n, most in zip(lengths, wanted, strict=True)]


def batches(given: Sequence[Job], size: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Ids padded on the left, their mask, and the most new ids of each batch."""
    out = []
    for first in range(0, len(given), size):
        part = given[first : first + size]
        longest = max(len(ids) for ids, _ in part)
        rows = [(np.pad(ids, (longest - len(ids), 0)), np.arange(longest) >= longest - len(ids)) for ids, _ in part]
        out.append((*(np.stack(a) for a in zip(*rows, strict=True)), max(most for _, most in part)))
    return out


def of_nnxmoe(folder: str, way: str, given: list[Job], slots: int) -> Callable[[], Any]:
    import jax.numpy as jnp

    import nnxmoe
    from nnxmoe.generation.rows import History

    nnxmoe.compile_cache()
    model = nnxmoe.from_pretrained(folder)

    def engine_run() -> None:
        limits = nnxmoe.EngineLimits(sampling=nnxmoe.RequestOptions().required_limits(10).sampling)
        engine = nnxmoe.Engine(model, slots=slots, capacity=384, limits=limits)
        for ids, most in given:
            engine.submit(ids, nnxmoe.RequestOptions(most))
        engine.run()

    def static() -> None:
        for ids, mask, most in batches(given, slots):
            nnxmoe.generate(model, ids, mask, max_new_tokens=most, eos_token_id=None)

    def repeat_the_prompt(logits: Any, history: History) -> Any:
        """An answer that copies: the id that stands as far back as the prompt is long."""
        back = history.length - history.new_count
        last = jnp.take_along_axis(history.ids, (history.length - back)[:, None], axis=1)
        return logits.at[jnp.arange(len(logits))[:, None], last].add(1e4)

    def lookup() -> None:
        draft = nnxmoe.PromptLookup() if way in ("copy", "free") else None
        process = repeat_the_prompt if "copy" in way else None
        engine = nnxmoe.Engine(model, slots=1, capacity=384, logits_processor=process, draft=draft)
        for ids, _ in given[:4]:
            request = engine.submit(ids, nnxmoe.RequestOptions(128))
            engine.run()
            print(dict(request.accepted), file=sys.stderr)

    return {"complete": engine_run, "static": static}.get(way, lookup)


def of_transformers(folder: str, given: list[Job], slots: int) -> Callable[[], Any]:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.generation_config.eos_token_id = None

    def run() -> None:
        with torch.inference_mode():
            for ids, mask, most in batches(given, slots):
                options = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
                model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask).long(), **options)

    return run


def measure(options: argparse.Namespace) -> None:
    """Prints tokens per second of one way, after a short first run."""
    import json

    vocab = json.loads((Path(options.folder) / "config.json").read_text())["vocab_size"]
    given = jobs(options.prompts, vocab)
    tokens = sum(most for _, most in given) if options.way in WAYS[:3] else 4 * 128
    if options.way == "transformers":
        run, first = (of_transformers(options.folder, part, options.slots) for part in (given, given[:2]))
    else:
        run, first = (
            of_nnxmoe(options.folder, options.way, part, options.slots) for part in (given, given[: options.slots])
        )
    first()
    started = time.perf_counter()
    run()
    print(tokens / (time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options)
        return
    found: dict[str, list[float]] = {way: [] for way in options.ways.split(",")}
    for _ in range(options.repeats):
        for way, speeds in found.items():
            command = [sys.executable, "-m", "tests.benchmarks.many", *sys.argv[1:], "--way", way]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "TQDM_DISABLE": "1"}
            )
            speeds.append(float(done.stdout))
    for way, speeds in found.items():
        print(f"| {way} | {statistics.median(speeds):.1f} tok/s | {', '.join(f'{s:.1f}' for s in speeds)} |")


if __name__ == "__main__":
    main()
