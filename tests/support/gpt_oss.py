"""gpt-oss checkpoints in MXFP4, by the formula of the specification, and the cases of ``tests/data/gpt_oss``.

``python -m tests.support.gpt_oss`` makes the cases anew with transformers (extra ``oracle``): two checkpoints of random
weights, one in bfloat16 whose kernels are square, and one in MXFP4, with what transformers computes of them in float32.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.tiny import TINY, Fields, Weights, random_tokens, tiny_weights

CASES = Path(__file__).parents[1] / "data" / "gpt_oss"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 … 7; 8 … 15 are their negatives
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
LENGTH, NEW = 17, 6

# Beyond twice the window and beyond the original positions; a head width that is not hidden_size / heads.
_FIELDS = TINY["gpt_oss"] | {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "hidden_size": 32,
    "head_dim": 12,
    "num_local_experts": 4,
}
FIELDS: dict[str, Fields] = {
    "square": _FIELDS | {"intermediate_size": 32},
    "mxfp4": _FIELDS | {"intermediate_size": 64, "quantization_config": MXFP4},
}


def by_the_formula(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weights ``[E, I, O]`` of blocks ``[E, O, I / 32, 16]`` and scales ``[E, O, I / 32]``, one at a time."""
    experts, outs, groups, _ = blocks.shape
    found = np.empty((experts, groups * 32, outs), np.float32)
    for e, o, i in np.ndindex(experts, outs, groups * 32):
        octet = int(blocks[e, o, i // 32, i % 32 // 2])
        code = octet >> 4 if i % 2 else octet & 15
        value = -MAGNITUDES[code - 8] if code > 7 else MAGNITUDES[code]
        found[e, i, o] = value * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    return found


def in_mxfp4(weights: Weights, seed: int = 0) -> tuple[Weights, Weights]:
    """Weights with experts of random codes, and with the floats that these stand for."""
    rng, stored, plain = np.random.default_rng(seed), {}, {}
    for name, tensor in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = tensor
            continue
        experts, ins, outs = tensor.shape
        blocks = rng.integers(0, 256, (experts, outs, ins // 32, 16)).astype(np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:3]).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = by_the_formula(blocks, scales)
    return stored, plain


def weights_of(name: str) -> Weights:
    """The tensors of a case, in bfloat16 or MXFP4."""
    made = {n: tensor.astype(ml_dtypes.bfloat16) for n, tensor in tiny_weights(FIELDS[name], seed=1).items()}
    return made if name == "square" else in_mxfp4(made)[0]


def reference(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """What transformers computes in float32: logits without and with padding, and greedy continuations, of the first
    tokens for which none of these is too close to call."""
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    tokens, mask = random_tokens(2, LENGTH, seed=seed), np.ones((2, LENGTH), np.int32)
    mask[0, :6], mask[1, -4:] = 0, 0
    left = mask.copy()
    left[1] = 1
    ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logits = model(ids).logits
        padded = model(ids, attention_mask=torch.from_numpy(mask)).logits
        made = model.generate(
            ids,
            attention_mask=torch.from_numpy(left),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(made.scores).topk(2, dim=-1)[0]
    if float((best[..., 0] - best[..., 1]).min()) < 2e-2:
        return reference(folder, seed + 1)
    return {
        "input_ids": tokens,
        "logits": logits.numpy(),
        "padded.attention_mask": mask,
        "padded.logits": padded.numpy(),
        "generate.attention_mask": left,
        "generate.ids": made.sequences.numpy().astype(np.int32),
    }


def load_reference(name: str) -> dict[str, np.ndarray]:
    """The stored outputs of transformers for a case."""
    return load_file(CASES / name / "reference.safetensors")


def main() -> None:
    """Writes the cases."""
    for name, fields in FIELDS.items():
        folder = CASES / name / "model"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
        save_file(weights_of(name), folder / "model.safetensors")
        save_file(reference(folder), CASES / name / "reference.safetensors")


if __name__ == "__main__":
    main()
