"""Kernel backends, one per file, imported on first use."""

import importlib
import pkgutil
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a backend such as ``nnxmoe.kernels.tokamax`` on first access."""
    if name in __dir__():
        return importlib.import_module(f"nnxmoe.kernels.{name}")
    raise AttributeError(f"module 'nnxmoe.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]
