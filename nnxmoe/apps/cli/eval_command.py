"""``nnxmoe eval``: evaluate a model with lm-evaluation-harness."""

# pyright: reportMissingImports=false
# lm-eval is an optional dependency, not installed for type checking.

import argparse
import json
from pathlib import Path

from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.options import add_loading, add_slots, count
from nnxmoe.convert.storage.atomic_dir import refuse_unless_writable
from nnxmoe.runtime.extras import install_command

EXAMPLE = "eval demo --tasks arc_easy,hellaswag --limit 100"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe eval``."""
    add_loading(parser)
    add = parser.add_argument
    add("--tasks", required=True, metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    add("--include-path", metavar="DIR", help="a folder with more tasks as YAML files")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)")
    add("--limit", type=count, metavar="N", help="evaluate only the first N questions of each task")
    add("--apply-chat-template", action="store_true", help="format each question with the chat template")
    add_slots(add)
    add("--seed", type=int, default=0, metavar="S", help="random seed for tasks that sample answers (default 0)")
    add("--out", type=Path, metavar="FILE", help="also write all results as JSON")


def run(options: argparse.Namespace) -> None:
    """Evaluate a model with lm-evaluation-harness. Requires the eval extra."""
    try:
        from lm_eval import evaluator
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        from nnxmoe.apps.evaluation.harness import HarnessLM
    except ModuleNotFoundError as error:
        raise ValueError(f"nnxmoe eval needs lm-eval ({error}): {install_command('eval')}") from None
    names = [name.strip() for name in options.tasks.split(",")]
    manager = TaskManager(include_path=options.include_path)
    unknown_tasks = [name for name in names if not manager.match_tasks([name])]
    if unknown_tasks:
        raise ValueError(f"--tasks: unknown task {unknown_tasks[0]!r}; list all tasks with: lm-eval ls tasks")
    if options.out is not None:
        if options.out.is_dir():
            raise ValueError(f"--out {options.out} is a folder: pass a file name")
        refuse_unless_writable(options.out.parent)
    model, tokenizer = loading.load(options)
    evaluator.get_git_commit_hash = lambda: None  # runs git, which prints an error outside a repository
    results = evaluator.simple_evaluate(
        HarnessLM(model, tokenizer, slots=options.slots, seed=options.seed),
        tasks=names,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        task_manager=manager,
        torch_random_seed=None,  # pyright: ignore[reportArgumentType]  None avoids importing torch
        log_samples=False,
    )
    if results is None:  # only the first process has results
        return
    limit = "" if options.limit is None else f", the first {options.limit} questions of each task"
    print(f"{options.model}, {model.dtype}{limit}")
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
