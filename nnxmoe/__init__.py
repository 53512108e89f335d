"""nnxmoe: Mixtral, DeepSeek-V3, Llama and other mixture-of-experts and dense language models in flax.nnx.

    model = nnxmoe.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    logits = model(tokens).logits

`nnxmoe.api` lists the public names. `nnxmoe.models.MODELS` lists the model families. Names are imported on first use,
because importing JAX and Flax takes more than a second and the command line must handle Ctrl-C before that.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"

_SUBMODULES = (
    *("api", "apps", "axes", "config", "convert", "generation", "layers", "linen", "model", "models", "moe", "plot"),
    *("runtime", "testing", "tokenizer", "train"),
)

if _TYPE_CHECKING:
    from nnxmoe import convert as convert
    from nnxmoe import linen as linen
    from nnxmoe import models as models
    from nnxmoe import plot as plot
    from nnxmoe import testing as testing
    from nnxmoe import train as train
    from nnxmoe.api import *  # noqa: F403
else:
    from nnxmoe.api import MODULES as _MODULES

    __all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]  `help(nnxmoe)` documents these names

    def __getattr__(name):
        import importlib

        if name in _SUBMODULES:
            return importlib.import_module(f"nnxmoe.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'nnxmoe' has no attribute {name!r}")
        # Unlike import_module, __import__ with `fromlist` also imports a submodule, such as `nnxmoe.runtime.processes`.
        return getattr(__import__(_MODULES[name], fromlist=[name]), name)

    def __dir__():
        return sorted({*_SUBMODULES, *_MODULES, "__version__"})
