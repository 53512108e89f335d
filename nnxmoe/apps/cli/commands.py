"""The commands of ``nnxmoe``; `nnxmoe.apps.cli.parser` defines their options."""

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

import nnxmoe
from nnxmoe.apps.cli import drafts, prompts
from nnxmoe.apps.cli.prompts import Speed
from nnxmoe.config.printable import bytes_text
from nnxmoe.convert.storage.find_checkpoint import gguf_in
from nnxmoe.generation.complete import StopStringFilter, split_stop_strings
from nnxmoe.generation.ids import eos_ids
from nnxmoe.generation.sampling import OPTIONS, effective_fields, listed
from nnxmoe.runtime import processes
from nnxmoe.runtime.progress import say

MODEL_FILES = ("config.json", "adapter_config.json")

_GREEDY = nnxmoe.Sampling(temperature=0.0)


def _weights(model: str) -> str:
    """The folder or hub id of a model with weights. Raises ValueError for a preset, and a folder without a model."""
    from nnxmoe.models import refuse_preset

    refuse_preset(model)
    empty = os.path.isdir(model) and not any(os.path.exists(os.path.join(model, name)) for name in MODEL_FILES)
    if empty and model != "demo":
        raise ValueError(f"{model} holds no model: {gguf_in(Path(model)) or 'config.json is missing'}")
    return model


def load(options: argparse.Namespace) -> tuple[Any, nnxmoe.Tokenizer]:
    """The model and the tokenizer, with an adapter merged into the model if one is named, or is what is named."""
    from nnxmoe.convert.peft.adapter_folder import open_adapter
    from nnxmoe.train import lora

    path, adapter = _weights(options.model), options.adapter
    if adapter is None and (base := lora.base_model_name(path)) is not None:
        path, adapter = base, path
        say("%s is an adapter of %s", adapter, base)
    if adapter is not None:
        open_adapter(adapter)
    hub = {"revision": options.revision, "local_files_only": options.local_files_only}
    tokenizer = nnxmoe.Tokenizer.from_pretrained(path, **hub)
    quantize, mesh = method(options), mesh_of(options.mesh)
    how = {"keep_quantized": options.keep_quantized}
    how["mtp"] = drafts.needs_mtp(getattr(options, "draft", None), path, options)
    rounded = None if adapter else quantize
    model = nnxmoe.from_pretrained(path, dtype=options.dtype, mesh=mesh, quantize=rounded, **hub, **how)
    say("%s", model.load_report.summary())
    if adapter is not None:
        lora.merge_from(model, adapter, quantize=quantize)
    say("running on %s", devices_text(mesh))
    return model, tokenizer


def mesh_of(mesh: Any, *, connect: bool = False) -> Any:
    """The first devices as a mesh of the sizes of ``--mesh``; None without one. ``connect``: over all processes of a
    job, which are connected without a mesh only if ``JAX_NUM_PROCESSES`` says that there are some."""
    if connect and (mesh is not None or "JAX_NUM_PROCESSES" in os.environ):
        processes.initialize()
    if mesh is None:
        return None
    found = jax.devices()
    if mesh.size > len(found):
        axes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise ValueError(
            f"--mesh {axes} needs {mesh.size} devices, and JAX finds {len(found)} x {found[0].device_kind}"
        )
    return nnxmoe.make_mesh(**mesh.shape, devices=found if connect else found[: mesh.size])


def devices_text(mesh: Any) -> str:
    """Number and kind of the devices in use, such as ``8 x NVIDIA H100 80GB HBM3``."""
    kind, count = jax.local_devices()[0].device_kind, jax.local_device_count()
    if mesh is not None:
        return f"{mesh.size} x {kind}"
    return kind if count == 1 else f"{kind}, one of {count} (--mesh uses more)"


def method(options: argparse.Namespace) -> Any:
    """The method that ``--quantize`` names."""
    from nnxmoe.model.quantization.methods import parse_method

    return parse_method(options.quantize) if options.quantize else None


def sampling_of(options: argparse.Namespace, default: nnxmoe.Sampling = _GREEDY) -> nnxmoe.Sampling:
    """How tokens are chosen; options without effect at temperature 0 are reported."""
    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    found = dataclasses.replace(default, **given)
    if found.temperature == 0:
        if given.keys() & {"top_k", "top_p", "min_p"}:
            say("temperature is 0 (always the most likely token): --top-k, --top-p and --min-p have no effect")
        if getattr(options, "samples", 1) > 1:
            say("temperature is 0 (always the most likely token): all --samples of a prompt are equal")
    return found


def generate(options: argparse.Namespace) -> None:
    """Continue a prompt, streaming the text, or many prompts, as JSON lines."""
    sampling = sampling_of(options)
    if options.prompts is not None:
        many = prompts.read(options.prompts)
    else:
        many = [prompts.Line(sys.stdin.read() if options.prompt == "-" else options.prompt, 1, {})]
    if not many or not many[0].prompt:
        raise ValueError(f"{options.prompts} holds no prompts" if options.prompts else "the prompt is empty")
    model, tokenizer = load(options)
    if sampling == _GREEDY and (asked := effective_fields(model.generation_config)[0]):
        say("generation_config.json asks for %s: chat and serve apply it, generate takes options only", listed(asked))
    if options.prompts is not None or options.samples > 1 or options.logprobs is not None:
        for line in prompts.lines(model, tokenizer, many, sampling, options):
            print(line, flush=True)
        return
    vocab = model.vocab_size
    texts, special = split_stop_strings(options.stop, tokenizer, vocab) if options.stop else ((), ())
    given = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": options.seed}
    given |= {"eos_token_id": (*eos_ids(model, ...), *special), "draft": drafts.draft_of(options.draft, model)}
    given["constraint"] = prompts.grammar_of(options, tokenizer)
    pieces = nnxmoe.stream(model, tokenizer, many[0].prompt, **given)
    made, shown = Speed(), StopStringFilter(texts)
    for piece in pieces:
        made.note(pieces.tokens)
        print(shown.add(piece), end="", flush=True)
        if shown.stopped:
            break
    print(shown.rest())
    if made.tokens > 1:
        ends = {"stop": "ended by the model", "error": "ended by an error", None: "ended by --stop"}
        end = ends.get(None if shown.stopped else pieces.finish, "stopped by --max-new-tokens")
        say("%d tokens, %s%s", pieces.tokens, end, made)
    elif pieces.finish == "stop" and tokenizer.chat_template is not None:
        say("the model ended at once; it has a chat template, so try: nnxmoe chat %s", options.model)


def convert(options: argparse.Namespace) -> None:
    """Convert a checkpoint between the layouts of Hugging Face, MaxText and nnxmoe.save, into a new folder."""
    from nnxmoe.convert import conversion
    from nnxmoe.convert.peft.adapter_folder import open_adapter
    from nnxmoe.models import refuse_preset
    from nnxmoe.train import lora

    refuse_preset(options.source)
    if options.adapter is not None:
        open_adapter(options.adapter)
    done = conversion.convert(
        options.source,
        options.target,
        options.to,
        scan=options.scan,
        dtype=options.dtype,
        mesh=mesh_of(options.mesh, connect=True),
        config=options.config,
        verify=options.verify,
        quantize=method(options),
        change=None if options.adapter is None else lambda model: lora.merge_from(model, options.adapter),
    )
    if jax.process_index() == 0:
        print(f"{done.target}: {done.arrays} arrays, {bytes_text(done.bytes)}")
        print(f"read {bytes_text(done.read_speed)}/s, written {bytes_text(done.write_speed)}/s")
        if done.difference is not None and done.roundings:
            print(
                f"the arrays are as they were written, but logits differ by {done.difference:.1e}: "
                f"{' and '.join(done.roundings)}; --dtype float32 avoids it"
            )
        elif done.difference is not None:
            print(f"verified: all arrays are equal; logits differ by at most {done.difference:.1e}")


def finetune(options: argparse.Namespace) -> None:
    """Fine-tune a model on lines of text or chats. Repeating the command resumes an interrupted run."""
    from nnxmoe.train import finetune as tuning
    from nnxmoe.train.loop.measured import EVAL_LOSS

    names = [field.name for field in dataclasses.fields(tuning.Finetune) if field.name != "model"]
    task = tuning.Finetune(_weights(options.model), **{name: getattr(options, name) for name in names})
    mesh = mesh_of(options.mesh, connect=True)
    if mesh is None and (count := jax.process_count()) > 1:
        raise ValueError(
            f"this job has {count} processes, and each would train a model of its own: give --mesh with all "
            f"{jax.device_count()} devices, such as --mesh fsdp={jax.device_count()}"
        )
    say("running on %s", devices_text(mesh))
    names = ("save_every", "local_files_only", "profile", "max_bad_fraction")
    try:
        done = tuning.finetune(task, options.out, mesh=mesh, **{name: getattr(options, name) for name in names})
    except KeyboardInterrupt:
        line = shlex.join(["nnxmoe", *sys.argv[1:]])
        raise KeyboardInterrupt(f"interrupted {tuning.progress_of(options.out)} with: {line}") from None
    if jax.process_index() == 0:
        if done is not None and done.history:
            first, last = done.history[0], done.history[-1]
            span = f"steps {first['step']} to {last['step']}"
            name = "cross_entropy" if "cross_entropy" in first else "loss"
            print(f"{span}: {name.replace('_', '-')} {first[name]:.4f} -> {last[name]:.4f}")
            if EVAL_LOSS in last:
                print(f"on {options.evaluation}: {last[EVAL_LOSS]:.4f}")
        kind = "an adapter for peft" if options.adapter_only else "the tuned model"
        hub = {"revision": options.revision, "local_files_only": options.local_files_only}
        chats = nnxmoe.Tokenizer.from_pretrained(task.model, **hub).chat_template is not None
        asked = ["chat", options.out] if chats else ["generate", options.out, "Once upon a time"]
        print(f"{options.out}: {kind}; its losses are in metrics.jsonl. Try it: {shlex.join(['nnxmoe', *asked])}")
