"""Faults of the tensors: missing, misshapen, of a wrong kind, too many, not numbers."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.corpus.case import CONFIG, FAMILIES, SINGLE, Case, Draft, container, entry
from tests.support.tiny import Weights

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
ROUTER = {"mixtral": "model.layers.1.block_sparse_moe.gate.weight", "deepseek_v3": "model.layers.2.mlp.gate.weight"}
DOWN = {
    "llama": "model.layers.1.mlp.down_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.4.w2.weight",
    "deepseek_v3": "model.layers.2.mlp.experts.7.down_proj.weight",
}
QUERY = {kind: "model.layers.1.self_attn.q_proj.weight" for kind in ("llama", "mixtral")} | {
    "deepseek_v3": "model.layers.1.self_attn.q_b_proj.weight"
}
MISSING: dict[str, list[str]] = {
    "llama": [QUERY["llama"], "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.gate_proj.bias"],
    "mixtral": [QUERY["mixtral"], ROUTER["mixtral"], DOWN["mixtral"]],
    "deepseek_v3": [
        QUERY["deepseek_v3"],
        ROUTER["deepseek_v3"],
        DOWN["deepseek_v3"],
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.kv_a_layernorm.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.bias",
    ],
}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 4],
}


def cases() -> Iterator[Case]:
    """All of them, for every family that has the tensor."""
    for kind in FAMILIES:
        names = [EMBED, HEAD, NORM, "model.layers.0.input_layernorm.weight", *MISSING[kind]]
        for name in names:
            yield Case(kind, f"tensors, {name} missing", "refuse", _edit(_drop(name)), (name, "missing"))
        yield Case(kind, "tensors, a layer missing", "refuse", _edit(_drop_layer), ("model.layers.1.", "missing"))
        for name in (QUERY[kind], DOWN[kind], EMBED, *([ROUTER[kind]] if kind in ROUTER else [])):
            yield Case(
                kind, f"tensors, {name} transposed", "refuse", _edit(_change(name, lambda t: t.T)), (name, SINGLE)
            )
        for fault, change in KINDS.items():
            name = DOWN[kind]
            yield Case(kind, f"tensors, {fault}", "refuse", _edit(_change(name, change)), (name, SINGLE))
        yield Case(kind, "tensors, an integer norm", "refuse", _edit(_change(NORM, _cast(np.int64))), (NORM, "int64"))
        for fault, value in (("NaN", np.nan), ("Inf", np.inf), ("-Inf", -np.inf)):
            make = _edit(_spoil(DOWN[kind], value, 2), expect=True)
            yield Case(kind, f"tensors, {fault} among the weights", "report", make, (DOWN[kind], "2 values"))
        yield Case(kind, "tensors, all of them NaN", "report", _edit(_all_nan, expect=True), (EMBED, "NaN"))
        yield Case(kind, "tensors, a layer too many", "report", _edit(_extra_layer), ("layers", "more"))
        yield Case(
            kind,
            "tensors, a bias too many",
            "report",
            _edit(_extra("model.norm.bias", 24)),
            ("model.norm.bias", "biases"),
        )
        yield Case(
            kind, "tensors, one nobody knows", "report", _edit(_extra("model.layers.0.x", 3)), ("model.layers.0.x",)
        )
        yield Case(
            kind,
            "tensors, rotary frequencies",
            "accept",
            _edit(_extra("model.layers.0.self_attn.rotary_emb.inv_freq", 4)),
            (),
        )
        yield Case(kind, "tensors, in float64", "accept", _edit(_all(_cast(np.float64))), ())
        yield from _tied(kind)
        yield from _fp8(kind)
    yield from _experts()


def _edit(change: Callable[[Weights], None], expect: bool = False) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        change(draft.weights)
        if expect:
            draft.expect()
        draft.write()

    return make


def _drop(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(name)


def _drop_layer(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        del weights[name]


def _change(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Weights], None]:
    def edit(weights: Weights) -> None:
        weights[name] = np.ascontiguousarray(change(weights[name]))

    return edit


def _all(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: change(tensor) for name, tensor in weights.items()})


def _cast(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: tensor.astype(dtype)


def _spoil(name: str, value: float, count: int) -> Callable[[Weights], None]:
    return lambda weights: weights[name].reshape(-1).__setitem__(slice(3, 3 + count), value)


def _all_nan(weights: Weights) -> None:
    for tensor in weights.values():
        tensor[...] = np.nan


def _extra_layer(weights: Weights) -> None:
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    weights |= {name.replace(old, new): tensor for name, tensor in weights.items() if name.startswith(old)}


def _extra(name: str, size: int) -> Callable[[Weights], None]:
    return lambda weights: weights.__setitem__(name, np.ones(size, np.float32))


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a row too many": lambda t: np.concatenate([t, t[:1]]),
    "a column too few": lambda t: t[:, 1:],
    "flattened": lambda t: t.reshape(-1),
    "with a third dimension": lambda t: t[None],
    "empty": lambda t: t[:0],
    "a scalar": lambda t: t[0, 0].reshape(()),
    "in int8": _cast(np.int8),
    "in int32": _cast(np.int32),
    "in uint16": _cast(np.uint16),
    "in bool": _cast(np.bool_),
    "in complex numbers": _cast(np.complex64),
    "in another FP8": _cast(ml_dtypes.float8_e5m2),
}


def _tied(kind: str) -> Iterator[Case]:
    def make(edit: Callable[[Weights], None], different: bool = False) -> Callable[[Draft], None]:
        def run(draft: Draft) -> None:
            draft.fields["tie_word_embeddings"] = True
            edit(draft.weights)
            computed = draft.weights if HEAD in draft.weights else draft.weights | {HEAD: draft.weights[EMBED]}
            computed = {EMBED: computed[HEAD], **computed}
            draft.expected = (draft.fields | {"tie_word_embeddings": False}, computed)
            draft.write()

        return run

    def equal(weights: Weights) -> None:
        weights[HEAD] = weights[EMBED].copy()

    yield Case(kind, "tied, another head stored", "report", make(lambda weights: None), (HEAD, "tie_word_embeddings"))
    yield Case(kind, "tied, the same head stored", "accept", make(equal), ())
    yield Case(kind, "tied, no head stored", "accept", make(_drop(HEAD)), ())
    yield Case(kind, "tied, only the head stored", "accept", make(_drop(EMBED)), ())
    yield Case(
        kind, "tied, a head of another shape", "refuse", make(_change(HEAD, lambda t: t[:50])), (HEAD, "[50, 24]")
    )


def _sparse_tied(draft: Draft) -> None:
    draft.fields["tie_word_embeddings"] = True
    draft.write_config()
    size = 2**31
    header = {HEAD: entry("F32", [1, 2**29], 0, size), EMBED: entry("F32", [1, 2**29], size, 2 * size)}
    data = container(header)
    (draft.folder / SINGLE).write_bytes(data)
    os.truncate(draft.folder / SINGLE, len(data) + 2 * size)


def _fp8(kind: str) -> Iterator[Case]:
    """One matrix in FP8 with a scale for each 16 x 4 block."""
    name = DOWN[kind]
    scale = name + "_scale_inv"

    def make(
        edit: Callable[[Draft], None], declared: bool = True, block: list[int] = FP8["weight_block_size"]
    ) -> Callable[[Draft], None]:
        def run(draft: Draft) -> None:
            weight = draft.weights[name]
            grid = (-(-weight.shape[0] // 16), -(-weight.shape[1] // 4))
            scales = np.linspace(0.01, 0.02, grid[0] * grid[1], dtype=np.float32).reshape(grid)
            full = np.repeat(np.repeat(scales, 16, 0), 4, 1)[: weight.shape[0], : weight.shape[1]]
            stored = (weight / full).astype(ml_dtypes.float8_e4m3fn)
            exact = stored.astype(np.float32) * full
            # Alone in its parameter it becomes bfloat16; beside float32 experts the parameter is float32.
            loaded = exact.astype(ml_dtypes.bfloat16).astype(np.float32) if kind == "llama" else exact
            if declared:
                draft.fields["quantization_config"] = FP8 | {"weight_block_size": block}
            draft.expected = (dict(draft.fields), draft.weights | {name: loaded})
            draft.weights |= {name: stored, scale: scales}
            edit(draft)
            draft.write()

        return run

    def drop(draft: Draft) -> None:
        del draft.weights[scale]

    def change(change: Callable[[np.ndarray], np.ndarray], which: str = scale) -> Callable[[Draft], None]:
        return lambda draft: _change(which, change)(draft.weights)

    def nan(draft: Draft) -> None:
        draft.weights[name].reshape(-1)[5] = np.nan
        draft.expected[1][name] = np.full_like(draft.expected[1][name], np.nan)

    def orphan(draft: Draft) -> None:
        draft.weights[name] = draft.expected[1][name]

    yield Case(kind, "FP8, as it should be", "accept", make(lambda draft: None), ())
    yield Case(
        kind, "FP8, not declared", "refuse", make(lambda draft: None, declared=False), (name, "quantization_config")
    )
    yield Case(kind, "FP8, without scales", "refuse", make(drop), (scale, "missing"))
    yield Case(kind, "FP8, a column of scales too few", "refuse", make(change(lambda s: s[:, 1:])), (name, "scales"))
    yield Case(kind, "FP8, scales transposed", "refuse", make(change(lambda s: s.T)), (name, "scales"))
    yield Case(kind, "FP8, scales in int32", "refuse", make(change(_cast(np.int32))), (name, "I32"))
    yield Case(kind, "FP8, scales of a weight that is not", "report", make(orphan), (scale,))
    yield Case(
        kind,
        "FP8, blocks beyond 64 bits",
        "refuse",
        make(lambda draft: None, block=[16, 2**63]),
        (CONFIG, "weight_block_size"),
    )
    yield Case(kind, "FP8, a NaN among the codes", "report", make(nan), (name, "1 values"))


def _experts() -> Iterator[Case]:
    """Faults of experts as a group."""
    prefix = {"mixtral": "model.layers.1.block_sparse_moe.experts.", "deepseek_v3": "model.layers.2.mlp.experts."}
    for kind, start in prefix.items():
        count = 6 if kind == "mixtral" else 9
        gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")

        def extra(weights: Weights, start: str = start, count: int = count) -> None:
            first = {n: t for n, t in weights.items() if n.startswith(f"{start}0.")}
            weights |= {name.replace("experts.0.", f"experts.{count}."): tensor for name, tensor in first.items()}

        def fused(
            weights: Weights, start: str = start, names: tuple[str, str, str] = (gate, up, down), less: int = 0
        ) -> None:
            for layer in ("0", "1", "2"):
                head = f"model.layers.{layer}.mlp.experts."
                old = start.replace(start.split(".")[2] + ".", layer + ".", 1)
                stacks = [
                    [weights.pop(n) for e in range(9) if (n := f"{old}{e}.{name}.weight") in weights] for name in names
                ]
                if stacks[0]:
                    both = [np.concatenate(pair) for pair in zip(stacks[0], stacks[1], strict=True)]
                    weights[head + "gate_up_proj"] = np.stack(both)[: len(both) - less]
                    weights[head + "down_proj"] = np.stack(stacks[2])

        short = f"{start}3.{gate}.weight"
        yield Case(
            kind, "experts, one with a row less", "refuse", _edit(_change(short, lambda t: t[1:])), (short, SINGLE)
        )
        yield Case(kind, "experts, one too many", "report", _edit(extra), (f"{start}{count}.", "experts"))
        yield Case(kind, "experts, many without bytes", "refuse", _hollow, (CONFIG, "num_hidden_layers"))
        yield Case(kind, "experts, fused", "accept", _edit(fused), ())
        less = _edit(lambda weights, fused=fused: fused(weights, less=1))
        yield Case(kind, "experts, fused, one missing", "refuse", less, ("gate_up_proj", SINGLE))
    yield Case("deepseek_v3", "tensors, a prediction layer", "accept", _prediction, ())
    yield Case(
        "deepseek_v3",
        "tensors, a plain layer where a prediction layer may be",
        "report",
        _no_prediction,
        ("model.layers.3.", "layers"),
    )


def _hollow(draft: Draft) -> None:
    """Tensors without bytes do not justify what the config asks for."""
    experts = {"num_hidden_layers": 64, "num_local_experts": 4096, "n_routed_experts": 4096, "n_group": 2}
    draft.fields |= {name: value for name, value in experts.items() if name in draft.fields}
    draft.weights |= {f"x{i}": np.zeros((4096, 0, 0), np.float32) for i in range(64)}
    draft.write()


def _prediction(draft: Draft) -> None:
    draft.fields["num_nextn_predict_layers"] = 1
    _extra_layer(draft.weights)
    draft.weights["model.layers.3.eh_proj.weight"] = np.zeros((24, 48), np.float32)
    draft.write()


def _no_prediction(draft: Draft) -> None:
    draft.fields["num_nextn_predict_layers"] = 1
    _extra_layer(draft.weights)
    draft.write()
