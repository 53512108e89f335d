"""Write and read PEFT's ``adapter_config.json``."""

import collections
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from nnxmoe.config.printable import short
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.untrusted_files import read_object

CONFIG_FILE = "adapter_config.json"

# Supported fields: this module reads them, or they do not affect a trained adapter, or the tensors imply them.
_KNOWN = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
    *("init_lora_weights", "ensure_weight_tying", "bias"),
}
_HARMLESS_INIT = (True, False, None, "gaussian", "eva", "orthogonal")  # Other values change the base model's weights.
# In models with experts, adapters of these modules must target the parameter instead of the module. PEFT 0.21 mistakes
# modules with these names for the expert modules of transformers 4, and a router is not a torch.nn.Linear.
_TAKEN = {"gate_proj", "up_proj", "down_proj", "gate", "router"}
_REPEATED_GROUP = re.compile(r"\)[*+{]")  # Matching a pattern with a repeated group can take exponential time.
# Adapter types and LoRA fields that peft 0.21 cannot merge: they add to the prompt, depend on the input, or need a bias
# that the base model lacks.
_UNMERGEABLE_TYPES = {
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT"),
    *("BEFT", "LILY", "POLY", "SHADOW", "XLORA"),
}
_UNMERGEABLE_FIELDS = {"alora_invocation_tokens", "arrow_config", "lora_bias"}


def _remedy(mergeable: bool) -> str:
    if mergeable:
        return "merge it into its base model with peft (merge_and_unload), and load the result"
    return "peft cannot merge it into the base model: use it with peft, or train a plain LoRA adapter"


Numbers = tuple[int, float]


def settings_of(numbers: Mapping[str, Numbers], *, has_experts: bool) -> dict[str, Any]:
    """Return the fields of adapter_config.json.

    Args:
        numbers: Parameter name, or a suffix such as ``mlp.up_proj.weight`` -> (rank, alpha).
        has_experts: Whether the model has MoE layers.
    """

    def is_module(name: str) -> bool:
        module, _, attribute = name.rpartition(".")
        return attribute == "weight" and not (has_experts and module.rpartition(".")[2] in _TAKEN)

    (rank, alpha), _ = collections.Counter(numbers.values()).most_common(1)[0]
    target_numbers = {name.removesuffix(".weight") if is_module(name) else name: pair for name, pair in numbers.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": {re.escape(name): r for name, (r, _) in target_numbers.items() if r != rank},
        "alpha_pattern": {re.escape(name): a for name, (_, a) in target_numbers.items() if a != alpha},
        "target_modules": sorted(target_numbers.keys() - numbers.keys()),
        "target_parameters": sorted(target_numbers.keys() & numbers.keys()) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }


@dataclasses.dataclass(frozen=True)
class Settings:
    """Fields of an adapter_config.json, with the path of the file."""

    fields: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the settings from a file. Raises CheckpointError for adapters other than plain LoRA."""
        if not os.path.lexists(path) and os.path.lexists(path.with_name("config.json")):
            raise CheckpointError(f"{path.parent} contains a whole model and no adapter: load it as the model")
        fields = read_object(path, "an adapter folder must have this file", CheckpointError)
        if "fine_tune_type" in fields:
            raise CheckpointError(f"{path} describes an adapter in mlx-lm's format: fuse the adapter with mlx_lm.fuse")
        if (peft_type := str(fields.get("peft_type"))) != "LORA":
            raise CheckpointError(
                f"{path}: peft_type {short(fields.get('peft_type'))} is not 'LORA', the only supported type; "
                f"{_remedy(peft_type not in _UNMERGEABLE_TYPES)}"
            )
        unsupported = [name for name, value in fields.items() if name not in _KNOWN and value]
        unsupported += ["bias"] if fields.get("bias") not in ("none", None) else []
        if unsupported:
            name = next((name for name in unsupported if name in _UNMERGEABLE_FIELDS), unsupported[0])
            remedy = _remedy(name not in _UNMERGEABLE_FIELDS)
            raise CheckpointError(f"{path}: {name} {short(fields[name])} is not supported; {remedy}")
        init_method = fields.get("init_lora_weights")
        if not (isinstance(init_method, bool | str | None) and init_method in _HARMLESS_INIT):
            raise CheckpointError(
                f"{path}: init_lora_weights {short(init_method)} changes the base model: convert the adapter with "
                "peft (save_pretrained with path_initial_model_for_weight_conversion)"
            )
        settings = cls(fields, path)
        settings._check_types()
        return settings

    def _check_types(self) -> None:
        def is_name_list(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(name, str) for name in value)

        def is_object(value: Any) -> bool:
            return isinstance(value, Mapping)

        def is_index_list(value: Any) -> bool:
            return all(type(i) is int for i in (value if isinstance(value, list) else [value]))

        checks: dict[str, tuple[Callable[[Any], bool], str]] = {
            "target_parameters": (is_name_list, "a list of names"),
            "target_modules": (
                lambda value: isinstance(value, str) or is_name_list(value),
                "a pattern or a list of names",
            ),
            "exclude_modules": (
                lambda value: isinstance(value, str) or is_name_list(value),
                "a pattern or a list of names",
            ),
            "layers_pattern": (
                lambda value: isinstance(value, str) or is_name_list(value),
                "a pattern or a list of patterns",
            ),
            "layers_to_transform": (is_index_list, "an integer or a list of integers"),
            "rank_pattern": (is_object, "an object"),
            "alpha_pattern": (is_object, "an object"),
            "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
        }
        for name, (is_valid, description) in checks.items():
            if (value := self.fields.get(name)) is not None and not is_valid(value):
                raise CheckpointError(f"{self.path}: {name} {short(value)} is not {description}")

    def _matches(self, field: str, pattern: str, name: str, *, whole: bool = True) -> re.Match[str] | None:
        """Match a pattern from a field against a name, or against the start of the name if not ``whole``.

        Raises CheckpointError if the pattern is not a valid regular expression, or if it repeats a group.
        """
        if _REPEATED_GROUP.search(pattern):
            raise CheckpointError(f"{self.path}: {field} {short(pattern)} is not supported: it repeats a group")
        try:
            return re.fullmatch(pattern, name) if whole else re.match(pattern, name)
        except re.error as error:
            raise CheckpointError(
                f"{self.path}: {field} {short(pattern)} is not a valid regular expression: {error}"
            ) from None

    def has_parameter(self, name: str) -> bool:
        """Return whether ``target_parameters`` lists a parameter such as ``model.layers.0.mlp.experts.down_proj``."""
        return _named(name, self.fields.get("target_parameters") or [])

    def has_module(self, name: str) -> bool:
        """Return whether the adapter targets a module such as ``model.layers.0.mlp.up_proj``.

        Follows peft's ``check_target_module_exists``.
        """
        targets, excluded = self.fields.get("target_modules"), self.fields.get("exclude_modules")
        if isinstance(excluded, str) and excluded:
            if self._matches("exclude_modules", excluded, name):
                return False
        elif _named(name, excluded or []):
            return False
        if isinstance(targets, str):
            if targets.lower() == "all-linear":
                return name.rpartition(".")[2] not in ("lm_head", "embed_tokens")
            return self._matches("target_modules", targets, name) is not None
        if name in (targets or []):
            return True
        return _named(name, targets or []) and self._in_layers(name)

    def _in_layers(self, name: str) -> bool:
        layers, patterns = self.fields.get("layers_to_transform"), self.fields.get("layers_pattern") or []
        if layers is None or layers == []:
            return True
        patterns = [patterns] if isinstance(patterns, str) else patterns
        expressions = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns] or [
            r".*?\.[^.]*\.(?P<idx>\d+)\."
        ]
        match = next(
            (m for pattern in expressions if (m := self._matches("layers_pattern", pattern, name, whole=False))), None
        )
        return match is not None and int(match["idx"]) in (layers if isinstance(layers, list) else [layers])

    def numbers(self, name: str) -> Numbers:
        """Return (rank, alpha) of a module or parameter by name.

        The scale of the adapter is alpha / rank. With rsLoRA, the returned alpha includes the factor sqrt(rank).
        """
        rank = self._number("r", "rank_pattern", name)
        alpha = self._number("lora_alpha", "alpha_pattern", name)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < 2**31:
            raise CheckpointError(f"{self.path}: the rank {short(rank)} of {name} is not a positive integer")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 2**31:
            raise CheckpointError(f"{self.path}: lora_alpha {short(alpha)} of {name} is not a positive number")
        return rank, float(alpha) * (math.sqrt(rank) if self.fields.get("use_rslora") else 1.0)

    def _number(self, field: str, patterns: str, name: str) -> Any:
        """Return the value of the first pattern that matches the name, else the field's value (default 8).

        Follows peft's ``get_pattern_key``.
        """
        for pattern, value in (self.fields.get(patterns) or {}).items():
            if self._matches(patterns, rf"(.*\.)?({pattern})$", name, whole=False):
                return value
        return self.fields.get(field, 8)


def _named(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)
