"""Training steps that both sides compile or run: nnxmoe objects, and MaxText flags for the same computation."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nnxmoe import Capacity, Dense, ExpertParallel, RaggedAllToAll, RingOfExperts, Sorted
from nnxmoe.config.base import DecoderConfig
from nnxmoe.models import preset
from nnxmoe.moe.dispatch import Dispatch
from tests.benchmarks.modes import MODES

TOPOLOGY = "v5p:4x4x4"
ON_TPU = "attention=flash compile_topology=v5p-128 compile_topology_num_slices=1 allow_split_physical_axes=true"
ON_CPU = "attention=dot_product"
FLAGS = {  # nnxmoe config field -> MaxText flag
    "vocab_size": "vocab_size",
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "moe_intermediate_size": "base_moe_mlp_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "first_k_dense_replace": "first_num_dense_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """An nnxmoe preset, the equal MaxText model, and config fields to replace on both sides."""

    preset: str
    maxtext: str
    replace: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step.

    Attributes:
        flags: MaxText flags of the execution mode. `Case.maxtext_flags` adds flags for the other fields.
        mesh: Sizes of mesh axes. The axes have the same names on both sides. Empty for one device.
        dispatch: nnxmoe dispatch of the execution mode.
        rows, length: Rows of the batch, and tokens per row.
        dtype: Dtype of the activations.
        remat: Whether the backward pass recomputes the layers.
    """

    model: Model
    flags: str
    mesh: Mapping[str, int]
    dispatch: Dispatch
    rows: int = 64
    length: int = 4096
    dtype: str = "bfloat16"
    remat: bool = True

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def config(self) -> DecoderConfig:
        """nnxmoe config of the model."""
        config = preset(self.model.preset)
        assert config is not None
        return dataclasses.replace(config, **self.model.replace)

    @property
    def maxtext_flags(self) -> list[str]:
        """All MaxText flags of the case."""
        replaced = {FLAGS[name]: value for name, value in self.model.replace.items() if name in FLAGS}
        implied = replaced | {f"ici_{axis}_parallelism": size for axis, size in self.mesh.items()}
        implied |= {"per_device_batch_size": self.rows // self.devices, "max_target_length": self.length}
        implied |= {"dtype": self.dtype, "remat_policy": "full" if self.remat else "none"}
        implied |= {"matmul_precision": "highest"} if self.dtype == "float32" else {}
        same = f"model_name={self.model.maxtext} override_model_config=true scan_layers=true weight_dtype=float32"
        return [*same.split(), *(f"{name}={value}" for name, value in implied.items()), *self.flags.split()]


RAGGED, RING, TIGHT = (
    ExpertParallel(Sorted(), exchange) for exchange in (RaggedAllToAll(), RingOfExperts(), RaggedAllToAll(1.25))
)
MIXTRAL = Model("mixtral-8x7b", "mixtral-8x7b", {"num_hidden_layers": 4})
V3_LAYERS = {"num_hidden_layers": 5, "first_k_dense_replace": 3, "num_nextn_predict_layers": 0}
DEEPSEEK = Model("deepseek-v3", "deepseek3-671b", V3_LAYERS)
QWEN = Model("qwen3-30b-a3b", "qwen3-30b-a3b", {"num_hidden_layers": 4})
LITE = Model("deepseek-v2-lite", "deepseek2-16b", {"num_hidden_layers": 4, "first_k_dense_replace": 1})
GROUPS = f"{ON_TPU} n_routing_groups=8 topk_routing_group=4"
EP4, EP8 = {"fsdp": 16, "expert": 4}, {"fsdp": 8, "expert": 8}
COMPILED = {
    "Mixtral-8x7B, 4 layers, fsdp 16 x expert 4": Case(MIXTRAL, ON_TPU, EP4, RAGGED),
    "Mixtral-8x7B, ring of experts": Case(MIXTRAL, f"{ON_TPU} use_ring_of_experts=true", EP4, RING),
    "Mixtral-8x7B, fsdp 64": Case(MIXTRAL, ON_TPU, {"fsdp": 64}, Sorted()),
    "DeepSeek-V3, 3 + 2 layers, fsdp 8 x expert 8": Case(DEEPSEEK, GROUPS, EP8, RAGGED),
    "DeepSeek-V3, buffers of 1.25": Case(DEEPSEEK, f"{GROUPS} ragged_buffer_factor=1.25", EP8, TIGHT),
    # nnxmoe was not tuned for the last two cases.
    "Qwen3-30B-A3B, 4 layers, fsdp 8 x expert 8": Case(QWEN, ON_TPU, EP8, RAGGED),
    "DeepSeek-V2-Lite, 1 + 3 layers, fsdp 16 x tensor 4": Case(LITE, ON_TPU, {"fsdp": 16, "tensor": 4}, Sorted()),
}

TINY_DEEPSEEK = Model(
    "deepseek-v3",
    "deepseek3-tiny",
    {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
        "num_hidden_layers": 2, "first_k_dense_replace": 0, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 32,
        "num_nextn_predict_layers": 0,
    },
)  # fmt: skip
WIDTHS = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64,
}  # fmt: skip
LLAMA = Model("llama-3.1-8b", "llama3-8b", WIDTHS | {"intermediate_size": 1408, "rope_scaling": None})
TINY_MIXTRAL = Model("mixtral-8x7b", "mixtral-8x7b", WIDTHS | {"intermediate_size": 704})
# On CPUs, MaxText's ring requires megablox, in Pallas interpret mode. MaxText's ragged exchange does not compile.
SPARSE, DENSE = "sparse_matmul=true megablox=false", "sparse_matmul=false"
MODE_FLAGS = {
    "sparse ring EP8": "sparse_matmul=true megablox=true use_ring_of_experts=true",
    "sparse ragged EP8": SPARSE,
    "sparse FSDP8": SPARSE,
    "dense FSDP8": DENSE,
    "dense EP8": DENSE,
    "capacity 1.5 EP8": f"{DENSE} capacity_factor=1.5 moe_dispatch_no_expert_sharding=true",
}


def _steps(dtype: str) -> dict[str, Case]:
    """Return the CPU cases: DeepSeek-V3 in each mode on eight devices, and Llama and Mixtral on one device."""
    modes = MODES | {"capacity 1.5 EP8": (Capacity(1.5), "expert", 0.0, 0.0)}
    cases = {
        name: Case(TINY_DEEPSEEK, f"{ON_CPU} {MODE_FLAGS[name]}", {axis: 8}, dispatch, 8, 128, dtype)
        for name, (dispatch, axis, *_) in modes.items()
    }
    for name, remat in (("Llama, one device", True), ("Llama, one device, no remat", False)):
        cases[name] = Case(LLAMA, ON_CPU, {}, Sorted(), 4, 256, dtype, remat)
    for name, flags, dispatch in (("dense", DENSE, Dense()), ("sparse", SPARSE, Sorted())):
        flags = f"{ON_CPU} base_moe_mlp_dim=704 {flags}"
        cases[f"Mixtral {name}, one device"] = Case(TINY_MIXTRAL, flags, {}, dispatch, 4, 256, dtype)
    return {f"{name}, {dtype}": case for name, case in cases.items()}


STEPS = _steps("float32") | _steps("bfloat16")
CASES = COMPILED | STEPS
