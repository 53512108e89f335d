"""Execution choices of a model, such as kernels, mesh and rematerialization.

The choices affect results only by rounding, with three exceptions: objects that drop assignments (`Capacity`, a
``buffer_factor``), objects with lossy formats (`W8A8Product`, `Int8Cache`), and a ``compute_dtype`` with fewer bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array

from nnxmoe.axes import CONTEXT, AnyMesh
from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short
from nnxmoe.config.validate import check_object, floating_dtype
from nnxmoe.layers.attention.softmax_attention import AttentionFn
from nnxmoe.layers.cache_buffer import CacheFormat
from nnxmoe.model.remat import Remat
from nnxmoe.model.stack import Scanned, Stacking, Unrolled
from nnxmoe.moe.dispatch import Dispatch, Sorted
from nnxmoe.moe.grouped_matmul import GroupedMatmul, RaggedDotMatmul
from nnxmoe.sharding import bind_mesh
from nnxmoe.sharding_rules import RULES, Rules, check_mesh, check_rules, sharding_of

_WHY = {  # (type, backend or None for all) -> reason. Speeds: `python -m tests.benchmarks --only moe`, two cores.
    (
        "BlockedMatmul",
        "cpu",
    ): "computes only blocks in use, at 0.65 (512 tokens) or 0.9 times (4096 tokens) the speed of one dense product "
    "with 8 experts; on CPUs, lax.ragged_dot applies every expert to every row",
    ("RaggedDotMatmul", "tpu"): "lax.ragged_dot is a grouped kernel on TPUs, and tokamax is not installed",
    ("TritonMatmul", "gpu"): "one kernel for all groups of 16-bit rows, also quantized; `fallback` for other dtypes",
    ("TokamaxMatmul", "tpu"): "tokamax's Pallas kernels",
    ("Sorted", None): "computes only the selected experts and drops no assignments",
    ("BlockwiseAttention", None): "half the scores of a causal pass, in blocks; memory is linear in the length",
    (
        "FusedAttention",
        "gpu",
    ): "cuDNN's kernel for passes of many tokens in bfloat16 and float16, for head widths that are multiples of 8 up "
    "to `max_head_dim`; `fallback` for decoding steps",
    (
        "SplashAttention",
        "tpu",
    ): "a Pallas kernel for causal passes of multiples of 128 tokens, with window, segments and "
    "padding; `fallback` for steps with a cache and for sinks",
    (
        "AllGatherAttention",
        None,
    ): "all-gathers the keys and values of whole rows; each device attends with its own queries",
    ("AutoProduct", "cpu"): "for quantized kernels only: one loop that dequantizes for up to 8 rows, integer products "
    "of int8 codes for up to 16 16-bit rows, otherwise a loop over blocks of outputs; none creates a float copy of the "
    "kernel",
    (
        "AutoProduct",
        "tpu",
    ): "for quantized kernels only: one product with the cast codes; the compiler can fuse the cast",
    ("TritonProduct", "gpu"): "for quantized kernels only: reads the codes once for up to 16 rows; `fallback` for more",
    ("Unrolled", None): "separate arrays per layer, the fastest for decoding",
    ("Scanned", None): "compiles a single layer, regardless of the depth",
    ("AdaptiveMLA", None): "absorbed for few tokens at a time (decoding), naive for many (prefill, training)",
}


def _defaults(platform: str | None = None) -> dict[str, Any]:
    """Return the defaults of fields that depend on the platform, or whose modules are imported on demand."""
    from nnxmoe.layers.attention import splash_attention
    from nnxmoe.layers.attention.mla import AdaptiveMLA
    from nnxmoe.layers.linear.quantized_products import AutoProduct
    from nnxmoe.moe import tokamax
    from nnxmoe.moe.blocked import BlockedMatmul
    from nnxmoe.moe.triton import TritonMatmul, TritonProduct

    backend = platform or jax.default_backend()
    matmul, quantized = BlockedMatmul(), AutoProduct()
    if backend == "tpu":
        matmul = tokamax.TokamaxMatmul() if tokamax.is_installed() else RaggedDotMatmul()
    elif backend == "gpu":
        matmul, quantized = TritonMatmul(), TritonProduct()
    return {
        "matmul": matmul,
        "attention_fn": splash_attention.default_attention_fn(platform),
        "mla": AdaptiveMLA(),
        "quantized": quantized,
    }


def _default(name: str) -> Any:
    return dataclasses.field(default_factory=lambda: _defaults()[name])


_EXAMPLES = {
    "dispatch": "Sorted()",
    "matmul": "BlockedMatmul()",
    "attention_fn": "BlockwiseAttention()",
    "mla": "AdaptiveMLA()",
    "quantized": "AutoProduct()",
    "stacking": "Unrolled()",
}


@dataclasses.dataclass(frozen=True)
class Strategy(KnownFields):
    """Execution choices of a model. Each choice is an object that performs the computation.

    Attributes:
        dispatch: Moves token rows to experts and back.
        matmul: Grouped matrix product of rows and their experts' kernels.
        attention_fn: Softmax attention of queries, keys and values.
        mla: Attention of `MLA` layers.
        quantized: Product of rows and a quantized kernel.
        recurrence: Computes recurrent layers (`nnxmoe.TokamaxDeltaRule`). If None, recurrent layers use XLA operations.
        stacking: ``Unrolled()`` for separate arrays per layer (fastest decoding), or ``Scanned()`` to stack the arrays
            of equal layers on a leading axis (training, large meshes). A ``pipeline`` requires ``Scanned()``, which is
            then the default.
        remat: Which activations the backward pass recomputes. If None, it recomputes none.
        cache: Format of the layers' caches (`Int8Cache`). If None, caches have the activations' dtype.
        compute_dtype: Dtype of the activations. Defaults to the dtype of the model's parameters.
        reduce_dtype: Dtype in which kernel gradients are summed over the devices of a mesh. Defaults to the dtype of
            the activations. Sums are never narrower than the activations. Sums in bfloat16 need half the traffic of
            sums in ``"float32"``. Over the tokens of a device and over microbatches, gradients are accumulated in
            float32. With a ``pipeline``, all sums are float32.
        mesh: Mesh over which parameters and tokens are sharded by ``rules``. ``from_pretrained(mesh=…)`` sets it.
        rules: Mesh axes of each logical axis. `nnxmoe.train.fit` replaces the default with `training_rules`.
        pipeline: A `Pipeline` that splits the layers over the mesh axis ``pipe``. If None, layers are not split.
    """

    dispatch: Dispatch = Sorted()
    matmul: GroupedMatmul = _default("matmul")
    attention_fn: AttentionFn = _default("attention_fn")
    mla: Any = _default("mla")  # An `MLAFn`.
    quantized: Callable[..., Any] = _default("quantized")  # A `QuantizedProduct`.
    recurrence: Callable[..., Any] | None = None  # A `Recurrence`.
    stacking: Stacking | None = None
    remat: Remat | None = None
    cache: CacheFormat | None = None
    compute_dtype: Any = None
    reduce_dtype: Any = None
    mesh: Mesh | None = None
    rules: Rules = RULES
    pipeline: Any = None  # A `Pipeline`.

    def __post_init__(self) -> None:
        self._check_mesh()
        if self.remat is not None and not isinstance(self.remat, Remat):
            raise ValueError(f"Strategy(remat={self.remat!r}): use a Remat object such as Remat(), or None")
        if self.cache is not None and (isinstance(self.cache, type) or not callable(self.cache)):
            raise ValueError(f"Strategy(cache={self.cache!r}): use an object such as Int8Cache(), or None")
        if self.recurrence is not None:
            check_object("Strategy", "recurrence", self.recurrence, "TokamaxDeltaRule()")
        if self.stacking is None:
            object.__setattr__(self, "stacking", Unrolled() if self.pipeline is None else Scanned())
        for name in ("compute_dtype", "reduce_dtype"):
            if (dtype := getattr(self, name)) is not None:
                object.__setattr__(self, name, floating_dtype("Strategy", name, dtype))
        for name, example in _EXAMPLES.items():
            check_object("Strategy", name, getattr(self, name), example)
        object.__setattr__(self, "attention_fn", attention_fn_for_mesh(self.attention_fn, self.mesh, self.rules))
        for name in ("quantized", "recurrence"):
            object.__setattr__(self, name, bind_mesh(getattr(self, name), self.mesh, self.rules))
        if self.pipeline is not None:
            self._check_pipeline(self.pipeline)

    def _check_mesh(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise ValueError(f"Strategy(mesh={self.mesh!r}): use a jax.sharding.Mesh, as nnxmoe.make_mesh returns")
        if self.mesh is not None and any(axis_type != AxisType.Auto for axis_type in self.mesh.axis_types):
            raise ValueError(
                f"Strategy(mesh={self.mesh}): its axes must be of type Auto. Create the mesh with nnxmoe.make_mesh, or "
                "with axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        check_rules("Strategy", self.rules)
        if self.rules is not RULES:  # a copy of `RULES` would not count as the default in `training_rules`
            object.__setattr__(self, "rules", FrozenDict(self.rules))

    def _check_pipeline(self, pipeline: Any) -> None:
        from nnxmoe.model.pipeline import Pipeline

        if not isinstance(pipeline, Pipeline):
            raise ValueError(f"Strategy(pipeline={pipeline!r}): use nnxmoe.Pipeline(microbatches), or None")
        if not isinstance(self.stacking, Scanned):
            raise ValueError(
                f"Strategy(pipeline={pipeline}, stacking={self.stacking}): pipeline stages require stacked layers. "
                "Use stacking=Scanned()"
            )
        for name, axis in self.rules.items():
            if name != "stages" and "pipe" in ((axis,) if isinstance(axis, str) else axis or ()):
                raise ValueError(
                    f"Strategy(pipeline=…, rules=…): {name!r} -> {axis!r}: with a pipeline, only 'stages' can be "
                    "sharded over 'pipe'. Use other mesh axes"
                )
        pipeline.check(self.mesh)

    @classmethod
    def auto(cls, platform: str | None = None) -> Self:
        """Return the default strategy for the platform ``"cpu"``, ``"gpu"`` or ``"tpu"``, or for the current platform.

        Pass a platform to compile programs for the devices of a different machine. Raises ValueError if the platform is
        unknown.
        """
        if platform not in (None, "cpu", "gpu", "tpu"):
            raise ValueError(f"Strategy.auto({platform!r}): use 'cpu', 'gpu', 'tpu' or None")
        return cls(**_defaults(platform))

    def sharding_of(self, variable: nnx.Variable) -> NamedSharding | None:
        """Return the sharding of a parameter on the mesh, or None without a mesh."""
        return None if self.mesh is None else sharding_of(variable, self.mesh, self.rules)

    def initialize(self, model: nnx.Module, parts: Callable[[Array], dict[str, Any]], key: Array | None) -> None:
        """Initialize each shard of ``model`` on the shard's device. The values do not depend on the mesh.

        ``parts(key)`` builds the model's attributes. If ``key`` is None, only checks that the mesh fits the model.
        Raises ValueError if the mesh does not divide a parameter, or if an attention does not support ``context``.
        """
        assert self.mesh is not None
        check_context(model, self.mesh)
        check_mesh(model, self.mesh, self.rules)
        if key is None:
            return
        shapes = nnx.to_flat_state(nnx.state(model))
        shardings = [self.sharding_of(variable) for _, variable in shapes]

        def values(key: Array) -> list[Array]:
            state = nnx.state(nnx.Dict({name: part for name, part in parts(key).items() if part is not None}))
            return [variable.get_value() for _, variable in nnx.to_flat_state(state)]

        arrays = jax.jit(values, out_shardings=shardings)(key)
        nnx.update(model, nnx.from_flat_state([(p, v.replace(a)) for (p, v), a in zip(shapes, arrays, strict=True)]))

    def explain(self) -> str:
        """Describe each choice in one line, with the reason if the choice is the default on this backend."""
        backend = jax.default_backend()

        def why(choice: Any) -> str:
            name = type(choice).__name__
            return f"{choice}: {_WHY.get((name, backend)) or _WHY.get((name, None)) or 'not a default on this backend'}"

        mesh_line, stages = "none, one device", 1 if self.mesh is None else self.mesh.shape.get("pipe", 1)
        if self.mesh is not None:
            is_cpu = self.mesh.devices.flat[0].platform == "cpu"
            exchange = "a padded all-to-all" if is_cpu else "jax.lax.ragged_all_to_all"
            mesh_line = f"{dict(self.mesh.shape)}; rows are sent to experts by {exchange}"
        choices = "dispatch", "matmul", "attention_fn", "mla", "quantized"
        return "\n".join(
            [
                f"backend      {backend}",
                f"mesh         {mesh_line}",
                *(f"{name:<12} {why(getattr(self, name))}" for name in choices),
                *([] if self.recurrence is None else [f"recurrence   {self.recurrence}"]),
                f"stacking     {why(self.stacking)}",
                *([] if self.pipeline is None else [f"pipeline     {self.pipeline.explain(stages)}"]),
                f"cache        {self.cache or 'in the dtype of the activations'}",
                f"remat        {self.remat or 'none: activations are stored for the backward pass'}",
            ]
        )


def attention_fn_for_mesh(attention_fn: AttentionFn, mesh: Mesh | None, rules: Rules) -> AttentionFn:
    """Bind an attention function to a mesh. Adds `AllGatherAttention` if the mesh has several ``context`` shards."""
    if mesh is not None and mesh.shape.get(CONTEXT, 1) > 1:
        from nnxmoe.layers.attention.context_parallel import AllGatherAttention, ContextParallelAttention

        attention_fn = (
            attention_fn if isinstance(attention_fn, ContextParallelAttention) else AllGatherAttention(attention_fn)
        )
    return bind_mesh(attention_fn, mesh, rules)


def check_context(model: Any, mesh: AnyMesh) -> None:
    """Raise ValueError if the mesh shards tokens over ``context`` and an attention requires complete rows."""
    for _, part in nnx.iter_graph((model.stacks, model.mtp)) if mesh.shape.get(CONTEXT, 1) > 1 else ():
        attention = getattr(part, "attention", None)
        if attention is not None and not getattr(attention, "supports_context_parallel", False):
            raise ValueError(
                f"{type(attention).__name__} needs all tokens of a row on each device, but the mesh axis {CONTEXT!r} "
                f"of size {mesh.shape[CONTEXT]} shards them: use make_mesh({CONTEXT}=1) with more devices along fsdp, "
                "expert or tensor"
            )


def with_mesh(strategy: Strategy | None, mesh: Mesh | None) -> Strategy:
    """Return ``strategy`` (default: `Strategy.auto`) with ``mesh`` (default: the strategy's mesh).

    Raises ValueError if ``strategy`` is not a `Strategy`.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={short(strategy)} is not an nnxmoe.Strategy: use nnxmoe.Strategy(…), or None")
    strategy = Strategy.auto() if strategy is None else strategy
    return strategy if mesh is None else dataclasses.replace(strategy, mesh=mesh)


def check_arguments(model: Any, config: Any, strategy: Any, rngs: Any) -> None:
    """Check the types of constructor arguments of the class ``model``. Raises ConfigError or ValueError."""
    name = model.__name__
    if type(config) not in model.configs:
        class_names = " or a ".join(config_class.__name__ for config_class in model.configs)
        raise ConfigError(f"{name} takes a {class_names}, got {type(config).__name__}")
    remedy = f"pass random keys as in {name}(config, rngs=nnx.Rngs(0)), or rngs=None for an abstract model"
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={type(strategy).__name__}(…) is not an nnxmoe.Strategy: {remedy}")
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"{remedy}, got rngs={rngs!r}")
