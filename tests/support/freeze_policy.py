"""Writes ``tests/data/policy.json`` with TRL's GRPOTrainer: ``python -m tests.support.freeze_policy``."""

import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl

from tests.support.policy import (
    CAP,
    CASES,
    FIELDS,
    FROZEN,
    MAX_LENGTH,
    REWARDS,
    STEPS,
    WEIGHTS,
    samples,
    untrained_logps,
)
from tests.support.tiny import tiny_weights, write_checkpoint

GRADIENTS = {"head": "lm_head.weight", "router": "model.layers.0.mlp.gate.weight"}


def tokenizer() -> Any:
    """A tokenizer that the trainer requires. Its ids are not used."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, FIELDS["vocab_size"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def trainer_of(folder: Path, rewards: int = 1, generations: int = 2, beta: float = 0.0, **options: Any) -> Any:
    """TRL's trainer of the tiny model, with float32 on a CPU. It has no reference model for ``beta``."""
    checkpoint = write_checkpoint(folder / "model", FIELDS, tiny_weights(FIELDS))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    fixed: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "num_generations": generations,
        "per_device_train_batch_size": 12,
        "max_completion_length": MAX_LENGTH,
        "gradient_checkpointing": False,
    }
    functions = [lambda completions, **_: [0.0] * len(completions)] * rewards
    data = datasets.Dataset.from_dict({"prompt": ["w3 w4"] * 12})
    trainer = trl.GRPOTrainer(
        model, functions, trl.GRPOConfig(**fixed | options), train_dataset=data, processing_class=tokenizer()
    )
    trainer.beta = beta
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def inputs_of(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, answers on the right."""
    width = max(sample["prompt"] for sample in found)
    lengths = [len(sample["tokens"]) - sample["prompt"] for sample in found]

    def right(values: list[Any], kind: Any) -> torch.Tensor:
        rows = [np.pad(np.asarray(v), (0, max(lengths) - len(v))) for v in values]
        return torch.tensor(np.stack(rows), dtype=kind)

    prompts = [np.pad(s["tokens"][: s["prompt"]], (width - s["prompt"], 0)) for s in found]
    there = [np.arange(width) >= width - s["prompt"] for s in found]
    old, sampler = (right([s[name] for s in found], torch.float32) for name in ("old_logps", "sampler_logps"))
    return {
        "prompt_ids": torch.tensor(np.stack(prompts)).long(),
        "prompt_mask": torch.tensor(np.stack(there)).long(),
        "completion_ids": right([s["tokens"][s["prompt"] :] for s in found], torch.long),
        "completion_mask": right([np.ones(n) for n in lengths], torch.long),
        "advantages": torch.tensor([s["advantages"][0] for s in found]),
        "old_per_token_logps": old,
        "ref_per_token_logps": right([s["reference_logps"] for s in found], torch.float32),
        "importance_sampling_ratio": torch.clamp(torch.exp(old - sampler), max=CAP),
        "num_items_in_batch": torch.tensor(float(sum(lengths))),
    }


def base_logps() -> list[list[float]]:
    """Log-probabilities of the answers in the untrained model."""
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        trainer, inputs = trainer_of(Path(name)), inputs_of(samples(untrained_logps()))
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, there, width)[0]
    return [row[: int(n)].tolist() for row, n in zip(logps, inputs["completion_mask"].sum(1), strict=True)]


def steps_of(options: dict[str, Any], rate: float, base: list[list[float]]) -> list[dict[str, Any]]:
    """Losses, gradients and metrics of SGD with the same samples in all steps."""
    with tempfile.TemporaryDirectory() as name:
        trainer, inputs, found = trainer_of(Path(name), **options), inputs_of(samples(base)), []
        trainer.use_vllm = "vllm_importance_sampling_mode" in options  # the weights are among the inputs
        parameters = dict(trainer.model.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=rate)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            grads = {name: parameters[key].grad[:2, :2].flatten().tolist() for name, key in GRADIENTS.items()}
            norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters.values() if p.grad is not None))
            metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
            kept = {"clipped/low": "clip_ratio/low_mean", "clipped/high": "clip_ratio/high_mean", "kl": "kl"}
            measured = {ours: metrics[theirs] for ours, theirs in kept.items() if theirs in metrics}
            measured["entropy"] = metrics["entropy"]
            found.append({"loss": loss.item(), "norm": norm.item(), "gradients": grads, "metrics": measured})
            optimizer.step()
    return found


def advantages_of(rewards: Any, **options: Any) -> list[list[float]]:
    """Advantages that the trainer computes of rewards ``[functions, prompts, n]``."""
    values = np.array(rewards, float)
    functions, prompts, n = values.shape
    with tempfile.TemporaryDirectory() as name:
        trainer = trainer_of(Path(name), functions, n, reward_weights=list(WEIGHTS[:functions]), **options)
        table = torch.tensor(values.reshape(functions, -1).T, dtype=torch.float32)
        trainer._calculate_rewards = lambda *_: table
        inputs = [{"prompt": "w3 w4"}] * (prompts * n)
        return trainer._generate_and_score_completions(inputs)["advantages"].reshape(prompts, n).tolist()


def main() -> None:
    base = base_logps()
    stored = {
        "trl": trl.__version__,
        "logps": base,
        "steps": {name: steps_of(options, rate, base) for name, (options, _, rate) in CASES.items()},
        "advantages": {
            "group_advantages": advantages_of(REWARDS),
            "dr_grpo": advantages_of(REWARDS, scale_rewards="none"),
            "GDPO": advantages_of(REWARDS, multi_objective_aggregation="normalize_then_sum"),
        },
    }
    short = json.loads(json.dumps(stored), parse_float=lambda text: float(f"{float(text):.8g}"))
    FROZEN.write_text(json.dumps(short) + "\n")


if __name__ == "__main__":
    main()
