"""The commands of ``nnxmoe``; `nnxmoe.cli.parser` defines their options."""

import argparse
import contextlib
import dataclasses
import shlex
import sys
import time
from typing import Any

import jax
from flax import nnx

import nnxmoe
from nnxmoe.cli import drafts, prompts
from nnxmoe.config.printable import bytes_text, count_text
from nnxmoe.runtime import interrupts, processes
from nnxmoe.runtime.progress import say
from nnxmoe.storage.hub import DEMO


def path_of(model: str) -> str:
    """A folder, hub id or preset as given; the folder of ``demo``."""
    return str(DEMO) if model == "demo" else model


def _weights(model: str) -> str:
    """The folder or hub id of a model with weights. Raises ValueError for a preset."""
    from nnxmoe.models import refuse_preset

    refuse_preset(model)
    return path_of(model)


def load(options: argparse.Namespace) -> tuple[Any, nnxmoe.Tokenizer]:
    """The model and the tokenizer, with an adapter merged into the model if one is named, or is what is named."""
    from nnxmoe.train import lora

    path, adapter = _weights(options.model), options.adapter
    if adapter is None and (base := lora.base_of(path)) is not None:
        path, adapter = path_of(base), path
        say("%s is an adapter of %s", adapter, base)
    hub = {"revision": options.revision, "local_files_only": options.local_files_only}
    tokenizer = nnxmoe.Tokenizer.from_pretrained(path, **hub)
    quantize = method(options)
    how = {"keep_quantized": options.keep_quantized}
    how["mtp"] = drafts.needs_mtp(getattr(options, "draft", None), path, options)
    model = nnxmoe.from_pretrained(path, dtype=options.dtype, quantize=None if adapter else quantize, **hub, **how)
    say("%s", model.load_report.summary())
    if adapter is not None:
        lora.merge_from(model, adapter, quantize=quantize)
    return model, tokenizer


def method(options: argparse.Namespace) -> Any:
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
        quantize=method(options),
        change=None if options.adapter is None else lambda model: lora.merge_from(model, options.adapter),
    )
    if jax.process_index() == 0:
        print(f"{done.target}: {done.arrays} arrays, {bytes_text(done.bytes)}")
        print(f"read {bytes_text(done.read_speed)}/s, written {bytes_text(done.write_speed)}/s")
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


def demo(options: argparse.Namespace) -> None:
    """Run the embedded model on a few prompts."""
    from nnxmoe.cli import demo as shown

    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(DEMO), nnxmoe.from_pretrained(DEMO)
    say("the embedded model: a Mixtral of %s parameters, trained on generated text", count_text(_size(model)))
    shown.run(model, tokenizer, options.max_new_tokens)
