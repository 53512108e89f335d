"""nnxmoe: Mixtral, DeepSeek-V3 and Llama as flax.nnx modules.

    model = nnxmoe.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    logits = model(tokens).logits

The public names live here; see the README for the map of the package.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType
from typing import Any as _Any

from nnxmoe.axes import RULES as RULES
from nnxmoe.axes import make_mesh as make_mesh
from nnxmoe.config.bounds import ConfigError as ConfigError
from nnxmoe.convert.core.report import LoadError as LoadError
from nnxmoe.convert.core.report import LoadReport as LoadReport
from nnxmoe.convert.hf.pretrained import from_pretrained as from_pretrained
from nnxmoe.convert.hf.pretrained import save_pretrained as save_pretrained
from nnxmoe.convert.native import load as load
from nnxmoe.convert.native import save as save
from nnxmoe.generation.decode import generate as generate
from nnxmoe.generation.decode import stream as stream
from nnxmoe.generation.sampling import Sampling as Sampling
from nnxmoe.generation.text import Tokenizer as Tokenizer
from nnxmoe.generation.text import TokenizerError as TokenizerError
from nnxmoe.layers.attend import Blockwise as Blockwise
from nnxmoe.layers.attend import Fused as Fused
from nnxmoe.layers.attend import Reference as Reference
from nnxmoe.layers.context import Context as Context
from nnxmoe.layers.mla import Absorbed as Absorbed
from nnxmoe.layers.mla import ByLength as ByLength
from nnxmoe.layers.mla import Naive as Naive
from nnxmoe.model.causal_lm import CausalLM as CausalLM
from nnxmoe.model.causal_lm import unscan as unscan
from nnxmoe.model.decoder import Output as Output
from nnxmoe.model.stack import Remat as Remat
from nnxmoe.model.stack import Scanned as Scanned
from nnxmoe.model.stack import Unrolled as Unrolled
from nnxmoe.model.strategy import Strategy as Strategy
from nnxmoe.models import config_from_hf as config_from_hf
from nnxmoe.moe.dispatch import Capacity as Capacity
from nnxmoe.moe.dispatch import Chunked as Chunked
from nnxmoe.moe.dispatch import Dense as Dense
from nnxmoe.moe.dispatch import Sorted as Sorted
from nnxmoe.moe.expert_parallel import ExpertParallel as ExpertParallel
from nnxmoe.moe.expert_parallel import RaggedAllToAll as RaggedAllToAll
from nnxmoe.moe.expert_parallel import RingOfExperts as RingOfExperts
from nnxmoe.moe.grouped_matmul import Aligned as Aligned
from nnxmoe.moe.grouped_matmul import Blocked as Blocked
from nnxmoe.moe.grouped_matmul import Masked as Masked
from nnxmoe.moe.grouped_matmul import RaggedDot as RaggedDot
from nnxmoe.runtime import processes as processes
from nnxmoe.runtime.compile_cache import compile_cache as compile_cache
from nnxmoe.storage.errors import CheckpointError as CheckpointError

__version__ = "0.1.0"


def _from_pretrained(cls: type[CausalLM], path_or_hub_id: _Any, **options: _Any) -> _Any:
    """``nnxmoe.from_pretrained`` for this class only. Raises CheckpointError for checkpoints of another class."""
    return from_pretrained(path_or_hub_id, expect=cls, **options)


setattr(CausalLM, "from_pretrained", classmethod(_from_pretrained))  # noqa: B010  models are below the converters


_SUBMODULES = ("convert", "kernels", "linen", "models", "plot", "processes", "testing", "train")


def __getattr__(name: str) -> _ModuleType:
    """Public submodules are imported on first use: some bring large libraries, such as Orbax."""
    if name in _SUBMODULES:
        return _importlib.import_module(f"nnxmoe.{name}")
    raise AttributeError(f"module 'nnxmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names: everything imported above, and the public submodules."""
    names = [name for name, value in globals().items() if not isinstance(value, _ModuleType)]
    return sorted({*names, *_SUBMODULES})
