"""Public names of `nnxmoe` and the modules that define them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports that type checkers and editors can resolve
    from nnxmoe.apps.planning.plan import Plan as Plan
    from nnxmoe.apps.planning.plan import plan as plan
    from nnxmoe.config.bounds import ConfigError as ConfigError
    from nnxmoe.convert.arrays.load_report import LoadError as LoadError
    from nnxmoe.convert.arrays.load_report import LoadReport as LoadReport
    from nnxmoe.convert.files.errors import CheckpointError as CheckpointError
    from nnxmoe.convert.hf.pretrained import from_pretrained as from_pretrained
    from nnxmoe.convert.hf.pretrained import save_pretrained as save_pretrained
    from nnxmoe.convert.native import load as load
    from nnxmoe.convert.native import save as save
    from nnxmoe.generation.complete import Completion as Completion
    from nnxmoe.generation.complete import complete as complete
    from nnxmoe.generation.decode import generate as generate
    from nnxmoe.generation.decode import stream as stream
    from nnxmoe.generation.draft import ModelDraft as ModelDraft
    from nnxmoe.generation.draft import MTPDraft as MTPDraft
    from nnxmoe.generation.draft import PromptLookup as PromptLookup
    from nnxmoe.generation.draft_cost import break_even as break_even
    from nnxmoe.generation.engine import Engine as Engine
    from nnxmoe.generation.grammar import Grammar as Grammar
    from nnxmoe.generation.request import EngineLimits as EngineLimits
    from nnxmoe.generation.request import Prefix as Prefix
    from nnxmoe.generation.request import RequestOptions as RequestOptions
    from nnxmoe.generation.sampling import Sampling as Sampling
    from nnxmoe.generation.score import Score as Score
    from nnxmoe.generation.score import score as score
    from nnxmoe.layers.attention.blockwise_attention import BlockwiseAttention as BlockwiseAttention
    from nnxmoe.layers.attention.context_parallel import AllGatherAttention as AllGatherAttention
    from nnxmoe.layers.attention.flash_attention import FlashAttention as FlashAttention
    from nnxmoe.layers.attention.fused_attention import FusedAttention as FusedAttention
    from nnxmoe.layers.attention.mla import AbsorbedMLA as AbsorbedMLA
    from nnxmoe.layers.attention.mla import AdaptiveMLA as AdaptiveMLA
    from nnxmoe.layers.attention.mla import NaiveMLA as NaiveMLA
    from nnxmoe.layers.attention.ring_attention import RingAttention as RingAttention
    from nnxmoe.layers.attention.softmax_attention import ReferenceAttention as ReferenceAttention
    from nnxmoe.layers.attention.splash_attention import SplashAttention as SplashAttention
    from nnxmoe.layers.cache_buffer import Int8Cache as Int8Cache
    from nnxmoe.layers.context import Context as Context
    from nnxmoe.layers.linear.quantized_products import AutoProduct as AutoProduct
    from nnxmoe.layers.linear.quantized_products import BlockwiseProduct as BlockwiseProduct
    from nnxmoe.layers.linear.quantized_products import CastProduct as CastProduct
    from nnxmoe.layers.linear.quantized_products import DequantizedProduct as DequantizedProduct
    from nnxmoe.layers.linear.quantized_products import TwoInt8Product as TwoInt8Product
    from nnxmoe.layers.linear.quantized_products import W8A8Product as W8A8Product
    from nnxmoe.layers.recurrent.tokamax_delta import TokamaxDeltaRule as TokamaxDeltaRule
    from nnxmoe.mesh import make_mesh as make_mesh
    from nnxmoe.model.causal_lm import CausalLM as CausalLM
    from nnxmoe.model.copies import unscan as unscan
    from nnxmoe.model.output import Output as Output
    from nnxmoe.model.pipeline import Pipeline as Pipeline
    from nnxmoe.model.quantization.methods import Float8 as Float8
    from nnxmoe.model.quantization.methods import Int4 as Int4
    from nnxmoe.model.quantization.methods import Int8 as Int8
    from nnxmoe.model.quantization.methods import Mixed as Mixed
    from nnxmoe.model.quantization.quantized_kernels import dequantize as dequantize
    from nnxmoe.model.quantization.rounding import quantize as quantize
    from nnxmoe.model.remat import Remat as Remat
    from nnxmoe.model.stack import Scanned as Scanned
    from nnxmoe.model.stack import Unrolled as Unrolled
    from nnxmoe.model.strategy import Strategy as Strategy
    from nnxmoe.models import config_from_hf as config_from_hf
    from nnxmoe.moe.blocked import BlockedMatmul as BlockedMatmul
    from nnxmoe.moe.capacity import Capacity as Capacity
    from nnxmoe.moe.capacity import Chunked as Chunked
    from nnxmoe.moe.dispatch import Dense as Dense
    from nnxmoe.moe.dispatch import Sorted as Sorted
    from nnxmoe.moe.dropless import Dropless as Dropless
    from nnxmoe.moe.expert_parallel import ChunkedExchange as ChunkedExchange
    from nnxmoe.moe.expert_parallel import ExpertParallel as ExpertParallel
    from nnxmoe.moe.expert_parallel import RaggedAllToAll as RaggedAllToAll
    from nnxmoe.moe.expert_parallel import RingOfExperts as RingOfExperts
    from nnxmoe.moe.grouped_matmul import AlignedMatmul as AlignedMatmul
    from nnxmoe.moe.grouped_matmul import MaskedMatmul as MaskedMatmul
    from nnxmoe.moe.grouped_matmul import RaggedDotMatmul as RaggedDotMatmul
    from nnxmoe.moe.tokamax import TokamaxMatmul as TokamaxMatmul
    from nnxmoe.moe.triton import TritonMatmul as TritonMatmul
    from nnxmoe.moe.triton import TritonProduct as TritonProduct
    from nnxmoe.runtime import processes as processes
    from nnxmoe.runtime.compile_cache import compile_cache as compile_cache
    from nnxmoe.sharding_rules import RULES as RULES
    from nnxmoe.sharding_rules import TRAINING_RULES as TRAINING_RULES
    from nnxmoe.tokenizer.tokenizer import Tokenizer as Tokenizer
    from nnxmoe.tokenizer.tokenizer import TokenizerError as TokenizerError

_NAMES = {  # module -> public names that it defines
    "nnxmoe.apps.planning.plan": "Plan plan",
    "nnxmoe.config.bounds": "ConfigError",
    "nnxmoe.convert.arrays.load_report": "LoadError LoadReport",
    "nnxmoe.convert.files.errors": "CheckpointError",
    "nnxmoe.convert.hf.pretrained": "from_pretrained save_pretrained",
    "nnxmoe.convert.native": "load save",
    "nnxmoe.generation.complete": "Completion complete",
    "nnxmoe.generation.decode": "generate stream",
    "nnxmoe.generation.draft": "ModelDraft MTPDraft PromptLookup",
    "nnxmoe.generation.draft_cost": "break_even",
    "nnxmoe.generation.engine": "Engine",
    "nnxmoe.generation.grammar": "Grammar",
    "nnxmoe.generation.request": "EngineLimits Prefix RequestOptions",
    "nnxmoe.generation.sampling": "Sampling",
    "nnxmoe.generation.score": "Score score",
    "nnxmoe.layers.attention.blockwise_attention": "BlockwiseAttention",
    "nnxmoe.layers.attention.context_parallel": "AllGatherAttention",
    "nnxmoe.layers.attention.flash_attention": "FlashAttention",
    "nnxmoe.layers.attention.fused_attention": "FusedAttention",
    "nnxmoe.layers.attention.mla": "AbsorbedMLA AdaptiveMLA NaiveMLA",
    "nnxmoe.layers.attention.ring_attention": "RingAttention",
    "nnxmoe.layers.attention.softmax_attention": "ReferenceAttention",
    "nnxmoe.layers.attention.splash_attention": "SplashAttention",
    "nnxmoe.layers.cache_buffer": "Int8Cache",
    "nnxmoe.layers.context": "Context",
    "nnxmoe.layers.linear.quantized_products": "AutoProduct BlockwiseProduct CastProduct DequantizedProduct "
    "TwoInt8Product W8A8Product",
    "nnxmoe.layers.recurrent.tokamax_delta": "TokamaxDeltaRule",
    "nnxmoe.mesh": "make_mesh",
    "nnxmoe.model.causal_lm": "CausalLM",
    "nnxmoe.model.copies": "unscan",
    "nnxmoe.model.output": "Output",
    "nnxmoe.model.pipeline": "Pipeline",
    "nnxmoe.model.quantization.methods": "Float8 Int4 Int8 Mixed",
    "nnxmoe.model.quantization.quantized_kernels": "dequantize",
    "nnxmoe.model.quantization.rounding": "quantize",
    "nnxmoe.model.remat": "Remat",
    "nnxmoe.model.stack": "Scanned Unrolled",
    "nnxmoe.model.strategy": "Strategy",
    "nnxmoe.models": "config_from_hf",
    "nnxmoe.moe.blocked": "BlockedMatmul",
    "nnxmoe.moe.capacity": "Capacity Chunked",
    "nnxmoe.moe.dispatch": "Dense Sorted",
    "nnxmoe.moe.dropless": "Dropless",
    "nnxmoe.moe.expert_parallel": "ChunkedExchange ExpertParallel RaggedAllToAll RingOfExperts",
    "nnxmoe.moe.grouped_matmul": "AlignedMatmul MaskedMatmul RaggedDotMatmul",
    "nnxmoe.moe.tokamax": "TokamaxMatmul",
    "nnxmoe.moe.triton": "TritonMatmul TritonProduct",
    "nnxmoe.runtime": "processes",
    "nnxmoe.runtime.compile_cache": "compile_cache",
    "nnxmoe.sharding_rules": "RULES TRAINING_RULES",
    "nnxmoe.tokenizer.tokenizer": "Tokenizer TokenizerError",
}

# Public name -> module that defines it.
MODULES: Mapping[str, str] = {name: module for module, names in _NAMES.items() for name in names.split()}
