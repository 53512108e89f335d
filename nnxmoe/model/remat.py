"""What a layer keeps for the backward pass: nothing, named activations, or what a policy of JAX's chooses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

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
class Remat:
    """Recomputes a layer's activations in the backward pass, except for its input and those named.

    Args:
        policy: one of ``jax.checkpoint_policies``, in place of names; None saves nothing more.
        save: names of activations that stay in the device's memory.
        offload: names of activations that are kept in the host's memory (``pinned_host``), from where the backward pass
            fetches them. With ``("layer_input",)`` a layer leaves nothing on the device. A CPU has no other memory, so
            that they stay where they are.

    The names (MaxText has most of them as options of ``remat_policy: custom``): ``layer_input``; ``queries``, ``keys``
    and ``values`` of `GQA` after the rotation, ``queries`` and ``latents`` of `MLA`; ``head_outputs``;
    ``attention_output``, what attention of any kind adds to the layer's input; ``gate``, ``up`` and ``down``, the
    products of an `MLP` and of experts.

    Raises:
        ValueError: an unknown name, one that is both saved and offloaded, names beside a policy, or a device that
            cannot address its host's memory.
    """

    policy: Callable[..., bool] | None = None
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("save", "offload"):
            names = getattr(self, option)
            if isinstance(names, str) or not all(name in NAMES for name in names):
                raise ValueError(f"Remat({option}={names!r}): give a tuple of names from {', '.join(NAMES)}")
            object.__setattr__(self, option, tuple(names))
        if both := set(self.save) & set(self.offload):
            raise ValueError(f"Remat saves and offloads {', '.join(sorted(both))}: name each once")
        if self.policy is not None and (self.save or self.offload):
            raise ValueError("Remat has a policy and names: give one of the two")

    def __call__(self, run: Callable[..., Any], *, scanned: bool) -> Callable[..., Any]:
        """``run``, whose first argument are the hidden states, with its activations recomputed."""

        def named(x: Any, **more: Any) -> Any:
            return run(jax.tree.map(lambda a: checkpoint_name(a, "layer_input"), x), **more)

        return jax.checkpoint(named, policy=self.policy or self._by_name(), prevent_cse=not scanned)

    def _by_name(self) -> Callable[..., Any] | None:
        policies = jax.checkpoint_policies
        if not self.offload:
            return policies.save_only_these_names(*self.save) if self.save else None
        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if "pinned_host" not in kinds:
            raise ValueError(
                f"Remat(offload={self.offload}): this device addresses {kinds}, no pinned_host: leave it out"
            )
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
