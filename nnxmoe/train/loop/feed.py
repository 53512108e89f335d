"""Batches on their way into a step: where in the data we are, and where on the devices they lie."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nnxmoe.axes import batch_axes, shards
from nnxmoe.runtime.progress import logger
from nnxmoe.train.loop.loss import Batch, check_batch, check_ids
from nnxmoe.train.loop.step import Step


class Source:
    """The batches, and where in them we are: the data's own state, or how many were taken."""

    def __init__(self, data: Iterable[Batch]) -> None:
        self.data, self.taken = data, 0
        self.batches: Any = iter(data)

    def next(self) -> tuple[Batch, dict[str, Any]]:
        """A batch, and the position after it."""
        batch = next(self.batches, None)
        if batch is None and iter(self.data) is not self.data:
            self.batches = iter(self.data)
            batch = next(self.batches, None)
        if batch is None:
            raise ValueError(f"the data ended after {self.taken} batches: give more, or fewer steps")
        self.taken += 1
        return batch, self.position()

    def position(self) -> dict[str, Any]:
        """What `go_to` takes."""
        own = self.batches.get_state() if _resumes(self.batches) else None
        return {"taken": self.taken, "state": own}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Where another run was."""
        if position["state"] is not None:
            if not _resumes(self.batches):
                raise ValueError("the checkpoint has the position of data that could be resumed: give the same data")
            self.batches.set_state(position["state"])
            self.taken = position["taken"]
            return
        if position["taken"]:
            logger.warning("the data has no set_state: going through %d batches again", position["taken"])
        while self.taken < position["taken"]:
            self.next()


def _resumes(batches: Any) -> bool:
    return hasattr(batches, "get_state") and hasattr(batches, "set_state")


def placed(batch: Batch, step: Step) -> dict[str, Any]:
    """A batch where the step wants it: rows over the mesh; of several processes each gives its own rows."""
    check_batch(batch)
    check_ids(batch, step.vocab)
    mesh = step.mesh
    if mesh is None:
        return {name: jnp.asarray(array) for name, array in batch.items()}
    rows, parts = np.shape(batch["tokens"])[0] * jax.process_count(), shards(mesh, batch_axes(mesh))
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} rows does not divide over the {parts} parts of {dict(mesh.shape)}: give a multiple"
        )
    place = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    return {name: jax.make_array_from_process_local_data(place, np.asarray(a)) for name, a in batch.items()}
