"""Compile a step for virtual CPU devices, a TPU slice or GPUs, in a separate process.

The number of devices must be set before JAX starts, which requires a separate process. No
accelerator is needed: libtpu (extra ``plan-tpu``) and the CUDA plugin (extra ``plan-gpu``) compile
for devices that are not present.
"""

import dataclasses
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxmoe.apps.planning.hlo import Collective
from nnxmoe.apps.planning.work import Work
from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.strategy import Strategy
from nnxmoe.runtime.hardware import CPU, GPU, TPU, Hardware

LIMIT_S = 1800


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """A step to compile. The process builds the mesh of the strategy from ``mesh`` and ``device``."""

    config: DecoderConfig
    strategy: Strategy
    mesh: Mapping[str, int]
    work: Work
    platform: str = CPU
    device: str = ""  # XLA's name of the devices: a TPU topology such as v5p:4x8x8, or a GPU target such as h100


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        arguments, temporary, outputs, aliased: Bytes on one device.
        operations: Operations of the traced step on all devices.
        seconds: Duration of the compilation.
        warnings: Number of involuntary rematerializations reported by XLA.
    """

    arguments: int
    temporary: int
    outputs: int
    aliased: int
    collectives: tuple[Collective, ...]
    operations: float
    seconds: float
    warnings: int = 0

    @property
    def total(self) -> int:
        """Bytes on one device while the step runs."""
        return self.arguments + self.temporary + self.outputs - self.aliased


def target(kind: Hardware, platform: str) -> str:
    """Return the compiler's name of the devices. Raises ValueError if a TPU slice has no shape."""
    if platform == TPU and not kind.topology:
        raise ValueError(f"compiling for {kind.name} needs the slice's shape, such as {kind.name}:4x4x4")
    return {TPU: kind.topology, GPU: kind.name, CPU: ""}[platform]


def compile_program(job: CompileJob) -> Program:
    """Compile the step in a child process.

    Raises RuntimeError with the compiler's message if compilation fails, for example because the step
    does not fit on a TPU.
    """
    env = dict(os.environ) | environment(job.platform, math.prod(job.mesh.values()))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # to import the user's modules that define families
    env.pop("JAX_NUM_CPU_DEVICES", None)  # would override the number of virtual devices
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "job"), Path(folder, "program")
        given.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "nnxmoe.apps.planning.child", str(given), str(made)]
        where = job.device or job.platform
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"compiling for {where} took more than {LIMIT_S} s: plan a smaller step") from None
        if done.returncode < 0:
            raise RuntimeError(
                f"compiling for {where} was ended by signal {-done.returncode}, as where the memory of this machine is "
                "short: plan a smaller step, or on a larger machine"
            )
        if done.returncode or not made.exists():
            lines = [line for line in done.stderr.splitlines() if re.search("Error|exceed|required", line)]
            last = lines[-1] if lines else done.stderr.strip()[-500:] or f"exit status {done.returncode}"
            raise RuntimeError(f"the step does not compile for {where}: {last.strip()}")
        program: Any = pickle.loads(made.read_bytes())
    return dataclasses.replace(program, warnings=done.stderr.count("Involuntary full rematerialization"))


def environment(platform: str, devices: int) -> dict[str, str]:
    """Return environment variables for a process that compiles for a platform.

    They extend this process's variables. ``devices`` is the number of virtual CPU devices.
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags = f"{flags} --xla_force_host_platform_device_count={devices if platform == CPU else 1}"
    found = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "TQDM_DISABLE": "1"}
    if platform == TPU:
        found |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return found
