"""Models as ordinary `flax.nnx` modules: training loops, filters, capture, transformations, export and checkpoints."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import nnxmoe
from nnxmoe.layers.attention.cross_layer import CrossLayerAttention
from nnxmoe.layers.context import FeedForwardOutput
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.layer import Layer
from nnxmoe.models import family_of
from nnxmoe.moe.router import Router
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.tiny import build, build_tiny, random_tokens, stacking_of

IDS = random_tokens(2, 9)


@pytest.fixture(params=[False, True], ids=["unrolled", "scanned"])
def model(request: pytest.FixtureRequest) -> nnxmoe.CausalLM:
    return build_tiny("mixtral", nnxmoe.Strategy(stacking=stacking_of(request.param)))


def layers(model: nnxmoe.CausalLM) -> list[Any]:
    return [part for _, part in nnx.iter_modules(model.stacks) if isinstance(part, Layer)]


def cross_entropy(model: nnxmoe.CausalLM, ids: Any = IDS) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]).logits, ids[:, 1:]).mean()


def values(model: nnx.Module, *filters: Any) -> dict[str, np.ndarray]:
    state: Any = nnx.state(model, *filters)
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): np.array(variable.get_value()) for path, variable in flat}


def trained(model: nnxmoe.CausalLM, wrt: Any, steps: int = 3, rate: float = 1e-2) -> tuple[list[float], set[str]]:
    """Train with an optimizer of Flax; returns the losses and the parameters that changed."""
    before, optimizer = values(model, nnx.Param), nnx.Optimizer(model, optax.adam(rate), wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(cross_entropy, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(steps)]
    after = values(model, nnx.Param)
    return losses, {name for name in after if not np.array_equal(before[name], after[name])}


# Filters and training loops


@pytest.mark.slow
@pytest.mark.parametrize("part", ["moe", "router", "attention", "moe_norm"])
def test_paths_select_the_parts_that_they_name(model: nnxmoe.CausalLM, part: str) -> None:
    losses, changed = trained(model, nnx.All(nnx.Param, nnx.PathContains(part)), steps=2)
    assert changed == {name for name in values(model, nnx.Param) if part in name.split(".")} != set()
    assert losses[1] < losses[0]


def test_attributes_of_a_layer_have_the_names_of_paths() -> None:
    """Attributes, paths, keys of tables and `feed_forward`, in a model with dense layers and layers with experts."""
    model = build_tiny("deepseek_v3")
    names = set()
    for layer in layers(model):
        name = layer.feed_forward_name
        assert getattr(layer, name) is layer.feed_forward and getattr(layer, f"{name}_norm") is layer.feed_forward_norm
        names.add(name)
    assert names == {"mlp", "moe"}
    keys = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model.stacks))}
    table = {key.removeprefix("layer.") for key in family_of(model).hf if key.startswith("layer.")}
    assert {key.split(".", 3)[3] for key in keys} <= table


@pytest.mark.slow
def test_flax_finds_adapters(model: nnxmoe.CausalLM) -> None:
    lora.add(model, 2, rngs=nnx.Rngs(1))
    adapters = values(model, nnx.LoRAParam)
    assert adapters and all(name.endswith((".a", ".b")) for name in adapters)
    losses, changed = trained(model, nnx.LoRAParam, rate=0.1)
    assert changed == set(adapters) and losses[-1] < losses[0]
    eager, gradients = nnx.value_and_grad(cross_entropy, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    assert float(eager) < losses[-1] and len(jax.tree.leaves(gradients)) == len(adapters)


def test_adapters_of_abstract_models() -> None:
    """As needed to restore with Orbax."""
    model = build_tiny("llama")
    abstract: Any = nnx.eval_shape(lambda: nnx.clone(model))
    lora.add(abstract, 2, rngs=None)
    lora.add(model, 2, rngs=nnx.Rngs(1))
    shapes = jax.tree.map(jax.typeof, nnx.state(model, nnx.LoRAParam))
    assert jax.tree.map(jax.typeof, nnx.state(abstract, nnx.LoRAParam)) == shapes
    with pytest.raises(ValueError, match=r"call nnx\.eval_shape first, then lora\.add with rngs=None"):
        nnx.eval_shape(lambda: lora.add(build_tiny("llama"), 2, rngs=nnx.Rngs(1)))


@pytest.mark.slow
def test_optax_labels_by_path(model: nnxmoe.CausalLM) -> None:
    """`optax.multi_transform` with labels made of paths, and a mask of the weight decay."""

    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, _: "train" if "router" in jax.tree_util.keystr(path) else "no", params
        )

    tx = optax.multi_transform({"train": optax.sgd(0.5), "no": optax.set_to_zero()}, labels)
    before, optimizer = values(model, nnx.Param), nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(cross_entropy)(model))
    changed = {name for name, value in values(model, nnx.Param).items() if not np.array_equal(value, before[name])}
    assert changed == {name for name in before if "router" in name}
    masked = optax.adamw(0.0, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda a: a.ndim > 1, params))
    nnx.Optimizer(model, masked, wrt=nnx.Param).update(model, nnx.grad(cross_entropy)(model))


@pytest.mark.slow
def test_steps_in_a_scan(model: nnxmoe.CausalLM) -> None:
    """`nnx.scan` over batches, with the model and the optimizer in the carry."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(carry: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = carry
        loss, gradients = nnx.value_and_grad(cross_entropy)(model, ids)
        optimizer.update(model, gradients)
        return carry, loss

    run = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    (model, _), losses = run((model, optimizer), jnp.stack([IDS] * 3))
    assert losses[2] < losses[1] < losses[0]
    assert max_error(cross_entropy(model), losses[2]) > 0


# Values within the model


class SowingRouter(Router):
    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        routing = super().__call__(x, *args, **options)
        self.sow(nnx.Intermediate, "weights", routing.weights)
        return routing


class SowingLinear(Linear):
    def __call__(self, x: Any) -> Any:
        self.sow(nnx.Intermediate, "mean", jnp.mean(x))
        return super().__call__(x)


class SowingNorm(RMSNorm):
    def __call__(self, x: Any) -> Any:
        self.sow(nnx.Intermediate, "mean", jnp.mean(x))
        return super().__call__(x)


def sowing(model: nnxmoe.CausalLM) -> nnxmoe.CausalLM:
    for layer in layers(model):
        layer.moe.router.__class__ = SowingRouter
    return model


def sown(state: Any) -> list[np.ndarray]:
    """The values per layer, of shape ``[B, T, X]``."""
    flat = nnx.to_flat_state(state)
    assert {path[-1] for path, _ in flat} == {"weights"}
    return [np.asarray(value) for _, variable in flat for value in variable.get_value()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("run", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_capture(model: nnxmoe.CausalLM, run: Callable[..., Any]) -> None:
    """Captured values are those of the routing, and the output is that of an ordinary call."""
    wanted: Any = model(IDS, return_routing=True)
    sowing(model)
    out, state = run(lambda model: nnx.capture(model, nnx.Intermediate)(IDS))(model)
    assert max_error(out.logits, wanted.logits) < 1e-5
    for ours, routing in zip(sown(state), wanted.routing.values(), strict=True):
        assert max_error(ours, routing.weights) < 1e-5
    assert max_error(model(IDS).logits, wanted.logits) < 1e-5
    nnx.pop(model, nnx.Intermediate)


@pytest.mark.slow
def test_capture_of_every_module(model: nnxmoe.CausalLM) -> None:
    wanted: Any = model(IDS, return_hidden=True)
    state: Any
    out, state = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(IDS)
    assert max_error(out.logits, wanted.logits) < 1e-5
    assert max_error(state["norm"]["__call__"].get_value()[0], wanted.hidden[-1]) < 1e-5
    assert max_error(state["embed"]["__call__"].get_value()[0], wanted.hidden[0]) < 1e-5
    assert "attention" in str(state) and max_error(model(IDS).logits, wanted.logits) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("run", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("remat", [None, nnxmoe.Remat()], ids=["stored", "recomputed"])
def test_values_of_recomputed_parts(remat: Any, scan: bool, run: Callable[..., Any]) -> None:
    """Captured and sown values are arrays, also in parts and layers that the backward pass recomputes."""
    model = build_tiny("llama", nnxmoe.Strategy(stacking=stacking_of(scan), remat=remat))
    wanted = model(IDS).logits

    def capture(model: Any) -> Any:
        return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(IDS)

    out, state = run(capture)(model)
    assert max_error(out.logits, wanted) < 1e-5
    assert all(np.isfinite(np.asarray(value)).all() for value in jax.tree.leaves(state))

    def call(model: Any) -> Any:
        return model(IDS).logits, nnx.pop(model, nnx.Intermediate)

    for layer in layers(model):
        layer.mlp.down.__class__, layer.mlp_norm.__class__ = SowingLinear, SowingNorm
    logits, state = run(call)(model)
    values = [value for _, variable in nnx.to_flat_state(state) for value in variable.get_value()]
    assert max_error(logits, wanted) < 1e-5 and len(values) == 4
    assert all(np.isfinite(np.asarray(value)) for value in values)


@pytest.mark.slow
def test_parts_that_cannot_be_recomputed_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A part with random state changes in each call, so its layer is not rematerialized."""

    class Noisy(nnx.Module):
        def __init__(self, part: Any) -> None:
            self.part, self.dropout = part, nnx.Dropout(1e-9, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.dropout(self.part(x))

    model = build_tiny("llama", nnxmoe.Strategy(remat=nnxmoe.Remat()), num_hidden_layers=2)
    wanted = model(IDS).logits
    for layer in layers(model):
        layer.mlp_norm = Noisy(layer.mlp_norm)
    for _ in range(2):
        assert max_error(nnx.jit(lambda model: model(IDS).logits)(model), wanted) < 1e-5
    warnings = [record.message for record in caplog.records if "not rematerialized" in record.message]
    assert warnings == ["Layer contains modules that change when called: not rematerialized"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_sown_values_do_not_vanish(model: nnxmoe.CausalLM) -> None:
    """Without `nnx.capture` too; a counter is kept as well."""
    wanted = model(IDS).logits
    sowing(model)
    for _ in range(2):
        assert max_error(model(IDS).logits, wanted) < 1e-5
        assert [value.shape for value in sown(nnx.pop(model, nnx.Intermediate))] == [(2, 9, 2)] * 2
    model(IDS)  # what it sows stays in the model
    assert nnxmoe.generate(model, IDS[:1], max_new_tokens=2).shape == (1, 11)
    assert len(sown(nnx.pop(model, nnx.Intermediate))) == 2

    class Counting(nnx.Module):
        def __init__(self, part: Any) -> None:
            self.part, self.calls = part, nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return self.part(x)

    model.norm = Counting(model.norm)
    for calls in (1, 2):
        model(IDS)
        assert int(model.norm.calls[...]) == calls


def test_capture_of_compiled_functions_is_refused() -> None:
    model = build_tiny("llama")
    with pytest.raises(ValueError, match=r"nnx\.capture supports only model\(tokens\)"):
        nnx.capture(lambda model: nnxmoe.generate(model, IDS, max_new_tokens=1), nnx.Intermediate)(model)


# Exchanged parts


class Twice(nnx.Module):
    """A part that has nothing but a call."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, *args: Any, **options: Any) -> Any:
        out = self.part(*args, **options)
        return (
            FeedForwardOutput(2 * out.y, out.info)
            if isinstance(out, FeedForwardOutput)
            else jax.tree.map(lambda a: 2 * a, out)
        )


@pytest.mark.slow
def test_wrapped_parts() -> None:
    """Parts without optional attributes: the feed-forward, norms, embedding, router and head."""
    model, other = build_tiny("mixtral"), build_tiny("mixtral")
    for layer in layers(model):
        layer.moe = Twice(layer.moe)
        layer.moe_norm, layer.moe.part.router.select = Twice(layer.moe_norm), Bare(layer.moe.part.router.select)
        layer.moe.part.router = Passing(layer.moe.part.router)
    for layer in layers(other):
        layer.moe.experts.down.set_value(2 * layer.moe.experts.down[...])
        layer.moe_norm.scale.set_value(2 * layer.moe_norm.scale[...])
    model.embed, model.head, model.norm = Passing(model.embed), Passing(model.head), Twice(model.norm)
    other.norm.scale.set_value(2 * other.norm.scale[...])
    assert not model.token_independent() and model.vocab_size == 53
    assert max_error(model(IDS).logits, other(IDS).logits) < 1e-4
    assert np.array_equal(nnxmoe.generate(model, IDS, max_new_tokens=3), nnxmoe.generate(other, IDS, max_new_tokens=3))


@pytest.mark.slow
def test_wrapped_parts_that_layers_share() -> None:
    """Gemma 4 E2B: attentions that read the keys of earlier layers, and an embedding with inputs of all layers."""
    from tests.support.families import load

    case = load("gemma4_text")
    model = build(case.fields, case.weights)
    wanted, attentions = model(IDS).logits, [layer.attention for layer in layers(model)]
    model.norm = Passing(model.norm)
    for layer in layers(model):
        if isinstance(layer.attention, CrossLayerAttention):
            layer.attention, layer.moe = Passing(layer.attention), Passing(layer.moe)
    assert max_error(model(IDS).logits, wanted) < 1e-5
    layers(model)[0].attention = Passing(attentions[0])
    with pytest.raises(ValueError, match=r"layer\.attention, a Passing, must define attend_and_share"):
        model(IDS)
    layers(model)[0].attention, model.embed = attentions[0], Passing(model.embed)
    with pytest.raises(ValueError, match=r"model\.embed, a Passing, must define inputs"):
        model(IDS)


class Passing(Twice):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.part(*args, **options)


class Bare:
    """A selection without attributes."""

    def __init__(self, select: Any) -> None:
        self.select = select

    def __call__(self, logits: Any, bias: Any) -> Any:
        return self.select(logits, bias)


def test_exchanged_parts_that_do_not_fit() -> None:
    """Each error names the part and what it must be."""
    model = build_tiny("mixtral")
    layer = layers(model)[0]
    linear: Any = nnx.Linear(24, 24, rngs=nnx.Rngs(0))
    experts, attention = layer.moe.experts, layer.attention
    with pytest.raises(ValueError, match=r"layer\.moe = Linear.*accepts \(x, context=…\)"):
        layer.moe = linear
    with pytest.raises(ValueError, match=r"layer\.attention = Dict.*must be a module that accepts"):
        layer.attention = nnx.Dict()
    with pytest.raises(ValueError, match="mlp cannot be assigned: this layer's feed-forward is moe"):
        layer.mlp = Passing(layer.moe)
    layer.moe.experts = Passing(experts)
    with pytest.raises(ValueError, match=r"moe\.experts is a Passing without count"):
        model(IDS)
    layer.moe.experts, layer.attention = experts, Passing(attention)
    assert model(IDS).logits.shape == (2, 9, 53)
    with pytest.raises(ValueError, match="the attention Passing has no cache: define empty_cache"):
        nnxmoe.generate(model, IDS, max_new_tokens=1)
    layer.attention, model.head = attention, Passing(model.head)
    with pytest.raises(ValueError, match=r"model\.head, a Passing, must define weight\(\)"):
        model.head_weight()


# Transformations and copies


@pytest.mark.slow
def test_copies_are_equal_and_apart(model: nnxmoe.CausalLM) -> None:
    wanted = model(IDS).logits
    graph, state = nnx.split(model)
    pure = nnx.to_pure_dict(state)
    restored = nnx.state(build_tiny("mixtral", model.strategy))
    nnx.replace_by_pure_dict(restored, pure)
    copies = [nnx.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies += [nnx.merge(graph, state, copy=True), nnx.merge(graph, restored)]
    for twin in copies:
        np.testing.assert_array_equal(twin(IDS).logits, wanted)
        twin.norm.scale.set_value(twin.norm.scale[...] * 2)
        assert max_error(twin(IDS).logits, wanted) > 1e-3
        np.testing.assert_array_equal(model(IDS).logits, wanted)


@pytest.mark.slow
def test_transformations(model: nnxmoe.CausalLM) -> None:
    """`nnx.jit`, `nnx.grad`, `nnx.eval_shape`, `nnx.vmap` over an ensemble and `print`."""
    wanted = model(IDS).logits
    assert max_error(nnx.jit(lambda model, ids: model(ids).logits)(model, IDS), wanted) < 1e-5
    gradients = nnx.grad(cross_entropy)(model)
    assert {type(v) for _, v in nnx.to_flat_state(gradients)} == {nnx.Param}

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key: jax.Array) -> nnxmoe.CausalLM:
        return type(model)(model.config, model.strategy, rngs=nnx.Rngs(key))

    ensemble = make(jax.random.split(jax.random.key(0), 3))
    logits = nnx.vmap(lambda model, ids: model(ids).logits, in_axes=(0, None))(ensemble, IDS)
    first = jax.tree.map(lambda a: a[1], nnx.state(ensemble))
    one = nnx.merge(nnx.graphdef(ensemble), first)
    assert logits.shape == (3, 2, 9, 53) and max_error(logits[1], one(IDS).logits) < 1e-4
    shapes = nnx.eval_shape(lambda: type(model)(model.config, model.strategy, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(shapes))
    assert all(isinstance(v.get_value(), jax.ShapeDtypeStruct) for _, v in flat)
    text = str(model)
    assert text.startswith(repr(model)) and "\n" not in repr(model)
    assert "attention: GQA" in text and "experts: Experts(" in text and text.count("moe: MoE") == 1


@pytest.mark.parametrize("sizes", ["b, 9", "2, t", "b, t"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_export_for_all_sizes(kind: str, sizes: str) -> None:
    model = build_tiny(kind)
    shape = jax.export.symbolic_shape(sizes)
    tokens, mask = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    exported = jax.export.export(jax.jit(lambda ids, mask: model(ids, attention_mask=mask).logits))(tokens, mask)
    real = np.arange(9)[None] < np.array([[9], [5]])
    wanted = np.asarray(model(IDS, attention_mask=real).logits)
    assert max_error(np.asarray(exported.call(jnp.asarray(IDS, jnp.int32), real))[real], wanted[real]) < 1e-4


@pytest.mark.slow
def test_export_refuses_sizes_that_must_be_numbers() -> None:
    from tests.support.families import load

    config = nnxmoe.models.config_from_hf(load("deepseek_v4").fields)
    model = nnxmoe.models.model_class(config)(config, rngs=nnx.Rngs(0))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t"), jnp.int32)
    with pytest.raises(ValueError, match=r"DeepSeekV4 cannot be exported for symbolic tokens \[b, t\]"):
        jax.export.export(jax.jit(lambda ids: model(ids).logits))(shape)


# Other doors of Flax and Orbax


@pytest.mark.slow
def test_bridge_of_flax_to_linen() -> None:
    """Every weight is in ``params`` with its axes, what is not trained is apart, and a Linen loop trains them."""
    model = build_tiny("deepseek_v3")
    module = nnx.bridge.to_linen(type(model), model.config)
    variables = module.init(jax.random.key(0), jnp.asarray(IDS))
    assert set(variables) == {"params", "RouterBias"}
    with nnx.use_eager_sharding(False):  # else Flax 0.12.12 makes variables for it, which need a mesh
        specs = nn.get_partition_spec(variables)["params"]
    assert specs["head"]["kernel"] == jax.sharding.PartitionSpec("vocab", "embed")
    count = len(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))
    assert len(leaves) == count and all(any(spec) for spec in leaves if len(spec) > 1)
    rest = {"RouterBias": variables["RouterBias"]}

    def loss(params: Any) -> jax.Array:
        out: Any = module.apply({"params": params, **rest}, jnp.asarray(IDS[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(out.logits, IDS[:, 1:]).mean()

    before, gradients = jax.jit(jax.value_and_grad(loss))(variables["params"])
    changed = jax.tree.map(lambda a, g: a - 0.1 * g, variables["params"], gradients)
    assert loss(changed) < before
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients["head"]))


@pytest.mark.slow
def test_partition_names_of_every_parameter() -> None:
    """`nnx.get_partition_spec` gives the logical axes, those of adapters and stacked layers included."""
    model = build_tiny("mixtral", nnxmoe.Strategy(stacking=nnxmoe.Scanned()))
    lora.add(model, 2, rngs=nnx.Rngs(1))
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(nnx.state(model))))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        spec = specs[path].get_value()
        assert len(spec) == len(variable.shape) and (path[0] != "stacks" or spec[0] == "layers"), path


@pytest.mark.slow
def test_orbax_by_hand(model: nnxmoe.CausalLM, tmp_path: Path) -> None:
    """The state of the model and the optimizer, saved and restored by Orbax alone."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(cross_entropy)(model))
    graph, state = nnx.split((model, optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "run", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    other, _ = nnx.merge(graph, restored)
    np.testing.assert_array_equal(other(IDS).logits, model(IDS).logits)
