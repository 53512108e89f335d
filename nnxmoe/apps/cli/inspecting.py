"""``nnxmoe inspect``: its options, and what it prints of a model."""

import argparse
import textwrap
from typing import Any

from nnxmoe.apps.cli import commands
from nnxmoe.apps.cli.options import add_model, add_quantize, count, mesh
from nnxmoe.config.printable import bytes_text, count_text, plain
from nnxmoe.models import PRESETS


def options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "a folder, a hub id, 'demo', or a preset such as deepseek-v3")
    add_quantize(parser)
    parser.epilog = f"{parser.epilog}\n\n{textwrap.fill('presets: ' + ', '.join(PRESETS), 100)}"
    add = parser.add_argument
    add("--batch", type=count, default=1, metavar="B", help="rows in the cache (default 1)")
    add("--fields", action="store_true", help="also print every field of config.json, and the strategy")
    add("--context", type=count, metavar="T", help="tokens in the cache (default: 4096 at most)")
    what = "also print how parameters are sharded on a mesh, such as fsdp=4,expert=8"
    add("--mesh", type=mesh, metavar="AXES", help=what)


def inspect(options: argparse.Namespace) -> None:
    """Print a model's sizes and whether it fits in memory, without reading its weights."""
    from nnxmoe.apps.cli.summary import spread_lines, summarise
    from nnxmoe.generation.draft_cost import auto_cost
    from nnxmoe.model.strategy import Strategy

    if options.mesh and options.keep_quantized:
        raise ValueError("--mesh shows how floats or weights of --quantize are sharded: leave --keep-quantized out")
    method, hub = commands.method(options), (options.revision, options.local_files_only)
    s = summarise(options.model, options.dtype, *hub, method, options.keep_quantized)
    spread = spread_lines(s.config, s.weight_dtype, options.mesh, method) if options.mesh else []
    batch, context = options.batch, options.context or min(s.config.max_position_embeddings, 4096)
    _print_memory(s, batch, context, spread[-1:])
    cost = auto_cost(s.model, batch, context)
    _print_sizes(s, batch, context, cost.plain_bytes)
    if s.stored:
        _print_files(s)
    fixed, per_token = s.cache.get(1, 0), s.cache_token - s.cache.get(1, 0)  # states do not grow with the length
    limits = "".join(
        f", {bytes_text(size)} of it for {n} tokens at most (sliding window)"
        for n, size in s.cache.items()
        if n is not None and n > 1
    )
    states = f", and {bytes_text(fixed)} of states per row" if fixed else ""
    print(f"cache       {bytes_text(per_token)} per token{limits}{states}")
    if options.fields:
        print("config.json")
        for name, value in s.config.to_hf().items():
            print(f"  {name:32} {value}")
        print("strategy    default on this machine:")
        for line in Strategy.auto().explain().splitlines():
            print(f"  {line}")
    for line in spread[:-1]:
        print(line)
    reads = f"{bytes_text(cost.plain_bytes)} at batch {batch}; with {cost.name} {bytes_text(cost.bytes)}"
    print(f"drafts      a step reads {reads}, in {cost.ratio:.2f} x the time")
    print(f"            they {cost.pays}; --draft auto expects {cost.expected:.0%}")
    if s.missing or s.misshapen:
        raise ValueError(
            f"{s.source} cannot be loaded: {len(s.missing)} tensors are missing and {len(s.misshapen)} do not fit "
            f"config.json, {plain([*s.missing, *s.misshapen][0])} among them"
        )


def _print_memory(s: Any, batch: int, context: int, spread: list[str]) -> None:
    """The memory of weights and cache, and whether this machine has it; on a mesh (``spread``) that of a device."""
    from nnxmoe.runtime.memory import memory_bytes

    need, (have, where) = s.needed(batch, context), memory_bytes()
    size = f"{count_text(s.parameters)} parameters, {count_text(s.active)} active per token"
    print(f"{s.source}: {s.config.model_type} of {size}")
    fits = f"{'fits' if need <= have else 'does not fit'}: {bytes_text(need)} of {bytes_text(have)} ({where})"
    print(f"memory      {bytes_text(need)} on all devices together" if spread else f"memory      {fits}")
    cache = f"{bytes_text(need - s.weight_bytes)} of cache for batch {batch}, {context} tokens"
    print(f"            {bytes_text(s.weight_bytes)} of weights in {' and '.join(s.weights)}, {cache}")
    for line in spread:
        print(line)


def _print_sizes(s: Any, batch: int, context: int, step: float) -> None:
    """Print the bytes that a token reads, the GPUs that hold the model and how fast they decode (``step``: the bytes
    that a step reads), and the parameters by kind."""
    from nnxmoe.apps.planning.published import Efficiency
    from nnxmoe.runtime.hardware import TABLE

    computed = f"and {count_text(2 * s.active)} floating-point operations are computed"
    print(f"per token   {bytes_text(s.active_bytes)} of weights are read at batch 1, {computed}")
    buffers = batch * context * s.buffer_token
    need = s.needed(batch, context) + buffers
    sizes = {f"{gib} GiB": gib * 2**30 for gib in (16, 24, 48)}
    sizes |= {name: TABLE[name.lower()].memory for name in ("H100", "H200")}
    room = ", ".join(f"{name} {'yes' if need <= size else 'no'}" for name, size in sizes.items())
    print(f"one GPU     {room}; with about {bytes_text(buffers)} of buffers for a prompt of {context} tokens")
    rates = list[str]()
    for kind in (TABLE[name] for name in ("t4", "rtx4090", "rtx5090", "l40s", "h100", "h200", "b200")):
        share = Efficiency.of(kind, s.config.experts > 0, train=False)
        low, high = (batch * kind.bandwidth * one / step for one in (share.low, share.high))
        rates += [f"on {kind.name} {low:,.0f} to {high:,.0f}"] if need <= kind.memory else []
    if rates:
        shown = ", ".join(rates[:3])
        print(f"            decodes {shown} tokens per second, by the share of bandwidth of published servers")
    if len(s.weights) > 1:
        print("weights     " + ", ".join(f"{kind} {bytes_text(size)}" for kind, size in s.weights.items()))
    if s.published:
        print(f"published   {s.published}")
    print(f"parameters  {s.parameters:>20,}")
    for part, size in s.parts.items():
        print(f"  {part:16}{size:>14,}  {size / s.parameters:6.1%}")
    print(f"active      {s.active:>20,}  per token")


def _print_files(s: Any) -> None:
    """The tensors of the files, and those that a load would leave out or refuse."""
    print("stored      " + ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in s.stored.items()))
    for rule, names in s.skipped.items():
        print(f"left out    {len(names)} tensors: {rule}")
    print(f"tensors     {len(s.missing)} missing, {len(s.unexpected)} belong to no parameter")
    for kind, names in (("missing", s.missing), ("not used", s.unexpected)):
        for name in names[:5]:
            print(f"  {kind:9} {plain(name)}")
    for line in s.misshapen[:5]:
        print(f"  wrong     {plain(line)}")
