"""The commands of ``nnxmoe``; `nnxmoe.cli.parser` defines their options."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import jax

import nnxmoe
from nnxmoe.config.printable import plain
from nnxmoe.runtime import processes
from nnxmoe.runtime.progress import say

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"


def _path(model: str) -> str:
    return str(DEMO) if model == "demo" else model


def _weights(model: str) -> str:
    """The folder or hub id of a model with weights. Raises ValueError for a preset."""
    from nnxmoe.models import preset

    if preset(model) is not None:
        raise ValueError(f"{model} is a preset, which has no weights: give a folder or a hub id such as 'org/name'")
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
        say("temperature is 0 (always the most likely token): --top-k, --top-p and --min-p have no effect")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return nnxmoe.Sampling(**{name: getattr(options, name) for name in names})


def generate(options: argparse.Namespace) -> None:
    """Continue a prompt, streaming the text."""
    sampling = _sampling(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    model, tokenizer = _load(options)
    for piece in nnxmoe.stream(
        model, tokenizer, prompt, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=options.seed
    ):
        print(piece, end="", flush=True)
    print()


def chat(options: argparse.Namespace) -> None:
    """A conversation, line by line."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  arrow keys and history for input()
    sampling = _sampling(options)
    model, tokenizer = _load(options)
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    tokenizer.apply_chat_template(
        [*opening, {"role": "user", "content": "Hi"}]
    )  # fails now rather than after the first line
    say("type a message; /clear starts over, /exit ends")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(opening)
            say("conversation cleared")
        elif line.startswith("/"):
            say("%s is not a command; use /clear or /exit", line.split()[0])
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
            piece = piece if answer else piece.lstrip()  # SentencePiece answers begin with a space
            print(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        say("stopped")
    print()
    return answer


def inspect(options: argparse.Namespace) -> None:
    """A model's config, sizes, and whether it fits in memory."""
    from nnxmoe.cli.inspect import summarise
    from nnxmoe.model.strategy import Strategy
    from nnxmoe.runtime.memory import memory_bytes

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
    print(f"active      {s.active:>20,}  per token")
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
    print(f"cache       {_bytes(s.cache_token)} per token{limit}")
    need, (have, where) = s.needed(options.batch, context), memory_bytes()
    verdict = "fits" if need < have else "does not fit"
    print(
        f"memory      {_bytes(need)} for batch {options.batch}, {context} tokens: {verdict} in {_bytes(have)} ({where})"
    )
    print("strategy    default on this machine:")
    for line in Strategy.auto().explain().splitlines():
        print(f"  {line}")
    for line in spread:
        print(line)
    if s.missing or s.misshapen:
        raise ValueError(
            f"{s.source} cannot be loaded: {len(s.missing)} tensors are missing and {len(s.misshapen)} do not fit "
            f"config.json, {plain([*s.missing, *s.misshapen][0])} among them"
        )


def _spread(config: Any, dtype: str, mesh: Any) -> list[str]:
    """One line a parameter: how many there are, of what shape, bytes of them on one device, and what splits them."""
    from nnxmoe.cli.inspect import spread

    parts = spread(config, dtype, mesh)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    lines = [f"mesh        {axes or 'one device'}"]
    for part in parts:
        split = ", ".join(axis or "-" for axis in part.spec) or "whole"
        shape = f"{part.count:>4} x {list(part.shape)}"
        lines.append(f"  {part.name:32} {shape:28} {_bytes(part.device_bytes):>10}  {split}")
    return [*lines, f"per device  {_bytes(sum(p.device_bytes for p in parts))} of weights, on each of {mesh.size}"]


def convert(options: argparse.Namespace) -> None:
    """Convert a checkpoint."""
    from nnxmoe.convert import conversion

    done = conversion.convert(
        _weights(options.source),
        options.target,
        options.to,
        scan=options.scan,
        dtype=options.dtype,
        mesh=_on(options.mesh),
        config=options.config,
        verify=options.verify,
    )
    if jax.process_index() == 0:
        print(f"{done.target}: {done.arrays} arrays, {_bytes(done.bytes)}")
        print(f"read {_bytes(done.read_speed)}/s, written {_bytes(done.write_speed)}/s")
        if done.difference is not None:
            print(f"verified: all arrays are equal; logits differ by at most {done.difference:.1e}")


def finetune(options: argparse.Namespace) -> None:
    """Fine-tune a model on a file of texts or chats."""
    from nnxmoe.train import finetune as tuning

    names = ("data", "lora", "steps", "batch_size", "seq_len", "learning_rate", "seed", "adapter_only")
    settings = {name: getattr(options, name) for name in (*names, "dtype", "revision")}
    task = tuning.Finetune(_weights(options.model), **settings)
    done = tuning.finetune(
        task,
        options.out,
        save_every=options.save_every,
        mesh=_on(options.mesh),
        local_files_only=options.local_files_only,
    )
    if jax.process_index() == 0:
        if done is not None and done.history:
            first, last = done.history[0], done.history[-1]
            span = f"steps {first['step']} to {last['step']}"
            print(f"{span}: cross-entropy {first['cross_entropy']:.4f} -> {last['cross_entropy']:.4f}")
        print(f"{options.out}: {'an adapter for peft' if options.adapter_only else 'the tuned model'}")


def _on(mesh: Any) -> Any:
    """The mesh of devices for a mesh given on the command line."""
    if mesh is None:
        return None
    processes.initialize()
    return nnxmoe.make_mesh(**mesh.shape)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def demo(options: argparse.Namespace) -> None:
    """Run the embedded model on a few prompts."""
    from nnxmoe.cli import demo as shown

    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(DEMO), nnxmoe.from_pretrained(DEMO)
    say("%s", model.load_report)
    shown.announce(model, DEMO)
    shown.run(model, tokenizer, options.max_new_tokens)
