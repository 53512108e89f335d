"""Runs a script as several processes on this machine: ``python -m nnxmoe.runtime.launch 2 script.py …``.

Each gets its own CPU devices and the environment in which ``nnxmoe.runtime.processes.initialize()`` finds the others. A
convenience: on a cluster its own launcher does this.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from nnxmoe.runtime import large_pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the processes until all have exited or one has failed; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nnxmoe.runtime.launch", description=__doc__)
    parser.add_argument("--devices", type=_positive, default=1, metavar="N", help="CPU devices of each process")
    parser.add_argument("count", type=_positive, help="how many processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of python: script.py …, or -m module …")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("give the script to run")
    signal.signal(signal.SIGTERM, _terminated)
    port, processes = free_port(), []
    try:
        for i in range(options.count):
            env = os.environ | environment(i, options.count, port, options.devices)
            command = [sys.executable, *options.command]
            processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL))
        return _wait(processes)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in processes:
            process.kill()  # a process inside a collective does not react to SIGTERM
        for process in processes:
            process.wait()


def environment(number: int, count: int, port: int, devices: int) -> dict[str, str]:
    """Environment variables of one process, besides the inherited ones."""
    address = f"127.0.0.1:{port}"
    return large_pages.setting() | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip(),
    }


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        for i, code in enumerate(codes):
            if code:
                how = f"with status {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
                print(
                    f"nnxmoe: process {i} of {len(codes)} exited {how}; stopping the others",
                    file=sys.stderr,
                    flush=True,
                )
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(0.05)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
