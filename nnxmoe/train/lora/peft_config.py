"""Writing and reading PEFT's ``adapter_config.json``."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from nnxmoe.config.printable import short
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import read_object

CONFIG_FILE = "adapter_config.json"

# Fields that do not affect a trained adapter, or that follow from the names and shapes of its tensors.
_KNOWN = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    *("init_lora_weights", "ensure_weight_tying", "bias"),
}
_HARMLESS_INIT = (True, False, None, "gaussian", "eva", "orthogonal")  # other values change the base model's weights
# In models with experts, PEFT 0.21 assumes that modules of these names are the experts of transformers 4, and a router
# is not a torch.nn.Linear: adapters of these modules have to target the parameter instead of the module.
_TAKEN = {"gate_proj", "up_proj", "down_proj", "gate", "router"}
_REMEDY = "use a LoRA adapter saved by peft or nnxmoe"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields of an adapter_config.json, and the file they were read from."""

    fields: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def of(cls, numbers: Mapping[str, tuple[int, float]], *, has_experts: bool) -> Self:
        """The settings of adapters, given (rank, alpha) per parameter name within a layer, ``mlp.up_proj.weight``."""

        def is_module(name: str) -> bool:
            module, _, last = name.rpartition(".")
            return last == "weight" and not (has_experts and module.rpartition(".")[2] in _TAKEN)

        (rank, alpha), _ = collections.Counter(numbers.values()).most_common(1)[0]
        named = {name.removesuffix(".weight") if is_module(name) else name: both for name, both in numbers.items()}
        parameters = [name for name in named if name in numbers]
        return cls(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "inference_mode": True,
                "r": rank,
                "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
                "rank_pattern": {re.escape(name): r for name, (r, _) in named.items() if r != rank},
                "alpha_pattern": {re.escape(name): a for name, (_, a) in named.items() if a != alpha},
                "target_modules": sorted(named.keys() - numbers.keys()),
                "target_parameters": sorted(parameters) or None,
                "bias": "none",
                "lora_dropout": 0.0,
                "fan_in_fan_out": False,
                "use_rslora": False,
                "use_dora": False,
                "init_lora_weights": True,
            }
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """The settings in a file. Raises CheckpointError for anything but plain LoRA."""
        fields = read_object(path, "every adapter folder has this file", CheckpointError)
        if fields.get("peft_type") != "LORA":
            raise CheckpointError(f"{path}: peft_type {short(fields.get('peft_type'))} is not 'LORA'; {_REMEDY}")
        for name, value in fields.items():
            if name not in _KNOWN and value:
                raise CheckpointError(f"{path}: {name} {short(value)} is not supported; {_REMEDY}")
        if fields.get("bias", "none") != "none":
            raise CheckpointError(f"{path}: bias {short(fields['bias'])} is not supported; {_REMEDY}")
        parameters, stable = fields.get("target_parameters"), fields.get("use_rslora")
        if not (isinstance(parameters, list | None) and all(isinstance(name, str) for name in parameters or ())):
            raise CheckpointError(f"{path}: target_parameters {short(parameters)} is not a list of names; {_REMEDY}")
        if not isinstance(stable, bool | None):
            raise CheckpointError(f"{path}: use_rslora {short(stable)} is not true or false; {_REMEDY}")
        init = fields.get("init_lora_weights")
        if not (isinstance(init, bool | str | None) and init in _HARMLESS_INIT):
            raise CheckpointError(
                f"{path}: init_lora_weights {short(init)} changes the base model: convert the adapter with "
                "peft (save_pretrained with path_initial_model_for_weight_conversion)"
            )
        return cls(fields, path)

    def has_parameter(self, name: str) -> bool:
        """Whether ``target_parameters`` names a parameter of a layer, such as ``mlp.experts.gate_up_proj``."""
        return any(_ends(name, target) for target in self.fields.get("target_parameters") or ())

    def numbers(self, name: str) -> tuple[int, float]:
        """(rank, alpha) of a parameter, by its name within a layer; the scale is alpha / rank, also with rsLoRA."""
        rank = self._number("r", "rank_pattern", name)
        alpha = self._number("lora_alpha", "alpha_pattern", name)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < 2**31:
            raise CheckpointError(f"{self.path}: the rank {short(rank)} of {name} is not a positive integer; {_REMEDY}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 2**31:
            raise CheckpointError(f"{self.path}: lora_alpha {short(alpha)} is not a positive number; {_REMEDY}")
        return rank, float(alpha) * (math.sqrt(rank) if self.fields.get("use_rslora") else 1.0)

    def _number(self, field: str, patterns: str, name: str) -> Any:
        """The value of the first pattern that matches the end of a name, else that of the field."""
        found = self.fields.get(patterns) or {}
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self.path}: {patterns} {short(found)} is not an object; {_REMEDY}")
        for pattern, value in found.items():
            plain = pattern.removeprefix("^").removeprefix(r".*\.").replace(r"\.", ".").replace(r"\_", "_")
            if not re.fullmatch(r"[A-Za-z0-9_.]{1,200}", plain) or re.search(r"(^|\.)\d+\.", plain):
                raise CheckpointError(
                    f"{self.path}: {patterns} {short(pattern)} is not supported: only names that hold for all layers "
                    "are"
                )
            if _ends(name, plain) or _ends(name.removesuffix(".weight"), plain):
                return value
        return self.fields.get(field)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or target.endswith(f".{name}")
