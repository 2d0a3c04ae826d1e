"""Static memory is used by one stream after another: each use waits for the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """The last use of some static memory, on whatever stream it was."""

    def __init__(self) -> None:
        self._last: Any = None  # (stream, event)

    @contextlib.contextmanager
    def _in_order(self, device: torch.device) -> Iterator[None]:
        current = torch.cuda.current_stream(device)
        if self._last is not None and self._last[0] != current:
            current.wait_event(self._last[1])
        try:
            yield
        finally:
            event = self._last[1] if self._last is not None else torch.cuda.Event()
            event.record(current)
            self._last = (current, event)

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """The body of a ``with`` statement uses the memory on the current stream of `device`; no-op on a CPU."""
        return self._in_order(device) if device.type == "cuda" else contextlib.nullcontext()

    def clear(self) -> None:
        """Forget the last use."""
        self._last = None
