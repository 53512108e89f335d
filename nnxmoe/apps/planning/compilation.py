"""Compile a step for virtual CPU devices, a TPU slice or GPUs, in a child process.

A child process is necessary because the number of devices must be set before JAX starts. No accelerator
is needed: libtpu (extra ``plan-tpu``) and the CUDA plugin (extra ``plan-gpu``) compile for devices that
are not present.
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
    """Step to compile. The child process builds the strategy's mesh from ``mesh`` and ``device``."""

    config: DecoderConfig
    strategy: Strategy
    mesh: Mapping[str, int]
    work: Work
    platform: str = CPU
    device: str = ""  # XLA's name of the hardware: a TPU topology such as v5p:4x8x8, or a GPU target such as h100


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        arguments, temporary, outputs, aliased: Bytes on one device.
        operations: Floating-point operations of the traced step, on all devices.
        seconds: Compilation time.
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


def target(device: Hardware, platform: str) -> str:
    """Return XLA's name of the hardware. Raises ValueError for a TPU without the shape of a slice."""
    if platform == TPU and not device.topology:
        raise ValueError(f"compiling for {device.name} needs the shape of a slice, such as {device.name}:4x4x4")
    return {TPU: device.topology, GPU: device.name, CPU: ""}[platform]


def compile_program(job: CompileJob) -> Program:
    """Compile the step in a child process.

    Raises RuntimeError with the compiler's message if compilation fails, for example because the step
    does not fit on a TPU.
    """
    env = dict(os.environ) | environment(job.platform, math.prod(job.mesh.values()))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # so that the child can import user-defined families
    env.pop("JAX_NUM_CPU_DEVICES", None)  # would override the number of virtual devices
    with tempfile.TemporaryDirectory() as folder:
        job_file, program_file = Path(folder, "job"), Path(folder, "program")
        job_file.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "nnxmoe.apps.planning.child", str(job_file), str(program_file)]
        device = job.device or job.platform
        try:
            process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"compiling for {device} took more than {LIMIT_S} s: plan a smaller step") from None
        if process.returncode < 0:
            raise RuntimeError(
                f"compiling for {device} was killed by signal {-process.returncode}, probably because this machine ran "
                "out of memory: plan a smaller step, or use a larger machine"
            )
        if process.returncode or not program_file.exists():
            lines = [line for line in process.stderr.splitlines() if re.search("Error|exceed|required", line)]
            reason = lines[-1] if lines else process.stderr.strip()[-500:] or f"exit status {process.returncode}"
            raise RuntimeError(f"the step does not compile for {device}: {reason.strip()}")
        program: Any = pickle.loads(program_file.read_bytes())
    return dataclasses.replace(program, warnings=process.stderr.count("Involuntary full rematerialization"))


def environment(platform: str, devices: int) -> dict[str, str]:
    """Return environment variables for a process that compiles for a platform.

    Args:
        platform: cpu, gpu or tpu.
        devices: Number of virtual devices if the platform is cpu.
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags = f"{flags} --xla_force_host_platform_device_count={devices if platform == CPU else 1}"
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "TQDM_DISABLE": "1"}
    if platform == TPU:
        variables |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return variables
