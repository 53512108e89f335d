"""What a model is: frozen dataclasses with Hugging Face's own field names and defaults.

A config determines the numbers. Its fields are validated when it is created, in Python or from a config.json.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from nnxmoe.config.bounds import (
    DTYPES,
    MOST_EXPERTS,
    TOKEN_IDS,
    ConfigError,
    check_fields,
    check_token_ids,
    count,
    number,
)
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short, some
from nnxmoe.config.rope import Rope
from nnxmoe.config.rope_fields import FIELDS as ROPE_FIELDS
from nnxmoe.config.rope_fields import kind_of, rope_from_fields

logger = logging.getLogger(__name__)


# Fields omitted from config.json if None: transformers would take null for a value.
ABSENT = frozenset(
    {"query_pre_attn_scalar", "head_dim", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields shared by all decoders. Widths and counts are positive integers; None stands for ``null``.

    ``query_pre_attn_scalar``: grouped-query attention multiplies scores by its ``-0.5``-th power; None: by that of the
    head width. It is 1 for checkpoints of MaxText, whose queries carry the scale.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}  # another name of a field -> the field
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # a field that is not stored -> the values it may have
    rope_field: ClassVar[str] = "head_dim"  # the field with the rotated width
    grouped: ClassVar[bool] = True  # whether attention is grouped-query attention
    # Fields of config.json that do not affect the forward pass; families add their own.
    ignored: ClassVar[str] = """architectures model_type transformers_version torch_dtype _name_or_path use_cache
        pretraining_tp initializer_range attention_dropout auto_map attn_implementation _attn_implementation_autoset
        output_attentions output_hidden_states return_dict use_return_dict task_specific_params is_encoder_decoder
        is_decoder tie_encoder_decoder chunk_size_feed_forward unsloth_version quantization_config add_cross_attention
        cross_attention_hidden_size id2label label2id problem_type torchscript pruned_heads finetuning_task prefix
        sep_token_id decoder_start_token_id tokenizer_class partial_rotary_factor max_window_layers"""

    vocab_size: int = count(32000, most=2**24)
    hidden_size: int = count(4096, most=2**20)
    intermediate_size: int = count(11008, most=2**24)
    num_hidden_layers: int = count(32, most=1024)
    num_attention_heads: int = count(32, most=2**14)
    num_key_value_heads: int | None = count(None, most=2**14)
    head_dim: int | None = count(None, most=2**16)
    query_pre_attn_scalar: float | None = number(None, above=0.0, most=2**16)
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = count(None)
    rms_norm_eps: float = number(1e-6, above=1e-20, most=1.0)
    tie_word_embeddings: bool = False
    rope_theta: float = number(10000.0, above=1.0, most=1e15)
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2
    pad_token_id: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("rope_scaling", "rope_parameters"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be an object or null, got {short(value)}")
            object.__setattr__(self, name, None if value is None else FrozenDict(value))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", self.dtype.removeprefix("torch."))
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        self._check()

    def _check(self) -> None:
        check_fields(self)
        if self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )
        if self.experts * self.num_hidden_layers > MOST_EXPERTS:
            raise ConfigError(
                f"num_hidden_layers {self.num_hidden_layers} with {self.experts} experts each is beyond what is "
                f"supported: at most {MOST_EXPERTS} experts in all"
            )
        if self.query_pre_attn_scalar is not None and not self.grouped:
            raise ConfigError(f"query_pre_attn_scalar is not supported for {self.model_type}: remove it")
        if self.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {short(self.hidden_act)} is not supported; supported: 'silu'")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype {short(self.dtype)} is not supported; supported: {', '.join(DTYPES)}")
        check_token_ids({name: getattr(self, name) for name in TOKEN_IDS}, self.vocab_size)
        _ = self.rope

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Self:
        """Config from a parsed config.json (transformers 4 or 5 style); absent fields take the family's defaults.

        Raises ConfigError for unsupported values. Unknown fields are ignored with a warning.
        """
        for alias, name in cls.aliases.items():
            if alias in fields and fields.get(name, fields[alias]) != fields[alias]:
                raise ConfigError(
                    f"{alias} {short(fields[alias])} and {name} {short(fields[name])} are one field: remove one"
                )
        fields = {cls.aliases.get(k, k): v for k, v in fields.items()}
        for name, allowed in cls.fixed.items():
            if name in fields and fields[name] not in allowed:
                raise ConfigError(
                    f"{name} {short(fields[name])} is not supported; supported: {', '.join(map(repr, allowed))}"
                )
        partial, rope = fields.get("partial_rotary_factor"), fields.get("rope_scaling") or fields.get("rope_parameters")
        if partial not in (None, 1) and isinstance(rope, Mapping) and kind_of(rope) != "default":
            raise ConfigError(
                f"partial_rotary_factor {short(partial)} with rope type {short(kind_of(rope))} is not supported"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        ignored = {name for base in cls.__mro__ for name in vars(base).get("ignored", "").split()}
        fields.setdefault("dtype", fields.get("torch_dtype"))
        strange = [k for k in fields if k not in known | ignored | set(cls.fixed)]
        for name in ("rope_scaling", "rope_parameters"):
            inner = fields.get(name)
            strange += [f"{name}.{k}" for k in inner if k not in ROPE_FIELDS] if isinstance(inner, Mapping) else []
        if strange:
            logger.warning("config.json: unknown fields, ignored: %s", some(sorted(strange), 20))
        return cls(**{k: v for k, v in fields.items() if k in known})

    def to_hf(self) -> dict[str, Any]:
        """The config.json that ``from_hf`` reads back to the same config."""
        fields: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in ABSENT:
                continue
            fields[field.name] = (
                dict(value) if isinstance(value, FrozenDict) else list(value) if isinstance(value, tuple) else value
            )
        return fields

    @property
    def kv_heads(self) -> int:
        """K; null means as many as query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """H; null means hidden_size / num_attention_heads."""
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}: "
                "give head_dim"
            )
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_scalar(self) -> float:
        """``query_pre_attn_scalar``; null means the head width."""
        return self.head_width if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar

    @property
    def query_scale(self) -> float:
        """What grouped-query attention multiplies scores by."""
        return self.query_scalar**-0.5

    def folded(self) -> tuple[Self, float]:
        """The config without query_pre_attn_scalar, and the factor that queries are multiplied by in its place."""
        if self.query_pre_attn_scalar is None:
            return self, 1.0
        factor = (self.head_width / self.query_pre_attn_scalar) ** 0.5
        return dataclasses.replace(self, query_pre_attn_scalar=None), factor

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, or None."""
        return None

    @property
    def experts(self) -> int:
        """E of each MoE layer; 0 for dense models."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """X; 0 for dense models."""
        return 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids as a tuple, none included."""
        eos = self.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def rope_dim(self) -> int:
        """Width that is rotated."""
        return self.head_width

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        """The rope object in force: ``rope_scaling`` (4.x) wins over ``rope_parameters`` (v5) where both are there."""
        return self.rope_scaling or self.rope_parameters or {}

    @property
    def rope(self) -> Rope:
        """The rotary embedding these fields ask for."""
        return rope_from_fields(
            self.rope_fields,
            self.rope_dim,
            self.rope_theta,
            self.max_position_embeddings,
            self.original_max_position_embeddings,
            self.rope_field,
        )
