"""Published config.json files by preset, with the fields that a config ignores."""

import json
from pathlib import Path

from tests.support.tiny import Fields

_DATA = Path(__file__).parents[1] / "data"
PUBLISHED: dict[str, Fields] = json.loads((_DATA / "published.json").read_text())
# Multimodal models, whose language model is in text_config.
PUBLISHED_TEXTS: dict[str, Fields] = json.loads((_DATA / "published_texts.json").read_text())
