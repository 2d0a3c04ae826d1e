"""What a call brings besides pixels in a tower of one image a row: masks and the like, with a row for each image.

Padded rows are copies of the call's first row: a value of the caller's own may be an index or a size, and zero need not be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .passes.bind_tokens import Bound

__all__ = ["BatchInputs", "dense"]


class BatchInputs:
    """Static buffers of these tensors for one bucket.

    Args:
        bound: the graph; `bound.batch` names them.
        args: arguments of a call: their shapes and dtypes.
        rows: images of the bucket.
        arena: where static inputs live (`capture.Arena`).
    """

    def __init__(self, bound: Bound, args: Sequence[Any], rows: int, arena: Any) -> None:
        self.positions = bound.batch
        self.tensors: list[Tensor] = []
        for position in self.positions:
            tensor = args[position]
            shape = (rows, *tensor.shape[1:])
            dense_strides = tensor.new_empty(shape, device="meta").stride()
            self.tensors.append(arena.view(("batch", position), shape, dense_strides, tensor.dtype, tensor.device))

    def write(self, args: Sequence[Any], rows: int) -> None:
        """Copy a call's `rows` real rows, and the first of them into each padded row."""
        for position, static in zip(self.positions, self.tensors, strict=True):
            given = args[position]
            static[:rows].copy_(given, non_blocking=True)
            if rows < len(static):
                static[rows:].copy_(given[:1].expand_as(static[rows:]), non_blocking=True)

    def give(self, arguments: list[Any]) -> None:
        """Put the static tensors in place of a call's own."""
        for position, static in zip(self.positions, self.tensors, strict=True):
            arguments[position] = static


def dense(bound: Bound, args: Sequence[Any]) -> list[Any]:
    """The arguments of a call as the pieces were traced: pixels, and what comes with them, without gaps between rows."""
    arguments = list(args)
    for position in (bound.pixels, *bound.batch):
        arguments[position] = args[position].contiguous()
    return arguments
