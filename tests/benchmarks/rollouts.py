"""KL divergence between sampler and trained model, with and without the replay of experts.

    python -m tests.benchmarks.rollouts

trains tiny models of five families with GRPO. It prints one row per family and dtype: ``kl/rollout`` after 0, 1 and 5
updates without replay and with replay, and the share of flipped tokens per layer (``routing/flipped``).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import optax

import nnxmoe
from nnxmoe import train
from tests.support.families import load
from tests.support.tiny import build, build_tiny

FAMILIES = ("mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text")
UPDATES = (0, 1, 5)


def even_ids(completions: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The share of even ids, a reward that needs no tokenizer."""
    return [float(np.mean(np.asarray(ids) % 2 == 0)) for ids in completions]


def tiny(family: str, dtype: str) -> nnxmoe.CausalLM:
    """A tiny model with random weights."""
    strategy = nnxmoe.Strategy(compute_dtype=dtype)
    if family in ("mixtral", "deepseek_v3", "gpt_oss"):
        return build_tiny(family, strategy)
    case = load(family)
    return build(case.fields, case.weights, strategy)


def measure(family: str, dtype: str, replay: bool) -> Iterator[tuple[float, float]]:
    """Yield ``kl/rollout`` and ``routing/flipped`` after each number of updates in `UPDATES`."""
    rng = np.random.RandomState(0)
    prompts = [[{"prompt": rng.randint(3, 50, 8).tolist()} for _ in range(16)]]
    objective = train.GRPO(even_ids, group_size=8, max_new_tokens=24, seq_len=32, eos_token_id=None, replay=replay)
    options: Any = {"objective": objective, "optimizer": optax.adam(1e-2), "steps": max(UPDATES) + 1}
    history = train.fit(tiny(family, dtype), prompts, **options).history
    for updates in UPDATES:
        yield history[updates]["kl/rollout"], history[updates].get("routing/flipped", np.nan)


def main() -> None:
    print("| model | dtype | kl/rollout without replay | with replay | flipped |\n|---|---|---|---|---|")
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            without, replayed = (list(measure(family, dtype, replay)) for replay in (False, True))
            texts = [", ".join(f"{kl:.1e}" for kl, _ in values) for values in (without, replayed)]
            flipped = ", ".join(f"{share:.2%}" for _, share in replayed)
            print(f"| {family} | {dtype} | {texts[0]} | {texts[1]} | {flipped} |", flush=True)


if __name__ == "__main__":
    main()
