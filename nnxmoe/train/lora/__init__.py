"""LoRA (Hu et al. 2021) on attention, feed-forward networks and every routed expert.

    lora.add(model, rank=16, rngs=nnx.Rngs(0))     # b is 0, so the logits do not change
    lora.add(model, lora.split_ranks(model, 16), rngs=nnx.Rngs(0))  # or rank 16 / experts per token per expert
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    lora.save(model, "adapter")                    # PEFT's format; lora.load(model, "adapter") reads it
    lora.merge(model); nnxmoe.save_pretrained(model, "merged")

The gate and up projections of an expert share ``a``, as in PEFT, because transformers stores them as
one matrix.
"""

from flax.nnx import LoRAParam as LoRAParam

from nnxmoe.convert.peft.adapter_folder import base_model_name as base_model_name
from nnxmoe.convert.peft.adapter_folder import load as load
from nnxmoe.convert.peft.adapter_folder import save as save
from nnxmoe.train.lora.adapters import add as add
from nnxmoe.train.lora.adapters import remove as remove
from nnxmoe.train.lora.adapters import split_ranks as split_ranks
from nnxmoe.train.lora.merge import merge as merge
from nnxmoe.train.lora.merge import merge_from as merge_from
from nnxmoe.train.lora.merge import unmerge as unmerge
from nnxmoe.train.lora.merge import without as without
