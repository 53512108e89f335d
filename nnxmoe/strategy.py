"""How this machine computes a model. Changing a strategy changes no result beyond rounding."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nnxmoe.layers.attend import Attend, Reference
from nnxmoe.layers.mla import ByLength, LatentAttend
from nnxmoe.layers.stack import Scanned, Unrolled
from nnxmoe.moe.dispatch import Dispatch, Sorted
from nnxmoe.moe.expert_parallel import has_ragged_all_to_all
from nnxmoe.moe.grouped_matmul import Blocked, GroupedMatmul, RaggedDot


def _default_matmul() -> GroupedMatmul:
    return RaggedDot() if jax.default_backend() == "tpu" else Blocked()


_DEFAULTS = {"dispatch": Sorted(), "matmul": Blocked(), "attend": Reference(), "latent": ByLength()}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The execution choices of a model, each an object that does the work.

    ``compute_dtype`` None: activations have the dtype of the loaded matrices. ``scan_layers`` stacks each run of equal
    layers into one module with a leading layer axis (training, large meshes); without it every layer has its own
    arrays (fastest decoding). ``mesh``: where parameters and tokens lie; ``from_pretrained(mesh=…)`` sets it.
    """

    dispatch: Dispatch = Sorted()
    matmul: GroupedMatmul = dataclasses.field(default_factory=_default_matmul)
    attend: Attend = Reference()
    latent: LatentAttend = ByLength()
    scan_layers: bool = False
    compute_dtype: jnp.dtype | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        for name in ("dispatch", "matmul", "attend", "latent"):
            value = getattr(self, name)
            if isinstance(value, type) or not callable(value):
                raise ValueError(
                    f"Strategy({name}={value!r}): give an object such as {type(_DEFAULTS[name]).__name__}()"
                )

    @classmethod
    def auto(cls) -> Self:
        """What suits the backend that JAX runs on."""
        return cls()

    @property
    def stack(self) -> type[Unrolled] | type[Scanned]:
        """The kind of stack that ``scan_layers`` asks for."""
        return Scanned if self.scan_layers else Unrolled

    def explain(self) -> str:
        """One line a choice: what was picked on this backend, and why."""
        backend = jax.default_backend()
        matmul = {
            "tpu": "lax.ragged_dot is a real grouped kernel here",
            "cpu": "a loop over the blocks in use: lax.ragged_dot computes every expert on every row here",
            "gpu": "a loop over the blocks in use: lax.ragged_dot computes every expert on every row here",
        }.get(backend, "not measured on this backend")
        exchange = "jax.lax.ragged_all_to_all" if has_ragged_all_to_all(self.mesh) else "a padded all-to-all"
        where = f"{dict(self.mesh.shape)}; rows between experts by {exchange}" if self.mesh else "none, one device"
        return "\n".join(
            [
                f"backend   {backend}",
                f"mesh      {where}",
                f"dispatch  {self.dispatch}",
                f"matmul    {self.matmul}: {matmul}",
                f"attend    {self.attend}",
                f"latent    {self.latent}",
                f"layers    {'scanned' if self.scan_layers else 'unrolled'}",
            ]
        )
