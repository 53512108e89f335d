"""The command ``nnxmoe``: demo, generate, chat, inspect, plan, convert, finetune, serve, eval.

Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 failure (one line on stderr says why), 2 wrong
command line, 130 Ctrl-C, 141 closed pipe.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import nnxmoe
from nnxmoe.cli import commands, drafts, evaluating, inspecting, serving
from nnxmoe.cli import plan as plan_options
from nnxmoe.runtime import interrupts
from nnxmoe.runtime.compile_cache import compile_cache
from nnxmoe.runtime.interrupts import INTERRUPTED, PIPE_CLOSED
from nnxmoe.runtime.progress import messages_on_stderr

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    options = _parser().parse_args(arguments)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # terminals with a small character set show "?" instead of failing
    try:
        with messages_on_stderr():
            if options.compile_cache:
                compile_cache()
            options.run(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        interrupts.say_farewell()
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        return PIPE_CLOSED
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if options.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"nnxmoe: error: {message}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    kw: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(
        prog="nnxmoe",
        description="Mixture-of-experts language models in JAX: Mixtral, DeepSeek-V3, Llama.",
        epilog="example:\n  nnxmoe demo\n  nnxmoe generate demo 'Once upon a time'",
        **kw,
    )
    parser.add_argument("--version", action="version", version=f"nnxmoe {nnxmoe.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text, epilog=f"example:\n  {example}", **kw)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.add_argument(
            "--no-compile-cache",
            dest="compile_cache",
            action="store_false",
            help="do not keep compiled programs for later (environment variable: NNXMOE_COMPILE_CACHE=FOLDER or off)",
        )
        sub.set_defaults(run=run)
        return sub

    text = "Run the embedded tiny Mixtral, and show which experts it uses."
    demo = command("demo", commands.demo, text, "nnxmoe demo")
    demo.add_argument(
        "--max-new-tokens", type=_count, default=80, metavar="N", help="at most N new tokens per prompt (default 80)"
    )

    example = "nnxmoe generate mistralai/Mixtral-8x7B-v0.1 'The three laws are' --dtype bfloat16\n"
    example += "  nnxmoe generate demo --prompts questions.txt --draft prompt:4"
    generate = command("generate", commands.generate, "Continue a prompt, streaming the text.", example)
    _loading_options(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue ('-': read from stdin)")
    prompt.add_argument("--prompt", dest="prompt", metavar="PROMPT", help="the same")
    _sampling_options(generate, 64)
    drafts.add_option(generate)
    _prompts_options(generate, prompt)

    chat = command("chat", commands.chat, "Chat with a model. /clear starts over, /exit ends.", "nnxmoe chat demo")
    _loading_options(chat)
    chat.add_argument("--system", help="a system message at the start of the conversation")
    _sampling_options(chat, 256)

    text = "Print a model's sizes and whether it fits in memory, without reading its weights."
    inspect = command("inspect", inspecting.inspect, text, "nnxmoe inspect deepseek-v3 --context 8192")
    _model_options(inspect)
    _quantize_options(inspect)
    inspecting.options(inspect, _count, _mesh)

    text = "Print the memory, traffic and time of a step on a mesh of devices that need not be there."
    example = "nnxmoe plan deepseek-v3 --mesh fsdp=16,expert=16 --batch 256 --seq 4096 --on h200"
    plan_options.add_options(command("plan", plan_options.run, text, example), _count, _mesh)

    text = "Convert a checkpoint between the layouts of Hugging Face, MaxText and nnxmoe.save, into a new folder."
    convert = command(
        "convert", commands.convert, text, "nnxmoe convert demo demo-maxtext --to maxtext --scan --verify"
    )
    _convert_options(convert)

    text = "Fine-tune a model on lines of text or chats. Repeating the command resumes an interrupted run."
    finetune = command("finetune", commands.finetune, text, "nnxmoe finetune demo chats.jsonl --out tuned --lora 16")
    _model_options(finetune)
    _finetune_options(finetune)

    text = "Serve a model over HTTP, after the OpenAI API, and a page to chat on. Needs nnxmoe[serve]."
    serve = command("serve", serving.serve, text, "nnxmoe serve demo --port 8000 --draft prompt:4")
    _loading_options(serve)
    serving.options(serve, _count)

    text = "Evaluate a model with lm-evaluation-harness. Needs nnxmoe[eval]."
    evaluate = command("eval", evaluating.evaluate, text, "nnxmoe eval demo --tasks arc_easy,hellaswag --limit 100")
    _loading_options(evaluate)
    evaluating.options(evaluate, _count)
    return parser


def _prompts_options(parser: argparse.ArgumentParser, prompt: Any) -> None:
    prompt.add_argument(
        "--prompts",
        metavar="FILE",
        help='many prompts, a line each ("-": stdin): text, or JSON with "prompt" or "messages"; writes JSON lines',
    )
    group = parser.add_argument_group("with --prompts")
    group.add_argument("--samples", type=_count, default=1, metavar="N", help="samples of each prompt (default 1)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities, also of the N most likely ids")
    group.add_argument("--slots", type=_count, default=8, metavar="N", help="prompts at a time (default 8)")


def _loading_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    _adapter_option(parser)
    _quantize_options(parser)


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a folder, a hub id, or 'demo'; the layout is detected")
    parser.add_argument("target", metavar="DST", help="the output folder; new or empty")
    parser.add_argument("--to", choices=["hf", "maxtext", "orbax"], required=True, help="orbax: for nnxmoe.load")
    parser.add_argument(
        "--scan",
        action="store_true",
        help="stack the parameters of all layers into one array each (MaxText's scan_layers)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    parser.add_argument("--mesh", type=_mesh, metavar="AXES", help="shard over devices, such as fsdp=4,expert=2")
    parser.add_argument(
        "--config", metavar="FOLDER", help="a folder with config.json, or a preset: MaxText does not store the config"
    )
    _adapter_option(parser)
    _quantize_options(parser, keep=False)
    parser.add_argument("--verify", action="store_true", help="read the result back and compare arrays and logits")


def _finetune_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA.jsonl",
        help='lines such as {"text": …}, {"messages": [{"role": …}, …]}, {"prompt": …, "completion": …}, or the '
        "objects of Alpaca and ShareGPT; other fields are ignored",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the output folder: new, empty, or that of a run to resume"
    )
    parser.add_argument(
        "--lora", type=_count, metavar="RANK", help="train LoRA adapters of this rank (default: train all parameters)"
    )
    _quantize_options(parser)
    parser.add_argument(
        "--adapter-only", action="store_true", help="write the adapter in peft's format instead of the merged model"
    )
    parser.add_argument("--lora-alpha", type=float, metavar="A", help="scale adapters by A / rank (default: the rank)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_count, metavar="N", help="training steps; more extend a run (default 200)")
    length.add_argument("--epochs", type=_count, metavar="N", help="instead of steps: how often to read the data")
    parser.add_argument("--warmup", type=int, metavar="N", help="steps to the peak learning rate (default: a tenth)")
    parser.add_argument(
        "--accumulate", type=_count, default=1, metavar="N", help="compute each batch in N parts, for less memory"
    )
    parser.add_argument(
        "--eval", dest="evaluation", metavar="DATA.jsonl", help="data held out; evaluated with every checkpoint"
    )
    parser.add_argument("--batch-size", type=_count, default=8, metavar="B", help="rows per step (default 8)")
    parser.add_argument("--seq-len", type=_count, default=512, metavar="T", help="tokens per row (default 512)")
    parser.add_argument(
        "--learning-rate", type=float, metavar="LR", help="peak learning rate (default 2e-4 with --lora, else 2e-5)"
    )
    parser.add_argument(
        "--save-every", type=_count, default=100, metavar="K", help="save a checkpoint every K steps (default 100)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed gives the same order of the data"
    )
    parser.add_argument("--mesh", type=_mesh, metavar="AXES", help="shard over devices, such as fsdp=4,expert=2")


def _quantize_options(parser: argparse.ArgumentParser, *, keep: bool = True) -> None:
    parser.add_argument(
        "--quantize",
        type=_quantization,
        metavar="METHOD",
        help="round weights to int8, int4 (int4:32: groups of 32), fp8, or experts=int4,others=int8,head=int8; lossy",
    )
    if keep:
        parser.add_argument(
            "--keep-quantized",
            action="store_true",
            help="keep the checkpoint's FP8, MXFP4, int8, int4 or NF4 codes in memory",
        )


def _adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="merge this LoRA adapter (of peft or of nnxmoe) into the model"
    )


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or 'demo'; inspect also takes preset names")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument(
        "--local-files-only", action="store_true", help="use cached files only, without contacting the hub"
    )


def _sampling_options(parser: argparse.ArgumentParser, tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=_count,
        default=tokens,
        metavar="N",
        help=f"maximum number of new tokens (default {tokens})",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (0: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens at least P times as likely as the best",
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: discourages repetition"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same text")


def _quantization(text: str) -> str:
    from nnxmoe.quantization.methods import parse

    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _mesh(text: str) -> Any:
    from nnxmoe.axes import abstract_mesh

    pairs = [part.partition("=")[::2] for part in text.split(",")]
    sizes = {name: int(size) for name, size in pairs if re.fullmatch("[1-9][0-9]{0,5}", size)}
    if len(sizes) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 'fsdp=4,expert=8'")
    try:
        return abstract_mesh(sizes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
