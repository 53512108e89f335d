"""Feed batches to training steps: track the position in the data, and place batches on devices."""

import base64
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding

from nnxmoe.axes import CONTEXT
from nnxmoe.config.validate import iterator_of
from nnxmoe.convert.storage.multihost import gather_texts
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding import batch_axes, batch_sharding
from nnxmoe.sharding_rules import shard_count
from nnxmoe.train.loop.batch import Batch, as_arrays, check_ids, rows_of
from nnxmoe.train.loop.memory_limit import BatchLimit
from nnxmoe.train.loop.objective import Objective
from nnxmoe.train.loop.step import Step

_BYTES = "base64"  # key of a data state in bytes, such as from grain's DataLoader
_PROCESSES = "processes"  # key of data positions per process, such as with grain.ShardByJaxProcess


class BatchSource:
    """Training data with a position that can be saved.

    The position contains the number of batches read and, if available, the state of the data's iterator.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data, self.taken = data, 0
        self.batches: Any = iterator_of("data", data, "an iterable of batches, such as train.batches(…)")

    @property
    def stride(self) -> int:
        """The position can be saved after every ``stride`` batches. 1 unless the batches are `Rollouts`."""
        return getattr(self.batches, "stride", 1)

    def samples_after(self, step: int) -> bool:
        """Check whether the next batch is sampled from the state after this step."""
        return hasattr(self.batches, "current_model") and step % self.stride == 0

    def sample_from(self, current_model: Callable[[], CausalLM]) -> None:
        """Set the function that returns the current model. No-op unless the batches are `Rollouts`."""
        if hasattr(self.batches, "current_model"):
            self.batches.current_model = current_model

    def next(self) -> tuple[Any, dict[str, Any]]:
        """Return the next batch and the position after it. Restarts re-iterable data when exhausted.

        Raises ValueError if the data are exhausted and cannot restart.
        """
        batch = next(self.batches, None)
        if batch is None and iter(self.data) is not self.data:
            self.batches = iter(self.data)
            batch = next(self.batches, None)
        if batch is None:
            raise ValueError(f"the data ended after {self.taken} batches: pass more data, or fewer steps")
        self.taken += 1
        return batch, self.position()

    def position(self) -> dict[str, Any]:
        """Return the current position as an argument for `restore`."""
        state = self.batches.get_state() if _resumes(self.batches) else None
        state = {_BYTES: base64.b64encode(state).decode()} if isinstance(state, bytes) else state
        return {"taken": self.taken, "state": state}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Restore the position of an earlier run, as returned by `in_every_process`."""
        if (saved := position.get(_PROCESSES)) is not None:
            if len(saved) != jax.process_count():
                raise ValueError(
                    f"the checkpoint contains a different data state for each of {len(saved)} processes, but "
                    f"this run has {jax.process_count()}: resume with {len(saved)} processes, or use data whose state "
                    "is equal in all processes, such as train.batches"
                )
            position = saved[jax.process_index()]
        if (state := position["state"]) is not None:
            if not _resumes(self.batches):
                raise ValueError(
                    "the checkpoint contains the state of an iterator with set_state, but this run's data have no "
                    "set_state: pass the same data as in the earlier run"
                )
            encoded = isinstance(state, Mapping) and state.keys() == {_BYTES}
            self.batches.set_state(base64.b64decode(state[_BYTES]) if encoded else state)
            self.taken = position["taken"]
            return
        if position["taken"]:
            logger.warning("the data has no set_state: skipping %d batches by reading them", position["taken"])
        while self.taken < position["taken"]:
            self.next()


def in_every_process(position: dict[str, Any]) -> dict[str, Any]:
    """Return the data position to save, or the positions of all processes if they differ.

    Collective: every process must call this function.
    """
    positions = [json.loads(text) for text in gather_texts(json.dumps(position))]
    return position if all(other == positions[0] for other in positions) else {_PROCESSES: positions}


def _resumes(batches: Any) -> bool:
    return hasattr(batches, "get_state") and hasattr(batches, "set_state")


def put_batch(batch: Batch, step: Step, limit: BatchLimit | None = None) -> dict[str, Any]:
    """Put a batch on the step's devices, with rows and tokens sharded over the mesh.

    Each process passes its own rows. Raises ValueError if the batch is malformed, has ids outside the
    vocabulary, exceeds the limit or does not divide evenly over the mesh.
    """
    batch = as_arrays(batch)
    step.objective.check(batch)
    check_ids(batch, ("tokens", "targets") if isinstance(step.objective, Objective) else ("tokens",), step.vocab)
    if limit is not None and "tokens" in batch:
        rows, *length = np.shape(batch["tokens"])
        limit.refuse((rows * jax.process_count(), *length))
    return jax.device_put(batch, step.replicated) if step.mesh is None else put_rows(batch, step.mesh)


def check_rows(rows: int, mesh: Mesh | None) -> None:
    """Raise ValueError if the mesh does not evenly divide the rows of the global batch."""
    parts = shard_count(mesh, batch_axes(mesh))
    if mesh is not None and rows % parts:
        names = " x ".join(batch_axes(mesh))
        raise ValueError(f"a batch of {rows} rows is not divisible by the {parts} devices of {names}: use a multiple")


def check_length(length: int, mesh: Mesh | None) -> None:
    """Raise ValueError if the mesh does not evenly divide the tokens of a row."""
    size = 1 if mesh is None else mesh.shape.get(CONTEXT, 1)
    if length % size:
        raise ValueError(
            f"rows of {length} tokens are not divisible by the {size} devices of {CONTEXT}: use a multiple of "
            f"{size} tokens, preferably of {2 * size}, which balances the devices' work"
        )


def put_rows(batch: Batch, mesh: Mesh | None) -> dict[str, Any]:
    """Put the arrays of a batch on devices, with rows sharded over the mesh; see `put_batch`."""
    if mesh is None:
        return {name: jnp.asarray(array) for name, array in batch.items()}
    rows, shape = rows_of(batch) * jax.process_count(), np.shape(batch.get("tokens", ()))
    check_rows(rows, mesh)
    if len(shape) == 2:
        check_length(shape[1], mesh)
    return {name: _put(np.asarray(array), batch_sharding(np.shape(array), mesh), rows) for name, array in batch.items()}


def _put(array: np.ndarray, sharding: NamedSharding, rows: int) -> jax.Array:
    """Build the global array from each process's rows.

    If the devices of a process need rows, or parts of rows, from a different process, every process
    gathers all rows in process order.
    """
    shape = (rows, *array.shape[1:])
    if own_rows(sharding, shape):
        return jax.make_array_from_process_local_data(sharding, array, shape)
    all_rows = multihost_utils.process_allgather(array, tiled=True)
    return jax.make_array_from_callback(shape, sharding, lambda index: all_rows[index])


def rows_of_process(array: jax.Array, rows: int) -> np.ndarray:
    """Return this process's ``rows`` rows of a global array that `put_rows` created."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if own_rows(array.sharding, array.shape):
        parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
    return multihost_utils.process_allgather(array, tiled=True)[jax.process_index() * rows :][:rows]


@functools.lru_cache(maxsize=64)
def own_rows(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Check whether all processes have equally many row ranges, and no two processes share a range."""
    row_ranges: dict[int, set[Any]] = {device.process_index: set() for device in jax.devices()}
    for device, index in sharding.devices_indices_map(shape).items():
        row_ranges[device.process_index].add(index[0].indices(shape[0]))
    process_ranges = row_ranges.values()
    return len(set(map(len, process_ranges))) == 1 and sum(map(len, process_ranges)) == len(
        set().union(*process_ranges)
    )
