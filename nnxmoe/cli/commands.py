"""The commands of ``nnxmoe``; `nnxmoe.cli.parser` defines their options."""

import argparse
import contextlib
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import nnxmoe
from nnxmoe.cli import drafts, prompts
from nnxmoe.config.printable import plain
from nnxmoe.runtime import interrupts, processes
from nnxmoe.runtime.progress import say

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"


def _path(model: str) -> str:
    return str(DEMO) if model == "demo" else model


def _weights(model: str) -> str:
    """The folder or hub id of a model with weights. Raises ValueError for a preset."""
    from nnxmoe.models import refuse_preset

    refuse_preset(model)
    return _path(model)


def load(options: argparse.Namespace) -> tuple[Any, nnxmoe.Tokenizer]:
    """The model and the tokenizer, with an adapter merged into the model if one is named, or is what is named."""
    from nnxmoe.train import lora

    path, adapter = _weights(options.model), options.adapter
    if adapter is None and (base := lora.base_of(path)) is not None:
        path, adapter = _path(base), path
        say("%s is an adapter of %s", adapter, base)
    hub = {"revision": options.revision, "local_files_only": options.local_files_only}
    tokenizer = nnxmoe.Tokenizer.from_pretrained(path, **hub)
    method = _method(options)
    how = {name: getattr(options, name) for name in ("keep_quantized", "ignore_unknown")}
    how["mtp"] = drafts.needs_mtp(getattr(options, "draft", None), path, options)
    model = nnxmoe.from_pretrained(path, dtype=options.dtype, quantize=None if adapter else method, **hub, **how)
    say("%s", model.load_report)
    if adapter is not None:
        lora.merge_from(model, adapter, quantize=method)
    return model, tokenizer


def _method(options: argparse.Namespace) -> Any:
    """The method that ``--quantize`` names."""
    from nnxmoe.quantization.methods import parse

    return parse(options.quantize) if options.quantize else None


def _sampling(options: argparse.Namespace) -> nnxmoe.Sampling:
    if options.temperature == 0 and (options.top_k, options.top_p, options.min_p) != (0, 1.0, 0.0):
        say("temperature is 0 (always the most likely token): --top-k, --top-p and --min-p have no effect")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return nnxmoe.Sampling(**{name: getattr(options, name) for name in names})


def generate(options: argparse.Namespace) -> None:
    """Continue a prompt, streaming the text, or many, as JSON lines."""
    sampling = _sampling(options)
    if options.prompts is not None:
        many = prompts.read(options.prompts)
        model, tokenizer = load(options)
        for line in prompts.lines(model, tokenizer, many, sampling, options):
            print(line, flush=True)
        return
    if options.stop or options.samples != 1 or options.logprobs is not None:
        raise ValueError(
            '--stop, --samples and --logprobs need --prompts FILE (or "-", for one prompt per line of stdin)'
        )
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    model, tokenizer = load(options)
    given = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": options.seed}
    pieces = nnxmoe.stream(model, tokenizer, prompt, **given, draft=drafts.draft_of(options.draft, model))
    first, started = 0, 0.0
    for piece in pieces:
        first, started = first or pieces.tokens, started or time.perf_counter()
        print(piece, end="", flush=True)
    print()
    if pieces.tokens > first > 0:
        speed = (pieces.tokens - first) / (time.perf_counter() - started)
        end = "ended by the model" if pieces.ended else "stopped by --max-new-tokens"
        say("%d tokens, %s; %.1f tokens per second after the first", pieces.tokens, end, speed)
    elif pieces.ended and tokenizer.chat_template is not None:
        say("the model ended at once; it has a chat template, so try: nnxmoe chat %s", options.model)


def chat(options: argparse.Namespace) -> None:
    """A conversation, line by line."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  arrow keys and history for input()
    sampling = _sampling(options)
    model, tokenizer = load(options)
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
        if not sys.stdin.isatty():  # only a person can continue the chat
            raise
        say("stopped")
    print()
    return answer


def inspect(options: argparse.Namespace) -> None:
    """A model's config, sizes, and whether it fits in memory."""
    from nnxmoe.cli.inspect import summarise
    from nnxmoe.model.strategy import Strategy

    if options.mesh and options.keep_quantized:
        raise ValueError("--mesh shows how floats or weights of --quantize are sharded: leave --keep-quantized out")
    method, hub = _method(options), (options.revision, options.local_files_only)
    s = summarise(_path(options.model), options.dtype, *hub, method, options.keep_quantized, options.ignore_unknown)
    spread = _spread(s.config, s.weight_dtype, options.mesh, method) if options.mesh else []
    _print_sizes(s, options.batch, options.context or min(s.config.max_position_embeddings, 4096))
    if s.stored:
        _print_files(s)
    bounded = {slots: size for slots, size in s.cache.items() if slots is not None}
    limits = "".join(f", {_bytes(size)} of it for {n} tokens at most (sliding window)" for n, size in bounded.items())
    print(f"cache       {_bytes(s.cache_token)} per token{limits}")
    if options.fields:
        print("config.json")
        for name, value in s.config.to_hf().items():
            print(f"  {name:32} {value}")
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


def _print_sizes(s: Any, batch: int, context: int) -> None:
    """The memory of weights and cache, what a token reads, and the number of parameters by kind."""
    from nnxmoe.generation.draft_cost import auto_cost
    from nnxmoe.runtime.memory import memory_bytes

    need, (have, where) = s.needed(batch, context), memory_bytes()
    print(
        f"{s.source}: {s.config.model_type} of {_count(s.parameters)} parameters, {_count(s.active)} active per token"
    )
    print(f"memory      {'fits' if need <= have else 'does not fit'}: {_bytes(need)} of {_bytes(have)} ({where})")
    print(
        f"            {_bytes(s.weight_bytes)} of weights in {' and '.join(s.weights)}, "
        f"{_bytes(need - s.weight_bytes)} of cache for batch {batch}, {context} tokens"
    )
    print(
        f"per token   {_bytes(s.active_bytes)} of weights are read at batch 1, "
        f"and {_count(2 * s.active)} operations are made"
    )
    cost = auto_cost(s.model, batch, context)
    print(
        f"per step    {_bytes(cost.plain_bytes)} are read at batch {batch}; with {cost.name} "
        f"{_bytes(cost.bytes)}, in {cost.ratio:.2f} x the time"
    )
    print(f"            drafts {cost.pays}; {cost.expected:.0%} is what --draft auto expects")
    buffers = batch * context * s.buffer_token
    room = ", ".join(f"{size} GB {'yes' if need + buffers <= size * 1e9 else 'no'}" for size in (24, 48, 80, 141))
    print(f"one GPU     {room}; with about {_bytes(buffers)} of buffers for a prompt of that length")
    if len(s.weights) > 1:
        print("weights     " + ", ".join(f"{kind} {_bytes(size)}" for kind, size in s.weights.items()))
    if s.published:
        print(f"published   {s.published}")
    print(f"parameters  {s.parameters:>20,}")
    for part, count in s.parts.items():
        print(f"  {part:16}{count:>14,}  {count / s.parameters:6.1%}")
    print(f"active      {s.active:>20,}  per token")


def _print_files(s: Any) -> None:
    """The tensors of the files, and those that a load would leave out or refuse."""
    print("stored      " + ", ".join(f"{dtype} {_bytes(size)}" for dtype, size in s.stored.items()))
    for rule, names in s.skipped.items():
        print(f"left out    {len(names)} tensors: {rule}")
    print(f"tensors     {len(s.missing)} missing, {len(s.unexpected)} belong to no parameter")
    for kind, names in (("missing", s.missing), ("not used", s.unexpected)):
        for name in names[:5]:
            print(f"  {kind:9} {plain(name)}")
    for line in s.misshapen[:5]:
        print(f"  wrong     {plain(line)}")


def _spread(config: Any, dtype: str, mesh: Any, method: Any) -> list[str]:
    """One line a parameter: how many there are, of what shape, bytes of them on one device, and what splits them."""
    from nnxmoe.cli.inspect import spread

    parts = spread(config, dtype, mesh, quantize=method)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    lines = [f"mesh        {axes or 'one device'}"]
    for part in parts:
        split = ", ".join(
            "-" if axis is None else axis if isinstance(axis, str) else " x ".join(axis) for axis in part.spec
        )
        split = split or "whole"
        shape = f"{part.count:>4} x {list(part.shape)}"
        lines.append(f"  {part.name:32} {shape:28} {_bytes(part.device_bytes):>10}  {split}")
    return [*lines, f"per device  {_bytes(sum(p.device_bytes for p in parts))} of weights, on each of {mesh.size}"]


def _size(model: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def convert(options: argparse.Namespace) -> None:
    """Convert a checkpoint."""
    from nnxmoe.convert import conversion
    from nnxmoe.train import lora

    done = conversion.convert(
        _weights(options.source),
        options.target,
        options.to,
        scan=options.scan,
        dtype=options.dtype,
        mesh=_on(options.mesh),
        config=options.config,
        verify=options.verify,
        quantize=_method(options),
        change=None if options.adapter is None else lambda model: lora.merge_from(model, options.adapter),
    )
    if jax.process_index() == 0:
        print(f"{done.target}: {done.arrays} arrays, {_bytes(done.bytes)}")
        print(f"read {_bytes(done.read_speed)}/s, written {_bytes(done.write_speed)}/s")
        if done.difference is not None:
            print(f"verified: all arrays are equal; logits differ by at most {done.difference:.1e}")


def finetune(options: argparse.Namespace) -> None:
    """Fine-tune a model on a file of texts or chats."""
    from nnxmoe.train import finetune as tuning

    names = [field.name for field in dataclasses.fields(tuning.Finetune) if field.name != "model"]
    task = tuning.Finetune(_weights(options.model), **{name: getattr(options, name) for name in names})
    interrupts.farewell(f"interrupted; to continue: {shlex.join(['nnxmoe', *sys.argv[1:]])}")
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
            if "evaluation" in last:
                print(f"on {options.evaluation}: {last['evaluation']:.4f}")
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


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def demo(options: argparse.Namespace) -> None:
    """Run the embedded model on a few prompts."""
    from nnxmoe.cli import demo as shown

    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(DEMO), nnxmoe.from_pretrained(DEMO)
    say("the embedded model: a Mixtral of %s parameters, trained on generated text", _count(_size(model)))
    shown.run(model, tokenizer, options.max_new_tokens)
