"""The command ``nnxmoe``: demo, generate, chat, inspect, plan, convert, finetune, serve, eval.

Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 failure (one line on stderr says why), 2 wrong
command line, 130 Ctrl-C, 141 closed pipe.
"""

import argparse
import io
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import nnxmoe
from nnxmoe.apps.cli import chat as talk
from nnxmoe.apps.cli import commands, demo, drafts, evaluating, importing, inspecting, serving
from nnxmoe.apps.cli import options as shared
from nnxmoe.apps.cli import plans as plan_options
from nnxmoe.apps.cli.exit_codes import INTERRUPTED, PIPE_CLOSED
from nnxmoe.config.printable import did_you_mean
from nnxmoe.models import MODELS
from nnxmoe.runtime.compile_cache import compile_cache
from nnxmoe.runtime.extras import install_command
from nnxmoe.runtime.progress import messages_on_stderr

_DESCRIPTION = "Mixture-of-experts language models in JAX. Families, by the model_type of their config.json: "
_DEVICES = re.compile(r"--(device|gpu|cuda|cpu|tpu|n-gpu|num-gpu|ngl|tensor-parallel|tp)\b")
_NO_DEVICES = f"""; JAX chooses the device: {install_command("cuda")} (or tpu), set JAX_PLATFORMS=cpu (or cuda, tpu) to
force one, and use --mesh tensor=8 for 8 devices"""


# Kept until the process ends: their frames hold what XLA's threads still compile, and freeing that while they do is a
# segmentation fault (jax 0.10.2, in about a third of Ctrl-C within 0.2 s after a compilation began).
_interruptions: list[KeyboardInterrupt] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # terminals with a small character set show "?" instead of failing
    try:
        with messages_on_stderr():
            importing.import_modules([*options.imports, *options.command_imports])
            if options.compile_cache:
                compile_cache()
            options.run(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as stop:
        _interruptions.append(stop)
        line = "\n" if sys.stderr.isatty() else ""  # there may be half a line
        print(f"{line}nnxmoe: {str(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        return PIPE_CLOSED
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if options.debug:
            raise
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        message = as_typed(" ".join(why.split()) or type(error).__name__, options.flags)
        print(f"nnxmoe: error: {message}", file=sys.stderr)
        return 1


def as_typed(message: str, flags: Sequence[argparse.Action]) -> str:
    """Replace Python arguments and calls in an error message by the command line's options. Messages about fields of a
    JSON file stay unchanged."""
    if ".json" in message:
        return message
    for action in flags:
        flag, name = action.option_strings[0], action.dest
        message = re.sub(rf"(?<![\w.\"'-]){name}=True(?!\w)", flag, message)
        message = re.sub(rf"(?<![\w.\"'-]){name}=False(?!\w)", f"without {flag}", message)
        message = re.sub(rf"(?<![\w.\"'-]){name}=(?=[^\s=])", rf"{flag} ", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w.\"'-]){name}(?!\w)", flag, message)
    return re.sub(r"\b[A-Za-z_.]+\((--[^()]*)\)", r"\1", message)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, with the nearest names of the options and values that exist."""

    def error(self, message: str) -> NoReturn:
        more = ""
        if unknown := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            start, flags = unknown[1].replace("-", ""), self._option_string_actions
            run_together = [flag for flag in flags if flag.replace("-", "").startswith(start)]
            more = did_you_mean(unknown[1], flags, cutoff=0.75)
            more = f"; did you mean {run_together[0]}?" if run_together and len(start) > 2 else more
            more = " ".join(_NO_DEVICES.split()) if _DEVICES.match(unknown[1]) else more
        elif wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            more = did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"{self.prog}: error: {message}{more} (see {self.prog} --help)\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names in the usage only what must be given: the options follow one by one."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        groups = [group for group in groups if group.required]
        one_of = [action for group in groups for action in group._group_actions]
        needed = [action for action in actions if action.required or not action.option_strings or action in one_of]
        super().add_usage(usage, [argparse.Action(["options"], "options", nargs=0), *needed], groups, prefix)


def _parser() -> argparse.ArgumentParser:
    how: Any = {"formatter_class": _Help}
    parser = _Parser(
        prog="nnxmoe",
        description=textwrap.fill(_DESCRIPTION + ", ".join(sorted(MODELS)) + ".", 100),
        epilog="example:\n  nnxmoe demo\n  nnxmoe generate demo 'Once upon a time'",
        **how,
    )
    parser.add_argument("--version", action="version", version=f"nnxmoe {nnxmoe.__version__}")
    importing.add_option(parser)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog="nnxmoe")
    what = "do not keep compiled programs for later (environment variable: NNXMOE_COMPILE_CACHE=FOLDER or off)"
    for name, (run, add_options, example) in _COMMANDS.items():
        text = " ".join((run.__doc__ or "").split())
        epilog = f"example:\n  nnxmoe {example}"
        sub = subparsers.add_parser(name, help=text, description=text, epilog=epilog, **how)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.add_argument("--no-compile-cache", dest="compile_cache", action="store_false", help=what)
        importing.add_option(sub, "command_imports")
        add_options(sub)
        flags = [action for action in sub._actions if action.option_strings]
        sub.set_defaults(run=run, flags=flags, parser=sub)
    return parser


def _generate_options(parser: argparse.ArgumentParser) -> None:
    shared.add_loading(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue ('-': read from stdin)")
    prompt.add_argument("--prompt", dest="prompt", metavar="PROMPT", help="PROMPT as an option: --prompt=-5")
    shared.add_sampling(parser, 64, "0")
    drafts.add_option(parser)
    prompt.add_argument(
        "--prompts",
        metavar="FILE",
        help='answer each prompt of a file ("-": stdin) with a line of JSON. A prompt is a line of text, or an object '
        '{"prompt": …} or {"messages": …}, one per line or in a JSON array, whose other fields are copied to the '
        "output. In FILE.txt every line is text",
    )
    add = parser.add_argument
    add(
        "--stop",
        action="append",
        default=[],
        type=shared.text,
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    add("--json-schema", metavar="FILE", help="generate only JSON that this schema accepts (needs the extra serve)")
    group = parser.add_argument_group("output as JSON lines, always with --prompts")
    add = group.add_argument
    add("--samples", type=shared.count, default=1, metavar="N", help="samples of each prompt (default 1)")
    add("--logprobs", type=shared.natural, metavar="N", help="log-probabilities, also of the N most likely tokens")
    shared.add_slots(add)


def _convert_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder, a hub id, or 'demo'; the layout is detected")
    add("target", metavar="DST", help="the output folder; new or empty")
    what = "hf: for transformers and from_pretrained, maxtext: for MaxText, orbax: for nnxmoe.load"
    add("--to", choices=["hf", "maxtext", "orbax"], required=True, help=what)
    what = "stack the parameters of all layers into one array each (MaxText's scan_layers)"
    add("--scan", action="store_true", help=what)
    add("--dtype", choices=shared.DTYPES, help="dtype of the weights (default: as stored)")
    shared.add_mesh(parser)
    add("--config", metavar="FOLDER", help="a folder with config.json, or a preset: MaxText does not store the config")
    shared.add_adapter(parser)
    shared.add_quantize(parser, keep=False)
    add("--verify", action="store_true", help="read the result back and compare arrays and logits")


def _finetune_options(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    add = parser.add_argument
    add(
        "data",
        metavar="DATA.json",
        help='objects {"text": …}, {"messages": [{"role": …}, …]}, {"prompt": …, "completion": …}, or of Alpaca and '
        "ShareGPT, one per line or in a JSON array, also as .gz",
    )
    add("--out", required=True, metavar="DIR", help="new, empty or the folder of a run; gets metrics.jsonl")
    add("--lora", type=shared.count, metavar="RANK", help="train LoRA adapters of this rank (default: all weights)")
    shared.add_quantize(parser)
    add("--adapter-only", action="store_true", help="write the adapter in peft's format, unmerged")
    add("--lora-alpha", type=float, metavar="A", help="scale adapters by A / rank (default: the rank)")
    add("--split-rank", action="store_true", help="divide the experts' ranks by the experts per token")
    length = parser.add_mutually_exclusive_group().add_argument
    length("--steps", type=shared.count, metavar="N", help="training steps in all (default 200)")
    length("--epochs", type=shared.count, metavar="N", help="passes over the data, instead of --steps")
    add("--warmup", type=int, metavar="N", help="steps to the peak learning rate (default: a tenth)")
    add("--preferences", action="store_true", help="DATA has chosen and rejected completions: use DPO")
    add("--beta", type=float, metavar="B", help="how closely DPO keeps to the original (default 0.1)")
    what = "compute each batch in N parts, for less memory"
    add("--accumulate", type=shared.count, default=1, metavar="N", help=what)
    add("--eval", dest="evaluation", metavar="DATA.json", help="data held out; evaluated with every checkpoint")
    what = "skip unusable records if they are at most this fraction of all (default 0.01; 0: skip none)"
    add("--max-bad-fraction", type=float, default=0.01, metavar="X", help=what)
    add("--batch-size", type=shared.count, default=8, metavar="B", help="rows per step (default 8)")
    add("--seq-len", type=shared.count, default=512, metavar="T", help="tokens per row (default 512)")
    add("--optimizer", default="adam", metavar="NAME", help="adam (default), muon, adafactor or lion")
    add("--learning-rate", type=float, metavar="LR", help="peak (2e-4 with --lora or 2e-5; lion / 5; DPO / 20)")
    what = "save a checkpoint every K steps (default 100)"
    add("--save-every", type=shared.count, default=100, metavar="K", help=what)
    add("--profile", type=shared.count, metavar="N", help="write a trace of N steps for xprof or Perfetto")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same order of the data")
    shared.add_mesh(parser)


# Command -> its function, whose docstring is the help, its options, and examples.
_COMMANDS: dict[str, tuple[Callable[..., None], Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (demo.demo, demo.options, "demo"),
    "generate": (
        commands.generate,
        _generate_options,
        "generate mistralai/Mixtral-8x7B-v0.1 'The three laws are' --mesh tensor=8\n"
        "  nnxmoe generate demo --prompts questions.txt --draft prompt:4",
    ),
    "chat": (talk.chat, talk.options, "chat demo"),
    "inspect": (inspecting.inspect, inspecting.options, "inspect deepseek-v3 --context 8192"),
    "plan": (
        plan_options.run,
        plan_options.add_options,
        "plan deepseek-v3 --mesh fsdp=16,expert=16 --batch 256 --seq 4096 --on h200",
    ),
    "convert": (commands.convert, _convert_options, "convert demo demo-maxtext --to maxtext --scan --verify"),
    "finetune": (commands.finetune, _finetune_options, "finetune demo chats.jsonl --out tuned --lora 16"),
    "serve": (serving.serve, serving.options, "serve demo --port 8000 --draft prompt:4"),
    "eval": (evaluating.evaluate, evaluating.options, "eval demo --tasks arc_easy,hellaswag --limit 100"),
}
