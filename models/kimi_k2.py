"""Kimi K2 (Moonshot AI, 2025) and Moonlight (2025): the layers of DeepSeek-V3 with one group of experts.

Moonlight's config.json has the model_type ``deepseek_v3``. transformers does not support the model_type of K2's
config.json. Saving writes ``deepseek_v3`` so that transformers can load the files. Text functions do not work with K2
and Moonlight, because their checkpoints have no tokenizer.json. K2-Thinking, K2.5, K2.6 and K2.7 have experts in packed
int4. Only the text models of K2.5, K2.6 and K2.7 are loaded.
"""

import dataclasses

from nnxmoe.model.family import Family
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiK2Config(DeepSeekV3Config):
    """Config of Kimi K2, with the fields of `DeepSeekV3Config`."""

    model_type = "kimi_k2"
    saved_type = "deepseek_v3"


class KimiK2(DeepSeekV3):
    """Kimi K2 and Moonlight language models."""

    configs = (KimiK2Config,)


FAMILY = Family(model=KimiK2, hf=DEEPSEEK_V3.hf, maxtext=DEEPSEEK_V3.maxtext)
