"""Format plans as text."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nnxmoe.apps.planning.published import nearest
from nnxmoe.config.printable import bytes_text
from nnxmoe.mesh import abstract_mesh
from nnxmoe.sharding_rules import rule_axes


def table(plan: Any) -> str:
    """Format a plan as text: one line per figure with its name, value and source."""
    work, spec = plan.work, plan.hardware
    axes = axes_text(plan)
    step_text = "training step of" if work.train else "decoding step with one token for each of"
    rows = f"{work.batch} rows {'of' if work.train else 'after'} {work.seq} tokens"
    devices_text = f"{plan.devices} x {spec.name}, --mesh {axes}" if axes else f"one {spec.name}"
    model = plan.model if work.layers is None else f"{plan.model} with the first {work.layers} layers"
    lines = [f"{model}, {step_text} {rows}, on {devices_text}", _verdict(plan)]
    lines += ["bytes, calls and times per device:"] if axes else []

    def line(name: str, value: str, source: str = "") -> None:
        lines.append(f"{name:15} {value:50} {source}".rstrip())

    _memory(plan, line)
    _time(plan, line)
    if plan.other_rules is not None:
        _rules(plan, line)
    for text in plan.advice:
        line("change", text)
    return "\n".join(lines)


def _memory(plan: Any, line: Any) -> None:
    work, spec, sizes = plan.work, plan.hardware, plan.bytes
    for name in ("parameters", "moments", "cache", "inputs"):
        if size := getattr(sizes, name):
            line(name, bytes_text(size), "exact")
    if plan.exact:
        line("temporary", bytes_text(plan.program.temporary), f"compiled for {spec.name}")
    else:
        line("gradients", bytes_text(sizes.gradients), "estimated") if sizes.gradients else None
        line("activations", bytes_text(sizes.activations), "estimated")
    if plan.program is not None:
        _compiled(plan, line)
    if work.pipeline is not None:
        stages = plan.mesh["pipe"]
        turns = f"{stages}; {work.microbatches} microbatches take {work.pipeline.num_turns(stages)} turns"
        line("stages", f"{turns}, {plan.bubble:.0%} of them idle", "exact")
    if work.chunks > 1:
        line("exchange", f"in {work.chunks} parts, one after another: ChunkedExchange(RaggedAllToAll(), {work.chunks})")
    fits = "fits" if plan.fits else "does not fit"
    line("memory", f"{bytes_text(plan.memory)} of {bytes_text(spec.memory)}: {fits}", "" if plan.exact else "estimated")
    if plan.fits and spec.platform == "gpu" and plan.memory > 0.75 * spec.memory:
        share = min(0.98, math.ceil(100 * plan.memory / spec.memory + 1) / 100)
        line("", f"JAX preallocates 75 % of a GPU by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}", "")


def _time(plan: Any, line: Any) -> None:
    work, spec = plan.work, plan.hardware
    for traffic in sorted(plan.traffic, key=lambda traffic: -traffic.bytes)[:6]:
        link = (
            "network" if any(plan.routes[axis].far > 1 for axis in traffic.axes) else plan.routes[traffic.axes[0]].name
        )
        size = f"{bytes_text(traffic.bytes)} of {traffic.what} over {' x '.join(traffic.axes)}"
        line(traffic.kind, f"{size}, {traffic.times} calls", f"estimated, {link}")
    line("operations", f"{plan.operations / plan.devices:.3g} per device, {plan.operations:.3g} on all", "formula")
    share = plan.efficiency
    for name, seconds in plan.times.items():
        rates = {"compute": f"{spec.flops / 1e12:.0f} TFLOP/s"}
        rates |= {} if work.train else {"memory": f"{spec.bandwidth / 1e12:.2f} TB/s"}
        note = f"at {share.expected:.0%} of {rates[name]}" if name in rates else "estimated"
        line(f"time, {name}", f"{seconds:.3g} s{': the step waits for this' if name == plan.limiter else ''}", note)
    if plan.fits:
        rate = work.tokens / plan.seconds
        line("speed", f"{rate:,.0f} tokens per second, {rate / plan.devices:,.0f} per device", "estimated")
        low, high = plan.range
        peak = f"at {share.high:.0%} to {share.low:.0%} of the peak"
        line("range", f"{low:.3g} to {high:.3g} s per step, {peak}", share.why)
        line("", "the upper end assumes no overlap of communication and computation", "an assumption")
        line("nearest", str(nearest(plan.model, spec, plan.config.experts > 0, plan.devices, work.train)), "published")


def _rules(plan: Any, line: Any) -> None:
    """Print memory and traffic of the plan with the chosen rules and of the plan with `RULES`."""
    for choice, note in ((plan, "chosen"), (plan.other_rules, "not chosen")):
        axes = " x ".join(rule_axes("embed", abstract_mesh(choice.mesh), choice.work.rules))
        size = f"{bytes_text(choice.memory)}, {bytes_text(choice.received)} received"
        line("rules", f"dense kernels over {axes or 'no axis'}: {size}", f"estimated, {note}")


def _verdict(plan: Any) -> str:
    """Describe in one line whether the plan fits and how fast the step is."""
    size = f"{bytes_text(plan.memory)} of {bytes_text(plan.hardware.memory)} on each device"
    if not plan.fits:
        return f"does not fit: {size}"
    (low, high), rate = plan.range, plan.work.tokens / plan.seconds
    step = f"{seconds_text(plan.seconds)} per step ({seconds_text(low)} to {seconds_text(high)})"
    return f"fits: {size}; {step}, {rate:,.0f} tokens per second"


def axes_text(plan: Any) -> str:
    """Format the mesh as the value of ``--mesh``. Returns an empty string for one device."""
    return ",".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1)


def cost(plan: Any, tokens: float, price: float | None = None) -> str:
    """Describe the time for ``tokens`` tokens, and the cost at ``price`` per device-hour."""
    days = [tokens / plan.work.tokens * seconds / 86400 for seconds in (plan.seconds, *plan.range)]
    hours = 24 * days[0] * plan.devices
    text = f"{tokens:,.0f} tokens: {_days(days[0])} ({_days(days[1])} to {_days(days[2])}), {hours:,.0f} device-hours"
    return text if price is None else f"{text}, {hours * price:,.0f} at a price of {price:g}"


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"


def seconds_text(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _compiled(plan: Any, line: Any) -> None:
    program, source = plan.program, f"compiled for {plan.compiled_for} in {plan.program.seconds:.0f} s"
    line("arguments", bytes_text(program.arguments), source)
    if not plan.exact:
        note = "an upper bound" if plan.work.train else "far too high because XLA:CPU casts stacked weights"
        line("temporary", f"{bytes_text(program.temporary)}, {note}", source)
    if not math.isnan(program.operations) and program.operations:
        line("operations", f"{program.operations / plan.devices:.3g} per device, counted", "traced, loops x lengths")
    sums, times = Counter[Any](), Counter[Any]()
    for collective in program.collectives:
        key = (collective.kind, collective.axes, collective.counted)
        sums[key] += collective.total
        times[key] += collective.times
    for (kind, axes, counted), size in sums.most_common(8):
        suffix = "" if counted else " or more, in a loop of unknown length"
        line(
            kind,
            f"{bytes_text(size)} over {' x '.join(axes)}, {times[kind, axes, counted]} calls{suffix}",
            source,
        )
    if program.warnings:
        line("warnings", f"{program.warnings} involuntary full rematerializations", source)


def compared(plans: Sequence[Any]) -> str:
    """Format one line per plan: mesh, rows, memory and, if the plan fits, time, speed and bottleneck."""
    lines = [f"{'mesh':36} {'rows':>6} {'memory':>10}  fits  {'step':>9}  {'tokens/s':>10}  waits for"]
    for plan in plans:
        axes = axes_text(plan) or "one device"
        axes += "" if plan.work.remat or not plan.work.train else " --no-remat"
        rate = f"{plan.work.tokens / plan.seconds:10,.0f}"
        speed = f"yes   {plan.seconds:8.3g}s  {rate}  {plan.limiter}" if plan.fits else "no"
        lines.append(f"{axes:36} {plan.work.batch:6} {bytes_text(plan.memory):>10}  {speed}")
    return "\n".join(lines)
