"""The tensors of GGUF files as lazy arrays with Hugging Face names. Reading an array dequantizes it.

llama.cpp stacks the kernels of all experts in one tensor, reorders the query and key rows of the Llama architecture for
rotary embeddings, and splits DeepSeek's latent up-projection. Weights of some types can stay quantized. The ``gguf``
library dequantizes all other types.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.arrays.boxes import Box
from nnxmoe.convert.arrays.coded_array import coded_array
from nnxmoe.convert.arrays.lazy_array import AT_ONCE, Empty, LazyArray
from nnxmoe.convert.arrays.tensor_parts import TensorPart
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.gguf.gguf_file import GGUF, GGUFInfo, library
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.layers.linear.code_format import STORAGE_DTYPES, CodeFormat
from nnxmoe.model.weight_names import Table, W, options
from nnxmoe.models import family_of, parse_config

_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")
_PARTS = {"gate": "gate", "up": "up", "down": "down"}

# Tensor name without the block number -> candidate parameter keys. Each family has at most one of the keys.
_KEYS: dict[str, tuple[str, ...]] = {
    "token_embd.weight": ("embed.table",),
    "output_norm.weight": ("norm.scale",),
    "output.weight": ("head.kernel",),
    "attn_norm.weight": ("layer.attention_norm.scale",),
    "ffn_norm.weight": ("layer.moe_norm.scale", "layer.mlp_norm.scale"),
    "post_attention_norm.weight": ("layer.moe_norm.scale", "layer.mlp_norm.scale"),
    "attn_sinks.weight": ("layer.attention.sinks.scores",),
    "attn_q_a.weight": ("layer.attention.q.a.kernel",),
    "attn_q_a_norm.weight": ("layer.attention.q.norm.scale",),
    "attn_q_b.weight": ("layer.attention.q.b.kernel",),
    "attn_kv_a_mqa.weight": ("layer.attention.kv_a.kernel",),
    "attn_kv_a_norm.weight": ("layer.attention.kv_norm.scale",),
    "attn_kv_b.weight": ("layer.attention.kv_b.kernel",),
    "ffn_gate_inp.weight": ("layer.moe.router.kernel",),
    "ffn_gate_inp.bias": ("layer.moe.router.logit_bias.values",),
    "exp_probs_b.bias": ("layer.moe.router.bias",),
    **{f"attn_{name}_norm.weight": (f"layer.attention.qk_norm.{name}.scale",) for name in "qk"},
    **{
        f"attn_{theirs}.{ending}": (f"layer.attention.{ours}.{what}",)
        for theirs, ours in {"q": "q", "k": "k", "v": "v", "output": "o"}.items()
        for ending, what in {"weight": "kernel", "bias": "bias"}.items()
    },
    **{f"ffn_{name}.weight": (f"layer.mlp.{name}.kernel",) for name in _PARTS},
    **{f"ffn_{name}.bias": (f"layer.mlp.{name}.bias",) for name in _PARTS},
    **{f"ffn_{name}_exps.weight": (f"layer.moe.experts.{name}",) for name in _PARTS},
    **{f"ffn_{name}_exps.bias": (f"layer.moe.experts.biases.{name}",) for name in _PARTS},
    **{f"ffn_{name}_shexp.weight": (f"layer.moe.shared.{name}.kernel",) for name in _PARTS},
    "nextn.eh_proj.weight": ("layer.mtp.project.kernel",),
    "nextn.embed_tokens.weight": ("layer.mtp.embed.table",),
    "nextn.enorm.weight": ("layer.mtp.token_norm.scale",),
    "nextn.hnorm.weight": ("layer.mtp.hidden_norm.scale",),
    "nextn.shared_head_head.weight": ("layer.mtp.head.kernel",),
    "nextn.shared_head_norm.weight": ("layer.mtp.norm.scale",),
}

# Suffix of the fused gate and up tensor of all experts -> keys of gate and up.
_FUSED = {
    "weight": ("layer.moe.experts.gate", "layer.moe.experts.up"),
    "bias": ("layer.moe.experts.biases.gate", "layer.moe.experts.biases.up"),
}

# Type that can stay quantized -> format of the codes, and byte ranges of codes, scale and offset ("zero") in a block.
_KEPT = {
    "Q8_0": (CodeFormat("int8", (1, 32)), {"codes": (2, 34), "scale": (0, 2)}),
    "Q4_0": (CodeFormat("int4", (1, 32)), {"codes": (2, 18), "scale": (0, 2)}),
    "Q4_1": (CodeFormat("int4", (1, 32), offset=True), {"codes": (4, 20), "scale": (0, 2), "zero": (2, 4)}),
    "MXFP4": (CodeFormat("fp4", (1, 32)), {"codes": (1, 17), "scale": (0, 1)}),
}


def gguf_arrays(checkpoint: Checkpoint) -> dict[str, LazyArray]:
    """Return lazy arrays by Hugging Face name. Tensors that match no parameter have their GGUF names."""
    model = GGUF.open(checkpoint.folder)
    config, _ = parse_config(checkpoint.config, checkpoint.config_file)
    table, has_row_pairs = family_of(config).hf_names(config), model.text("general.architecture") == "llama"
    arrays: dict[str, LazyArray] = {}
    halves: dict[str, dict[str, LazyArray]] = {}
    for name, info in model.tensors.items():
        if name == "rope_freqs.weight":  # `rope_fields` converts this tensor to fields of the config
            continue
        match = _BLOCK.match(name)
        layer, stem = (int(match[1]), name[match.end() :]) if match else (None, name)
        if stem in ("attn_k_b.weight", "attn_v_b.weight"):
            halves.setdefault(name[: -len(stem)] + "attn_kv_b.weight", {})[stem[5]] = _array(info, checkpoint)
            continue
        if stem.startswith("ffn_gate_up_exps."):
            for half, key in enumerate(_FUSED[stem.rpartition(".")[2]]):
                if key in table:
                    arrays |= _of_experts(table, key, layer, info, checkpoint, half)
            continue
        key = next((key for key in _KEYS.get(stem, ()) if key in table), None)
        if key is None:
            arrays[name] = dataclasses.replace(_array(info, checkpoint), tensors=(name,))
        elif has_row_pairs and stem.startswith(("attn_q.", "attn_k.")):
            heads = config.num_attention_heads if stem.startswith("attn_q.") else config.kv_heads
            arrays[_name(table, key, layer)] = _turned_back(_array(info, checkpoint), heads, config.head_width)
        else:
            arrays |= _of_experts(table, key, layer, info, checkpoint)
    for name, kv_halves in halves.items():
        layer = int(name.split(".")[1])
        arrays[_name(table, "layer.attention.kv_b.kernel", layer)] = _joined(kv_halves, config, name)
    return arrays


def _name(table: Table, key: str, layer: int | None) -> str:
    w = options(table, key)[0]
    return w.label(w.tensor(layer))


def _of_experts(
    table: Table, key: str, layer: int | None, info: GGUFInfo, checkpoint: Checkpoint, half: int | None = None
) -> dict[str, LazyArray]:
    """Return the array of a parameter, or one array per expert if the Hugging Face layout has one tensor per expert.

    If ``half`` is 0 or 1, select only this half of the outputs of each expert.
    """
    w = options(table, key)[0]

    def read_array(tensor_info: GGUFInfo, dim: int) -> LazyArray:
        tensor = _array(tensor_info, checkpoint)
        if half is None:
            return tensor
        part = TensorPart(tensor_info.name, W(tensor_info.name).rows(half, 2), dim).select(tensor)
        return dataclasses.replace(part, stored=tensor.stored and (tensor_info.kind, tensor_info.nbytes // 2))

    if not w.per_expert:
        return {_name(table, key, layer): read_array(info, 1)}
    if len(info.values) != 3:
        fault = f"{info.name} in {info.file.name} has shape {list(info.values)}: it must contain a kernel per expert"
        return {w.tensor(layer, 0): LazyArray.faulty(fault, (info.name,))}
    return {w.tensor(layer, expert): read_array(info.at(expert), 0) for expert in range(info.values[0])}


def _array(info: GGUFInfo, checkpoint: Checkpoint) -> LazyArray:
    """Return a tensor as a lazy array. Quantized blocks are dequantized when they are read."""
    octets = plain_array(checkpoint, info)
    if info.kind in _KEPT:
        codes, byte_ranges = _KEPT[info.kind]
        parts = {name: _part(octets, codes, info, name, byte_range) for name, byte_range in byte_ranges.items()}
        return dataclasses.replace(coded_array(codes, info.values, parts), stored=(info.kind, info.nbytes))
    if info.shape == info.values:
        return octets
    ggml_type = library().GGMLQuantizationType[info.kind]
    group, width = library().GGML_QUANT_SIZES[ggml_type]
    floats = octets.map_blocks(width, group, lambda blocks: library().dequantize(blocks, ggml_type), np.float32)
    return dataclasses.replace(floats, stored=(info.kind, info.nbytes))


def _part(octets: LazyArray, codes: CodeFormat, info: GGUFInfo, name: str, byte_range: tuple[int, int]) -> LazyArray:
    """Return one array of a quantized kernel, read from the same byte range of every block."""
    begin, end = byte_range
    width = info.shape[-1] // (info.values[-1] // 32)
    dtype = (
        STORAGE_DTYPES[codes.code_dtype] if name == "codes" else np.dtype(np.float16 if end - begin == 2 else np.uint8)
    )

    def read(file_bytes: np.ndarray) -> np.ndarray:
        blocks = file_bytes.reshape(*file_bytes.shape[:-1], -1, width)[..., begin:end]
        return np.ascontiguousarray(blocks).view(dtype).reshape(*file_bytes.shape[:-1], -1)

    part = octets.map_blocks(width, (end - begin) // dtype.itemsize, read, dtype)
    if name == "codes" or dtype != np.uint8:
        return part
    return part.map(lambda exponents: np.ldexp(np.float32(1), exponents.astype(np.int32) - 127), np.float32)


def _turned_back(array: LazyArray, heads: int, width: int) -> LazyArray:
    """Reorder the rows of queries or keys from llama.cpp's order to the Hugging Face order.

    Rotary embeddings rotate pairs of rows. In the Hugging Face order, a pair consists of row i of each half of a head.
    In llama.cpp's order, the two rows of a pair are next to each other.
    """
    if array.fault is not None or array.shape[0] != heads * width:
        return array  # `load_model` reports the wrong shape
    order = np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)
    if array.codes is None:
        return array.take(order, 0)
    parts = {name: part.take(order, 0) for name, part in array.parts.items()}
    return dataclasses.replace(coded_array(array.codes, array.shape, parts), stored=array.stored)


def _joined(halves: Mapping[str, LazyArray], config: DecoderConfig, name: str) -> LazyArray:
    """Join ``k [heads, latent, nope]`` and ``v [heads, v, latent]`` into ``kv_b [heads (nope + v), latent]``."""
    tensors = tuple(tensor for part in halves.values() for tensor in part.tensors)
    shapes = {part: array.shape for part, array in halves.items()}
    heads = config.num_attention_heads
    is_valid = shapes.keys() == {"k", "v"} and all(len(shape) == 3 and shape[0] == heads for shape in shapes.values())
    if not is_valid or shapes["k"][1] != shapes["v"][2]:
        return LazyArray.faulty(f"the key and value parts of {name} have inconsistent shapes: {shapes}", tensors)
    outs = shapes["k"][2] + shapes["v"][1]

    def read(box: Box, empty: Empty) -> np.ndarray:
        first_head, last_head = box[0].start // outs, -(-box[0].stop // outs)  # range of heads that contains the rows
        k, v = (np.asarray(halves[part].rows(slice(first_head, last_head)), np.float32) for part in "kv")
        rows = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape((last_head - first_head) * outs, -1)
        return rows[box[0].start - first_head * outs : box[0].stop - first_head * outs, box[1]]

    dtype = halves["k"].dtype if halves["k"].dtype == halves["v"].dtype else np.dtype(np.float32)
    shape = heads * outs, shapes["k"][1]
    # Read the whole array at once. Reads of row blocks would dequantize the heads at block boundaries twice.
    array = LazyArray(shape, np.dtype(np.float32), read, AT_ONCE, tensors=tensors, file=halves["k"].file)
    return array.astype(dtype)
