"""Rules that map the logical axes of parameters to mesh axes, and the resulting shardings."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from nnxmoe.axes import CONTEXT, AnyMesh, axes_of
from nnxmoe.config.frozen import FrozenDict

Rules = Mapping[str, str | tuple[str, ...] | None]

# Logical axis of a parameter -> the mesh axis or axes that shard the dimension, or None to replicate. A rule with
# several mesh axes omits mesh axes that already shard a different dimension. For example, "embed": ("fsdp", "expert")
# shards dense kernels over both axes, but expert kernels over "fsdp" only. "context" shards parameters in the same way
# as "fsdp", because devices along "context" have different tokens.
RULES: Rules = FrozenDict(
    {
        "vocab": "tensor",
        "embed": ("fsdp", CONTEXT),
        "heads": "tensor",
        "kv_heads": "tensor",
        "head": None,
        "mlp": "tensor",
        "expert": "expert",
        "latent": None,  # Output of MLA's down projections.
        "q_rank": ("fsdp", CONTEXT),  # Input of MLA's up projections.
        "kv_rank": ("fsdp", CONTEXT),
        "norm": None,
        "router": None,
        "layers": None,
        "stages": "pipe",  # Stacked layers of a pipeline.
        "rank": None,  # Rank of a LoRA adapter.
        "gate_up": None,  # Gate and up projections with a shared LoRA adapter.
    }
)
# A training step gathers each kernel anyway. Sharding over `expert` as well saves memory at nearly the same traffic (at
# most 1.2 times). In decoding, every token would wait for these gathers.
TRAINING_RULES: Rules = FrozenDict(
    {**RULES, **dict.fromkeys(("embed", "q_rank", "kv_rank"), ("fsdp", CONTEXT, "expert"))}
)

_NOUNS = {"expert": "experts", "kv_heads": "KV heads", "stages": "layers", "vocab": "vocabulary ids"}


def shard_count(mesh: AnyMesh | None, mesh_axes: Sequence[str]) -> int:
    """Return the product of the sizes of these mesh axes, or 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in mesh_axes)


def rule_axes(name: str, mesh: AnyMesh, rules: Rules, axes: Sequence[str | None] = ()) -> tuple[str, ...]:
    """Return the mesh axes of size > 1 in the rule for a logical axis.

    Args:
        name: Logical axis to map.
        mesh: Device mesh.
        rules: Logical axis -> mesh axes.
        axes: All logical axes of the parameter, for the error message.

    Raises:
        ValueError: If ``name`` has no rule, or the rule names an axis that the mesh does not have.
    """
    if name not in rules:
        raise ValueError(f"no rule for the logical axis {name!r} of a parameter with axes {tuple(axes)}")
    rule = rules[name]
    if rule is None:
        return ()
    mesh_axes = (rule,) if isinstance(rule, str) else tuple(rule)
    for axis in mesh_axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"the rule {name!r} -> {rule!r} names an axis that the mesh {dict(mesh.shape)} does not have. "
                "Create the mesh with nnxmoe.make_mesh, which defines all axes, or pass different rules"
            )
    return tuple(axis for axis in mesh_axes if mesh.shape[axis] > 1)


def axes_per_dimension(axes: Sequence[str | None], mesh: AnyMesh, rules: Rules = RULES) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that shard each dimension of a parameter with these logical axes.

    Mesh axes of size 1 are omitted. If a rule lists several mesh axes, axes that already shard a different
    dimension are also omitted.

    Raises:
        ValueError: If a logical axis has no rule, or a mesh axis does not exist or shards two dimensions.
    """
    per_dimension = [() if name is None else rule_axes(name, mesh, rules, axes) for name in axes]
    may_yield = [name is not None and isinstance(rules[name], list | tuple) for name in axes]
    used = set[str]()
    for mesh_axes, yields in zip(per_dimension, may_yield, strict=True):
        if not yields:
            used.update(mesh_axes)
    for i, yields in enumerate(may_yield):
        if yields:
            per_dimension[i] = tuple(axis for axis in per_dimension[i] if axis not in used)
            used.update(per_dimension[i])
    if len(used) < sum(map(len, per_dimension)):
        raise ValueError(
            f"the rules shard two dimensions over the same mesh axis: axes {tuple(axes)} -> {tuple(per_dimension)}"
        )
    return tuple(per_dimension)


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: AnyMesh, rules: Rules = RULES
) -> PartitionSpec:
    """Return the partition spec of a parameter. See `axes_per_dimension`.

    Args:
        axes: Logical axis of each dimension, or None for a dimension that is not sharded.
        shape: Shape of the parameter.
        mesh: Device mesh.
        rules: Logical axis -> mesh axes.

    Raises:
        ValueError: If mesh axes do not divide a dimension, a logical axis has no rule, or a mesh axis does not exist or
            shards two dimensions.
    """
    per_dimension = axes_per_dimension(axes, mesh, rules)
    for name, size, mesh_axes in zip(axes, shape, per_dimension, strict=True):
        count = shard_count(mesh, mesh_axes)
        if size % count:
            dimension = f"the {size} {_NOUNS[name]}" if name in _NOUNS else f"{name!r} of size {size}"
            raise ValueError(f"mesh axis {' x '.join(mesh_axes)} of size {count} does not divide {dimension}")
    if not any(per_dimension):
        return PartitionSpec()
    return PartitionSpec(*map(_spec_entry, per_dimension))


def _spec_entry(mesh_axes: tuple[str, ...]) -> tuple[str, ...] | str | None:
    """Convert mesh axes to a partition spec entry. A single axis becomes a str, because ``("fsdp",) != "fsdp"``."""
    if len(mesh_axes) > 1:
        return mesh_axes
    return mesh_axes[0] if mesh_axes else None


def sharding_of(variable: nnx.Variable, mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """Return the sharding of a parameter over the mesh."""
    return NamedSharding(mesh, partition_spec(axes_of(variable), variable.shape, mesh, rules))


def check_rules(where: str, rules: Any) -> None:
    """Raise ValueError unless the rules map every logical axis to mesh axes.

    Args:
        where: Function or class that takes ``rules``, for the error message.
        rules: Logical axis -> mesh axes.
    """
    if not isinstance(rules, Mapping) or set(rules) != set(RULES):
        mismatches = sorted(set(rules) ^ set(RULES), key=str) if isinstance(rules, Mapping) else [rules]
        raise ValueError(
            f"{where}(rules=…): {mismatches[0]!r} is missing or is not a logical axis. Pass all logical axes: "
            "{**nnxmoe.RULES, name: mesh axis or None}"
        )
    for name, rule in rules.items():
        names = rule if isinstance(rule, list | tuple) else (rule,)
        if rule is not None and not all(isinstance(axis, str) for axis in names):
            raise ValueError(
                f"{where}(rules=…): {name!r} -> {rule!r}: pass the name of a mesh axis, a tuple of names, or None"
            )


def training_rules(model: nnx.Module, mesh: AnyMesh, rules: Rules = RULES) -> Rules:
    """Return the default rules for training a model on a mesh.

    Args:
        model: Model with annotated parameters. It may be abstract.
        mesh: Device mesh.
        rules: Rules of the model's strategy.

    Returns:
        `TRAINING_RULES`, if ``rules`` is the object `RULES` (not a copy such as ``{**RULES}``) and the mesh has several
        devices along ``expert``, and along ``fsdp`` or ``context``. Rules of `TRAINING_RULES` that do not divide a
        parameter are left out. In all other cases, ``rules`` is returned. Without several devices along ``fsdp`` or
        ``context``, `TRAINING_RULES` would gather kernels that `RULES` does not gather.
    """
    if rules is not RULES or not rule_axes("expert", mesh, rules) or not rule_axes("embed", mesh, rules):
        return rules
    for name in [name for name, axes in TRAINING_RULES.items() if axes != rules[name]]:
        wider = {**rules, name: TRAINING_RULES[name]}
        with contextlib.suppress(ValueError):
            check_mesh(model, mesh, wider)
            rules = wider
    return rules


def check_mesh(model: nnx.Module, mesh: AnyMesh, rules: Rules) -> None:
    """Raise ValueError unless the mesh divides every parameter. The error suggests the largest valid mesh sizes."""
    forms = dict[tuple[Any, ...], str]()  # (logical axes, shape) -> path of the first matching parameter
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        forms.setdefault((axes_of(variable), tuple(variable.shape)), ".".join(map(str, path)))
    for (axes, shape), path in forms.items():
        try:
            partition_spec(axes, shape, mesh, rules)
        except ValueError as error:
            valid_sizes = _largest_fitting_sizes(list(forms), mesh, rules)
            sizes = ",".join(f"{axis}={size}" for axis, size in valid_sizes.items() if size > 1)
            raise ValueError(f"{path}: {error}{f'; try {sizes}' if sizes else ''}") from None


def _largest_fitting_sizes(forms: Sequence[tuple[Any, ...]], mesh: AnyMesh, rules: Rules) -> dict[str, int]:
    """Find the largest size of each mesh axis, up to its size in ``mesh``, that divides all parameters.

    Axes are resolved in order. The sizes of earlier axes limit the sizes of later axes.
    """
    sizes = dict.fromkeys(mesh.shape, 1)
    for axis, max_size in mesh.shape.items():
        if max_size > 1:
            trial = AbstractMesh(tuple((sizes | {axis: 2}).values()), tuple(sizes))
            divisor = _common_divisor(forms, axis, trial, rules)
            sizes[axis] = next(size for size in range(max_size, 0, -1) if divisor % size == 0)
    return sizes


def _common_divisor(forms: Sequence[tuple[Any, ...]], axis: str, trial: AnyMesh, rules: Rules) -> int:
    """Return the greatest common divisor of the dimensions that ``axis`` shards, or 0 if it shards no dimension.

    ``axis`` has size 2 in the trial mesh. Sizes are divided by the number of shards over other mesh axes first.
    """
    divisor = 0
    for axes, shape in forms:
        for size, mesh_axes in zip(shape, axes_per_dimension(axes, trial, rules), strict=True):
            if axis in mesh_axes:
                divisor = math.gcd(divisor, 2 * size // shard_count(trial, mesh_axes))
    return divisor
