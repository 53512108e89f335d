"""Model configs: frozen dataclasses with the field names and defaults of Hugging Face transformers.

A config contains every setting that affects a model's output. Its constructor validates the fields.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from nnxmoe.config.arguments import KnownFields
from nnxmoe.config.bounds import (
    MAX_EXPERTS,
    MAX_LAYERS,
    TOKEN_IDS,
    ConfigError,
    check_at_most,
    check_fields,
    check_multiple,
    check_token_ids,
    count,
    is_one_of,
    number,
    one_of,
)
from nnxmoe.config.frozen import FrozenDict, thaw
from nnxmoe.config.printable import short, some
from nnxmoe.config.rope_parameters import FIELDS as ROPE_FIELDS
from nnxmoe.config.rope_parameters import Rope, rope_from_fields, theta_in
from nnxmoe.config.validate import as_number, python_values

_ROPES = {"rope_scaling", "rope_parameters"}

# Fields omitted from config.json if None, because transformers does not replace null with the default.
ABSENT = frozenset(
    """query_pre_attn_scalar head_dim rope_scaling rope_parameters original_max_position_embeddings
    partial_rotary_factor rotary_dim""".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(KnownFields):
    """Config fields shared by all decoders. Widths and counts are positive integers. None represents ``null``.

    Grouped-query attention multiplies scores by ``query_pre_attn_scalar ** -0.5``. The scalar defaults to the head
    width. It is 1 for MaxText checkpoints, because MaxText folds the scale into the query kernel.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    published_architectures: ClassVar[str] = ""  # Class names in published files that transformers does not define.
    saved_type: ClassVar[str | None] = None  # The model_type in saved files if it differs.
    # Subclasses add entries to ``aliases`` (alternative name -> field), ``fixed`` (field of config.json without a
    # dataclass field -> supported values, first the value to save) and ``ignored`` (fields that do not affect the
    # forward pass).
    aliases: ClassVar[Mapping[str, str]] = {}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"partial_rotary_factor": (None, 1)}
    experts_field: ClassVar[str] = ""  # Name of the field with the number of experts per layer. Empty for dense models.
    experts_per_token_field: ClassVar[str] = (
        "num_experts_per_tok"  # Name of the field with the number of experts per token.
    )
    rope_field: ClassVar[str] = "head_dim"  # Name of the field that determines the rotated width.
    rope_keys: ClassVar[frozenset[str]] = ROPE_FIELDS  # Fields of a rope object that the family reads.
    scale_in_queries: ClassVar[bool] = True  # Whether the query kernel can absorb the attention scale.
    ignored: ClassVar[str] = ""
    default_ropes: ClassVar[Mapping[str, Any]] = FrozenDict({})  # Used if neither rope object is set.
    # Defaults for families without these fields. They are not dataclass fields, because they have no annotations.
    mlp_layer_types = None
    first_k_dense_replace = 0

    vocab_size: int = count(32000, most=2**24)
    hidden_size: int = count(4096, most=2**20)
    intermediate_size: int = count(11008, most=2**24)
    num_hidden_layers: int = count(32, most=MAX_LAYERS)
    num_attention_heads: int = count(32, most=2**14)
    num_key_value_heads: int | None = count(None, most=2**14)
    head_dim: int | None = count(None, most=2**16)
    query_pre_attn_scalar: float | None = number(None, above=0.0, most=2**16)
    hidden_act: str = one_of("silu", "swish")
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = count(None)
    rms_norm_eps: float = number(1e-6, above=1e-20, most=1.0)
    tie_word_embeddings: bool = False
    rope_theta: float = number(10000.0, above=1.0, most=1e15)
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    dtype: str | None = one_of(None, "float32", "bfloat16", "float16", "float64")

    def __post_init__(self) -> None:
        self._update_default_ropes()
        self._read_overrides()
        for name in ("rope_scaling", "rope_parameters"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be an object or null, got {short(value)}")
            object.__setattr__(self, name, None if value is None else FrozenDict(value))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", self.dtype.removeprefix("torch."))
        for field in dataclasses.fields(self):  # Python values and tuples are hashable and JSON-serializable
            object.__setattr__(self, field.name, python_values(getattr(self, field.name)))
        self._check()

    @classmethod
    def rope_overrides(cls, scaling: Any, parameters: Any) -> dict[str, Any]:
        """Map each field that the rope objects override to the value there, or to None if absent.

        The rope objects are ``rope_scaling`` and ``rope_parameters``. Saved files repeat ``rope_theta`` at the top
        level and in the rope object.
        """
        return {"rope_theta": theta_in(scaling or parameters)}

    @classmethod
    def default_ropes_with(cls, theta: Any) -> Mapping[str, Any]:
        """Return ``default_ropes`` with a different value of the field ``rope_theta``."""
        return {**cls.default_ropes, "rope_theta": theta}

    @classmethod
    def _overrides(cls, scaling: Any, parameters: Any) -> dict[str, Any]:
        """Call `rope_overrides`, with ``default_ropes`` if neither rope object is set."""
        return cls.rope_overrides(scaling, parameters if scaling or parameters else cls.default_ropes)

    def _update_default_ropes(self) -> None:
        """If neither object is set, ``rope_theta`` replaces the theta of ``default_ropes``.

        An existing ``rope_parameters`` that equals ``default_ropes`` apart from the theta counts as not set.
        """
        ropes, theta = self.rope_parameters or self.default_ropes, as_number(self.rope_theta)
        if not self.default_ropes or self.rope_scaling or theta is None or not isinstance(ropes, FrozenDict):
            return
        current = self._overrides(None, ropes)["rope_theta"]
        if theta != current and ropes == self.default_ropes_with(current):
            updated = self.default_ropes_with(theta)
            object.__setattr__(self, "rope_parameters", None if updated == self.default_ropes else updated)

    def _read_overrides(self) -> None:
        """Set the fields that the rope objects override.

        Raises ConfigError if a field differs from a rope object of an existing config (a `FrozenDict`). A rope object
        passed as a dict takes precedence over the field.
        """
        scaling_overrides = self.rope_overrides(self.rope_scaling, None)
        for name, override in self._overrides(self.rope_scaling, self.rope_parameters).items():
            value, rope = getattr(self, name), "rope_parameters" if scaling_overrides[name] is None else "rope_scaling"
            if override is None or (value is not None and as_number(value) is None):
                continue  # `check_fields` reports values that are not numbers
            if isinstance(getattr(self, rope), FrozenDict) and as_number(value) not in (None, as_number(override)):
                raise ConfigError(
                    f"{name} is {short(value)}, but {rope} sets {short(override)}: set {short(value)} there as well, "
                    f"or pass {rope}=None"
                )
            object.__setattr__(self, name, override)

    def _check(self) -> None:
        check_fields(self)
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        if self.experts * self.num_hidden_layers > MAX_EXPERTS:
            raise ConfigError(
                f"num_hidden_layers {self.num_hidden_layers} with {self.experts} experts per layer exceeds the "
                f"supported total of {MAX_EXPERTS} experts"
            )
        if self.query_pre_attn_scalar is not None and not self.scale_in_queries:
            raise ConfigError(f"query_pre_attn_scalar is not supported for {self.model_type}: remove it")
        check_token_ids({name: getattr(self, name) for name in TOKEN_IDS}, self.vocab_size)
        _ = self.rope
        if self.experts:
            self._check_experts()

    def _check_experts(self) -> None:
        check_at_most(self, self.experts_per_token_field, self.experts_field)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Create a config from a parsed config.json in the format of transformers 4 or 5.

        Absent fields have the family's defaults. Fields that neither nnxmoe nor transformers reads are dropped (see
        `notes`).

        Raises:
            ConfigError: If a value is not supported, or an unknown field changes what transformers computes.
        """
        from nnxmoe.config.config_json import check_unknown_fields

        values, field_names = cls._standard_fields(fields), cls._field_names()
        for name, allowed in cls._inherited("fixed").items():
            if name in values and name not in field_names and not is_one_of(values[name], allowed):
                raise ConfigError(
                    f"{name} {short(values[name])} is not supported; supported: {', '.join(map(repr, allowed))}"
                )
        values.setdefault("dtype", values.get("torch_dtype"))
        for name in _ROPES & values.keys():
            if isinstance(rope := values[name], Mapping):
                values[name] = {k: v for k, v in rope.items() if k in cls.rope_keys or isinstance(v, Mapping)}
        for name, value in cls._overrides(values.get("rope_scaling"), values.get("rope_parameters")).items():
            if value is not None:  # the rope object overrides the field in transformers, too
                values.pop(name, None)
        config = cls(**{k: v for k, v in values.items() if k in field_names})
        check_unknown_fields(config, cls.unknown_fields(fields), fields)
        return config

    @classmethod
    def notes(cls, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Return notes on a config.json: fields that `from_hf` drops, and token ids outside the vocabulary."""
        from nnxmoe.config.config_json import describe_fields

        unread = describe_fields(cls.unknown_fields(fields))
        text = f"config.json has fields that neither nnxmoe nor transformers reads for {cls.model_type} models: "
        invalid_ids = check_token_ids(fields, fields.get("vocab_size", cls.vocab_size))
        ignored = (f"config.json: {some(invalid_ids)}: ignored, because not in the vocabulary",) if invalid_ids else ()
        return ((text + some(unread, 20),) if unread else ()) + ignored

    @classmethod
    def unknown_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json and its rope object that this family neither reads nor ignores."""
        from nnxmoe.config.config_json import IGNORED

        ignored = IGNORED | {name for base in cls.__mro__ for name in vars(base).get("ignored", "").split()}
        names = cls._field_names() | ignored | cls._inherited("fixed").keys() | cls._inherited("aliases").keys()
        unknown = {name: value for name, value in fields.items() if name not in names}
        for name in _ROPES & fields.keys():
            if isinstance(rope := fields[name], Mapping):
                unknown |= {f"{name}.{k}": rope[k] for k in rope.keys() - cls.rope_keys if f"{name}.{k}" not in names}
        if not any(fields.get(name) for name in _ROPES):
            defaults = {k: v for k, v in cls._overrides(None, None).items() if v is not None and k not in ignored}
            unknown |= {k: fields[k] for k, v in defaults.items() if k in fields and fields[k] != v}
        return unknown

    @classmethod
    def _field_names(cls) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)}

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Rename aliases to field names. Raises ConfigError if two names of a field have different values."""
        aliases = cls._inherited("aliases")
        values: dict[str, tuple[str, Any]] = {}  # field -> (name in the file, value)
        for alias, value in fields.items():
            name = aliases.get(alias, alias)
            first_name, first_value = values.setdefault(name, (alias, value))
            if first_value is None:
                values[name] = alias, value
            elif value is not None and first_name != alias and value != first_value:
                raise ConfigError(
                    f"{first_name} {short(first_value)} and {alias} {short(value)} set the same field: remove one"
                )
        return {name: value for name, (_, value) in values.items()}

    @classmethod
    def _inherited(cls, name: str) -> dict[str, Any]:
        """Merge the dicts that this class and its bases assign to a class variable."""
        return {k: v for base in reversed(cls.__mro__) for k, v in vars(base).get(name, {}).items()}

    def to_hf(self) -> dict[str, Any]:
        """Return the fields of a config.json. `from_hf` converts them back to an equal config.

        Includes the first value of each ``fixed`` field unless the value is None, because some programs select a
        different router if the fields are absent.
        """
        fields: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        fields |= {name: values[0] for name, values in self._inherited("fixed").items() if values[0] is not None}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in ABSENT:
                continue
            fields[field.name] = thaw(value)
        return fields

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads (K). Defaults to the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of an attention head (H). Defaults to hidden_size / num_attention_heads."""
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}: "
                "set head_dim"
            )
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_scalar(self) -> float:
        """``query_pre_attn_scalar``. Defaults to the head width."""
        return self.head_width if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar

    @property
    def query_scale(self) -> float:
        """Factor that multiplies the scores in grouped-query attention."""
        return self.query_scalar**-0.5

    def fold_query_scale(self) -> tuple[Self, float]:
        """Return the config without query_pre_attn_scalar, and the equivalent factor to fold into the queries."""
        if self.query_pre_attn_scalar is None:
            return self, 1.0
        factor = (self.head_width / self.query_pre_attn_scalar) ** 0.5
        return dataclasses.replace(self, query_pre_attn_scalar=None), factor

    @property
    def window(self) -> int | None:
        """Sliding window of all layers in tokens, or None if layers attend to all tokens."""
        return None

    @property
    def windows(self) -> Sequence[int | None]:
        """Sliding window of each layer in tokens, or None for layers that attend to all tokens."""
        return (self.window,) * self.num_hidden_layers

    @property
    def experts(self) -> int:
        """Experts per MoE layer (E); 0 if dense."""
        return getattr(self, self.experts_field) if self.experts_field else 0

    @property
    def experts_per_token(self) -> int:
        """Experts per token (X); 0 if dense."""
        return getattr(self, self.experts_per_token_field) if self.experts else 0

    @property
    def empty_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of the zero-size tensors that transformers stores in each MoE layer."""
        return {}

    @property
    def unused_tensors(self) -> Collection[str]:
        """Names of tensors that checkpoints may contain but the reference implementation ignores."""
        return ()

    @property
    def sparse_layers(self) -> Sequence[bool]:
        """Whether each layer is an MoE layer, from ``mlp_layer_types``.

        If ``mlp_layer_types`` is null, all layers of an MoE model are MoE layers except the first
        ``first_k_dense_replace``.
        """
        layer_types: Sequence[str] | None = self.mlp_layer_types
        if layer_types is not None:
            return tuple(layer_type != "dense" for layer_type in layer_types)
        return tuple(self.experts > 0 and i >= self.first_k_dense_replace for i in range(self.num_hidden_layers))

    @property
    def rope_dim(self) -> int:
        """Number of rotated dimensions per head."""
        return self.head_width

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        """Rope object: ``rope_scaling`` (transformers 4), ``rope_parameters`` (transformers 5) or ``default_ropes``."""
        return self.rope_scaling or self.rope_parameters or self.default_ropes

    @property
    def rope(self) -> Rope:
        """Rotary embedding built from the rope fields."""
        positions = self.max_position_embeddings, self.original_max_position_embeddings
        return rope_from_fields(self.rope_fields, self.rope_dim, self.rope_theta, *positions, self.rope_field)
