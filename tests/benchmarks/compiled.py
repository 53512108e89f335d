"""Read the programs that XLA compiles for an H100: products, kernels, bytes, copies of weights, attention calls.

    python -m tests.benchmarks.compiled [--only prefill decode moe attention train] [--text FOLDER]

Programs are compiled but not run. No GPU is needed, only the extras ``kernels`` and ``plan-gpu``. Each program has the
dimensions of a real model in bfloat16, and few layers (`tests.benchmarks.gpu_programs`). The fastest implementation of
each product is unknown, so no times are printed. ``bytes`` are relative to the bytes that must be read and written.
``bound`` is a lower bound of the run time: for every kernel the larger of its bytes at 3.35 TB/s and its FLOPs at 800
TFLOP/s, and at least 2 us.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nnxmoe.apps.planning import hlo
from nnxmoe.apps.planning.compilation import environment

BYTES_PER_S, FLOPS_PER_S, LAUNCH_S = 3.35e12, 8e14, 2e-6
LARGE = 2**21  # elements of an array that should not be copied: a weight or a cache
MARKER = "_NNXMOE_COMPILED_BENCHMARK"  # environment variable of the process that compiles
FREE = set("parameter constant bitcast tuple get-tuple-element while conditional call after-all partition-id".split())
FREE |= {"opt-barrier", "optimization-barrier", "iota"}
SLICES, UPDATES = {"dynamic-slice", "slice", "gather"}, {"dynamic-update-slice", "scatter"}
FUSED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


class Line(NamedTuple):
    """An instruction: its name, result type, operation, names of operands, and its text."""

    name: str
    result: str
    operation: str
    operands: Sequence[str]
    text: str
    is_root: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """An optimized HLO module.

    Attributes:
        lines: Instructions by name, for each computation.
        fused: Computations inside of kernels.
        executed: Computations and the number of times that each is executed.
        unknown_loops: Number of loops whose trip count depends on data. A GPU waits for the host in each iteration.
    """

    lines: Mapping[str, Mapping[str, Line]]
    fused: frozenset[str]
    executed: Mapping[str, int]
    unknown_loops: int

    @classmethod
    def parse(cls, text: str) -> "Module":
        text = re.sub(r"/\*index=\d+\*/", "", text)
        lines, times, fused, loops = dict[str, dict[str, Line]](), Counter[str](), set[str](), 0
        for instruction in hlo.instructions(text):
            found = INSTRUCTION.match(instruction.text)
            if found is None:
                continue
            root, name, result, operation, rest = found.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            computation = lines.setdefault(instruction.computation, {})
            if not computation or name == next(iter(computation)):
                times[instruction.computation] += instruction.times
            is_new = name not in computation
            computation[name] = Line(name, result, operation, operands, rest, root is not None)
            if operation not in ("call", "while", "conditional"):
                fused.update(FUSED.findall(rest))
            loops += is_new and operation == "while" and '"known_trip_count"' not in rest
        return cls(lines, frozenset(fused), times, loops)

    def kernels(self) -> Iterator[tuple[str, Line, int]]:
        """Yield every instruction that is a kernel, with its computation and number of executions."""
        for name, computation in self.lines.items():
            if name not in self.fused:
                for line in computation.values():
                    if line.operation not in FREE and not line.operation.endswith("-done"):
                        yield name, line, self.executed[name]

    def body(self, line: Line) -> Mapping[str, Line]:
        """Return the instructions of a fusion. Empty for other instructions."""
        called = FUSED.search(line.text) if line.operation == "fusion" else None
        return self.lines.get(called[1], {}) if called else {}


def shapes(result: str) -> list[tuple[str, list[int]]]:
    """Return the dtypes and shapes of an HLO type."""
    return [(dtype, [int(n) for n in dims.split(",") if n]) for dtype, dims in hlo._SHAPE.findall(result)]


def elements(result: str) -> int:
    return sum(math.prod(shape) for _, shape in shapes(result))


def size(result: str) -> int:
    """Bytes of an HLO type."""
    return sum(hlo._sizes(result))


def product(line: Line, types: Mapping[str, str]) -> tuple[str, float] | None:
    """Return the operands' dtype and the FLOPs of a product or of an attention call, or None for other instructions."""
    known = [types[name] for name in line.operands if name in types]
    if "fmha" in line.text:
        (dtype, q), (_, k) = shapes(known[0])[0], shapes(known[1])[0]
        tokens = re.search(r'"dimensions": ?\["(\d+)", ?"(\d+)", ?"(\d+)", ?"(\d+)"\]', line.text)
        pairs = math.prod(map(int, tokens.groups())) if tokens else q[0] * q[1] * q[2] * k[1]
        causal = 0.5 if 'CAUSAL"' in line.text else 1.0
        return f"{dtype} cuDNN", causal * (10 if "Backward" in line.text else 4) * pairs * q[-1]
    if line.operation != "dot" and "__cublas" not in line.text:
        return None
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d",]*)', line.text)
    dtype, left = shapes(known[0])[0]
    inner = math.prod(left[int(n)] for n in re.findall(r"\d+", contracted[1])) if contracted else 1
    return dtype, 2 * inner * math.prod(shapes(line.result)[0][1])


def read_bytes(module: Module, line: Line, types: Mapping[str, str]) -> int:
    """Return the bytes that a kernel reads and writes. Slices and updates count the bytes of the slice only.

    An array that the kernel also uses in a different way, for example after a bitcast, counts in full.
    """
    body, inner, parameters = [line], types, dict(enumerate(line.operands))
    if fused := module.body(line):
        body, inner = [*fused.values()], {name: instruction.result for name, instruction in fused.items()}
        parameters = {int(i.text.split(")")[0]): i.name for i in body if i.operation == "parameter"}
    total, written = size(line.result), size(line.result)
    for instruction in body:
        if instruction.operation in UPDATES and size(instruction.result) <= total:
            values = [inner[name] for name in instruction.operands[1:] if name in inner]
            written -= size(instruction.result) - max(map(size, values), default=0)
    moved = max(written, 0)
    for index, name in enumerate(line.operands):
        full, parameter = size(types.get(name, "")), parameters.get(index)
        users = [instruction for instruction in body if parameter in instruction.operands]
        if users and all(user.operands[0] == parameter for user in users):
            if all(user.operation in SLICES for user in users):
                full = min(full, sum(size(user.result) for user in users))
            elif all(user.operation in UPDATES for user in users):
                full = 0
        moved += full
    return moved


@dataclasses.dataclass(frozen=True)
class Facts:
    """Counts and bytes of a compiled program, over all layers.

    Attributes:
        products: Number and FLOPs of the matrix products per dtype.
        kernels: Number of kernels that are launched.
        bytes: Bytes that all kernels read and write.
        needed: Bytes that must be read and written.
        limit_s: Lower bound of the run time.
        copies: Large arguments that are copied, cast or transposed.
        attention: Number of calls per attention kernel.
        unknown_loops: Number of loops whose trip count depends on data.
    """

    products: Mapping[str, tuple[int, float]]
    kernels: int
    bytes: int
    needed: int
    limit_s: float
    copies: Sequence[str]
    attention: Mapping[str, int]
    unknown_loops: int


def facts(text: str, needed: int) -> Facts:
    """Read the optimized HLO text of a program. ``needed`` are the bytes that it must read and write."""
    module, products, kernels = Module.parse(text), dict[str, tuple[int, float]](), 0
    total, seconds, attention, copies = 0, 0.0, Counter[str](), []
    for name, line, times in module.kernels():
        types = {other.name: other.result for other in module.lines[name].values()}
        body = module.body(line).values()
        inner = {instruction.name: instruction.result for instruction in body}
        found = [product(line, types), *(product(instruction, inner) for instruction in body)]
        for dtype, flops in filter(None, found):
            count, before = products.get(dtype, (0, 0.0))
            products[dtype] = count + times, before + times * flops
        flops = sum(amount for _, amount in filter(None, found))
        moved = read_bytes(module, line, types)
        kernels, total = kernels + times, total + times * moved
        seconds += times * max(moved / BYTES_PER_S, flops / FLOPS_PER_S, LAUNCH_S)
        target = re.search(r'custom_call_target="([^"]+)"', line.text)
        if target and ("fmha" in target[1] or "triton" in target[1]):
            attention[target[1].removeprefix("__cudnn$").removeprefix("__gpu$xla.gpu.")] += times
        if not flops and not target:
            copies += _copied(module, name, line) * times
    return Facts(products, kernels, total, needed, seconds, copies, attention, module.unknown_loops)


def _copied(module: Module, computation: str, line: Line) -> list[str]:
    """Return the name of a large argument of the program that this kernel copies, casts or transposes."""
    lines = module.lines[computation]
    for name in line.operands:
        source = lines.get(name)
        while source is not None and source.operation in ("bitcast", "get-tuple-element", "optimization-barrier"):
            source = lines.get(source.operands[0])
        if source is None or source.operation != "parameter":
            continue
        count = elements(source.result)
        updates = any(instruction.operation in UPDATES for instruction in module.body(line).values())
        if count >= LARGE and 2 * elements(line.result) >= count and not updates:
            return [re.sub(r"_+", ".", source.name)]
    return []


def row(name: str, layers: int, found: Facts) -> str:
    """Format a row of the table."""
    flops = sum(amount for _, amount in found.products.values()) or 1.0
    products = ", ".join(
        f"{count} {dtype} ({100 * amount / flops:.0f} %)" for dtype, (count, amount) in sorted(found.products.items())
    )
    attention = ", ".join(f"{count} {target}" for target, count in found.attention.items()) or "products"
    loops = f", {found.unknown_loops} loops" if found.unknown_loops else ""
    copies = f"{len(found.copies)}" + (f": {', '.join(sorted(set(found.copies)))[:60]}" if found.copies else "")
    ratio, kernels = found.bytes / max(found.needed, 1), found.kernels / layers
    cells = products, f"{ratio:.2f}", f"{kernels:.0f}", copies, attention + loops, f"{1e6 * found.limit_s:.0f}"
    return f"| {' | '.join((name, *cells))} |"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="programs whose name contains a word")
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="write the compiled programs to files")
    options = parser.parse_args()
    if MARKER not in os.environ:  # JAX reads the environment once
        variables = dict(os.environ) | environment("gpu", 1) | {MARKER: "1"}
        variables.pop("JAX_DEFAULT_MATMUL_PRECISION", None)
        os.execve(sys.executable, [sys.executable, "-m", "tests.benchmarks.compiled", *sys.argv[1:]], variables)
    from tests.benchmarks import gpu_programs

    print("| program | products | bytes | kernels per layer | weights copied | attention, loops | bound, us |")
    print("|---" * 7 + "|", flush=True)
    failed = 0
    for program in gpu_programs.PROGRAMS:
        if not any(word in program.name for word in options.only):
            continue
        try:
            text, needed = gpu_programs.compile_program(program)
        except Exception as error:  # one program must not end the table
            failed += 1
            print(f"| {program.name} | {type(error).__name__}: {str(error)[:160]!r} |", flush=True)
            continue
        if options.text is not None:
            options.text.mkdir(parents=True, exist_ok=True)
            (options.text / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', program.name)}.hlo").write_text(text)
        print(row(program.name, program.layers, facts(text, needed)), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
