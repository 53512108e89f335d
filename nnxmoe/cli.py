"""The command ``nnxmoe``: demo, generate, chat, inspect, convert. Results on stdout, everything else on stderr.

Exit codes: 0 done, 1 failed (one line says why), 2 the command line is wrong.
"""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

import nnxmoe
from nnxmoe import processes
from nnxmoe.files import plain
from nnxmoe.progress import say

DTYPES = ("float32", "bfloat16", "float16")
DEMO = Path(__file__).resolve().parent / "models" / "demo"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    options = _parser().parse_args(arguments)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        options.run(options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("nnxmoe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if options.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"nnxmoe: error: {message}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    kw: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(
        prog="nnxmoe",
        description="Mixture-of-experts language models in JAX: Mixtral, DeepSeek-V3, Llama.",
        epilog="example:\n  nnxmoe demo\n  nnxmoe generate demo --prompt 'Once upon a time'",
        **kw,
    )
    parser.add_argument("--version", action="version", version=f"nnxmoe {nnxmoe.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=f"example:\n  {example}", **kw)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(run=run)
        return sub

    demo = command("demo", _demo, "Run the embedded tiny Mixtral: text, and the experts it used.", "nnxmoe demo")
    demo.add_argument("--max-new-tokens", type=_count, default=80, metavar="N", help="at most N tokens a prompt")

    example = "nnxmoe generate mistralai/Mixtral-8x7B-v0.1 --prompt 'The three laws are' --dtype bfloat16"
    generate = command("generate", _generate, "Continue a prompt, streaming the text.", example)
    _model_options(generate)
    generate.add_argument("--prompt", required=True, help="the text to continue ('-': read it from stdin)")
    _sampling_options(generate, 64)

    chat = command("chat", _chat, "Talk with a model. /clear forgets, /exit ends.", "nnxmoe chat demo")
    _model_options(chat)
    chat.add_argument("--system", help="a system message that opens the conversation")
    _sampling_options(chat, 256)

    text = "Print what a model is and whether it fits, without reading its weights."
    inspect = command("inspect", _inspect, text, "nnxmoe inspect deepseek-v3 --context 8192")
    _model_options(inspect)
    inspect.add_argument("--batch", type=_count, default=1, metavar="B", help="rows in the cache (default 1)")
    inspect.add_argument("--context", type=_count, metavar="T", help="tokens in the cache (default: 4096 at most)")
    inspect.add_argument(
        "--mesh", type=_mesh, metavar="AXES", help="how parameters would lie on a mesh, such as fsdp=4,expert=8"
    )

    text = "Turn a checkpoint of Hugging Face, MaxText or nnxmoe.save into another, in a new folder."
    convert = command("convert", _convert, text, "nnxmoe convert demo demo-maxtext --to maxtext --scan --verify")
    convert.add_argument("source", metavar="SRC", help="a folder, a hub id, or 'demo'; what it is is found out")
    convert.add_argument("target", metavar="DST", help="the folder to write; new or empty")
    convert.add_argument("--to", choices=["hf", "maxtext", "orbax"], required=True, help="orbax: for nnxmoe.load")
    convert.add_argument("--scan", action="store_true", help="all layers of a stack as one array")
    convert.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as stored)")
    convert.add_argument("--mesh", type=_mesh, metavar="AXES", help="spread over devices, such as fsdp=4,expert=2")
    convert.add_argument(
        "--config", metavar="FOLDER", help="with config.json, or a preset: what MaxText does not store"
    )
    convert.add_argument("--verify", action="store_true", help="read all of it back and compare, logits too")
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or 'demo'; inspect also takes preset names")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as stored)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--local-files-only", action="store_true", help="use the cache, do not ask the hub")


def _sampling_options(parser: argparse.ArgumentParser, tokens: int) -> None:
    parser.add_argument("--max-new-tokens", type=_count, default=tokens, metavar="N", help=f"default {tokens}")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the likeliest")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="… among those that together reach P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="… among those at least P times the best")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text")


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


def _path(model: str) -> str:
    return str(DEMO) if model == "demo" else model


def _weights(model: str) -> str:
    """The folder or hub id of a model to run; presets have no weights."""
    from nnxmoe.models import preset

    if preset(model) is not None:
        raise ValueError(f"{model} is a preset, sizes without weights: give a folder or a hub id such as 'org/name'")
    return _path(model)


def _load(options: argparse.Namespace) -> tuple[Any, nnxmoe.Tokenizer]:
    hub = {"revision": options.revision, "local_files_only": options.local_files_only}
    path = _weights(options.model)
    tokenizer = nnxmoe.Tokenizer.from_pretrained(path, **hub)
    model = nnxmoe.from_pretrained(path, dtype=options.dtype, **hub)
    say("%s", model.load_report)
    return model, tokenizer


def _sampling(options: argparse.Namespace) -> nnxmoe.Sampling:
    if options.temperature == 0 and (options.top_k, options.top_p, options.min_p) != (0, 1.0, 0.0):
        say("temperature is 0, always the likeliest token: --top-k, --top-p and --min-p change nothing")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return nnxmoe.Sampling(**{name: getattr(options, name) for name in names})


def _generate(options: argparse.Namespace) -> None:
    sampling = _sampling(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    model, tokenizer = _load(options)
    for piece in nnxmoe.stream(
        model, tokenizer, prompt, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=options.seed
    ):
        print(piece, end="", flush=True)
    print()


def _chat(options: argparse.Namespace) -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  arrow keys and history for input()
    sampling = _sampling(options)
    model, tokenizer = _load(options)
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    tokenizer.apply_chat_template([*opening, {"role": "user", "content": "Hi"}])  # fail now, not after the first line
    say("type a message; /clear forgets the conversation, /exit ends it")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(opening)
            say("forgotten")
        elif line.startswith("/"):
            say("%s is no command; there are /clear and /exit", line.split()[0])
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(model, tokenizer, messages, sampling, options)})


def _answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], sampling: Any, options: Any) -> str:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = ""
    try:
        for piece in nnxmoe.stream(
            model, tokenizer, ids, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=options.seed
        ):
            print(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        say("stopped")
    print()
    return answer


def _inspect(options: argparse.Namespace) -> None:
    from nnxmoe.memory import memory_bytes
    from nnxmoe.summary import summarise

    s = summarise(_path(options.model), options.dtype, options.revision, options.local_files_only)
    spread = _spread(s.config, s.weight_dtype, options.mesh) if options.mesh else []
    context = options.context or min(s.config.max_position_embeddings, 4096)
    print(f"{s.source}: {s.config.model_type}")
    for name, value in s.config.to_hf().items():
        if name not in ("architectures", "model_type"):
            print(f"  {name:32} {value}")
    print(f"parameters  {s.parameters:>20,}")
    for part, count in s.parts.items():
        print(f"  {part:16}{count:>14,}  {count / s.parameters:6.1%}")
    print(f"active      {s.active:>20,}  a token")
    if s.stored:
        print("stored      " + ", ".join(f"{dtype} {_bytes(size)}" for dtype, size in s.stored.items()))
        print(f"tensors     {len(s.missing)} missing, {len(s.unexpected)} belong to no parameter")
        for kind, names in (("missing", s.missing), ("not used", s.unexpected)):
            for name in names[:5]:
                print(f"  {kind:9} {plain(name)}")
        for line in s.misshapen[:5]:
            print(f"  wrong     {plain(line)}")
    limit = "" if s.cache_slots is None else f", {s.cache_slots} tokens at most (sliding window)"
    print(f"weights     {_bytes(s.weight_bytes)} in {s.weight_dtype}")
    print(f"cache       {_bytes(s.cache_token)} a token{limit}")
    need, (have, where) = s.needed(options.batch, context), memory_bytes()
    verdict = "fits" if need < have else "does not fit"
    print(
        f"memory      {_bytes(need)} for batch {options.batch}, {context} tokens: {verdict} in {_bytes(have)} ({where})"
    )
    for line in spread:
        print(line)
    if s.missing or s.misshapen:
        raise ValueError(
            f"{s.source} cannot be loaded: {len(s.missing)} tensors are missing and {len(s.misshapen)} do not fit "
            f"config.json, {plain([*s.missing, *s.misshapen][0])} among them"
        )


def _spread(config: Any, dtype: str, mesh: Any) -> list[str]:
    """One line a parameter: how many there are, of what shape, bytes of them on one device, and what splits them."""
    from nnxmoe.summary import spread

    parts = spread(config, dtype, mesh)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    lines = [f"mesh        {axes or 'one device'}"]
    for part in parts:
        split = ", ".join(axis or "-" for axis in part.spec) or "whole"
        shape = f"{part.count:>4} x {list(part.shape)}"
        lines.append(f"  {part.name:32} {shape:28} {_bytes(part.device_bytes):>10}  {split}")
    return [*lines, f"a device    {_bytes(sum(p.device_bytes for p in parts))} of weights, on each of {mesh.size}"]


def _convert(options: argparse.Namespace) -> None:
    from nnxmoe.convert.conversion import convert

    mesh = None
    if options.mesh is not None:
        processes.initialize()
        mesh = nnxmoe.make_mesh(**options.mesh.shape)
    done = convert(
        _weights(options.source),
        options.target,
        options.to,
        scan=options.scan,
        dtype=options.dtype,
        mesh=mesh,
        config=options.config,
        verify=options.verify,
    )
    if jax.process_index() == 0:
        print(f"{done.target}: {done.arrays} arrays, {_bytes(done.bytes)}")
        print(f"read {_bytes(done.read_speed)}/s, written {_bytes(done.write_speed)}/s")
        if done.difference is not None:
            print(f"verified: every array is what was written; logits differ by {done.difference:.1e} at most")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def _demo(options: argparse.Namespace) -> None:
    from nnxmoe.generation import demo

    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(DEMO), nnxmoe.from_pretrained(DEMO)
    say("%s", model.load_report)
    demo.announce(model, DEMO)
    demo.run(model, tokenizer, options.max_new_tokens)


if __name__ == "__main__":
    sys.exit(main())
