"""Run a script as several processes on this machine: ``python -m nnxmoe.runtime.launch 2 script.py …``.

Each process has separate CPU devices, and the environment variables that
``nnxmoe.runtime.processes.initialize()`` reads to connect the processes. Ctrl-C interrupts all
processes, so that training saves the current step. A second Ctrl-C kills all processes. This
launcher is for a single machine. On a cluster, use the cluster's launcher.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the processes until all have exited or one has failed. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nnxmoe.runtime.launch", description=__doc__)
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="CPU devices per process")
    parser.add_argument("count", type=int, help="number of processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments for python: script.py …, or -m module …")
    options = parser.parse_args(arguments)
    if not options.command or min(options.count, options.devices) < 1:
        parser.error("pass at least one process, one device and a script to run")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP stays ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    port, running = free_port(), []
    try:
        for i in range(options.count):
            env = os.environ | environment(i, options.count, port, options.devices)
            command = [sys.executable, *options.command]  # process_group=0: Ctrl-C reaches only the launcher
            running.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, process_group=0))
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.05)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                process.wait()
        return 130
    finally:
        for process in running:
            process.kill()  # a process inside a collective does not react to SIGTERM
            process.wait()
    for i, code in enumerate(codes):
        if code:
            print(
                f"nnxmoe: process {i} of {len(codes)} exited with {code}; the other processes were stopped",
                file=sys.stderr,
            )
            return code if code > 0 else 128 - code
    return 0


def environment(number: int, count: int, port: int, devices: int) -> dict[str, str]:
    """Return the environment variables of one process, in addition to inherited variables."""
    address = f"127.0.0.1:{port}"
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip(),
    }


def free_port() -> int:
    """Return a free port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
