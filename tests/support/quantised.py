"""Checkpoints in the formats of quantisation tools, made from random codes by the formulas of their documentation.

None of the packing comes from the package: codes are drawn first, and packed one bit field at a time.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.convert.storage.checkpoint import Checkpoint
from tests.support.families import load, weights_of
from tests.support.fp8 import quantise
from tests.support.tiny import TINY, Fields, tiny_weights, write_checkpoint

Tensors = dict[str, np.ndarray]
Made = tuple[Tensors, np.ndarray]  # tensors by their ending, and the weight [O, I] that they stand for
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column 8 c + AWQ_ORDER[i]
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BFLOAT16 = ml_dtypes.bfloat16
FOLDER = Path(__file__).parents[1] / "data" / "quantised"  # what the tools themselves make of one projection
MODULE = "model.layers.1.self_attn.q_proj"  # of a tiny Llama


def words(numbers: np.ndarray, bits: int, place: Callable[[int], int] = lambda i: i) -> np.ndarray:
    """Rows of unsigned numbers in 32-bit words, padded with zeros; number ``place(i)`` of a word in its i-th field."""
    per_word = 32 // bits
    rows, count = numbers.shape
    out = np.zeros((rows, -(-count // per_word)), np.uint32)
    for word in range(out.shape[1]):
        for i in range(per_word):
            column = word * per_word + place(i)
            if column < count:
                out[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * i)
    return out.view(np.int32)


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 values rounded to a dtype and back."""
    return values.astype(dtype).astype(np.float32)


def affine(weight: np.ndarray, bits: int, group: int, zero: bool, dtype: Any) -> tuple[np.ndarray, ...]:
    """Codes, zero points and scales ``[O, I / group]`` of groups of columns, and what they stand for."""
    rng = np.random.default_rng(weight.size + bits)
    outs, ins = weight.shape
    groups = weight.reshape(outs, ins // group, group)
    half = 1 << (bits - 1)
    scale = (np.abs(groups).max(-1) / (half - 0.5)).astype(dtype)
    if zero:
        scale *= rng.choice(np.array([1, 1, 1, -1], dtype), scale.shape)  # tools that learn scales make negative ones
    zeros = rng.integers(half - 2, half + 2, scale.shape) if zero else np.full(scale.shape, half)
    codes = np.clip(np.rint(groups / scale[..., None].astype(np.float32)) + zeros[..., None], 0, 2 * half - 1)
    values = (codes - zeros[..., None]).astype(np.float32) * scale[..., None].astype(np.float32)
    return codes.reshape(outs, ins).astype(np.int64), zeros, scale, rounded(values.reshape(outs, ins), dtype)


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: how a weight is stored, and the ``quantization_config`` beside it. ``kept``: the kind of its codes."""

    name: str
    kept: str
    make: Callable[[np.ndarray], Made]
    config: Mapping[str, Any]

    def checkpoint(self, tensors: Mapping[str, np.ndarray], chosen: Callable[[str], bool]) -> tuple[Tensors, Tensors]:
        """All tensors with the chosen weights stored in this format, and the floats that they stand for."""
        stored, plain = {}, {}
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and chosen(name):
                module = name.removesuffix(".weight")
                endings, values = self.make(tensor.astype(np.float32))
                stored |= {f"{module}.{ending}": value for ending, value in endings.items()}
                plain[name] = values
            else:
                stored[name] = plain[name] = tensor
        return stored, plain


def compressed(bits: int, strategy: str, kind: str, layout: str, **more: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


def deepseek(block: tuple[int, int], scale_dtype: Any = np.float32, ue8m0: bool = False) -> Format:
    """DeepSeek's FP8 blocks; ``ue8m0``: scales that are powers of two."""

    def make(weight: np.ndarray) -> Made:
        codes, scales = quantise(weight, block)
        if ue8m0:
            powers = 2.0 ** np.ceil(np.log2(scales))
            lines = np.repeat(np.repeat(powers, block[0], 0), block[1], 1)[: weight.shape[0], : weight.shape[1]]
            codes, scales = (weight / lines).astype(ml_dtypes.float8_e4m3fn), powers.astype(np.float32)
        scales = scales.astype(scale_dtype)
        full = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: weight.shape[0], : weight.shape[1]]
        return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * full.astype(np.float32)

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    name = f"deepseek-{block[0]}x{block[1]}{'-ue8m0' if ue8m0 else ''}-{np.dtype(scale_dtype)}"
    return Format(name, "fp8", make, config | ({"scale_fmt": "ue8m0"} if ue8m0 else {}))


def fp4_in_pairs() -> Format:
    """Experts of DeepSeek-V4: groups of 32 with an exponent each, the code of the even input in the low bits."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

    def make(weight: np.ndarray) -> Made:
        groups = weight.reshape(len(weight), -1, 32)
        scales = 2.0 ** np.ceil(np.log2(np.abs(groups).max(-1) / 6))
        codes = np.abs(np.abs(groups / scales[..., None])[..., None] - levels).argmin(-1)
        values = np.sign(groups) * levels[codes] * scales[..., None]
        octets = (codes + 8 * (groups < 0)).reshape(weight.shape).astype(np.uint8)
        pairs = (octets[:, ::2] + 16 * octets[:, 1::2]).view(np.int8)
        return {"weight": pairs, "scale": scales.astype(ml_dtypes.float8_e8m0fnu)}, values.reshape(weight.shape)

    return Format("fp4-in-pairs", "fp4", make, {})


def autofp8(static: bool, ending: str = "weight_scale") -> Format:
    """AutoFP8: one scale per tensor, which transformers calls ``weight_scale_inv``."""

    def make(weight: np.ndarray) -> Made:
        scale = np.float32(np.abs(weight).max() / 448)
        codes = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors = {"weight": codes, ending: np.array(scale)}
        tensors |= {"input_scale": np.array(0.5, np.float32)} if static else {}
        return tensors, codes.astype(np.float32) * scale

    scheme = "static" if static else "dynamic"
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
    if ending == "weight_scale":
        return Format(f"autofp8-{scheme}", "fp8", make, config)
    return Format("fp8-tensor", "fp8", make, config | {"weight_block_size": None})


def float_quantized(strategy: str, dtype: Any = BFLOAT16) -> Format:
    """compressed-tensors: FP8 per channel, tensor or block."""
    block = (16, 32)

    def make(weight: np.ndarray) -> Made:
        if strategy == "block":
            codes, scales = quantise(weight, block)
            scales = scales.astype(dtype)
            full = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: weight.shape[0], : weight.shape[1]]
        else:
            axis = 1 if strategy == "channel" else None
            scales = (np.abs(weight).max(axis=axis, keepdims=True) / 448).astype(dtype)
            full = np.broadcast_to(scales, weight.shape)
            codes = np.clip(weight / full.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
            scales = scales.reshape(1) if strategy == "tensor" else scales
        values = rounded(codes.astype(np.float32) * full.astype(np.float32), dtype)
        return {"weight": codes, "weight_scale": scales}, values

    more = {"block_structure": list(block)} if strategy == "block" else {}
    return Format(
        f"float-quantized-{strategy}", "fp8", make, compressed(8, strategy, "float", "float-quantized", **more)
    )


def int_quantized(zero: bool, dtype: Any = BFLOAT16) -> Format:
    """compressed-tensors W8A8: int8 per channel."""

    def make(weight: np.ndarray) -> Made:
        codes, zeros, scale, values = affine(weight, 8, weight.shape[1], zero, dtype)
        tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scale}
        tensors |= {"weight_zero_point": (zeros - 128).astype(np.int8)} if zero else {}
        return tensors, values

    name = f"int-quantized{'-zero' if zero else ''}"
    return Format(name, "int8", make, compressed(8, "channel", "int", "int-quantized", symmetric=not zero))


def pack_quantized(bits: int, group: int | None, zero: bool, dtype: Any = BFLOAT16) -> Format:
    """compressed-tensors W4A16 and W8A16, with groups or per channel."""

    def make(weight: np.ndarray) -> Made:
        codes, zeros, scale, values = affine(weight, bits, group or weight.shape[1], zero, dtype)
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scale, "weight_shape": np.array(weight.shape)}
        tensors |= {"weight_zero_point": np.ascontiguousarray(words(zeros.T, bits).T)} if zero else {}
        return tensors, values

    strategy = "group" if group else "channel"
    config = compressed(bits, strategy, "int", "pack-quantized", symmetric=not zero, group_size=group)
    return Format(f"pack-{bits}-{group}{'-zero' if zero else ''}", f"int{bits}", make, config)


def awq(group: int) -> Format:
    """AWQ gemm."""

    def make(weight: np.ndarray) -> Made:
        size = group if group > 0 else weight.shape[1]
        codes, zeros, scale, values = affine(weight, 4, size, True, np.float16)
        pack = lambda numbers: words(np.ascontiguousarray(numbers.T), 4, AWQ_ORDER.__getitem__)  # noqa: E731
        tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": np.ascontiguousarray(scale.T)}
        return tensors, values

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(f"awq-{group}", "int4", make, config)


def gptq(bits: int, group: int, version: int, act_order: bool) -> Format:
    """GPTQ, version 1 or 2, with or without act order."""

    def make(weight: np.ndarray) -> Made:
        ins, size = weight.shape[1], group if group > 0 else weight.shape[1]
        index = np.arange(ins) // size
        if act_order:
            index = np.random.default_rng(ins).permutation(index)
        order = np.argsort(index, kind="stable")
        codes, zeros, scale, values = affine(weight[:, order], bits, size, True, np.float16)
        back = np.argsort(order)
        stored = (zeros - 1) & (2**bits - 1) if version == 1 else zeros
        tensors = {
            "qweight": np.ascontiguousarray(words(codes[:, back], bits).T),
            "qzeros": words(np.ascontiguousarray(stored.T), bits),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": index.astype(np.int32),
        }
        return tensors, np.ascontiguousarray(values[:, back])

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return Format(f"gptq-{bits}-{group}-v{version}{'-act' if act_order else ''}", f"int{bits}", make, config)


def auto_round(form: Format, packing: str) -> Format:
    """AutoRound, which packs as GPTQ without ``g_idx`` or as AWQ, and names that packing."""

    def make(weight: np.ndarray) -> Made:
        tensors, values = form.make(weight)
        return {name: tensor for name, tensor in tensors.items() if name != "g_idx"}, values

    config = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int", "sym": False, "iters": 200}
    config |= {"block_name_to_quantize": "model.layers", "autoround_version": "0.12.3"}
    config |= {name: form.config[name] for name in ("bits", "group_size")}
    return Format(f"auto-round-{form.name}", form.kept, make, config)


def nf4(nested: bool, block: int = 16, dtype: str = "bfloat16", storage: Any = np.uint8) -> Format:
    """bitsandbytes NF4; ``nested``: double quantisation; ``storage``: the dtype in which its bytes are stored."""

    def make(weight: np.ndarray) -> Made:
        flat = np.pad(weight.reshape(-1), (0, -weight.size % block)).reshape(-1, block)
        flat[0] = 0
        absmax = np.abs(flat).max(1).astype(np.float32)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": list(weight.shape)}
        tensors: Tensors = {"weight.quant_map": np.array(NF4, np.float32)}
        if nested:
            coarse, offset = 32, float(np.float32(absmax.mean()))
            table = np.sort(np.random.default_rng(0).uniform(-1, 1, 256)).astype(np.float32)
            table[0] = -1.01  # rounds the scale of zeros to below zero
            padded = np.pad(absmax - np.float32(offset), (0, -len(absmax) % coarse)).reshape(-1, coarse)
            outer = np.maximum(np.abs(padded).max(1), 1e-6).astype(np.float32)
            ratio = (padded / outer[:, None]).reshape(-1)[: len(absmax)]
            fine = np.abs(ratio[:, None] - table).argmin(1).astype(np.uint8)
            absmax = table[fine] * np.repeat(outer, coarse)[: len(absmax)] + np.float32(offset)
            state |= {"nested_blocksize": coarse, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.absmax": fine, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
        else:
            tensors["weight.absmax"] = absmax
        scaled = flat / np.where(absmax > 0, absmax, 1)[:, None]
        codes = np.abs(scaled[..., None] - np.array(NF4, np.float32)).argmin(-1).astype(np.uint8)
        values = (np.array(NF4, np.float32)[codes] * absmax[:, None]).reshape(-1)[: weight.size]
        pairs = codes.reshape(-1)[: weight.size + weight.size % 2].reshape(-1, 2)
        tensors["weight"] = ((pairs[:, 0] << 4) | pairs[:, 1]).view(storage)[:, None]
        tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        return tensors, rounded(values.reshape(weight.shape), np.dtype(getattr(ml_dtypes, dtype, dtype)))

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config |= {"bnb_4bit_quant_storage": np.dtype(storage).name}
    name = f"nf4{'-nested' if nested else ''}{'' if block == 16 else f'-{block}-{np.dtype(storage).name}'}"
    return Format(name, "nf4", make, config)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def fp4(weight: np.ndarray, scales: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of FP4 codes of groups with these scales, and what they stand for in float32."""
    groups = weight.reshape(len(weight), -1, size)
    ratio = groups / np.where(scales > 0, scales, 1)[..., None]
    codes = np.abs(np.abs(ratio)[..., None] - FP4).argmin(-1)
    values = (np.where(groups < 0, -FP4[codes], FP4[codes]) * scales[..., None]).astype(np.float32)
    octets = (codes + 8 * (groups < 0)).reshape(weight.shape).astype(np.uint8)
    return octets[:, ::2] | octets[:, 1::2] << 4, values.reshape(weight.shape)


def exponents(groups: np.ndarray, largest: float) -> np.ndarray:
    """E8M0 bytes of groups whose largest magnitude is to be at most ``largest``."""
    return (np.ceil(np.log2(np.abs(groups).max(-1) / largest)) + 127).astype(np.uint8)


def nvfp4(tool: str) -> Format:
    """Groups of 16 with FP8 scales and one factor, which compressed-tensors divides by and ModelOpt multiplies with.
    One group's scale is too small for FP8 and becomes zero."""

    def make(weight: np.ndarray) -> Made:
        weight = weight.copy()
        weight[0, :16] *= 1e-7
        peaks = np.abs(weight.reshape(len(weight), -1, 16)).max(-1)
        factor = np.float32(peaks.max() / (6 * 448))
        stored = (peaks / 6 / factor).astype(ml_dtypes.float8_e4m3fn)
        assert stored.astype(np.float32)[0, 0] == 0
        if tool == "modelopt":
            codes, values = fp4(weight, stored.astype(np.float32) * factor, 16)
            tensors = {"weight": codes, "weight_scale": stored, "weight_scale_2": np.array(factor)}
            return tensors | {"input_scale": np.array(0.25, np.float32)}, values
        divisor = np.array([1 / factor], np.float32)
        codes, values = fp4(weight, stored.astype(np.float32) / divisor, 16)
        tensors = {"weight_packed": codes, "weight_scale": stored, "weight_global_scale": divisor}
        return tensors | {"input_global_scale": np.array([2.0], np.float32)}, rounded(values, BFLOAT16)

    if tool == "modelopt":
        return Format("modelopt-nvfp4", "fp4", make, modelopt("NVFP4", group_size=16))
    config = compressed(4, "tensor_group", "float", "nvfp4-pack-quantized", group_size=16)
    return Format("nvfp4-pack", "fp4", make, config)


def mxfp4_pack() -> Format:
    """compressed-tensors' MXFP4."""

    def make(weight: np.ndarray) -> Made:
        stored = exponents(weight.reshape(len(weight), -1, 32), 6)
        codes, values = fp4(weight, np.exp2(stored.astype(np.float32) - 127), 32)
        return {"weight_packed": codes, "weight_scale": stored}, values

    config = compressed(4, "group", "float", "mxfp4-pack-quantized", group_size=32, scale_dtype="torch.uint8")
    return Format("mxfp4-pack", "fp4", make, config)


def mxfp8(tool: str) -> Format:
    """FP8 in groups of 32 with an exponent each."""

    def make(weight: np.ndarray) -> Made:
        groups = weight.reshape(len(weight), -1, 32)
        stored = exponents(groups, 448)
        scales = np.exp2(stored.astype(np.float32) - 127)[..., None]
        codes = (groups / scales).astype(ml_dtypes.float8_e4m3fn)
        values = (codes.astype(np.float32) * scales).reshape(weight.shape)
        return {"weight": codes.reshape(weight.shape), "weight_scale": stored}, values

    if tool == "modelopt":
        return Format("modelopt-mxfp8", "fp8", make, modelopt("MXFP8"))
    config = compressed(8, "group", "float", "mxfp8-quantized", group_size=32, scale_dtype="torch.uint8")
    return Format("mxfp8", "fp8", make, config)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """A ``quantization_config`` of ModelOpt."""
    producer = {"name": "modelopt", "version": "0.43.0"}
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": producer, **more}


def modelopt_fp8(kind: str) -> Format:
    """ModelOpt's FP8, with one scale, one per output, or one per 128 x 128 weights."""

    def make(weight: np.ndarray) -> Made:
        if kind == "blocks":
            codes, scales = quantise(weight, (128, 128))
            full = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: weight.shape[0], : weight.shape[1]]
            return {"weight": codes, "weight_scale": scales[:, None, :, None]}, codes.astype(np.float32) * full
        scales = (np.abs(weight).max(axis=None if kind == "tensor" else 1) / 448).astype(np.float32)
        full = scales if kind == "tensor" else scales[:, None]
        codes = np.clip(weight / full, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        more = {"input_scale": np.array(0.5, np.float32)} if kind == "tensor" else {}
        return {"weight": codes, "weight_scale": np.asarray(scales), **more}, codes.astype(np.float32) * full

    names = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "blocks": "fp8_pb_wo"}
    return Format(f"modelopt-fp8-{kind}", "fp8", make, modelopt(names[kind]))


FORMATS = {
    each.name: each
    for each in (
        deepseek((16, 32)),
        deepseek((24, 40)),
        deepseek((16, 32), BFLOAT16),
        deepseek((16, 32), ml_dtypes.float8_e8m0fnu, ue8m0=True),
        deepseek((16, 32), np.float32, ue8m0=True),
        autofp8(static=True),
        autofp8(static=False),
        autofp8(static=True, ending="weight_scale_inv"),
        float_quantized("channel"),
        float_quantized("tensor"),
        float_quantized("block"),
        int_quantized(zero=False),
        int_quantized(zero=True),
        pack_quantized(4, 16, zero=False),
        pack_quantized(4, None, zero=False, dtype=np.float32),
        pack_quantized(4, 16, zero=True),
        pack_quantized(8, None, zero=False),
        pack_quantized(8, 32, zero=True, dtype=np.float16),
        awq(16),
        awq(-1),
        gptq(4, 16, version=1, act_order=False),
        gptq(4, 16, version=2, act_order=False),
        gptq(4, 16, version=1, act_order=True),
        gptq(8, 32, version=1, act_order=True),
        gptq(4, -1, version=1, act_order=True),
        auto_round(gptq(4, 16, version=1, act_order=False), "auto_round:auto_gptq"),
        auto_round(gptq(8, 32, version=2, act_order=False), "auto_round"),
        auto_round(awq(16), "auto_round:auto_awq"),
        nf4(nested=False),
        nf4(nested=True),
        nf4(nested=True, block=64, storage=BFLOAT16),
        nvfp4("compressed-tensors"),
        nvfp4("modelopt"),
        mxfp4_pack(),
        mxfp8("compressed-tensors"),
        mxfp8("modelopt"),
        modelopt_fp8("tensor"),
        modelopt_fp8("channel"),
        modelopt_fp8("blocks"),
    )
}


# Tiny configs whose linear maps have inputs that are multiples of 32 and outputs that are multiples of 8.
_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 53}
FIELDS: dict[str, Fields] = {
    "llama": TINY["llama"] | _WIDTHS,
    "mixtral": TINY["mixtral"] | _WIDTHS | {"num_local_experts": 4},
    "deepseek_v3": TINY["deepseek_v3"]
    | _WIDTHS
    | {"num_hidden_layers": 2, "moe_intermediate_size": 32, "n_routed_experts": 6, "n_shared_experts": 1}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_experts_per_tok": 2}
    | {"head_dim": 8},
}


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of attention, of a feed-forward network or of an expert."""
    return ("_proj" in name or ".experts." in name) and name.endswith(".weight")


def write_quantised(
    folder: Path,
    kind: str,
    form: Format,
    seed: int = 0,
    chosen: Callable[[str], bool] = is_linear,
    more: Mapping[str, Any] = {},
) -> tuple[Path, Path]:
    """Writes a tiny checkpoint in a format, and one with the floats that it stands for; ``more``: of config.json."""
    fields = FIELDS[kind] | more
    weights = tiny_weights(fields, seed)
    stored, plain = form.checkpoint(weights, chosen)
    quantised = write_checkpoint(folder / "codes", {**fields, "quantization_config": dict(form.config)}, stored)
    return quantised, write_checkpoint(folder / "floats", fields, plain)


def write_deepseek_v4(folder: Path) -> tuple[Path, Path]:
    """A tiny DeepSeek-V4 as it is published, FP8 blocks and FP4 experts with exponents as scales, and one with the
    floats that these stand for."""
    fields = load("deepseek_v4").fields | {"hidden_size": 64, "moe_intermediate_size": 32, "expert_dtype": "fp4"}
    untrained = nnxmoe.models.DeepSeekV4(nnxmoe.config_from_hf(fields), rngs=nnx.Rngs(0))
    nnxmoe.save_pretrained(untrained, folder / "shapes")
    weights = weights_of({name: tensor.shape for name, tensor in read_tensors(folder / "shapes").items()})
    blocks, e8m0 = deepseek((4, 4), ml_dtypes.float8_e8m0fnu, ue8m0=True), ("wq", "wkv.", "wo_", "shared_experts")
    in_blocks, of_blocks = blocks.checkpoint(
        weights, lambda name: "compressor" not in name and any(part in name for part in e8m0)
    )
    in_blocks = {name.replace("weight_scale_inv", "scale"): tensor for name, tensor in in_blocks.items()}
    experts, floats = fp4_in_pairs().checkpoint(weights, lambda name: ".experts." in name)
    stored = in_blocks | {name: tensor for name, tensor in experts.items() if ".experts." in name}
    plain = of_blocks | {name: tensor for name, tensor in floats.items() if ".experts." in name}
    stored["mtp.0.e_proj.weight"] = np.zeros((4, 4), np.float32)
    settings = {"quantization_config": dict(blocks.config)}
    return write_checkpoint(folder / "codes", fields | settings, stored), write_checkpoint(
        folder / "floats", fields, plain
    )


def read_tensors(folder: Path) -> Tensors:
    """The tensors of a checkpoint as they are stored; the safetensors library has no FP8 for NumPy."""
    with Checkpoint.open(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}
