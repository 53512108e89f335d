"""transformers' side of one checkpoint, on torch. Needs the 'oracle' extra.

    python -m tests.benchmarks.theirs FOLDER {machine,decode,prefill,load,train} [--setting eager] [--quick]

``--setting``: how its mixture-of-experts layers are computed. Default threads, on a GPU if torch has it.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.benchmarks import engine
from tests.benchmarks.models import Fields

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Clock(transformers.generation.streamers.BaseStreamer):
    """Records when ``generate`` gets each token; the prompt comes first."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: Any) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass


class Theirs:
    """A model of ``AutoModelForCausalLM.from_pretrained``."""

    def __init__(self, folder: Path, experts: str | None):
        self.folder, self.experts = folder, {} if experts is None else {"experts_implementation": experts}
        config = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM._model_mapping[type(config)]  # importing is not part of loading
        self.dtype: Any = config.dtype
        torch.zeros(1, device=DEVICE)

    def load(self) -> None:
        """In the dtype of the checkpoint."""
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="auto", **self.experts)
        self.model = model.to(DEVICE).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, ids: np.ndarray, new: int, streamer: Any = None) -> np.ndarray:
        tokens = torch.tensor(ids, device=DEVICE)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "streamer": streamer}
        with torch.inference_mode():
            return self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).cpu().numpy()

    def stamps(self, ids: np.ndarray, new: int) -> Sequence[float]:
        clock = Clock()
        self.generate(ids, new, clock)
        return clock.stamps[1:]

    def training(self, fields: Fields, tokens: np.ndarray, rank: int | None) -> Callable[[], Any]:
        """Adapters by peft on the same maps as ours: all but the router and the head."""
        config = transformers.AutoConfig.for_model(**fields, use_cache=False)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **self.experts)
        if rank is not None:
            import peft  # here, since loading reports the time of the imports that it needs

            experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "num_experts_per_tok" in fields else None
            adapter = peft.LoraConfig(
                r=rank, lora_alpha=rank, target_modules="all-linear", target_parameters=experts, task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, adapter)
        model = model.to(DEVICE).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        ids, narrow = torch.tensor(tokens, device=DEVICE), self.dtype == torch.bfloat16

        def run() -> None:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        return run

    def products(self, size: int) -> Sequence[Callable[[], Any]]:
        """With the second matrix as it is and transposed, as in a linear layer."""
        x, y = (
            torch.ones(size, size, dtype=self.dtype, device=DEVICE),
            torch.ones(size, size, dtype=self.dtype).to(DEVICE),
        )
        return [lambda: (x @ y)[0, 0].item(), lambda: torch.nn.functional.linear(x, y)[0, 0].item()]

    def copy(self) -> float | None:
        """The best of ten copies of a gigabyte, on a GPU."""
        if DEVICE == "cpu":
            return None
        source = torch.ones(250_000_000, device=DEVICE)
        took = [engine.seconds(lambda: (source.clone(), torch.cuda.synchronize())) for _ in range(11)]
        return 2 * source.nbytes / min(took[1:]) / 1e9


if __name__ == "__main__":
    engine.main(Theirs)
