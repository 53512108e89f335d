"""Rematerialization: which activations of a layer are saved for the backward pass and which are recomputed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import check_object
from nnxmoe.layers.stateful import checkpoint_unless_stateful

NAMES = (
    "layer_input",
    "queries",
    "keys",
    "values",
    "latents",
    "head_outputs",
    "attention_output",
    "gate",
    "up",
    "down",
)


@dataclasses.dataclass(frozen=True)
class Remat(CheckedFields):
    """Rematerialization of all activations of a layer except for its input and the named activations.

    Names of activations (most are also options of MaxText's ``remat_policy: custom``):

    - ``layer_input``
    - ``queries``, ``keys`` and ``values`` of `GQA` after the rotation; ``queries`` and ``latents`` of `MLA`
    - ``head_outputs``
    - ``attention_output``: the attention's output before its post-norm
    - ``gate``, ``up`` and ``down``: the products of an `MLP` and of experts

    Args:
        policy: A policy of ``jax.checkpoint_policies``, instead of names.
        save: Names of activations to save in device memory.
        offload: Names of activations to save in host memory (``pinned_host``). The backward pass copies them back. With
            ``("layer_input",)`` a layer saves nothing on the device. On CPU, offloaded activations stay in the same
            memory.

    Raises:
        ValueError: A name is unknown or is both saved and offloaded, or names are combined with a policy. Calls raise
            ValueError if the device cannot address ``pinned_host`` memory.
    """

    policy: Callable[..., bool] | None = None
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None:
            check_object("Remat", "policy", self.policy, "jax.checkpoint_policies.dots_saveable")
        for option in ("save", "offload"):
            names = getattr(self, option)
            if isinstance(names, str) or not isinstance(names, Sequence) or not all(name in NAMES for name in names):
                raise ValueError(f"Remat({option}={names!r}): use a tuple of names from {', '.join(NAMES)}")
            object.__setattr__(self, option, tuple(names))
        if duplicates := set(self.save) & set(self.offload):
            raise ValueError(f"Remat cannot both save and offload {', '.join(sorted(duplicates))}: list each name once")
        if self.policy is not None and (self.save or self.offload):
            raise ValueError("Remat has both a policy and names: use only one of them")

    def __call__(self, layer: Callable[..., Any], *, scanned: bool) -> Callable[..., Any]:
        """Wrap ``layer(hidden_states, …)`` with `jax.checkpoint`, unless calls change the layer.

        Args:
            layer: A layer whose first argument is the hidden states.
            scanned: Whether the call is inside a scan, where ``prevent_cse`` is not needed.
        """

        def named(x: Any, **kwargs: Any) -> Any:
            return layer(jax.tree.map(lambda a: checkpoint_name(a, "layer_input"), x), **kwargs)

        return checkpoint_unless_stateful(named, layer, policy=self.policy or self._by_name(), prevent_cse=not scanned)

    def _by_name(self) -> Callable[..., Any] | None:
        policies = jax.checkpoint_policies
        if not self.offload:
            return policies.save_only_these_names(*self.save) if self.save else None
        memory_kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if "pinned_host" not in memory_kinds:
            raise ValueError(
                f"Remat(offload={self.offload}): this device has only {memory_kinds} memory, not pinned_host. "
                "Remove offload"
            )
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
