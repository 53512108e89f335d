"""Names of dimensions, logical axes and mesh axes, and the rules table that maps logical axes to mesh axes.

Dimension letters, the same in every signature and einsum:

    B batch          T query tokens    S key positions    D model width    V vocabulary
    N query heads    K key/value heads G = N / K          H head width     F feed-forward width
    E experts        X experts/token   C slots/expert     R routed rows    L layers

MLA's widths are words: ``q_rank kv_rank nope rope``. ``asked``: T, or 1 if only the last token's output is needed.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from nnxmoe.config.frozen import FrozenDict

MESH_AXES = ("pipe", "data", "fsdp", "context", "expert", "tensor")
# The batch is sharded over all of these, so attention needs no communication; within the stages of a pipeline over all
# but the first.
BATCH_AXES = ("pipe", "data", "fsdp", "expert")
CONTEXT = "context"  # shards the tokens of every row; attention exchanges keys and values over it
TOKEN_AXES = (*BATCH_AXES, CONTEXT)  # devices along these have tokens of their own, so gradients are summed over them
LAYER_AXES = ("layers", "stages")  # logical axes that count layers, of which a parameter may have one, the first
AnyMesh = Mesh | AbstractMesh

Rules = Mapping[str, str | tuple[str, ...] | None]

# Logical axis of a parameter -> mesh axis, or several, that shard it (None: replicated). Of several, those that shard
# another dimension of the same parameter are left out: "embed": ("fsdp", "expert") shards dense kernels over both.
# Devices along "context" have tokens of their own, as those along "fsdp", so parameters are sharded over both.
RULES: Rules = FrozenDict(
    {
        "vocab": "tensor",
        "embed": ("fsdp", CONTEXT),
        "heads": "tensor",
        "kv_heads": "tensor",
        "head": None,
        "mlp": "tensor",
        "expert": "expert",
        "latent": None,  # output of MLA's down projections
        "q_rank": ("fsdp", CONTEXT),  # input of MLA's up projections
        "kv_rank": ("fsdp", CONTEXT),
        "norm": None,
        "router": None,
        "layers": None,
        "stages": "pipe",  # the layers of a pipeline
        "rank": None,  # of a LoRA adapter
        "gate_up": None,  # gate and up in one LoRA adapter
    }
)

_NOUNS = {"expert": "experts", "kv_heads": "KV heads", "stages": "layers", "vocab": "vocabulary ids"}


class ParamOptions(TypedDict):
    """What every constructor of parameters takes: their dtype, and random keys for their values (None: only shapes)."""

    dtype: jnp.dtype
    rngs: nnx.Rngs | None


def parameter(
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: nnx.Initializer,
    *,
    kind: type[nnx.Variable] = nnx.Param,
    inputs: int | None = None,
    keeps_dtype: bool = False,
    **kw: Unpack[ParamOptions],
) -> nnx.Variable:
    """A parameter labelled with its logical axes, as ``out_sharding``, which Flax reads too; ``rngs`` None: a
    ShapeDtypeStruct instead of a value.

    ``inputs``: how many of the last dimensions a linear map contracts; None for other parameters. ``keeps_dtype``: it
    has this dtype whatever the model's is.
    """
    shape, axes = tuple(shape), tuple(axes)
    assert len(shape) == len(axes), (shape, axes)
    dtype, rngs = kw["dtype"], kw["rngs"]
    value = jax.ShapeDtypeStruct(shape, dtype) if rngs is None else init(rngs.params(), shape, dtype)
    return kind(value, out_sharding=axes, inputs=inputs, keeps_dtype=keeps_dtype, eager_sharding=False)


def keeps_dtype(variable: nnx.Variable) -> bool:
    """Whether a parameter has a dtype of its own, which loading and saving do not change."""
    return bool(getattr(variable, "keeps_dtype", False))


def is_static(*sizes: Any) -> bool:
    """Whether these sizes of dimensions are numbers, not the symbols of a program that `jax.export` makes for all
    sizes."""
    return all(isinstance(size, int) for size in sizes)


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes over which the code being traced runs per device: ``pipe`` within the stages of a pipeline."""
    return jax.sharding.get_abstract_mesh().manual_axes


def _current_mesh(mesh: AnyMesh) -> AnyMesh:
    """The mesh for shardings in the code being traced, where JAX refuses ``mesh`` itself if an axis is manual."""
    return jax.sharding.get_abstract_mesh() if _manual_axes() else mesh


def shard_map(
    run: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None
) -> Callable[..., Any]:
    """``jax.shard_map`` over these axes of the mesh; None: all, within the stages of a pipeline all but ``pipe``."""
    over = set(mesh.shape) - set(_manual_axes()) if axes is None else set(axes)
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, mesh=_current_mesh(mesh), axis_names=over, check_vma=False, **specs)


def batch_axes(mesh: AnyMesh | None) -> tuple[str, ...]:
    """The mesh axes that shard the batch, without those of size 1; within the stages of a pipeline without ``pipe``."""
    closed = _manual_axes()
    several = () if mesh is None else tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    return tuple(axis for axis in several if axis not in closed)


def shard_count(mesh: AnyMesh | None, axes: Sequence[str]) -> int:
    """Number of shards over these mesh axes."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def batch_shard_axes(batch: Any, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The batch axes of a mesh if the batch size is divisible by their shards, else ()."""
    axes = batch_axes(mesh)
    return () if batch % shard_count(mesh, axes) else axes


def context_shard_axes(length: int, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The mesh axis ``context`` if it shards rows of this many tokens: it has several devices and divides them."""
    size = 1 if mesh is None or CONTEXT in _manual_axes() else mesh.shape.get(CONTEXT, 1)
    return (CONTEXT,) if size > 1 and length % size == 0 else ()


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: AnyMesh, rules: Rules = RULES
) -> PartitionSpec:
    """The mesh axes that shard each dimension; a dimension without a name (None) is not sharded.

    Mesh axes of size 1 are dropped, and those of a rule with several axes that shard another dimension. ValueError for
    an indivisible size, a missing rule, or a missing or repeated axis.
    """
    found = axes_per_dimension(axes, mesh, rules)
    for name, size, over in zip(axes, shape, found, strict=True):
        if size % shard_count(mesh, over):
            what = f"the {size} {_NOUNS[name]}" if name in _NOUNS else f"{name!r} of size {size}"
            raise ValueError(f"mesh axis {' x '.join(over)} of size {shard_count(mesh, over)} does not divide {what}")
    named = [over if len(over) > 1 else over[0] if over else None for over in found]
    return PartitionSpec(*(named if any(found) else ()))


def check_rules(where: str, rules: Any) -> None:
    """Raise ValueError for ``where(rules=…)`` unless the rules map every logical axis to mesh axes."""
    if not isinstance(rules, Mapping) or set(rules) != set(RULES):
        odd = sorted(set(rules) ^ set(RULES), key=str) if isinstance(rules, Mapping) else [rules]
        raise ValueError(
            f"{where}(rules=…): {odd[0]!r} is missing or no logical axis; give a dict of all of them, "
            "{**nnxmoe.RULES, name: mesh axis or None}"
        )
    for name, axis in rules.items():
        several = isinstance(axis, list | tuple) and all(isinstance(one, str) for one in axis)
        if axis is not None and not isinstance(axis, str) and not several:
            raise ValueError(
                f"{where}(rules=…): {name!r} -> {axis!r}: give the name of a mesh axis, a tuple of names, or None"
            )


def check_mesh(model: nnx.Module, mesh: AnyMesh, rules: Rules) -> None:
    """Raise ValueError unless every parameter divides over the mesh, naming the largest sizes of its axes that do."""
    shapes = dict[tuple[Any, ...], str]()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shapes.setdefault((axes_of(variable), tuple(variable.shape)), ".".join(map(str, path)))
    for (axes, shape), key in shapes.items():
        try:
            partition_spec(axes, shape, mesh, rules)
        except ValueError as error:
            fits = _largest_that_fit(list(shapes), mesh, rules)
            sizes = ",".join(f"{axis}={size}" for axis, size in fits.items() if size > 1)
            raise ValueError(f"{key}: {error}{f'; try {sizes}' if sizes else ''}") from None


def _largest_that_fit(shapes: Sequence[tuple[Any, ...]], mesh: AnyMesh, rules: Rules) -> dict[str, int]:
    """The largest sizes, at most the mesh's, over which all parameters divide, chosen one axis after the other."""
    sizes = dict.fromkeys(mesh.shape, 1)
    for axis, most in mesh.shape.items():
        common, tried = 0, AbstractMesh(tuple((sizes | {axis: 2}).values()), tuple(sizes))
        for axes, shape in shapes if most > 1 else ():
            for size, over in zip(shape, axes_per_dimension(axes, tried, rules), strict=True):
                common = math.gcd(common, 2 * size // shard_count(tried, over)) if axis in over else common
        sizes[axis] = next(size for size in range(most, 0, -1) if common % size == 0)
    return sizes


def axes_per_dimension(axes: Sequence[str | None], mesh: AnyMesh, rules: Rules = RULES) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that shard each dimension of a parameter with these logical axes; see `partition_spec`."""
    named = [() if name is None else rule_axes(name, mesh, rules, axes) for name in axes]
    several = [name is not None and isinstance(rules[name], list | tuple) for name in axes]
    used = {axis for over, many in zip(named, several, strict=True) if not many for axis in over}
    found = list[tuple[str, ...]]()
    for over, many in zip(named, several, strict=True):
        found.append(tuple(axis for axis in over if axis not in used) if many else over)
        used |= set(over) if many else set()
    every = [axis for over in found for axis in over]
    if len(set(every)) != len(every):
        raise ValueError(f"the rules use a mesh axis twice: axes {tuple(axes)} -> {tuple(found)}")
    return tuple(found)


def rule_axes(name: str, mesh: AnyMesh, rules: Rules, axes: Sequence[str | None] = ()) -> tuple[str, ...]:
    """The mesh axes that the rule of a logical axis names, without those of size 1. ValueError for a missing rule or
    mesh axis; ``axes``: all of the parameter's, for the message."""
    if name not in rules:
        raise ValueError(f"no rule for the logical axis {name!r} of a parameter with axes {tuple(axes)}")
    rule = rules[name]
    named = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
    for axis in named:
        if axis not in mesh.shape:
            raise ValueError(
                f"the rule {name!r} -> {rule!r} does not name an axis of the mesh {dict(mesh.shape)}: "
                "create the mesh with nnxmoe.make_mesh, which has all axes, or pass other rules"
            )
    return tuple(axis for axis in named if mesh.shape[axis] > 1)


def shard_constraint(x: Any, mesh: AnyMesh | None, *axes: str | Sequence[str] | None) -> Any:
    """``x`` with its first dimensions sharded over these mesh axes; a no-op without axes or mesh."""
    spec = PartitionSpec(*(axis or None for axis in axes))
    if mesh is None or not any(spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(_current_mesh(mesh), spec))


def shard_batch(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """``x [B, T, ...]`` with its rows sharded over the batch axes and its tokens over ``context``; dimensions that do
    not divide are not sharded, with a warning for rows and for several tokens."""
    axes, wanted, over = batch_shard_axes(x.shape[0], mesh), batch_axes(mesh), context_shard_axes(x.shape[1], mesh)
    text = "%s do not divide over %s: every device computes all of them"
    if axes != wanted:
        logging.getLogger("nnxmoe").warning(text, f"{x.shape[0]} rows", wanted)
    if mesh is not None and not over and x.shape[1] > 1 and mesh.shape.get(CONTEXT, 1) > 1:
        logging.getLogger("nnxmoe").warning(text, f"{x.shape[1]} tokens", (CONTEXT,))
    return shard_constraint(x, mesh, axes, over)


def bind_mesh(choice: Any, mesh: Mesh | None, rules: Rules) -> Any:
    """The choice for a model on this mesh: what its ``with_mesh`` returns if XLA cannot partition it and it shards its
    operands itself, else the choice."""
    return choice.with_mesh(mesh, rules) if hasattr(choice, "with_mesh") else choice


def replicate(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """``x`` replicated over the mesh, so that every process can read it."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """The logical axes of a parameter's dimensions; None for each dimension of a parameter without labels.

    Inside a scan over layers, where values have no layer dimension, its axis is omitted.
    """
    axes, rank = variable.get_metadata().get("out_sharding"), len(variable.shape)
    return (None,) * rank if axes is None else tuple(axes[len(axes) - rank :])


def is_stacked(axes: Sequence[str | None]) -> bool:
    """Whether a parameter with these logical axes belongs to several layers, counted by its first dimension."""
    return bool(axes) and axes[0] in LAYER_AXES


def sharding_of(variable: nnx.Variable, mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """The sharding of a parameter over the mesh."""
    return NamedSharding(mesh, partition_spec(axes_of(variable), variable.shape, mesh, rules))


def spans_hosts(value: object) -> bool:
    """Whether an array has shards on other hosts."""
    return isinstance(value, jax.Array) and not value.is_fully_addressable
