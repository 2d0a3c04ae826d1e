"""Calls of a tower of images that nobody made: what `warmup` serves, with a graph's own arguments and no Dynamo.

A tower of one image a row says nowhere which images it takes and what comes with them, so that is taken from the call that a
graph was traced with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .bucketing import Bucket
from .parts import Parts
from .passes import CompiledBody
from .planning import Part

__all__ = ["ExampleCall"]


class ExampleCall:
    """Arguments for one graph of a tower of images.

    Args:
        body: the compiled graph.
        parts: of the same graph.
        positions: arguments that are parameters or buffers.
        example_inputs: arguments of its first call. One row is kept of what comes beside the pixels (masks, sizes): zeros
            need not be allowed there.
    """

    def __init__(self, body: CompiledBody, parts: Parts, positions: Sequence[int], example_inputs: Sequence[Any]) -> None:
        self._bound, self._parts, self._positions = body.bound, parts, positions
        with torch.inference_mode(False), torch.no_grad():
            self._rows: dict[int, Tensor] = {p: example_inputs[p][:1].detach().clone() for p in body.bound.batch}
        self._ambient = _torch.ambient_state()

    def arguments(self, images: int, state: Sequence[Tensor]) -> list[Any] | None:
        """Those of a call of so many black images; None under another autocast and the like than the graph was traced for.

        Args:
            images: rows of the call.
            state: parameters and buffers, one for each of the positions.
        """
        if _torch.ambient_state() != self._ambient:
            return None
        bound, rows = self._bound, images * self._bound.symbols.unit
        arguments: list[Any] = [None] * len(bound.placeholders)
        for position, number in bound.numbers:
            value = bound.placeholders[position].meta["val"]
            arguments[position] = torch.tensor(number, dtype=value.dtype) if isinstance(value, Tensor) else number
        for position, tensor in zip(self._positions, state, strict=True):
            arguments[position] = tensor
        pixels = bound.placeholders[bound.pixels].meta["val"]
        shape = (rows * bound.pixels_per_row, *pixels.shape[1:])
        arguments[bound.pixels] = torch.zeros(shape, dtype=pixels.dtype, device=pixels.device)
        for position, row in self._rows.items():
            arguments[position] = row.repeat(rows, *[1] * (row.dim() - 1))
        return self._parts.cut(arguments, Part(None, rows, Bucket(images, bound.symbols.unit), ((0, rows),)))
