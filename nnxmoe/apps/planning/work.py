"""The work of a planned step: rows, tokens, and the options of their computation."""

import dataclasses
import math
from typing import Literal, get_args

from nnxmoe.axes import AnyMesh
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, set_positive
from nnxmoe.model.pipeline import AXIS, Pipeline, stages_of
from nnxmoe.model.quantization.methods import Method, Mixed, check_quantize_options
from nnxmoe.model.strategy import Strategy
from nnxmoe.moe.capacity import check_factor
from nnxmoe.moe.expert_parallel import ChunkedExchange, ExpertParallel, RaggedAllToAll
from nnxmoe.sharding_rules import RULES, Rules, check_rules

# Fields of `Work` that no strategy supports yet, or that a compiled step does not have.
PLANNED_ONLY = ("interleaved", "node_copies", "lora", "split_rank", "compute", "quantize")

Compute = Literal["bf16", "fp8"]


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one step, and the options of its computation.

    Attributes:
        batch: Number of rows.
        seq: Tokens per row to train on, or tokens per row in the cache.
        train: Train on the rows. If False, decode one token per row.
        accumulate: Number of parts of a training batch.
        across: The mesh axis that crosses nodes or slices.
        rules: Sharding of parameters over mesh axes.
        remat: Recompute activations in the backward pass.
        offload: Store the inputs of layers on the host, as with ``Remat(offload=("layer_input",))``.
        buffer_factor: Of `RaggedAllToAll`. If None, buffers have room for all rows of the expert axis.
        chunks: Of `ChunkedExchange` around it, which bounds the room and drops nothing. If None, as
            chosen by `ChunkedExchange`.
        microbatches: Of a `Pipeline` over the mesh axis ``pipe``. If None, ``pipe`` splits only the
            batch.
        interleaved: Groups of layers per stage (arithmetic only).
        node_copies: Send one copy of a token per node to its experts there (arithmetic only).
        lora: Rank of adapters of all layer kernels. Only the adapters are trained. If 0, all
            parameters are trained (arithmetic only).
        split_rank: Divide the rank of experts' adapters by the experts per token (arithmetic only).
        compute: Dtype of products (arithmetic only).
        quantize: Method for weights that are not trained (arithmetic only).
    """

    batch: int
    seq: int
    train: bool = True
    accumulate: int = 1
    across: str | None = None
    rules: Rules = dataclasses.field(default_factory=lambda: RULES)
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
        """The pipeline over the mesh axis ``pipe``, or None without microbatches."""
        return None if self.microbatches is None else Pipeline(self.microbatches)

    @property
    def tokens(self) -> int:
        """Tokens that pass through the model in one step."""
        return self.batch * (self.seq if self.train else 1)

    def turns(self, mesh: AnyMesh) -> int:
        """Count how often a step computes a layer and gathers its kernels.

        A step does so once per part of a batch, or once per turn of a pipeline.
        """
        if self.microbatches is None:
            return self.accumulate
        return self.accumulate * (self.microbatches + math.ceil((stages_of(mesh) - 1) / self.interleaved))

    def check(self) -> None:
        """Reject non-positive sizes, batches that ``accumulate`` does not divide, and conflicting options."""
        sizes = ("batch", "seq", "accumulate", "chunks", "microbatches", "interleaved")
        set_positive(self, *sizes, where="plan")
        if (rank := as_integer(self.lora, 0)) is None:
            raise ValueError(f"plan(lora={short(self.lora)}): give the rank, or 0 to train all parameters")
        object.__setattr__(self, "lora", rank)
        for name in ("train", "remat", "offload", "node_copies", "split_rank"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"plan({name}={short(value)}): give True or False")
        check_rules("plan", self.rules)
        if self.across is not None and not isinstance(self.across, str):
            raise ValueError(f"plan(across={short(self.across)}): give the name of a mesh axis, or None")
        check_quantize_options(self.quantize, keep_quantized=False)
        if self.compute not in get_args(Compute):
            raise ValueError(f"plan(compute={short(self.compute)}): use {' or '.join(get_args(Compute))}")
        if self.buffer_factor is not None:
            object.__setattr__(self, "buffer_factor", check_factor("plan(buffer_factor", self.buffer_factor))
        if self.quantize is not None and self.train and not self.lora:
            raise ValueError(
                "quantize: quantised weights are not trained: plan adapters (lora), or decoding (train=False)"
            )
        if self.offload and not (self.train and self.remat):
            raise ValueError(
                "offload: the host keeps inputs of layers that are computed again: plan training, with remat"
            )
        if self.split_rank and not self.lora:
            raise ValueError("split_rank: there is no rank to split: plan adapters (lora)")
        if self.accumulate > 1 and not self.train:
            raise ValueError(f"accumulate={self.accumulate}: decoding has no parts to accumulate: leave it out")
        if self.batch % self.accumulate:
            raise ValueError(
                f"a batch of {self.batch} rows cannot be cut into accumulate={self.accumulate} parts: use a multiple"
            )

    def check_mesh(self, mesh: AnyMesh) -> None:
        """Raise ValueError if the mesh lacks the axis ``across`` or does not allow the pipeline stages."""
        if self.across is not None and self.across not in mesh.shape:
            raise ValueError(f"across={self.across!r} is not a mesh axis: use one of {', '.join(mesh.shape)}")
        if self.pipeline is not None:
            self.pipeline.check(mesh)
            if stages_of(mesh) == 1:
                raise ValueError(f"microbatches={self.microbatches}: the mesh has one stage: give it an axis {AXIS}")
            if not self.train:
                raise ValueError(
                    f"microbatches={self.microbatches}: pipeline stages do not decode: leave it out, or plan training"
                )
            self.pipeline.refuse_batch(self.batch // self.accumulate, mesh)

    def of(self, strategy: Strategy) -> "Work":
        """Return this work with the options of a strategy. Raises ValueError if both set an option."""
        changed = (self.microbatches, self.buffer_factor, self.chunks) != (None, None, None)
        if changed or self.rules is not RULES or not self.remat:
            raise ValueError(
                "give rules, microbatches, remat, buffer_factor and chunks by the strategy, or without one"
            )
        exchange = strategy.dispatch.exchange if isinstance(strategy.dispatch, ExpertParallel) else None
        exchange, chunks = (
            (exchange.exchange, exchange.chunks) if isinstance(exchange, ChunkedExchange) else (exchange, 1)
        )
        return dataclasses.replace(
            self,
            rules=strategy.rules,
            remat=strategy.remat is not None,
            buffer_factor=exchange.buffer_factor if isinstance(exchange, RaggedAllToAll) else None,
            chunks=chunks,
            microbatches=None if strategy.pipeline is None else strategy.pipeline.microbatches,
        )
