"""Rotary position embedding of queries and keys, in the feature order of Hugging Face checkpoints."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.rope_parameters import Rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the rotation angles of every token, in float32."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


@jax.tree_util.register_pytree_node_class
class Rotations(dict[Rope, Rotation]):
    """Rotations of a pass by `Rope`.

    As a pytree it has arrays as direct children, because `nnx.tabulate` fails on dataclasses in containers.
    """

    def tree_flatten(self) -> tuple[list[Any], Any]:
        leaves, tree = jax.tree.flatten(list(self.values()))
        return leaves, (tuple(self), tree)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> Self:
        ropes, tree = aux
        return cls(zip(ropes, jax.tree.unflatten(tree, leaves), strict=True))


RotateFn = Callable[[Float[Array, "B T N H"], Rotation], Float[Array, "B T N H"]]
"""Rotates heads. If the `Rotation` has more tokens than ``x``, its last T tokens belong to ``x``."""


def compute_rotation(rope: Rope, positions: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Rotation:
    """Compute the `Rotation` of tokens at these positions.

    Args:
        rope: The rotary position embedding.
        positions: Position of each token.
        valid: False for padding. Positions of padding are ignored when the sequence length is computed, from which
            some ropes choose their frequencies.
    """
    used = positions if valid is None else jnp.where(valid, positions, 0)
    frequencies = rope.frequencies(jnp.max(used) + 1)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    return Rotation(jnp.cos(angles) * rope.factor(), jnp.sin(angles) * rope.factor())


def rotate_halves(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(i, i + H/2)`` in float32 (Llama, Mistral, Mixtral)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (a[:, -x.shape[1] :, None, :] for a in (rotation.cos, rotation.sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_pairs(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(2i, 2i + 1)`` (DeepSeek).

    The output is de-interleaved: even components first. Scores do not change if both queries and keys use it.
    """
    return rotate_halves(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), rotation)


@dataclasses.dataclass(frozen=True)
class PartialRotary:
    """Rotation by halves of the first ``width`` components of each head. The remaining components are unchanged.

    The `Rotation` must come from a `Rope` of this width (GPT-NeoX-20B, Black et al. 2022; GLM-4.5, MiniMax-M2).
    """

    width: int

    def __call__(self, x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
        rotated, rest = x[..., : self.width], x[..., self.width :]
        return jnp.concatenate([rotate_halves(rotated, rotation), rest], axis=-1)


@dataclasses.dataclass(frozen=True)
class TrailingPairs:
    """Rotation of the pairs ``(2i, 2i + 1)`` of the last ``width`` components of each head (DeepSeek-V4).

    The components keep their order.
    """

    width: int

    def __call__(self, x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
        rest, rotated = x[..., : -self.width], x[..., -self.width :].astype(jnp.float32)
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        cos, sin = (a[:, -x.shape[1] :, None, :] for a in (rotation.cos, rotation.sin))
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([rest, pairs.reshape(rotated.shape).astype(x.dtype)], axis=-1)

    def inverse(self, x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
        """Apply the inverse rotation."""
        return self(x, Rotation(rotation.cos, -rotation.sin))
