"""Temporary memory: rules checked on traced or compiled programs; each check also fails for a program that breaks it.

Programs are inspected and not timed, so XLA may compile them with less optimisation.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import nnxmoe
from nnxmoe import sharding
from nnxmoe.layers import cache_buffer
from nnxmoe.layers.attention import softmax_attention
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import CacheMetadata, SlotMetadata, TokenCache
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear import kernel as kernels
from nnxmoe.layers.linear import matmul as matmuls
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.remat import NAMES
from nnxmoe.model.stack import Body, ByLayer, ScannedStack
from nnxmoe.models import Llama, LlamaConfig, config_from_hf, model_class
from nnxmoe.moe import dispatch, permute
from nnxmoe.moe.selection import SoftmaxTopK
from nnxmoe.sharding_rules import RULES
from nnxmoe.train.loop.step import Step
from tests.support.arrays import max_error
from tests.support.programs import clear_program_cache
from tests.support.tiny import TINY, random_tokens

pytestmark = pytest.mark.program

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
LENGTH = 48  # tokens per row; no other dimension has this size
REMAT = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), remat=nnxmoe.Remat())


def shape(*dims: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def compiled(function: Any, *given: Any, **options: Any) -> Any:
    return jax.jit(function, **options).lower(*given).compile()


def temporary(function: Any, *given: Any, **options: Any) -> int:
    return compiled(function, *given, **options).memory_analysis().temp_size_in_bytes


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def shapes(kind: str, strategy: nnxmoe.Strategy, **changes: Any) -> nnxmoe.CausalLM:
    """Tiny model with shapes only."""
    config = config_from_hf(TINY[kind] | changes)
    return model_class(config)(config, strategy, rngs=None)


def step_of(model: nnxmoe.CausalLM, *fields: str) -> tuple[Any, Any, dict[str, Any]]:
    """Step function, and its state and batch as shapes. The cleared program cache makes it trace monkeypatched code."""
    clear_program_cache()
    step = Step(model, optax.sgd(0.1))
    return step._run.jitted, step.shapes(), {name: shape(2, LENGTH, dtype=jnp.int32) for name in ("tokens", *fields)}


# Norms


class Contracting(RMSNorm):
    """RMSNorm that scales by an einsum."""

    def __call__(self, x: Any) -> Any:
        unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return jnp.einsum("...D,D->...D", unit, self.scale[...])


@pytest.mark.parametrize(("kind", "dots"), [(RMSNorm, False), (Contracting, True)])
def test_norms_use_no_dot_general(kind: type[RMSNorm], dots: bool) -> None:
    graph, state = nnx.split(kind(8, 1e-6, dtype=F32, rngs=None))

    def loss(state: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

    text = jax.jit(jax.grad(loss, (0, 1))).lower(state, shape(2, 3, 8)).as_text()
    assert ("dot_general" in text) == dots


# Masks


def masks(text: str) -> set[str]:
    """Arrays of shape ``[..., LENGTH, LENGTH]`` in a compiled program that outlive a layer: loop operands, constants,
    and arrays without a head axis that more than one instruction reads."""
    within = set(re.findall(r" fusion\(.*calls=%?([\w.-]+)", text))  # values inside a fusion are not in memory
    here, found = "", set[str]()
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            here = head[1]
        parts = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(", line)
        if parts is None or here in within or parts[3] == "parameter":
            continue
        for dims in re.findall(rf"\w+\[((?:\d+,)*{LENGTH},{LENGTH})\]", parts[2]):
            readers = len(re.findall(rf"%{re.escape(parts[1])}[,)]", text))
            if parts[3] in ("while", "constant") or (dims.count(",") < 3 and readers > 1):
                found.add(f"{parts[3]} {dims}")
    return found


def materialize_mask(mask: Mask, scores: Any, q: Any) -> Any:
    """Naive `_mask_scores` that materializes the mask."""
    return jnp.where(mask.allowed()[:, None, None], scores, jnp.finfo(jnp.float32).min)


@pytest.mark.parametrize("fields", [(), ("segment_ids",), ("segment_ids", "attention_mask")])
def test_training_stores_no_attention_mask(fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Any:
        run, *given = step_of(shapes("llama", REMAT), *fields)
        return masks(run.lower(*given).compile().as_text())

    assert not found()
    if not fields:
        monkeypatch.setattr(softmax_attention, "_mask_scores", materialize_mask)
        assert any(mask.startswith("while") for mask in found())


def test_attention_backward_stores_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without remat: the residuals are the operands and weights only."""
    operands = [shape(2, heads, LENGTH, 8) for heads in (4, 2, 2)]
    slots = SlotMetadata(jnp.arange(LENGTH), None, None)

    def kept() -> int:
        mask = Mask(slots.index, None, slots, None)
        back = jax.eval_shape(
            lambda *a: jax.vjp(lambda q, k, v: nnxmoe.ReferenceAttention()(q, k, v, MaskedSoftmax(mask, 0.3)), *a)[1],
            *operands,
        )
        return sum(a.dtype == bool and a.shape[-2:] == (LENGTH, LENGTH) for a in jax.tree.leaves(back))

    assert kept() == 0
    monkeypatch.setattr(softmax_attention, "_mask_scores", materialize_mask)
    assert kept() > 0


@pytest.mark.parametrize("window", [None, 5])
def test_fused_attention_passes_is_causal_instead_of_a_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With only causal order and a window, no mask array is passed, and the outputs equal the reference."""
    given, library = [], jax.nn.dot_product_attention

    def kernel(*operands: Any, **options: Any) -> Any:
        given.append(options)
        return library(*operands, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    rng, index = np.random.default_rng(0), jnp.arange(LENGTH)
    q, k, v = (jnp.asarray(rng.normal(size=(2, heads, LENGTH, 8)), F32) for heads in (4, 2, 2))
    segment = jnp.asarray(index // 20 * jnp.ones((2, 1), int), jnp.int32)
    for segments in (None, segment):
        mask = Mask(index, segments, SlotMetadata(index, None, segments), window, causal=True)
        outs = [
            attention_fn(q, k, v, MaskedSoftmax(mask, 0.3))
            for attention_fn in (nnxmoe.ReferenceAttention(), nnxmoe.FusedAttention())
        ]
        assert max_error(*outs) < 1e-5
    assert given[0]["is_causal"] and not given[0].keys() & {"mask", "bias"} and "mask" in given[1]


def attention_bytes(attention_fn: Any, count: int, keys: int, dtype: Any, gradients: bool) -> int:
    """Temporary bytes of the last ``count`` of ``keys`` tokens as queries."""
    query, key = jnp.arange(keys - count, keys), jnp.arange(keys)
    mask = Mask(query, None, SlotMetadata(key, None, None), None, causal=count == keys)

    def out(*operands: Any) -> Any:
        return attention_fn(*operands, MaskedSoftmax(mask, 0.3))

    def loss(*operands: Any) -> Any:
        return jnp.sum(out(*operands).astype(F32))

    given = (shape(1, heads, length, 16, dtype=dtype) for heads, length in ((4, count), (2, keys), (2, keys)))
    return temporary(jax.grad(loss, (0, 1, 2)) if gradients else out, *given)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_streaming_attention_memory_is_linear(dtype: Any, gradients: bool) -> None:
    """Of a pass without a cache, and of a chunk against a long cache."""
    small = nnxmoe.FlashAttention(32, 32)
    for count in (None, 64):
        one, two = (attention_bytes(small, count or n, n, dtype, gradients) for n in (2048, 4096))
        assert two <= 2.2 * one, (count, one, two)
    one, two = (attention_bytes(nnxmoe.ReferenceAttention(), n, n, dtype, gradients) for n in (1024, 2048))
    assert two > 3.5 * one


# The embedding


class OneHot(Embed):
    """Embedding lookup by a one-hot matmul."""

    def __call__(self, tokens: Any) -> Any:
        return jax.nn.one_hot(tokens, self.table.shape[0]) @ self.table[...]


@pytest.mark.parametrize(("kind", "dots"), [(Embed, False), (OneHot, True)])
def test_embedding_gathers_rows(kind: type[Embed], dots: bool) -> None:
    """No array of tokens times vocabulary, forward or backward."""
    vocab, dim, count = 2048, 8, 512
    graph, state = nnx.split(kind(vocab, dim, dtype=F32, rngs=None))

    def loss(state: Any, tokens: Any) -> Any:
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(tokens)))

    given = state, shape(2, count // 2, dtype=jnp.int32)
    text = jax.jit(jax.grad(loss)).lower(*given).as_text()
    assert ("dot_general" in text) == dots and ('"stablehlo.gather"' in text) == (not dots)
    assert (temporary(jax.grad(loss), *given) < count * vocab) == (not dots)


# Weighted sums


def multiplied(weights: Any, rows: Any, axis: int) -> Any:
    """`weighted_sum` as a float32 matmul."""
    spec = "NX,NXD->ND" if axis else "EN,END->ND"
    return jnp.einsum(spec, weights, rows.astype(jnp.float32))


class Doubling:
    """Experts that double their rows."""

    rules, count = RULES, 4

    def __call__(self, rows: Any, sizes: Any) -> Any:
        return rows * 2


@pytest.mark.parametrize(("way", "residuals"), [(nnxmoe.Dense(), True), (nnxmoe.Sorted(), False)])
def test_weighted_sums_make_no_float32_rows(way: Any, residuals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass materializes a float32 copy of bfloat16 rows. `combine` has a custom derivative."""
    x, logits = shape(2, 64, 32, dtype=BF16), shape(2, 64, 4)
    rows = 2 * 64 * 32 * (4 if isinstance(way, nnxmoe.Dense) else 2)  # of all experts, or of two per token

    def run(x: Any, logits: Any) -> Any:
        return way(x, SoftmaxTopK(2)(logits, None), Doubling())[0]

    def found() -> tuple[bool, bool]:
        """Whether float32 rows are residuals, and whether they are operands of a matmul."""
        kept = jax.tree.leaves(jax.eval_shape(lambda x, logits: jax.vjp(run, x, logits)[1], x, logits))
        dots = [
            e
            for e in equations(jax.make_jaxpr(lambda *a: run(*a))(x, logits).jaxpr)
            if e.primitive.name == "dot_general"
        ]
        operands = [v.aval for e in dots for v in e.invars]
        kept_rows, made_rows = (any(a.dtype == F32 and a.size >= rows for a in each) for each in (kept, operands))
        return kept_rows, made_rows

    assert found() == (False, False)
    for module in (dispatch, permute):
        monkeypatch.setattr(module, "weighted_sum", multiplied)
    assert found() == (residuals, True)


# Casts and constraints


def traced(strategy: nnxmoe.Strategy) -> list[Any]:
    run, *given = step_of(shapes("mixtral", strategy))
    return list(equations(run.trace(*given).jaxpr.jaxpr))


def casts(found: list[Any]) -> list[Any]:
    """Casts between different floating-point dtypes."""
    every = [e for e in found if e.primitive.name == "convert_element_type"]
    kinds = [(e, e.invars[0].aval.dtype, e.outvars[0].aval.dtype) for e in every]
    return [e for e, old, new in kinds if old != new and all(jnp.issubdtype(t, jnp.floating) for t in (old, new))]


def round_trips(found: list[Any]) -> int:
    """Number of casts that undo the preceding cast."""
    made = {e.outvars[0]: e.invars[0].aval.dtype for e in casts(found)}
    return sum(made.get(e.invars[0]) == e.outvars[0].aval.dtype for e in casts(found))


def plain_matmul(x: Any, kernel: Any, transpose: bool = False) -> Any:
    """`matmul` with JAX's default backward."""
    return matmuls.matmul_f32(x, kernel.astype(x.dtype), transpose).astype(x.dtype)


@pytest.mark.slow
def test_steps_have_no_redundant_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 step has no casts; a bfloat16 step has no round trips, including its gradients."""
    narrow = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), remat=nnxmoe.Remat(), compute_dtype=BF16)
    assert not casts(traced(REMAT))
    found = traced(narrow)
    assert casts(found) and not round_trips(found)
    monkeypatch.setattr(kernels, "matmul", plain_matmul)
    assert round_trips(traced(narrow))


def test_backward_matmuls_have_operands_of_one_dtype() -> None:
    """JAX's default would multiply float32 copies of bfloat16 weights and activations by float32 gradients."""

    def mixed(product: Any) -> bool:
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(product(x, w).astype(F32)), (0, 1)))
        found = [e for e in equations(jaxpr(shape(3, 4, dtype=BF16), shape(4, 5))) if e.primitive.name == "dot_general"]
        assert len(found) >= 2
        return any(e.invars[0].aval.dtype != e.invars[1].aval.dtype for e in found)

    assert not mixed(matmuls.matmul)
    assert mixed(plain_matmul)
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(3, 4)), F32), jnp.asarray(rng.normal(size=(4, 5)), F32)
    ours, plain = (
        jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1))(x, w) for f in (matmuls.matmul, jnp.matmul)
    )
    assert max(map(max_error, ours, plain)) < 1e-6


def test_step_on_one_device_has_no_sharding_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replicated constraint is omitted; for several devices see test_collectives.py."""
    mesh = nnxmoe.make_mesh(devices=jax.devices()[:1])

    def constraints() -> int:
        run, *given = step_of(
            shapes("mixtral", nnxmoe.Strategy(stacking=nnxmoe.Scanned(), remat=nnxmoe.Remat(), mesh=mesh))
        )
        return len(re.findall(r"sharding_constraint|custom_call @Sharding", run.lower(*given).as_text()))

    assert constraints() == 0
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    monkeypatch.setattr(sharding, "shard_constraint", lambda x, *_: jax.lax.with_sharding_constraint(x, everywhere))
    assert constraints() > 0


# Stacks: weights and caches of a layer


def sliced_outside(self: ScannedStack, x: Any, context: Any, cache: Any) -> Body:
    """Slices each layer's weights outside the rematerialised function."""
    graph, state = nnx.split(self.layer)
    assert cache is None
    run = jax.checkpoint(lambda weights, x: nnx.merge(graph, weights)(x, context, None)[0])
    for i in range(self.depth):
        x = run(jax.tree.map(lambda a, i=i: a[i], state), x)
    return Body(x, None, ByLayer(), ())


@pytest.mark.slow
def test_weights_are_selected_inside_remat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each extra layer costs its input and gradients, not a second copy of its weights."""

    def growth() -> float:
        sizes = []
        for layers in (2, 6):
            run, *given = step_of(shapes("llama", REMAT, num_hidden_layers=layers))
            done = run.lower(*given).compile()
            sizes.append(done.memory_analysis().temp_size_in_bytes)
        return (sizes[1] - sizes[0]) / 4

    layer = nnx.state(shapes("llama", REMAT, num_hidden_layers=1).stacks, nnx.Param)
    weights, inputs = (4 * sum(a.size for a in jax.tree.leaves(found)) for found in (layer, shape(2, LENGTH, 24)))
    assert growth() <= inputs + weights
    monkeypatch.setattr(ScannedStack, "__call__", sliced_outside)
    assert growth() > inputs + 1.5 * weights


def handed_along(self: ScannedStack, x: Any, context: Any, cache: Any) -> Body:
    """Passes caches as scanned inputs and outputs instead of in the carry."""
    graph, state = nnx.split(self.layer)

    def step(x: Any, inputs: Any) -> Any:
        x, one, _ = nnx.merge(graph, inputs[0])(x, context, inputs[1])
        return x, one

    x, cache = jax.lax.scan(step, x, (state, cache))
    return Body(x, cache, ByLayer(), ())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("mistral", {"sliding_window": 256}), pytest.param("deepseek_v3", {}, marks=pytest.mark.slow)],
)
def test_scanned_caches_are_updated_in_place(kind: str, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step makes no second copy of key-value, ring or latent caches."""

    def copied() -> float:
        """Temporary bytes per layer, as a fraction of its cache."""
        sizes, caches = [], []
        for layers in (3, 7):
            model = shapes(kind, nnxmoe.Strategy(stacking=nnxmoe.Scanned()), num_hidden_layers=layers, **changes)
            graph, state = nnx.split(model)
            cache = model.empty_cache(2, 512)
            leaves, tree = jax.tree.flatten(cache)

            def run(state: Any, token: Any, leaves: Any, graph: Any = graph, tree: Any = tree) -> Any:
                body = nnx.merge(graph, state).body(token, cache=jax.tree.unflatten(tree, leaves))
                return body.x, jax.tree.leaves(body.cache)

            sizes.append(temporary(run, state, shape(2, 1, dtype=jnp.int32), leaves, donate_argnums=2))
            caches.append(sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache.layers)))
        return (sizes[1] - sizes[0]) / (caches[1] - caches[0])

    assert copied() < 0.1
    monkeypatch.setattr(ScannedStack, "__call__", handed_along)
    assert copied() > 0.9


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("ring", [False, True])
def test_unrolled_caches_are_updated_in_place(ring: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one cache per layer there is no second copy either; head width as in real models."""
    buffers = [(shape(1, 4, 512, 64, dtype=dtype),) * 2] * 4

    def decode(buffers: Any, x: Any, past: Any) -> Any:
        after = []
        for k, v in buffers:
            new, (keys, values), _ = TokenCache((k, v), ring).append((x[:, :, :1], x[:, :, 1:2]), CacheMetadata(*past))
            scores = matmuls.batched_matmul_f32(x, keys, -1)
            x = matmuls.batched_matmul_f32(jax.nn.softmax(scores).astype(dtype), values, -2).astype(dtype)
            after.append(new.buffers)
        return after, x

    def copied() -> float:
        """Temporary bytes, as a multiple of a cache."""
        past = tuple(shape(*size, dtype=jnp.int32) for size in ((1, 1), (1,), (1,), (1, 512)))
        given = buffers, shape(1, 4, 4, 64, dtype=dtype), past
        again = functools.partial(decode)  # a new object, so JAX traces it again
        return temporary(again, *given, donate_argnums=0) / (4 * 512 * 64 * dtype.itemsize)

    assert copied() < 0.3
    if dtype == F32:  # older XLA versions do not copy 16-bit buffers
        monkeypatch.setattr(cache_buffer, "is_single_cpu", lambda: False)  # a single write outside a loop
        assert copied() > 3


# Rematerialisation


@pytest.mark.slow
def test_remat_policies_trade_memory_and_keep_the_gradients() -> None:
    """Temporary bytes increase with the number of saved residuals."""
    names = (None, "dots_with_no_batch_dims_saveable", "dots_saveable", "everything_saveable")
    results, sizes, config = [], [], LlamaConfig.from_hf(TINY["llama"])
    batch = {"tokens": random_tokens(2, LENGTH)}
    state = Step(Llama(config, rngs=nnx.Rngs(0), strategy=REMAT), optax.sgd(1.0)).init()
    for name in names:
        policy = None if name is None else getattr(jax.checkpoint_policies, name)
        strategy = dataclasses.replace(REMAT, remat=nnxmoe.Remat(policy))
        step = Step(Llama(config, strategy, rngs=None), optax.sgd(1.0))
        program = compiled(step.definition.step, state, batch)
        after, report = program(state, batch)
        results.append((after.params, report.losses.total))
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    print(dict(zip(names, sizes, strict=True)))
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    for other in results[1:]:
        assert max(map(max_error, jax.tree.leaves(results[0]), jax.tree.leaves(other))) < 1e-6


def names_in(model: nnxmoe.CausalLM) -> set[str]:
    """Names of the activations of a model's pass."""
    found = equations(jax.make_jaxpr(model)(random_tokens(2, LENGTH)).jaxpr)
    return {equation.params["name"] for equation in found if equation.primitive.name == "name"}


@pytest.mark.parametrize("stacking", [nnxmoe.Scanned(), nnxmoe.Unrolled()], ids=["scanned", "unrolled"])
def test_activations_are_kept_in_the_memory_that_is_named(stacking: Any) -> None:
    """What is offloaded goes to the host and back, and the step's results are the same."""
    config, batch, results = config_from_hf(TINY["deepseek_v3"]), {"tokens": random_tokens(2, LENGTH)}, []
    offload = ("layer_input", "queries", "latents", "gate")
    for remat in (nnxmoe.Remat(), nnxmoe.Remat(save=("head_outputs",), offload=offload)):
        strategy = nnxmoe.Strategy(stacking=stacking, remat=remat)
        step = Step(model_class(config)(config, strategy, rngs=nnx.Rngs(0)), optax.sgd(1.0))
        state = step.init()
        layers = 2 if isinstance(stacking, nnxmoe.Scanned) else config.num_hidden_layers
        made = equations(jax.make_jaxpr(step.definition.step)(state, batch).jaxpr)
        moves = [equation.outvars[0].aval for equation in made if equation.primitive.name == "device_put"]
        away = [one.shape for one in moves if one.memory_space == jax.memory.Space.Host]
        # A dense layer has four of them, the others one more: the gate of the shared expert.
        assert len(away) == len(moves) / 2 == (5 * layers - 1) * bool(remat.offload), away
        after, report = compiled(step.definition.step, state, batch)(state, batch)
        results.append((after.params, report.losses.total))
    assert max(map(max_error, *map(jax.tree.leaves, results))) < 1e-6


def test_names_of_activations() -> None:
    """Each that a `Remat` takes marks an activation of some model, and others are refused."""
    configs = [config_from_hf(TINY[family]) for family in ("mixtral", "deepseek_v3")]
    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), remat=nnxmoe.Remat())
    models = [model_class(config)(config, strategy, rngs=nnx.Rngs(0)) for config in configs]
    assert set[str]().union(*map(names_in, models)) == set(NAMES)
    for save, offload, told in (
        (("query",), (), r"save=\('query',\).*queries"),
        (("up",), ("up", "down"), "both save and offload up"),
    ):
        with pytest.raises(ValueError, match=told):
            nnxmoe.Remat(save=save, offload=offload)
    with pytest.raises(ValueError, match="policy and names"):
        nnxmoe.Remat(jax.checkpoint_policies.dots_saveable, offload=("up",))


@pytest.mark.wrong_types
def test_names_of_activations_are_tuples() -> None:
    with pytest.raises(ValueError, match="a tuple of names"):
        nnxmoe.Remat(offload="up")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("conditional", [True, False])
def test_updates_copy_no_parameters_or_moments(conditional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not conditional:
        select = lambda good, new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new(), old())  # noqa: E731
        monkeypatch.setattr("nnxmoe.train.loop.step.jax.lax.cond", select)
    clear_program_cache()
    step = Step(Llama(config_from_hf(TINY["llama"]), rngs=nnx.Rngs(0)), optax.adamw(0.1))
    batch = {"tokens": random_tokens(2, LENGTH)}
    text = step._run.jitted.lower(step.init(), batch).compile().as_text()
    copies = re.findall(r" copy\(\S*state_(?:params|moments)\w*_kernel", text)
    assert bool(copies) == (not conditional), copies
