"""Recurrences whose tokens are sharded over the mesh axis ``context``: devices exchange their states."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from nnxmoe.axes import CONTEXT, AnyMesh, shard_map
from nnxmoe.layers.delta_rule import Chunked, DeltaInputs, product
from nnxmoe.layers.over_context import gathered


def passed_on(
    chunked: Chunked, inputs: DeltaInputs, state: Float[Array, "B N H W"], mesh: AnyMesh
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """``chunked(inputs, state) -> outputs, state``, with the tokens of each device along ``context`` computed there.

    The state after them is linear in the one before, ``A S + B``. Each device first computes its A and B, as columns of
    one state, gathers those of all, and then starts from the state after the devices before it (sequence parallelism
    of linear attention, LASP-2; Sun et al. 2025).
    """
    (heads, key_dim, width), count = state.shape[1:], mesh.shape[CONTEXT]
    runs = None if inputs.run is None else inputs.run.reshape(len(state), count, -1)[:, :, -1]

    def local(inputs: DeltaInputs, state: Array, runs: Any) -> tuple[Array, Array]:
        me = jax.lax.axis_index(CONTEXT)
        if inputs.run is not None:  # counted from the state that the device starts from
            inputs = inputs._replace(run=inputs.run - jnp.pad(runs, ((0, 0), (1, 0)))[:, me, None])
        more = jnp.zeros((*inputs.v.shape[:3], key_dim), inputs.v.dtype)
        one = jnp.broadcast_to(jnp.eye(key_dim), (len(state), heads, key_dim, key_dim))
        start = jnp.concatenate([jnp.zeros_like(state), one], axis=3)
        _, own = chunked(inputs._replace(v=jnp.concatenate([inputs.v, more], axis=3)), start)

        def after(state: Array, given: Array) -> tuple[Array, Array]:
            state = product("bnhi,bniw->bnhw", given[..., width:], state) + given[..., :width]
            return state, state

        last, states = jax.lax.scan(after, state, gathered(own[None], 0))
        out, _ = chunked(inputs, jnp.concatenate([state[None], states])[me])
        return out, last

    tokens, whole = PartitionSpec(None, CONTEXT), PartitionSpec()
    return shard_map(local, mesh, (tokens, whole, whole), (tokens, whole), (CONTEXT,))(inputs, state, runs)
