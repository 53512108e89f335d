"""Dropless dispatch: a fallback for layers whose assignments exceed the buffers of another dispatch."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float

from nnxmoe.axes import AnyMesh
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.printable import short
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo, Sorted, dispatch_info
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.selection import Routing


@runtime_checkable
class BufferedDispatch(Dispatch, Protocol):
    """Dispatch that drops assignments if its buffers are too small for the routing."""

    def needed_factor(self, routing: Routing, mesh: AnyMesh | None = None) -> Float[Array, ""]:
        """Return the smallest capacity or buffer factor at which this routing drops no assignments."""
        ...

    def fits(self, routing: Routing, mesh: AnyMesh | None = None) -> Bool[Array, ""]:
        """Return whether this routing drops no assignments. The result is the same on all devices."""
        ...


@dataclasses.dataclass(frozen=True)
class Dropless(CheckedFields):
    """Dispatch that uses ``inner`` if all assignments of the batch fit into its buffers, and ``fallback`` otherwise.

    The choice is made per layer and step, and is the same on all devices. Only the chosen dispatch is computed, but XLA
    reserves memory for both. Use a fallback with bounded buffers, such as
    ``ExpertParallel(Sorted(), ChunkedExchange(RaggedAllToAll(), 8))``.

    Attributes:
        inner: Dispatch with bounded buffers: `Capacity`, or `ExpertParallel` with a ``buffer_factor``.
        fallback: Dispatch that drops no assignments.
    """

    inner: BufferedDispatch
    fallback: Dispatch = Sorted()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, type) or not isinstance(self.inner, BufferedDispatch):
            raise ValueError(
                f"Dropless(inner={short(self.inner)}): use Capacity, or ExpertParallel with a buffer_factor"
            )

    @property
    def token_independent(self) -> bool:
        """Whether the fallback is token-independent. ``inner`` is only used if it drops nothing."""
        return getattr(self.fallback, "token_independent", False)

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        def run(dispatch: Dispatch) -> tuple[Array, DispatchInfo]:
            y, info = dispatch(x, routing, experts, mesh)
            # `dropped_by_shard` must have the same shape in both branches of `cond`.
            return y, dispatch_info(routing, info.dropped)

        # Without `jax.checkpoint`, every layer would reserve memory for the fallback's activations.
        fallback = jax.checkpoint(lambda: run(self.fallback))
        return jax.lax.cond(self.inner.fits(routing, mesh), lambda: run(self.inner), fallback)
