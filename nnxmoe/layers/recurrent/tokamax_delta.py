"""Gated delta rule (`nnxmoe.layers.recurrent.delta_rule`) with tokamax's Pallas kernels for TPUs."""

import dataclasses
import importlib
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from nnxmoe.layers.attention.fused_attention import ShardMapKernel, batch_and_head_axes
from nnxmoe.layers.recurrent.delta_rule import CHUNK, ChunkedRule, DeltaInputs
from nnxmoe.runtime.extras import install_command
from nnxmoe.sharding import shard_map

MAX_KEY_DIM = 256


def import_delta_attention() -> Any:
    """Import ``tokamax.ops.kimi_delta_attention``. Raise ValueError if tokamax is too old or not installed."""
    try:
        attention = getattr(importlib.import_module("tokamax.ops"), "kimi_delta_attention", None)
    except ModuleNotFoundError:
        attention = None
    if attention is None:
        raise ValueError(
            f"TokamaxDeltaRule() requires tokamax 0.0.17 and Python 3.12 or newer. Run {install_command('kernels')}"
        )
    return attention


@dataclasses.dataclass(frozen=True)
class TokamaxDeltaRule(ShardMapKernel):
    """Delta rule of recurrent layers, computed by ``tokamax.ops.kimi_delta_attention``.

    Decays are per key channel (Kimi Linear, Ling 3, GLM-5.3), or per head and broadcast to all channels (Qwen3-Next,
    Qwen3.5). Passes with one segment per row and keys of width up to 256 are supported. Packed rows, wider keys, and
    rows sharded over ``context`` use the layer's chunked rule.

    Args:
        implementation: "mosaic" for the TPU kernels, or "xla" for a loop over tokens on any backend.

    Raises:
        ValueError: If tokamax is not installed, or is older than 0.0.17.
    """

    implementation: str = "mosaic"

    def __post_init__(self) -> None:
        super().__post_init__()
        import_delta_attention()

    def __call__(
        self, inputs: DeltaInputs, state: Float[Array, "B N H W"], chunk_rule: ChunkedRule
    ) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
        """Return the outputs and the state after the last token. ``chunk_rule`` is used for unsupported inputs."""
        q, k, v, g, beta, segment = inputs
        if segment is not None or k.shape[-1] > MAX_KEY_DIM:
            return chunk_rule(inputs, state)
        q, k = (jnp.repeat(a, v.shape[2] // k.shape[2], axis=2) for a in (q, k))
        g = g if g.ndim == 4 else jnp.broadcast_to(g[..., None], q.shape)
        padded_inputs = [
            jnp.pad(a, ((0, 0), (0, -a.shape[1] % CHUNK), *((0, 0),) * (a.ndim - 2))) for a in (q, k, v, g, beta)
        ]
        outputs, state = self._shard_map_kernel(*(jnp.moveaxis(a, 2, 0) for a in padded_inputs), state)
        return jnp.moveaxis(outputs, 0, 2)[:, : v.shape[1]], state

    def _shard_map_kernel(self, *operands: Array) -> tuple[Array, Array]:
        """Call the kernel on every device with its shard of operands ``[N B T …]`` and state ``[B N H W]``."""
        if self.mesh is None or self.mesh.size == 1:
            return self._kernel(*operands)
        batch, heads = operands[-1].shape[:2]
        batch_axes, head_axes = batch_and_head_axes(batch, heads, "heads", self.mesh, self.rules)
        token_spec, state_spec = PartitionSpec(head_axes, batch_axes), PartitionSpec(batch_axes, head_axes)
        return shard_map(self._kernel, self.mesh, (*(token_spec,) * 5, state_spec), (token_spec, state_spec))(*operands)

    def _kernel(self, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        options = {"scale": 1.0, "output_final_state": True, "implementation": self.implementation}
        outputs, state = import_delta_attention()(q, k, v, g, beta, initial_state=state[:, None], **options)
        return outputs, state[:, 0]
