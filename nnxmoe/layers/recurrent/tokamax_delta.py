"""The gated delta rule (`nnxmoe.layers.recurrent.delta_rule`) with tokamax's Pallas kernels for TPUs."""

import dataclasses
import importlib
import importlib.util
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from nnxmoe.layers.attention.fused_attention import ShardMapKernel, batch_and_head_axes
from nnxmoe.layers.recurrent.delta_rule import CHUNK, Chunked, DeltaInputs
from nnxmoe.runtime.extras import install_command
from nnxmoe.sharding import shard_map

WIDEST = 256  # keys


def delta_attention() -> Any:
    """``tokamax.ops.kimi_delta_attention``. Raises ValueError if tokamax lacks it or is not installed."""
    installed = importlib.util.find_spec("tokamax") is not None
    attention = getattr(importlib.import_module("tokamax.ops"), "kimi_delta_attention", None) if installed else None
    if attention is None:
        raise ValueError(
            f"TokamaxDeltaRule() needs tokamax 0.0.17 and Python 3.12 or newer: {install_command('kernels')}"
        )
    return attention


@dataclasses.dataclass(frozen=True)
class TokamaxDeltaRule(ShardMapKernel):
    """``tokamax.ops.kimi_delta_attention``, for recurrent layers with a decay per channel of the keys (Kimi Linear,
    Ling 3, GLM-5.3) and with one per head, repeated for all channels (Qwen3-Next, Qwen3.5).

    It computes passes of one segment per row with keys of up to 256 numbers, and the layer's own chunks the rest:
    packed rows, and rows sharded over ``context``. ``implementation``: "mosaic", the kernels for TPUs, or "xla", token
    by token on any backend.
    Raises ValueError if tokamax is not installed, or has no such function, as versions before 0.0.17.
    """

    implementation: str = "mosaic"

    def __post_init__(self) -> None:
        delta_attention()

    def __call__(
        self, inputs: DeltaInputs, state: Float[Array, "B N H W"], chunked: Chunked
    ) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
        """Outputs and the state after all tokens; ``chunked``: the layer's own computation of both."""
        q, k, v, g, beta, run = inputs
        if run is not None or k.shape[-1] > WIDEST:
            return chunked(inputs, state)
        q, k = (jnp.repeat(a, v.shape[2] // k.shape[2], axis=2) for a in (q, k))
        g = g if g.ndim == 4 else jnp.broadcast_to(g[..., None], q.shape)
        given = [jnp.pad(a, ((0, 0), (0, -a.shape[1] % CHUNK), *((0, 0),) * (a.ndim - 2))) for a in (q, k, v, g, beta)]
        out, state = self._by_head(*(jnp.moveaxis(a, 2, 0) for a in given), state)
        return jnp.moveaxis(out, 0, 2)[:, : v.shape[1]], state

    def _by_head(self, *given: Array) -> tuple[Array, Array]:
        """The kernel for ``[N B T …]`` and the state ``[B N H W]``, on each device's rows and heads."""
        if (mesh := self.mesh) is None or mesh.size == 1:
            return self._kernel(*given)
        rows, heads = batch_and_head_axes(given[-1].shape[0], given[-1].shape[1], "heads", mesh, self.rules)
        tokens, states = PartitionSpec(heads, rows), PartitionSpec(rows, heads)
        return shard_map(self._kernel, mesh, (*(tokens,) * 5, states), (tokens, states))(*given)

    def _kernel(self, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        options = {"scale": 1.0, "output_final_state": True, "implementation": self.implementation}
        out, state = delta_attention()(q, k, v, g, beta, initial_state=state[:, None], **options)
        return out, state[:, 0]
