"""nnxmoe: Mixtral, DeepSeek-V3 and Llama as flax.nnx modules.

    model = nnxmoe.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    logits = model(tokens).logits

The public names are those of `nnxmoe.api`, and the submodules below. They are imported on first use, since JAX and Flax
take more than a second: the command line handles Ctrl-C before that.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

_SUBMODULES = ("convert", "kernels", "linen", "models", "plot", "testing", "train")

if _TYPE_CHECKING:
    from nnxmoe import convert as convert
    from nnxmoe import kernels as kernels
    from nnxmoe import linen as linen
    from nnxmoe import models as models
    from nnxmoe import plot as plot
    from nnxmoe import testing as testing
    from nnxmoe import train as train
    from nnxmoe.api import *  # noqa: F403
else:

    def __getattr__(name):
        import importlib

        if name in _SUBMODULES:
            return importlib.import_module(f"nnxmoe.{name}")
        if not name.startswith("_"):
            api = importlib.import_module("nnxmoe.api")
            if hasattr(api, name):
                return getattr(api, name)
        raise AttributeError(f"module 'nnxmoe' has no attribute {name!r}")

    def __dir__():
        """Public names."""
        import nnxmoe.api

        return sorted({*_SUBMODULES, *(name for name in vars(nnxmoe.api) if not name.startswith("_")), "__version__"})
