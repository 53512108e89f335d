"""Options of a planned step, such as batch size, sequence length and rematerialization."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax.numpy as jnp

from nnxmoe.axes import AnyMesh
from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, floating_dtype, set_positive
from nnxmoe.model.pipeline import AXIS, Pipeline, stages_of
from nnxmoe.model.quantization.methods import Method, Mixed, check_quantize_options
from nnxmoe.model.remat import Remat
from nnxmoe.model.strategy import Strategy
from nnxmoe.moe.capacity import check_factor
from nnxmoe.moe.expert_parallel import ChunkedExchange, ExpertParallel, RaggedAllToAll
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding_rules import RULES, Rules, check_rules

# Fields of `Work` that only the arithmetic supports, because strategies or compiled steps do not implement them.
PLANNED_ONLY = ("interleaved", "node_copies", "lora", "split_rank", "compute", "quantize")

Compute = Literal["bf16", "fp8"]


@dataclasses.dataclass(frozen=True)
class Work(KnownFields):
    """Rows, tokens and options of one planned step.

    Attributes:
        batch: Rows per step, on all devices together.
        seq: Tokens per row in training, or tokens per row in the cache in decoding.
        layers: Number of layers to plan, starting with the first. If `None`, all layers are planned.
        train: Train on the rows. If False, decode one token per row.
        accumulate: Number of parts of a training batch for gradient accumulation.
        across: The mesh axis that crosses nodes or slices.
        rules: Mesh axes that shard each logical axis of the parameters. A training step uses `training_rules` by
            default.
        reduce_dtype: Dtype in which kernel gradients are summed over devices. Defaults to bfloat16, or to float32
            with a pipeline.
        remat: Rematerialize activations in the backward pass.
        offload: Offload the inputs of layers to the host, as ``Remat(offload=("layer_input",))`` does.
        buffer_factor: Buffer factor of `RaggedAllToAll`. If `None`, buffers fit all rows of the expert axis.
        chunks: Chunks of `ChunkedExchange`, which bounds the buffers without dropping rows. If `None`,
            `ChunkedExchange` chooses the number.
        microbatches: Microbatches of a `Pipeline` over the mesh axis ``pipe``. If `None`, ``pipe`` only
            shards the batch.
        interleaved: Number of interleaved groups of layers per pipeline stage (arithmetic only).
        node_copies: Send each token once per node instead of once per expert (arithmetic only).
        lora: Rank of adapters of all layer kernels. Only the adapters are trained. If 0, all
            parameters are trained (arithmetic only).
        split_rank: Divide the rank of experts' adapters by the experts per token (arithmetic only).
        compute: Dtype of matrix products (arithmetic only).
        quantize: Quantization method for weights that are not trained (arithmetic only).
    """

    callee = "plan"

    batch: int
    seq: int
    train: bool = True
    layers: int | None = None
    accumulate: int = 1
    across: str | None = None
    rules: Rules = dataclasses.field(default_factory=lambda: RULES)
    reduce_dtype: Any = None
    remat: bool = True
    offload: bool = False
    buffer_factor: float | None = None
    chunks: int | None = None
    microbatches: int | None = None
    interleaved: int = 1
    node_copies: bool = False
    lora: int = 0
    split_rank: bool = False
    compute: Compute = "bf16"
    quantize: Method | Mixed | None = None

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline over the mesh axis ``pipe``, or `None` without microbatches."""
        return None if self.microbatches is None else Pipeline(self.microbatches)

    @property
    def reduction_itemsize(self) -> int:
        """Bytes per element of a kernel gradient in the sum over devices."""
        dtype = jnp.float32 if self.microbatches is not None else self.reduce_dtype or jnp.bfloat16
        return jnp.dtype(dtype).itemsize

    @property
    def tokens(self) -> int:
        """Tokens that pass through the model in one step."""
        return self.batch * (self.seq if self.train else 1)

    def num_turns(self, mesh: AnyMesh) -> int:
        """Count how often a step computes a layer and gathers its kernels.

        Each part of the batch counts once. With a pipeline, each turn counts once per part.
        """
        if self.microbatches is None:
            return self.accumulate
        return self.accumulate * (self.microbatches + math.ceil((stages_of(mesh) - 1) / self.interleaved))

    def check(self) -> None:
        """Reject non-positive sizes, batches that ``accumulate`` does not divide, and conflicting options."""
        sizes = ("batch", "seq", "layers", "accumulate", "chunks", "microbatches", "interleaved")
        set_positive(self, *sizes, where="plan")
        if (rank := as_integer(self.lora, 0)) is None:
            raise ValueError(f"plan(lora={short(self.lora)}): use the rank, or 0 to train all parameters")
        object.__setattr__(self, "lora", rank)
        for name in ("train", "remat", "offload", "node_copies", "split_rank"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"plan({name}={short(value)}): use True or False")
        if self.reduce_dtype is not None:
            object.__setattr__(self, "reduce_dtype", floating_dtype("plan", "reduce_dtype", self.reduce_dtype))
        check_rules("plan", self.rules)
        if self.across is not None and not isinstance(self.across, str):
            raise ValueError(f"plan(across={short(self.across)}): use the name of a mesh axis, or None")
        check_quantize_options(self.quantize, keep_quantized=False)
        if self.compute not in get_args(Compute):
            raise ValueError(f"plan(compute={short(self.compute)}): use {' or '.join(get_args(Compute))}")
        if self.buffer_factor is not None:
            object.__setattr__(self, "buffer_factor", check_factor("plan(buffer_factor", self.buffer_factor))
        if self.quantize is not None and self.train and not self.lora:
            raise ValueError(
                "quantize: quantized weights cannot be trained. Set lora to train adapters, or train=False to plan "
                "decoding"
            )
        if self.offload and not (self.train and self.remat):
            raise ValueError(
                "offload needs rematerialization, because only inputs of rematerialized layers are offloaded. "
                "Plan a training step with remat"
            )
        if self.split_rank and not self.lora:
            raise ValueError("split_rank divides the rank of adapters: set lora too")
        if self.accumulate > 1 and not self.train:
            raise ValueError(f"accumulate={self.accumulate} has no effect in decoding: omit it")
        if self.batch % self.accumulate:
            raise ValueError(
                f"a batch of {self.batch} rows is not divisible by accumulate={self.accumulate}: use a multiple"
            )

    def check_mesh(self, mesh: AnyMesh) -> None:
        """Raise ValueError if the mesh lacks the axis ``across`` or does not allow the pipeline stages."""
        if self.across is not None and self.across not in mesh.shape:
            raise ValueError(f"across={self.across!r} is not a mesh axis: use one of {', '.join(mesh.shape)}")
        if self.pipeline is not None:
            self.pipeline.check(mesh)
            if stages_of(mesh) == 1:
                raise ValueError(
                    f"microbatches={self.microbatches} needs more than one pipeline stage: add a mesh axis {AXIS}"
                )
            if not self.train:
                raise ValueError(
                    f"microbatches={self.microbatches} is not supported in decoding. Omit it, or plan training"
                )
            self.pipeline.refuse_batch(self.batch // self.accumulate, mesh)

    def of(self, strategy: Strategy) -> "Work":
        """Return a copy with the options of a strategy. Raises ValueError if any of them is already set."""
        has_options = (self.microbatches, self.buffer_factor, self.chunks) != (None, None, None)
        if has_options or self.rules is not RULES or not self.remat or self.offload:
            raise ValueError(
                "rules, microbatches, remat, offload, buffer_factor and chunks are options of the strategy: omit them, "
                "or omit the strategy"
            )
        offload, remat = Remat(offload=("layer_input",)), strategy.remat
        if self.train and remat not in (None, Remat(), offload):
            logger.warning("the planned bytes exclude activations saved by %s: pass compile_for for exact bytes", remat)
        exchange = strategy.dispatch.exchange if isinstance(strategy.dispatch, ExpertParallel) else None
        exchange, chunks = (
            (exchange.exchange, exchange.chunks) if isinstance(exchange, ChunkedExchange) else (exchange, 1)
        )
        return dataclasses.replace(
            self,
            rules=strategy.rules,
            reduce_dtype=strategy.reduce_dtype,
            remat=strategy.remat is not None,
            offload=remat == offload,
            buffer_factor=exchange.buffer_factor if isinstance(exchange, RaggedAllToAll) else None,
            chunks=chunks,
            microbatches=None if strategy.pipeline is None else strategy.pipeline.microbatches,
        )
