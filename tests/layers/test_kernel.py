"""Kernel objects: a custom storage format works everywhere a kernel is used."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.layers.linear.kernel import DenseKernel, Kernel, ParamWeight, as_kernel, is_kernel
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.running import PART_TOLERANCE
from tests.support.tiny import build_tiny, random_tokens

# A custom storage format: int8 codes with one scale per output.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodesKernel(Kernel):
    codes: Any  # int8 [*E, O, I]
    scale: Any  # float32 [*E, O]

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, outs, ins = self.codes.shape
        return (*lead, ins, outs)

    def dense(self, dtype: Any = None) -> Any:
        whole = jnp.swapaxes(self.codes * self.scale[..., None], -1, -2)
        return whole if dtype is None else whole.astype(dtype)


class Codes(nnx.Module):
    def __init__(self, variable: nnx.Param):
        param = ParamWeight(variable)
        lead, self.ins, self.outs = param.lead, param.ins, param.outs
        axes = variable.get_metadata()["out_sharding"]
        last, first = axes[len(lead)], axes[len(lead) + len(self.outs)]
        whole = np.swapaxes(np.asarray(param.read().dense()), -1, -2)
        scale = np.abs(whole).max(-1) / 127
        values = {"codes": (np.round(whole / scale[..., None]).astype(np.int8), (*axes[: len(lead)], last, first))}
        values["scale"] = (scale, (*axes[: len(lead)], last))
        for name, (value, labels) in values.items():
            options = {"out_sharding": labels, "inputs": None, "eager_sharding": False}
            setattr(self, name, nnx.Variable(jnp.asarray(value), **options))

    @property
    def lead(self) -> tuple[int, ...]:
        return self.codes.shape[:-2]

    def read(self) -> CodesKernel:
        return CodesKernel(self.codes[...], self.scale[...])


def quantise(model: nnx.Module) -> None:
    """Replace every kernel of a model by int8 codes."""
    for _, module in list(nnx.iter_graph(model)):
        for name, value in list(vars(module).items()) if isinstance(module, nnx.Module) else []:
            if type(value) is nnx.Param and is_kernel(value):
                setattr(module, name, nnx.data(Codes(value)))


def dequantise(model: nnx.Module, codes: nnx.Module) -> None:
    """Set a model's kernels to the dequantised codes of another model."""
    found = {path: module for path, module in nnx.iter_graph(codes) if isinstance(module, Codes)}
    for path, variable in nnx.iter_graph(model):
        if path in found:
            variable.set_value(found[path].read().transposed().reshape(variable.shape))


STRATEGIES = {
    "sorted-blocked": nnxmoe.Strategy(dispatch=nnxmoe.Sorted(), matmul=nnxmoe.BlockedMatmul()),
    "dense-absorbed": nnxmoe.Strategy(dispatch=nnxmoe.Dense(), matmul=nnxmoe.MaskedMatmul(), mla=nnxmoe.AbsorbedMLA()),
    "scanned-ragged": nnxmoe.Strategy(
        dispatch=nnxmoe.Sorted(), matmul=nnxmoe.RaggedDotMatmul(), stacking=nnxmoe.Scanned()
    ),
}


PAIRS = {
    ("llama", "sorted-blocked"),
    ("mixtral", "scanned-ragged"),
    ("mixtral", "dense-absorbed"),
    ("deepseek_v3", "sorted-blocked"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if (kind, way) in PAIRS else pytest.mark.slow)
        for kind in ("llama", "mixtral", "deepseek_v3")
        for way in STRATEGIES
    ],
)
def test_custom_storage_format_works_in_every_family(kind: str, way: str) -> None:
    model, twin = (build_tiny(kind, STRATEGIES[way], num_hidden_layers=2) for _ in range(2))
    tokens = random_tokens(2, 12)
    plain = np.asarray(model(tokens).logits)
    quantise(model)
    dequantise(twin, model)
    assert not any(is_kernel(variable) for _, variable in nnx.iter_graph(model))
    got = model(tokens).logits
    assert max_error(got, twin(tokens).logits) < 1e-4 < max_error(got, plain)


@pytest.mark.slow
def test_adapters_on_a_custom_storage_format() -> None:
    """Gradients reach the adapters and the inputs, but not the codes."""
    model = build_tiny("mixtral", STRATEGIES["sorted-blocked"], num_hidden_layers=2)
    lora.add(model, 4, rngs=nnx.Rngs(0))
    quantise(model)
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    tokens = random_tokens(2, 12)
    grads = jax.grad(lambda a: jnp.mean(jnp.sin(nnx.merge(graph, a, rest)(tokens).logits)))(adapters)
    moved = {path[-1] for path, grad in nnx.to_flat_state(grads) if float(jnp.abs(grad[...]).max()) > 0}
    assert moved == {"b"}  # the gradient of a is zero while b is zero


@pytest.mark.slow
def test_both_orientations_give_the_same_products() -> None:
    rng = np.random.default_rng(0)
    x, d = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 5, 6), (3, 5, 4)))
    array = jnp.asarray(rng.standard_normal((3, 6, 4)), jnp.float32)
    plain, turned = as_kernel(array), DenseKernel(jnp.swapaxes(array, 1, 2))
    assert plain.shape == turned.shape == (3, 6, 4) and (turned.dense() == array).all()
    assert plain.transposed("bfloat16").shape == (3, 4, 6) and (plain.transposed() == turned.transposed()).all()
    assert max_error(plain.batched_matmul(x), turned.batched_matmul(x)) < PART_TOLERANCE
    sizes = jnp.asarray([2, 0, 13], jnp.int32)
    rows, d_rows = x.reshape(-1, 6), d.reshape(-1, 4)
    for backend in (nnxmoe.BlockedMatmul(), nnxmoe.MaskedMatmul(), nnxmoe.RaggedDotMatmul()):
        (y, pull), (other, other_pull) = (
            jax.vjp(lambda rows, kernel, backend=backend: backend(rows, kernel, sizes), rows, kernel)
            for kernel in (plain, turned)
        )
        assert max_error(y, other) < PART_TOLERANCE
        for grad, wanted in zip(other_pull(d_rows), pull(d_rows), strict=True):
            whole = (grad.dense(), wanted.dense()) if isinstance(grad, Kernel) else (grad, wanted)
            assert max_error(*whole) < PART_TOLERANCE
    one, other = plain.expert(1), turned.expert(1)
    assert (
        max_error(one(x), other(x)) < PART_TOLERANCE
        and max_error(one.vjp_input(d), other.vjp_input(d)) < PART_TOLERANCE
    )
    assert max_error(one.matmul_f32(x), other.matmul_f32(x)) < PART_TOLERANCE
    assert max_error(one.vjp_kernel(x, d).dense(), other.vjp_kernel(x, d).dense()) < PART_TOLERANCE


def test_only_layers_access_kernel_arrays() -> None:
    """No other file accesses kernel values, except those that merge adapters and that round kernels to codes."""
    import pathlib
    import re

    raw = re.compile(r"\b(kernel|gate|up|down)(\[\.\.\.\]|\.(get_value|set_value|value)\b)")
    root = pathlib.Path(nnxmoe.__file__).parent
    found = {str(p.relative_to(root)) for p in root.rglob("*.py") if raw.search(p.read_text(encoding="utf-8"))}
    assert found <= {"train/lora/merge.py", "model/quantization/rounding.py"}
