"""Rotary position embeddings, in the feature order of Hugging Face checkpoints."""

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
    """Cosines and sines of each token's rotation angles, in float32."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


@jax.tree_util.register_pytree_node_class
class Rotations(dict[Rope, Rotation]):
    """Rotations of a forward pass, by `Rope`.

    The children of this pytree are arrays, because `nnx.tabulate` fails on dataclasses in containers.
    """

    def tree_flatten(self) -> tuple[list[Any], Any]:
        leaves, tree = jax.tree.flatten(list(self.values()))
        return leaves, (tuple(self), tree)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> Self:
        ropes, tree = aux
        return cls(zip(ropes, jax.tree.unflatten(tree, leaves), strict=True))


RotateFn = Callable[[Float[Array, "B T N H"], Rotation], Float[Array, "B T N H"]]
"""Applies a `Rotation` to heads ``x``. If the `Rotation` has more tokens than ``x``, the last T tokens are used."""


def compute_rotation(
    rope: Rope, positions: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None, capacity: int | None = None
) -> Rotation:
    """Compute the `Rotation` of tokens at ``positions``.

    Args:
        rope: Rotary position embedding.
        positions: Position of each token.
        valid: False for padding. Some ropes select the frequencies by the sequence length, which excludes padding.
        capacity: Capacity of the cache. None without a cache.
    """
    length = jnp.max(positions if valid is None else jnp.where(valid, positions, 0)) + 1
    frequencies = rope.frequencies(length if capacity is None else rope.length_with_cache(length, capacity))
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    return Rotation(jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor)


def rotate_halves(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(i, i + H/2)`` in float32 (Llama, Mistral, Mixtral)."""
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (a[:, -x.shape[1] :, None, :] for a in (rotation.cos, rotation.sin))
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def rotate_pairs(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(2i, 2i + 1)`` (DeepSeek).

    The output is de-interleaved: even components come first. Attention scores do not depend on this order, because
    queries and keys are permuted equally.
    """
    return rotate_halves(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), rotation)


@dataclasses.dataclass(frozen=True)
class PartialRotary:
    """`rotate_halves` of the first ``width`` components of each head. The remaining components are unchanged.

    The `Rope` of the `Rotation` must have the same width (GPT-NeoX-20B, Black et al. 2022; GLM-4.5, MiniMax-M2).
    """

    width: int

    def __call__(self, x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
        x_rope, x_nope = x[..., : self.width], x[..., self.width :]
        return jnp.concatenate([rotate_halves(x_rope, rotation), x_nope], axis=-1)


@dataclasses.dataclass(frozen=True)
class TrailingPairs:
    """Rotation of the pairs ``(2i, 2i + 1)`` in the last ``width`` components of each head (DeepSeek-V4).

    The order of the components does not change.
    """

    width: int

    def __call__(self, x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
        x_nope, x_rope = x[..., : -self.width], x[..., -self.width :].astype(jnp.float32)
        x1, x2 = x_rope[..., 0::2], x_rope[..., 1::2]
        cos, sin = (a[:, -x.shape[1] :, None, :] for a in (rotation.cos, rotation.sin))
        pairs = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
        return jnp.concatenate([x_nope, pairs.reshape(x_rope.shape).astype(x.dtype)], axis=-1)

    def inverse(self, x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
        """Apply the inverse rotation."""
        return self(x, Rotation(rotation.cos, -rotation.sin))
