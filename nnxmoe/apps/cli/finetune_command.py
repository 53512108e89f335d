"""``nnxmoe finetune``: train a model or a LoRA adapter on a file of records."""

import argparse
import dataclasses
import shlex
import sys

import jax

import nnxmoe
from nnxmoe.apps.cli.loading import devices_text, mesh_of, refuse_without_weights
from nnxmoe.apps.cli.options import add_mesh, add_model, add_quantize, count
from nnxmoe.runtime.progress import say

EXAMPLE = "finetune demo chats.jsonl --out tuned --lora 16"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe finetune``."""
    add_model(parser)
    add = parser.add_argument
    add(
        "data",
        metavar="DATA.json",
        help='objects {"text": …}, {"messages": [{"role": …}, …]} or {"prompt": …, "completion": …}, or objects in the '
        "format of Alpaca or ShareGPT, one per line or in a JSON array, optionally compressed (.gz)",
    )
    add("--out", required=True, metavar="DIR", help="new or empty folder, or a run to resume; gets metrics.jsonl")
    add("--lora", type=count, metavar="RANK", help="train LoRA adapters of this rank (default: all weights)")
    add_quantize(parser)
    add("--adapter-only", action="store_true", help="write the unmerged adapter in PEFT's format")
    add("--lora-alpha", type=float, metavar="A", help="scale adapters by A / rank (default: the rank)")
    add(
        "--split-rank",
        action="store_true",
        help="divide the rank of expert adapters by the experts per token",
    )
    length = parser.add_mutually_exclusive_group().add_argument
    length("--steps", type=count, metavar="N", help="total number of training steps (default 200)")
    length("--epochs", type=count, metavar="N", help="passes over the data, instead of --steps")
    add("--warmup", type=int, metavar="N", help="warmup steps (default: a tenth of all steps, at most 100)")
    add("--preferences", action="store_true", help="train with DPO on chosen and rejected completions")
    add(
        "--beta",
        type=float,
        metavar="B",
        help="DPO's beta: higher values stay closer to the original model (default 0.1)",
    )
    help_text = "accumulate gradients over N microbatches to save memory"
    add("--accumulate", type=count, default=1, metavar="N", help=help_text)
    add("--eval", dest="evaluation", metavar="DATA.json", help="held-out data, evaluated at every checkpoint")
    help_text = "skip unusable records up to this fraction of all records (default 0.01; 0 skips none)"
    add("--max-bad-fraction", type=float, default=0.01, metavar="X", help=help_text)
    add("--batch-size", type=count, default=8, metavar="B", help="rows per step (default 8)")
    add("--seq-len", type=count, default=512, metavar="T", help="tokens per row (default 512)")
    add("--optimizer", default="adam", metavar="NAME", help="adam (default), muon, adafactor or lion")
    add(
        "--learning-rate",
        type=float,
        metavar="LR",
        help="peak learning rate (default 2e-5, or 2e-4 with --lora; lion / 5, DPO / 20)",
    )
    help_text = "save a checkpoint every K steps (default 100)"
    add("--save-every", type=count, default=100, metavar="K", help=help_text)
    add("--profile", type=count, metavar="N", help="write a trace of N steps for xprof or Perfetto")
    add("--seed", type=int, default=0, metavar="S", help="random seed, for example of the data order (default 0)")
    add_mesh(parser)


def run(options: argparse.Namespace) -> None:
    """Fine-tune a model on texts or chats. Rerun the command to resume an interrupted run."""
    from nnxmoe.train import finetune as tuning
    from nnxmoe.train.loop.measured import EVAL_LOSS

    names = [field.name for field in dataclasses.fields(tuning.Finetune) if field.name != "model"]
    task = tuning.Finetune(refuse_without_weights(options.model), **{name: getattr(options, name) for name in names})
    mesh = mesh_of(options.mesh, connect=True)
    if mesh is None and (count := jax.process_count()) > 1:
        raise ValueError(
            f"this job has {count} processes, and each would train a separate model without --mesh: use a mesh of all "
            f"{jax.device_count()} devices, such as --mesh fsdp={jax.device_count()}"
        )
    say("running on %s", devices_text(mesh))
    names = ("save_every", "local_files_only", "profile", "max_bad_fraction")
    try:
        result = tuning.finetune(task, options.out, mesh=mesh, **{name: getattr(options, name) for name in names})
    except KeyboardInterrupt:
        line = shlex.join(["nnxmoe", *sys.argv[1:]])
        raise KeyboardInterrupt(f"interrupted {tuning.progress_of(options.out)} with: {line}") from None
    if jax.process_index() > 0:
        return
    if result is not None and result.history:
        first_metrics, last_metrics = result.history[0], result.history[-1]
        name = "cross_entropy" if "cross_entropy" in first_metrics else "loss"
        steps = f"steps {first_metrics['step']} to {last_metrics['step']}"
        print(f"{steps}: {name.replace('_', '-')} {first_metrics[name]:.4f} -> {last_metrics[name]:.4f}")
        if EVAL_LOSS in last_metrics:
            print(f"on {options.evaluation}: {last_metrics[EVAL_LOSS]:.4f}")
    output = "adapter in PEFT's format" if options.adapter_only else "fine-tuned model"
    hub = {"revision": options.revision, "local_files_only": options.local_files_only}
    has_template = nnxmoe.Tokenizer.from_pretrained(task.model, **hub).chat_template is not None
    arguments = ["chat", options.out] if has_template else ["generate", options.out, "Once upon a time"]
    print(f"{options.out}: {output}, with losses in metrics.jsonl. Try it: {shlex.join(['nnxmoe', *arguments])}")
