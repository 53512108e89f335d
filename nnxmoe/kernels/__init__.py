"""Kernels of other libraries and our own, one backend per file; each is imported on first use."""

import importlib
import pkgutil
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """``nnxmoe.kernels.tokamax`` and its like work after ``import nnxmoe`` alone."""
    if name in __dir__():
        return importlib.import_module(f"nnxmoe.kernels.{name}")
    raise AttributeError(f"module 'nnxmoe.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The backends."""
    return [module.name for module in pkgutil.iter_modules(__path__)]
