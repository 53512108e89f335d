"""Connect the processes of a multi-process program, with a single timeout for every wait.

JAX detects SLURM, Open MPI, Kubernetes and Cloud TPU, connects the processes and checks their
heartbeats.
"""

import faulthandler
import math
import os
from typing import Any

import jax

from nnxmoe.config.validate import real_number
from nnxmoe.runtime.progress import say

_LAUNCHERS = (
    "SLURM_",
    "OMPI_",
    "JOB_COMPLETION_",
    "TPU_WORKER",
    "MEGASCALE_",
)  # prefixes of variables set by launchers
_FROM_ENVIRONMENT = {"coordinator_address": str, "num_processes": int, "process_id": int}
_TIMEOUTS = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")


def initialize(timeout: float = 300.0, **options: Any) -> None:
    """Connect this process to the other processes. Call it before any other use of JAX.

    If no cluster is detected and no process is configured, the function only logs a message.

    Args:
        timeout: Seconds to wait for other processes at startup, between heartbeats and at shutdown.
            After the timeout, JAX ends this process with a message and a non-zero exit status.
        options: Arguments of ``jax.distributed.initialize``. Missing arguments are read from the
            environment: the variables of the cluster's launcher, or ``JAX_COORDINATOR_ADDRESS``,
            ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``.

    Raises:
        ValueError: If the timeout is invalid, the variables are incomplete, or the process is already
            connected.
    """
    timeout = real_number("timeout (seconds)", timeout, 0, 2**31, positive=True)
    if jax.distributed.is_initialized():
        raise ValueError("this process is already connected to the other processes: call initialize only once")
    settings = _from_environment() | options
    limits: dict[str, Any] = dict.fromkeys(_TIMEOUTS, math.ceil(timeout))
    try:
        jax.distributed.initialize(**limits | settings)
    except Exception as error:
        configured = settings.keys() & _FROM_ENVIRONMENT.keys()
        launched = configured or any(name.startswith(_LAUNCHERS) for name in os.environ)
        jax_in_use = (
            "must be called before any JAX" in str(error) and not launched
        )  # JAX was used before, as in a notebook
        if not jax_in_use and (configured or "coordinator_address should" not in str(error)):
            raise
        say("no cluster and no JAX_COORDINATOR_ADDRESS found: running as a single process")
        return
    faulthandler.enable()  # JAX aborts if another process dies: print the stacks of this process


def _from_environment() -> dict[str, Any]:
    """Read settings from ``JAX_*`` variables. If all are set, cluster detection is disabled."""
    settings: dict[str, Any] = {}
    for name, parse in _FROM_ENVIRONMENT.items():
        text = os.environ.get(variable := f"JAX_{name.upper()}")
        if text is not None and parse is int and not text.isdecimal():
            raise ValueError(
                f"the environment variable {variable}={text!r} is not a number: set it to a number, or unset it"
            )
        settings |= {} if text is None else {name: parse(text)}
    return settings | ({"cluster_detection_method": "deactivate"} if len(settings) == len(_FROM_ENVIRONMENT) else {})
