"""Connect the processes of a program, with one timeout for every wait.

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

_LAUNCHERS = ("SLURM_", "OMPI_", "JOB_COMPLETION_", "TPU_WORKER", "MEGASCALE_")  # environment variables of clusters
_FROM_ENVIRONMENT = {"coordinator_address": str, "num_processes": int, "process_id": int}
_TIMEOUTS = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")


def initialize(timeout: float = 300.0, **options: Any) -> None:
    """Connect this process to the others, before any other use of JAX.

    No-op with a log message for a single process.

    Args:
        timeout: Seconds to wait for other processes at the start, for their heartbeats and at the
            end. After the timeout, JAX ends this process with a message and a non-zero status.
        options: Arguments of ``jax.distributed.initialize``. Missing arguments are read from the
            environment: the variables of the cluster's launcher, or ``JAX_COORDINATOR_ADDRESS``,
            ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``.

    Raises:
        ValueError: For an invalid timeout, incomplete variables, or if the process is connected
            already.
    """
    timeout = real_number("timeout (seconds)", timeout, 0, 2**31, positive=True)
    if jax.distributed.is_initialized():
        raise ValueError("this process is already connected to the others: call initialize once")
    given = _from_environment() | options
    limits: dict[str, Any] = dict.fromkeys(_TIMEOUTS, math.ceil(timeout))
    try:
        jax.distributed.initialize(**limits | given)
    except Exception as error:
        set_here = given.keys() & _FROM_ENVIRONMENT.keys()
        launched = set_here or any(name.startswith(_LAUNCHERS) for name in os.environ)
        late = "must be called before any JAX" in str(error) and not launched  # JAX was used before, as in a notebook
        if not late and (set_here or "coordinator_address should" not in str(error)):
            raise
        say("no cluster and no JAX_COORDINATOR_ADDRESS found: running as a single process")
        return
    faulthandler.enable()  # JAX aborts if another process dies: print the stacks of this process


def _from_environment() -> dict[str, Any]:
    """Read settings from ``JAX_*`` variables. If all are set, cluster detection is disabled."""
    found: dict[str, Any] = {}
    for name, kind in _FROM_ENVIRONMENT.items():
        text = os.environ.get(variable := f"JAX_{name.upper()}")
        if text is not None and kind is int and not text.isdecimal():
            raise ValueError(
                f"the environment variable {variable}={text!r} is not a number: set it to one, or unset it"
            )
        found |= {} if text is None else {name: kind(text)}
    return found | ({"cluster_detection_method": "deactivate"} if len(found) == len(_FROM_ENVIRONMENT) else {})
