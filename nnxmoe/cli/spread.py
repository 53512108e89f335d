"""Sharding of a model's parameters on a mesh, whose devices need not exist."""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnxmoe.axes import RULES, AnyMesh, Rules, check_mesh, keeps_dtype, partition_spec
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.core.layout import parameters
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import model_class
from nnxmoe.quantization.methods import Method, Mixed
from nnxmoe.quantization.rounding import quantize_shapes


@dataclasses.dataclass(frozen=True)
class Spread:
    """Parameters of one name on a mesh: their number, the shape of each, and the bytes of all on one device."""

    name: str
    count: int
    shape: tuple[int, ...]
    spec: PartitionSpec
    device_bytes: int


def spread(
    config: DecoderConfig, dtype: str, mesh: AnyMesh, rules: Rules = RULES, quantize: Method | Mixed | None = None
) -> list[Spread]:
    """The sharding of a model on a mesh. Raises ValueError for a parameter that the rules cannot split."""
    model = model_class(config)(config, Strategy(rules=rules), rngs=None)
    check_mesh(model, mesh, rules)
    quantize_shapes(model, quantize, dtype, mesh)
    found: dict[tuple[str, tuple[int, ...]], Spread] = {}
    for parameter in parameters(model, codes=True):
        key, shape = parameter.key, parameter.shape
        spec = partition_spec(parameter.axes, shape, mesh, rules)
        fixed = keeps_dtype(parameter.variable)
        item = jnp.dtype(parameter.variable.dtype if fixed else dtype).itemsize
        size = math.prod(NamedSharding(mesh, spec).shard_shape(shape)) * item
        one = found.setdefault((key, shape), Spread(key, 0, shape, spec, 0))
        found[key, shape] = dataclasses.replace(one, count=one.count + 1, device_bytes=one.device_bytes + size)
    return list(found.values())
