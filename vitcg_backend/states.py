"""Which parameters a call brings: sets of addresses and layouts, numbered. A graph replays only for the number it was captured
with.

Every parameter's address, dtype, sizes and strides are looked at in every call, so there is no change of storage that goes
unseen; an edit in place keeps them, and the graph reads the new values.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from . import _torch

__all__ = ["MAX_STATES", "States"]

MAX_STATES = 8
"""Most sets that are remembered: towers of one class share a graph, adapters are switched."""
_OWNERS = 8  # parameters that stand for their tower
_address = Tensor.data_ptr


class States:
    """The latest sets of parameter addresses.

    Args:
        positions: arguments of the graph that are parameters or buffers.
        example_inputs: the first call's arguments.
        forget: called with a number whose set is dropped: weights that move at every step must not leave captures behind.
    """

    def __init__(self, positions: Sequence[int], example_inputs: Sequence[Any], forget: Callable[[int], None]) -> None:
        self.positions = list(positions)
        self._of = itemgetter(*self.positions) if len(self.positions) > 1 else self._few
        self._forget = forget
        self._known: OrderedDict[Any, int] = OrderedDict()
        self._numbers = itertools.count()
        self._last: tuple[list[int], int] = ([], -1)
        self._laid_out_alike: Callable[..., bool] = lambda *tensors: True
        self._owners: dict[int, list[weakref.ref[Tensor]]] = {-1: self._weak(example_inputs)}

    def __len__(self) -> int:
        return len(self._known)

    def number(self, args: Sequence[Any]) -> int:
        """The number of the parameters of a call."""
        tensors = self._of(args)
        addresses = list(map(_address, tensors))
        if addresses != self._last[0] or not self._laid_out_alike(*tensors) or self._moved_in(args):
            self._note(addresses, tensors, args)
        return self._last[1]

    def belongs_to(self, tensors: set[int]) -> bool:
        """Whether one of the latest towers owns any tensor of these ids."""
        owners = [ref() for refs in list(self._owners.values()) for ref in refs[:_OWNERS]]
        return any(id(owner) in tensors for owner in owners if owner is not None)

    def latest_of(self, tensors: set[int]) -> list[Tensor] | None:
        """The latest set with any tensor of these ids, in the order of the positions; None without one that is still there."""
        for refs in reversed(list(self._owners.values())):
            held = [ref() for ref in refs]
            if (any(id(owner) in tensors for owner in held) or not held) and all(owner is not None for owner in held):
                return held  # type: ignore[return-value]  # none of them is None, says the line above
        return None

    def _note(self, addresses: list[int], tensors: Sequence[Tensor], args: Sequence[Any]) -> None:
        key = tuple((address, t.dtype, t.shape, t.stride()) for address, t in zip(addresses, tensors, strict=True))
        if key not in self._known:
            self._known[key] = next(self._numbers)
            while len(self._known) > MAX_STATES:
                dropped = self._known.popitem(last=False)[1]
                self._owners.pop(dropped, None)
                self._forget(dropped)
        self._known.move_to_end(key)
        number = self._known[key]
        self._last = (addresses, number)
        self._laid_out_alike = _torch.layout_check(tensors)
        self._owners.pop(number, None)  # the latest comes last
        self._owners[number] = self._weak(args)

    def _moved_in(self, args: Sequence[Any]) -> bool:
        """Whether another tower has come to lie at the addresses of the last one."""
        owners = self._owners.get(self._last[1])
        return bool(owners) and owners[0]() is not args[self.positions[0]]  # type: ignore[index]

    def _weak(self, args: Sequence[Any]) -> list[weakref.ref[Tensor]]:
        return [weakref.ref(args[i]) for i in self.positions]

    def _few(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args[position] for position in self.positions)
