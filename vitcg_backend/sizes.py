"""The sizes that Dynamo passes to a graph besides its tensors: whose they are, and their values for other rows or items.

Each is 1. a number of rows, ``c * n + d`` for n output tokens; 2. the number of items of the grid; 3. the size of another
tensor of the call; 4. a number that a call brings (`bind_tokens` made it a constant). Padding and cutting change 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .passes.bind_tokens import Bound
from .passes.graph import Role

__all__ = ["Sizes"]


class Sizes:
    """The size inputs of a bound graph.

    Attributes:
        positions: of all of them among the arguments of a call.
        others: of those that are neither rows nor items.
    """

    def __init__(self, bound: Bound) -> None:
        nodes = bound.placeholders
        self._linear: dict[int, tuple[int, int]] = {}
        self._items: set[int] = set()
        self._tensors: dict[int, tuple[int, int]] = {}  # position -> position of a tensor, axis
        self.positions = [i for i, node in enumerate(nodes) if node.meta["role"] == Role.SIZE]
        lengths = [
            (_expression(size), i, axis)
            for i, node in enumerate(nodes)
            if isinstance(node.meta["val"], Tensor)
            for axis, size in enumerate(node.meta["val"].shape)
        ]
        for position in self.positions:
            value = nodes[position].meta["val"]
            form = bound.symbols.linear(value) if isinstance(value, (int, torch.SymInt)) else None
            owners = [(i, axis) for length, i, axis in lengths if length == _expression(value)]
            if form is not None:
                self._linear[position] = form
            elif any(nodes[i].meta["role"] in (Role.GRID, Role.ITEMS) and axis == 0 for i, axis in owners):
                self._items.add(position)
            elif owners:
                self._tensors[position] = owners[0]
        self.others = [i for i in self.positions if i not in self._linear and i not in self._items]

    def value(self, position: int, arguments: Sequence[Any], tokens: int, items: int) -> Any:
        """The size at a position for so many output tokens and items; `arguments` has the tensors of the call."""
        if position in self._linear:
            factor, rest = self._linear[position]
            return factor * tokens + rest
        if position in self._items:
            return items
        if position in self._tensors:
            tensor, axis = self._tensors[position]
            return arguments[tensor].shape[axis]
        return arguments[position]

    def fill(self, arguments: Any, tokens: int, items: int) -> None:
        """Set every size among the arguments of a call, a list or what takes its place."""
        for position in self.positions:
            arguments[position] = self.value(position, arguments, tokens, items)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size
