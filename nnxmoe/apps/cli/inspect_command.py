"""``nnxmoe inspect``: print the parameter counts, memory and cache sizes of a model."""

import argparse
import textwrap
from typing import TYPE_CHECKING

from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.options import add_model, add_quantize, count, mesh
from nnxmoe.config.printable import bytes_text, count_text, plain
from nnxmoe.models import PRESETS

if TYPE_CHECKING:
    from nnxmoe.apps.cli.summary import Summary

EXAMPLE = "inspect deepseek-v3 --context 8192"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe inspect``."""
    add_model(parser, "a folder, a hub id, 'demo', or a preset such as deepseek-v3")
    add_quantize(parser)
    parser.epilog = f"{parser.epilog}\n\n{textwrap.fill('presets: ' + ', '.join(PRESETS), 100, break_on_hyphens=False)}"
    add = parser.add_argument
    add("--batch", type=count, default=1, metavar="B", help="rows in the cache (default 1)")
    add("--fields", action="store_true", help="also print all fields of config.json and the default strategy")
    add(
        "--context",
        type=count,
        metavar="T",
        help="tokens per row of the cache (default: the model's maximum, up to 4096)",
    )
    help_text = "also print how parameters are sharded on a mesh, such as fsdp=4,expert=8"
    add("--mesh", type=mesh, metavar="AXES", help=help_text)


def run(options: argparse.Namespace) -> None:
    """Print the sizes of a model and whether it fits in memory, without reading its weights."""
    from nnxmoe.apps.cli.summary import shard_lines, summarize
    from nnxmoe.generation.draft_cost import auto_cost
    from nnxmoe.model.strategy import Strategy

    if options.mesh and options.keep_quantized:
        raise ValueError("--mesh cannot show the shards of a checkpoint's quantized weights: omit --keep-quantized")
    method, hub = loading.quantize_method(options), (options.revision, options.local_files_only)
    summary = summarize(options.model, options.dtype, *hub, method, options.keep_quantized)
    shards = shard_lines(summary.config, summary.weight_dtype, options.mesh, method) if options.mesh else []
    batch, context = options.batch, options.context or min(summary.config.max_position_embeddings, 4096)
    _print_memory(summary, batch, context, shards[-1:])
    cost = auto_cost(summary.model, batch, context)
    _print_sizes(summary, batch, context, cost.plain_bytes)
    if summary.stored:
        _print_files(summary)
    _print_cache(summary)
    if options.fields:
        print("config.json")
        for name, value in summary.config.to_hf().items():
            print(f"  {name:32} {value}")
        print("strategy    default on this machine:")
        for line in Strategy.auto().explain().splitlines():
            print(f"  {line}")
    for line in shards[:-1]:
        print(line)
    reads = f"{bytes_text(cost.plain_bytes)} at batch {batch}; with {cost.name} {bytes_text(cost.bytes)}"
    print(f"drafts      a step reads {reads}, in {cost.ratio:.2f} x the time")
    print(f"            they {cost.break_even_text}; --draft auto expects {cost.expected:.0%}")
    if summary.missing or summary.misshapen:
        missing, misshapen = len(summary.missing), len(summary.misshapen)
        raise ValueError(
            f"{summary.source} cannot be loaded: {missing} tensors are missing and {misshapen} do not match "
            f"config.json, {plain([*summary.missing, *summary.misshapen][0])} among them"
        )


def _print_memory(summary: "Summary", batch: int, context: int, shards: list[str]) -> None:
    """Print the memory of weights and cache. Without ``shards``, also print whether this machine has enough."""
    from nnxmoe.runtime.memory import memory_bytes

    total, (memory, device) = summary.needed(batch, context), memory_bytes()
    size = f"{count_text(summary.parameters)} parameters, {count_text(summary.active)} active per token"
    print(f"{summary.source}: {summary.config.model_type} of {size}")
    fits = f"{'fits' if total <= memory else 'does not fit'}: {bytes_text(total)} of {bytes_text(memory)} ({device})"
    print(f"memory      {bytes_text(total)} on all devices together" if shards else f"memory      {fits}")
    cache = f"{bytes_text(total - summary.weight_bytes)} of cache for batch {batch}, {context} tokens"
    print(f"            {bytes_text(summary.weight_bytes)} of weights in {' and '.join(summary.weights)}, {cache}")
    for line in shards:
        print(line)


def _print_sizes(summary: "Summary", batch: int, context: int, step_bytes: float) -> None:
    """Print bytes read per token, parameter counts, and the decoding speed of each GPU that fits the model.

    Args:
        step_bytes: Bytes that one decoding step reads.
    """
    from nnxmoe.apps.planning.published import Efficiency
    from nnxmoe.runtime.hardware import TABLE

    operations = f"and {count_text(2 * summary.active)} floating-point operations are computed"
    print(f"per token   {bytes_text(summary.active_bytes)} of weights are read at batch 1, {operations}")
    buffers = batch * context * summary.buffer_token
    needed_bytes = summary.needed(batch, context) + buffers
    sizes = {f"{gib} GiB": gib * 2**30 for gib in (16, 24, 48)}
    sizes |= {name: TABLE[name.lower()].memory for name in ("H100", "H200")}
    gpu_fits = ", ".join(f"{name} {'yes' if needed_bytes <= size else 'no'}" for name, size in sizes.items())
    print(f"one GPU     {gpu_fits}; with about {bytes_text(buffers)} of buffers for a prompt of {context} tokens")
    gpu_rates = list[str]()
    for gpu in (TABLE[name] for name in ("t4", "rtx4090", "rtx5090", "l40s", "h100", "h200", "b200")):
        if needed_bytes <= gpu.memory:
            share = Efficiency.of(gpu, summary.config.experts > 0, train=False)
            low_rate, high_rate = (
                batch * gpu.bandwidth * fraction / step_bytes for fraction in (share.low, share.high)
            )
            gpu_rates.append(f"on {gpu.name} {low_rate:,.0f} to {high_rate:,.0f}")
    if gpu_rates:
        speeds = ", ".join(gpu_rates[:3])
        print(f"            decodes {speeds} tokens per second, at the bandwidth utilization of published servers")
    if len(summary.weights) > 1:
        print("weights     " + ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in summary.weights.items()))
    if summary.published:
        print(f"published   {summary.published}")
    print(f"parameters  {summary.parameters:>20,}")
    for part, size in summary.parts.items():
        print(f"  {part:16}{size:>14,}  {size / summary.parameters:6.1%}")
    print(f"active      {summary.active:>20,}  per token")


def _print_cache(summary: "Summary") -> None:
    state = summary.cache.get(1, 0)  # recurrent states have capacity 1: they do not grow with the length
    per_token = summary.cache_token - state
    windows = [(tokens, size) for tokens, size in summary.cache.items() if tokens is not None and tokens > 1]
    line = f"cache       {bytes_text(per_token)} per token"
    for tokens, size in windows:
        line += f", {bytes_text(size)} of it for at most {tokens} tokens (sliding window)"
    if state:
        line += f", and {bytes_text(state)} of states per row"
    print(line)


def _print_files(summary: "Summary") -> None:
    """Print the stored sizes, and the tensors that loading would skip or reject."""
    print("stored      " + ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in summary.stored.items()))
    for rule, names in summary.skipped.items():
        print(f"left out    {len(names)} tensors: {rule}")
    print(f"tensors     {len(summary.missing)} missing, {len(summary.unexpected)} belong to no parameter")
    for label, names in (("missing", summary.missing), ("not used", summary.unexpected)):
        for name in names[:5]:
            print(f"  {label:9} {plain(name)}")
    for line in summary.misshapen[:5]:
        print(f"  wrong     {plain(line)}")
