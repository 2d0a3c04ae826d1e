"""`torch.compile` backend that runs vision towers from CUDA graphs: ``torch.compile(tower, backend="vitcg")``.

The import is optional where the package is installed: torch finds the backend through its entry point. Run from a source
tree, importing this package is what makes the name known.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .backend import reset, stats, vitcg
    from .counters import BucketStats, CallRecord, Stats
    from .errors import AttentionUnavailable, OptionError, Refused, UnknownInput, VitcgError
    from .family_record import FamilyStatus, families
    from .guide import Recommendation, recommend_budgets
    from .lanes import FastLane, fast_lane
    from .lowering import register_lowering
    from .options import Options
    from .warming import Warmed, warmup

_HOME = {
    "AttentionUnavailable": "errors",
    "BucketStats": "counters",
    "CallRecord": "counters",
    "FamilyStatus": "family_record",
    "FastLane": "lanes",
    "OptionError": "errors",
    "Options": "options",
    "Recommendation": "guide",
    "Refused": "errors",
    "Stats": "counters",
    "UnknownInput": "errors",
    "VitcgError": "errors",
    "Warmed": "warming",
    "families": "family_record",
    "fast_lane": "lanes",
    "recommend_budgets": "guide",
    "register_lowering": "lowering",
    "reset": "backend",
    "stats": "backend",
    "vitcg": "backend",
    "warmup": "warming",
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    """Public names, imported when first used: ``TORCH_LOGS=+vitcg_backend`` imports this package while torch starts."""
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")


def _register() -> None:
    """Make the name known to `torch.compile` where no entry point is installed (a source tree on PYTHONPATH)."""
    torch = sys.modules.get("torch")
    if torch is not None and not hasattr(torch, "compile"):
        return  # torch is starting and looks at our name for TORCH_LOGS
    registry = importlib.import_module("torch._dynamo.backends.registry")
    entry = EntryPoint(name="vitcg", value="vitcg_backend.backend:vitcg", group="torch_dynamo_backends")
    registry._BACKENDS.setdefault("vitcg", entry)


_register()
