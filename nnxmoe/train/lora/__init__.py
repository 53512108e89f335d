"""LoRA (Hu et al. 2021) on attention, feed-forward networks and every routed expert.

    lora.add(model, rank=16, rngs=nnx.Rngs(0))     # logits do not change: b is 0
    lora.add(model, lora.split_ranks(model, 16), rngs=nnx.Rngs(0))  # or: 16 / experts per token for each expert
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    lora.save(model, "adapter")                    # in PEFT's format; lora.load(model, "adapter")
    lora.merge(model); nnxmoe.save_pretrained(model, "merged")

Gate and up of the experts share ``a``, as in PEFT, because transformers stores them as one matrix.
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
