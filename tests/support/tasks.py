"""Three local tasks for lm-evaluation-harness, and models and results in its terms."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"), ("Peru", "Lima")]
TASKS = ("local_choice", "local_answer", "local_text")
WORDS = "the fox and the hen went to the river where a boat made of birch wood lay".split()


def write_tasks(folder: Path) -> Path:
    """YAML files (JSON is YAML) and data: choices, answers up to a stop string, and texts of up to 300 words."""
    cities = [city for _, city in CAPITALS]
    choice = [
        {"question": f"What is the capital of {c}?", "cities": cities, "right": i} for i, (c, _) in enumerate(CAPITALS)
    ]
    choice += [{"question": "", "cities": ["a", "b long one"], "right": 0}]  # an empty context
    answer = [{"question": f"What is {a} + {b}?", "sum": str(a + b)} for a, b in ((47, 38), (12, 5), (9, 81), (3, 4))]
    text = [{"text": " ".join(WORDS[(i * 7 + n) % len(WORDS)] for i in range(n))} for n in (1, 30, 300)]
    _write(folder, "local_choice", choice, {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "cities",
        "doc_to_target": "right", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    })  # fmt: skip
    _write(folder, "local_answer", answer, {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "sum",
        "generation_kwargs": {"until": ["e", "."], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    })  # fmt: skip
    _write(folder, "local_text", text, {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    })  # fmt: skip
    return folder


def _write(folder: Path, name: str, rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))


def quiet_harness(folder: Path) -> None:
    """Keeps the harness' data sets in a folder, and away from the network. Call it before lm_eval is imported."""
    os.environ |= {"HF_DATASETS_CACHE": str(folder), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def evaluate(
    model: Any, folder: Path, names: Sequence[str] = TASKS, **options: Any
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Metrics by task, and what the model answered to each request of each task."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    evaluator.add_env_info = lambda results: None  # runs `pip list`, where torch is installed
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"torch_random_seed": None, "bootstrap_iters": 0, **options}
    found: Any = evaluator.simple_evaluate(model, tasks=list(names), task_manager=manager, **options)
    ordered = {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in names}
    return found["results"], {name: [sample["filtered_resps"] for sample in ordered[name]] for name in names}
