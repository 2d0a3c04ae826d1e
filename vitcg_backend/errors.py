"""The exceptions that users can meet.

::

    VitcgError
    ├── OptionError            (ValueError)    a bad value in torch.compile(..., options={...})
    ├── UnknownInput           (ValueError)    the budget guide knows no such family, configuration or size
    ├── AttentionUnavailable   (RuntimeError)  the attention asked for by name cannot run here
    └── Refused                (RuntimeError)  strict=True: a call or a graph took a slower path, with its reason

Without ``strict=True`` no call raises because of buckets, capture, memory or a missing package: it takes a slower path and
the reason is counted in `vitcg_backend.stats()`. Dynamo shows only ``str(error)``, so each message stands alone.
"""

from __future__ import annotations

__all__ = ["AttentionUnavailable", "OptionError", "Refused", "UnknownInput", "VitcgError"]


class VitcgError(Exception):
    """Base of every exception this package raises on purpose."""


class OptionError(VitcgError, ValueError):
    """An option is unknown or has a value that is not allowed."""


class UnknownInput(VitcgError, ValueError):
    """A family, a configuration or an input that the budget guide cannot work with."""


class AttentionUnavailable(VitcgError, RuntimeError):
    """The attention implementation asked for by name cannot run on this device, dtype or head size."""


class Refused(VitcgError, RuntimeError):
    """Under ``strict=True``: why a graph was not bucketed or a call was not replayed.

    Attributes:
        reason: the reason's code, as counted in `Stats.fallbacks`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"vitcg refused [{reason}]: {detail} (strict=True turns this reason into an error)")
