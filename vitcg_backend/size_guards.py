"""What Dynamo assumes about the sizes of a call: its graph is right where they hold, elsewhere there is or will be another.

A tower's own code may ask how many rows there are (``if len(pixels) > 4096``), and then each answer is a graph. Dynamo checks
that in each call; whoever calls a graph without Dynamo asks here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import _torch

__all__ = ["SizeGuards"]


class SizeGuards:
    """The sizes of those arguments of a Dynamo graph that a call brings, and what was decided by them.

    Args:
        placeholders: inputs of the graph, with ``meta["example_value"]``.
        positions: those of them whose sizes are to be looked at.

    Raises:
        ValueError: something was decided by a size that none of these has.
    """

    def __init__(self, placeholders: Sequence[fx.Node], positions: Iterable[int]) -> None:
        self._sizes: list[tuple[int, list[Any]]] = []  # position, for each axis its size or the number of its symbol
        symbols: list[Any] = []
        shape_env = None
        for position in positions:
            sizes: list[Any] = []
            for size in placeholders[position].meta["example_value"].shape:
                if not isinstance(size, torch.SymInt):
                    sizes.append(size)
                    continue
                shape_env, symbol = size.node.shape_env, size.node.expr
                if symbol.is_number:
                    sizes.append(int(symbol))
                    continue
                if not symbol.is_Symbol:
                    raise ValueError(f"a size of {placeholders[position].name} is {symbol}")
                if symbol not in symbols:
                    symbols.append(symbol)
                sizes.append(_Axis(symbols.index(symbol)))
            self._sizes.append((position, sizes))
        self._count = len(symbols)
        self._holds = None if shape_env is None else _torch.size_guards(shape_env, symbols)

    def hold(self, args: Sequence[Any]) -> bool:
        """Whether the graph is right for these arguments, as far as their sizes go."""
        found: list[int | None] = [None] * self._count
        for position, expected in self._sizes:
            value: Tensor = args[position]
            shape = value.shape
            if len(shape) != len(expected):
                return False
            for size, wanted in zip(shape, expected, strict=True):
                if type(wanted) is not _Axis:
                    if size != wanted:
                        return False
                elif found[wanted.number] is None:
                    found[wanted.number] = size
                elif found[wanted.number] != size:
                    return False
        return self._holds is None or self._holds(*found)


class _Axis:
    """An axis whose size is a symbol, which is the same one for axes of one size."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number
