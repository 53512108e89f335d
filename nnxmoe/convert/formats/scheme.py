"""Parse ``quantization_config``: the tool that quantized a checkpoint, and the tool's settings."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.storage.find_checkpoint import module_spellings

METHODS = {
    "fp8": "FP8 with scales per block (DeepSeek-V3, V4) or per tensor",
    "compressed-tensors": "FP8, int8, packed 4-bit and 8-bit integers, NVFP4, MXFP4, MXFP8",
    "modelopt": "FP8, NVFP4, MXFP8",
    "awq": "version gemm, 4 bits",
    "gptq": "4 or 8 bits",
    "auto-round": "packed as GPTQ or AWQ",
    "bitsandbytes": "4 bits, NF4",
    "mxfp4": "blocks and scales of experts, as in gpt-oss",
}
_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "mixed-precision", "dense")
_FORMATS += ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
_ALGORITHMS = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_pb_real", "nvfp4", "w4a16_nvfp4", "w4a8_nvfp4_fp8")
_ALGORITHMS += ("mxfp8", "mixed_precision")
# Method -> (field, supported values, the tool's default). The default is None if the field is required.
GPTQ_FORMATS = ("gptq", "gptq_v2", None)
_FIELDS: dict[str, list[tuple[str, tuple[Any, ...], Any]]] = {
    "fp8": [("fmt", ("e4m3", "float8_e4m3fn"), "e4m3"), ("activation_scheme", ("dynamic", "static"), "dynamic")],
    "compressed-tensors": [("format", _FORMATS, "dense")],
    "modelopt": [("quant_algo", _ALGORITHMS, "mixed_precision")],
    "awq": [("version", ("gemm",), "gemm"), ("bits", (4,), 4)],
    "gptq": [("bits", (4, 8), None), ("checkpoint_format", GPTQ_FORMATS, "gptq")],
    "bitsandbytes": [
        ("load_in_8bit", (False,), False),
        ("_load_in_8bit", (False,), False),
        ("bnb_4bit_quant_type", ("nf4",), "nf4"),
    ],
    "mxfp4": [],
}
_GPTQ, _AWQ = {"quant_method": "gptq"}, {"quant_method": "awq"}
_GPTQ_V2 = _GPTQ | {"checkpoint_format": "gptq_v2"}
# AutoRound's ``packing_format`` -> settings of the tool with the same packing (``auto_round/inference/backend.py``).
_PACKINGS = {"auto_round:auto_gptq": _GPTQ, "auto_round:gptq": _GPTQ, "auto_round:gptqmodel": _GPTQ_V2}
_PACKINGS |= {"auto_round": _GPTQ_V2, "auto_round:auto_awq": _AWQ, "auto_round:awq": _AWQ}


class MalformedTensor(CheckpointError):
    """Error for a malformed tensor. Loading collects these errors and reports them together."""


@dataclasses.dataclass(frozen=True)
class QuantizationScheme:
    """Quantization settings of a checkpoint.

    Attributes:
        method: Key of `METHODS`. Empty if the checkpoint is not quantized.
        fields: Fields of ``quantization_config``.
        where: Location of the settings, for messages.
        groups: For compressed-tensors, pairs of (targets that match modules, settings of the modules' weights).
    """

    method: str
    fields: Mapping[str, Any]
    where: str
    groups: tuple[tuple[list[str], "WeightScheme"], ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> "QuantizationScheme":
        """Parse the settings in a config.json. Raises CheckpointError for unsupported quantization."""
        fields, where = config.get("quantization_config"), f"{where}: quantization_config"
        if fields is None:
            return cls("", {}, where)
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"{where} must be an object, got {short(fields)}")
        # Older ModelOpt files lack quant_method.
        method = fields.get("quant_method", "modelopt" if "quant_algo" in fields else None)
        if method is None:
            raise CheckpointError(f"{where} lacks quant_method, the name of the quantization method")
        if not isinstance(method, str) or method not in METHODS:
            listing = "; ".join(f"{name!r} ({description})" for name, description in METHODS.items())
            raise CheckpointError(f"{where}: method {short(method)} is not supported; supported: {listing}")
        for name in ("rotation", "rotation_config", "spinquant_config"):  # fields of GPTQModel and AutoRound
            if fields.get(name):
                reason = "rotates activations at run time, which is not supported"
                raise CheckpointError(f"{where}: {name} {short(fields[name])} {reason}")
        scheme = cls(method, _with_older_names(method, fields), where)
        if method == "auto-round":
            scheme = scheme._repacked()
        for name, allowed, default in _FIELDS[scheme.method]:
            scheme.choice(name, allowed, default)
        if scheme.method == "compressed-tensors":
            return dataclasses.replace(scheme, groups=_groups(scheme))
        if scheme.method == "fp8":
            scheme.block()
        elif scheme.method in ("awq", "gptq"):
            scheme.group_size()
        if scheme.method == "gptq" and not isinstance(dynamic := scheme.fields.get("dynamic"), Mapping | None):
            raise CheckpointError(f"{scheme.where}: dynamic must be an object, got {short(dynamic)}")
        return scheme

    def _repacked(self) -> "QuantizationScheme":
        """Convert AutoRound's settings to the settings of the tool with the same packing.

        ``extra_config`` becomes ``dynamic``, so that the tensors determine the settings of each module.
        """
        self.choice("data_type", ("int",), "int")
        packing = self.choice("packing_format", tuple(_PACKINGS), "auto_round:gptq")
        fields = {"bits": 4, **self.fields, "dynamic": self.fields.get("extra_config"), **_PACKINGS[packing]}
        return QuantizationScheme(fields["quant_method"], fields, f"{self.where} of AutoRound")

    def check_use(self, count: int) -> None:
        """Raise CheckpointError if the settings require quantized weights and the checkpoint has none (``count`` 0)."""
        has_blocks = self.method == "fp8" and self.block() is not None
        is_dense = self.fields.get("format") == "dense"
        has_exclusions = bool(self.fields.get("dynamic"))  # may exclude all modules
        if self.method and not (count or has_blocks or is_dense or has_exclusions):
            remark = " without weight_block_size" if self.method == "fp8" else ""
            raise CheckpointError(
                f"{self.where} has quant_method {self.method!r}{remark}, but no tensor contains quantized weights: "
                "check that config.json belongs to these files, or remove the field"
            )

    def choice(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """Return a field's value, with strings in lower case. Raises CheckpointError if it is not in ``allowed``."""
        value = self.fields.get(name, default)
        if value is None and None not in allowed:
            raise CheckpointError(f"{self.where} lacks {name}: set it to one of {', '.join(map(repr, allowed))}")
        normalized = value.lower() if isinstance(value, str) else value
        if normalized not in allowed or isinstance(value, bool) != isinstance(default, bool):
            listing = ", ".join(map(repr, allowed))
            raise CheckpointError(f"{self.where}: {name} {short(value)} is not supported; supported: {listing}")
        return normalized

    def group_size(self) -> int | None:
        """Return the number of inputs per group. `None` if all inputs form one group."""
        value = self.fields.get("group_size", 128)
        if type(value) is not int or (value < 1 and value != -1):
            raise CheckpointError(f"{self.where}: group_size must be a positive integer or -1, got {short(value)}")
        return None if value == -1 else value

    def block(self) -> tuple[int, int] | None:
        """Return DeepSeek's ``weight_block_size`` (rows, columns). `None` if the field is missing."""
        return self._pair("weight_block_size", self.fields.get("weight_block_size"))

    def _pair(self, name: str, value: Any) -> tuple[int, int] | None:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in value):
            raise CheckpointError(f"{self.where}: {name} must be two positive integers, got {short(value)}")
        return value[0], value[1]

    def weights(self, module: str) -> "WeightScheme":
        """Return the compressed-tensors settings of a module's weight.

        Raises MalformedTensor if no group matches the module.
        """
        ranked = [(_nearness(target, module), weights) for targets, weights in self.groups for target in targets]
        rank, weights = max(ranked, key=lambda pair: pair[0], default=(0, None))
        if not rank or weights is None:
            raise MalformedTensor(f"{module} is quantized, but no group in config_groups targets it")
        return weights


@dataclasses.dataclass(frozen=True)
class WeightScheme:
    """compressed-tensors settings for the weights of a group of modules.

    Attributes:
        bits: Bits per code, 4 or 8.
        strategy: Granularity of the scales: "tensor", "channel", "group", "tensor_group" or "block".
        size: Number of inputs per group.
        block: Rows and columns per block.
        symmetric: Whether the weights have no zero points.
        floats: Whether the codes are FP8 or FP4 instead of integers.
    """

    bits: int
    strategy: str
    size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    floats: bool

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], scheme: QuantizationScheme) -> "WeightScheme":
        """Parse ``config_groups.*.weights`` with the library's defaults.

        Raises CheckpointError for unsupported settings.
        """
        bits, strategy, size = fields.get("num_bits", 8), fields.get("strategy"), fields.get("group_size")
        code_type = fields.get("type", "int")
        location = f"{scheme.where}: config_groups"
        if type(bits) is not int or bits not in (4, 8):
            raise CheckpointError(f"{location}: num_bits {short(bits)} is not supported; supported: 4, 8")
        if code_type not in ("int", "float"):
            raise CheckpointError(f"{location}: type {short(code_type)} is not supported; supported: int, float")
        if strategy is None:
            strategy = {None: "tensor", -1: "channel"}.get(size, "group")
        size = None if size == -1 else size
        if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
            raise CheckpointError(
                f"{location}: strategy {short(strategy)} is not supported; supported: tensor, channel, group, "
                "tensor_group, block"
            )
        if strategy in ("group", "tensor_group") and (type(size) is not int or size < 1):
            raise CheckpointError(f"{location}: group_size must be a positive integer, got {short(size)}")
        block = fields.get("block_structure")
        if isinstance(block, str) and re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", block):
            block = [int(n) for n in block.split("x")]
        if strategy == "block" and block is None:
            raise CheckpointError(f"{location}: strategy 'block' requires block_structure")
        pair = scheme._pair("block_structure", block) if strategy == "block" else None
        floats = code_type == "float"
        if strategy == "tensor_group" and not floats:
            raise CheckpointError(f"{location}: strategy 'tensor_group' is supported for type 'float' only (NVFP4)")
        return cls(bits, strategy, size, pair, fields.get("symmetric") is not False, floats)


def _with_older_names(method: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with ``format`` renamed to its older name. If both names are present, the older name wins."""
    name = {"gptq": "checkpoint_format", "awq": "version"}.get(method)
    if name is None or fields.get(name) is not None:
        return fields
    value = "llm-awq" if method == "awq" and fields.get("backend") == "llm-awq" else fields.get("format")
    return fields if value is None else {**fields, name: value}


def _nearness(target: str, module: str) -> int:
    """Rank how a target matches a module: 3 by name, 2 by regular expression, 1 by class, 0 if it does not match."""
    names = module_spellings(module)
    if target in names:
        return 3
    if target.startswith("re:"):
        return 2 if any(re.match(target[3:], name) for name in names) else 0
    return int(target == "Linear")


def _groups(scheme: QuantizationScheme) -> tuple[tuple[list[str], WeightScheme], ...]:
    """Parse ``config_groups`` of compressed-tensors. Raises CheckpointError if a group is malformed."""
    groups, parsed_groups = scheme.fields.get("config_groups"), []
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"{scheme.where}: config_groups must be an object, got {short(groups)}")
    for name, group in groups.items():
        location = f"{scheme.where}: config_groups: {short(name)}"
        weights = group.get("weights") if isinstance(group, Mapping) else ""
        if not isinstance(weights, Mapping | None):
            raise CheckpointError(f"{location} requires an object 'weights', or null")
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise CheckpointError(f"{location}: targets must be a list of strings, got {short(targets)}")
        for target in targets:
            try:
                re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            except re.error as error:
                raise CheckpointError(
                    f"{location}: target {short(target)} is not a valid regular expression: {error}"
                ) from None
        if group.get("format") is not None and group["format"] not in _FORMATS:
            raise CheckpointError(
                f"{location}: format {short(group['format'])} is not supported; supported: {', '.join(_FORMATS)}"
            )
        if weights is not None:  # a group without weights is for activations or caches
            parsed_groups.append((targets, WeightScheme.from_fields(weights, scheme)))
    _refuse_rotations(scheme)
    return tuple(parsed_groups)


def _refuse_rotations(scheme: QuantizationScheme) -> None:
    """Raise CheckpointError if activations are transformed at run time.

    Transforms of weights are already applied to the stored weights.
    """
    location, fields = f"{scheme.where}: transform_config", scheme.fields.get("transform_config") or {}
    try:
        groups = fields.get("config_groups") or {}
        locations = {entry["location"] for group in groups.values() for entry in group["apply"]}
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(
            f"{location} must have config_groups with apply and location, got {short(fields)}"
        ) from None
    if rotations := sorted(map(str, locations - {"weight_input", "weight_output"})):
        raise CheckpointError(
            f"{location} rotates activations at run time (location {', '.join(map(short, rotations))}), which is "
            "not supported; only rotations that are fused into the weights are supported"
        )
