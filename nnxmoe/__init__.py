"""nnxmoe: Mixtral, DeepSeek-V3, Llama and their relatives as flax.nnx modules.

    model = nnxmoe.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    logits = model(tokens).logits

The public names are those of `nnxmoe.api`, and the submodules below. Each is imported on first use, since JAX and Flax
take more than a second: the command line handles Ctrl-C before that.
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
    import functools as _functools
    import sys as _sys
    import types as _types

    class _Package(_types.ModuleType):
        """The package as a module that resolves its public names and its description on first use."""

        def __getattr__(self, name):
            import importlib

            if name in _SUBMODULES:
                return importlib.import_module(f"nnxmoe.{name}")
            if not name.startswith("_") and name in _homes():
                return getattr(__import__(_homes()[name], fromlist=[name]), name)  # a module counts too
            raise AttributeError(f"module 'nnxmoe' has no attribute {name!r}")

        def __dir__(self):
            return sorted({*_SUBMODULES, *_homes(), "__version__"})

        @property
        def __doc__(self):
            import inspect

            from nnxmoe.models import MODELS

            def line(name):
                words = (inspect.getdoc(getattr(self, name)) or "").split("\n\n")[0].replace("\n", " ")
                return f"    {name:16} {words if len(words) < 100 else words[:96].rsplit(' ', 1)[0] + ' …'}"

            families = ", ".join(MODELS)
            return "\n\n".join(
                [_DESCRIPTION, f"Families: {families}", "Names:", "\n".join(map(line, sorted(_homes())))]
            )

    @_functools.cache
    def _homes():
        """Map each public name to its module, by parsing the source of `nnxmoe.api` without importing it."""
        import ast
        import pkgutil

        tree = ast.parse(pkgutil.get_data(__name__, "api.py") or b"")
        found = (node for node in tree.body if isinstance(node, ast.ImportFrom))
        return {alias.name: str(node.module) for node in found for alias in node.names}

    _DESCRIPTION = str(__doc__).split("\n\nThe public names")[0]
    del __doc__
    _sys.modules[__name__].__class__ = _Package
