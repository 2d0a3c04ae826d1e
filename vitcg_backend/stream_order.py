"""Static memory is used by one stream after another: each use waits for the one before."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from . import _torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """The last use of some static memory, on whatever stream it was."""

    def __init__(self) -> None:
        self._last: tuple[int, Any] | None = None  # (stream, event)

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """The body of a ``with`` statement uses the memory on the current stream of `device`; no-op on a CPU."""
        return _InOrder(self, device) if device.type == "cuda" else contextlib.nullcontext()

    def clear(self) -> None:
        """Forget the last use."""
        self._last = None


class _InOrder:
    """One use."""

    def __init__(self, order: StreamOrder, device: torch.device) -> None:
        self._order, self._device = order, device

    def __enter__(self) -> None:
        last = self._order._last
        if last is not None and _torch.raw_stream(self._device) != last[0]:
            torch.cuda.current_stream(self._device).wait_event(last[1])

    def __exit__(self, *_: object) -> None:
        last = self._order._last
        event = torch.cuda.Event() if last is None else last[1]
        event.record(torch.cuda.current_stream(self._device))
        self._order._last = (_torch.raw_stream(self._device), event)
