"""Which parameters a call brings: sets of addresses and layouts, numbered. A graph replays only for the number it was captured
with.

Every parameter's address, dtype, sizes and strides are looked at in every call, so there is no change of storage that goes
unseen; an edit in place keeps them, and the graph reads the new values. That is done while the device works, before
anybody gets a result (`number_at`, `confirms`): what comes before a replay is that the memory which it reads is still there
(`in_memory`), and a guess which set of parameters the call will turn out to bring (`guess`).
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor

from . import _torch

__all__ = ["MAX_STATES", "Known", "StateChanged", "States"]

MAX_STATES = 8
"""Most sets that are remembered: towers of one class share a graph, adapters are switched."""
_OWNERS = 8  # parameters that stand for their tower
_DOUBT = 32  # calls that follow a wrong guess and are served without one
_address = Tensor.data_ptr


class StateChanged(Exception):
    """The parameters of a call are not those that were expected of it."""


@dataclass(frozen=True)
class Known:
    """A set of parameters that a caller keeps.

    Attributes:
        number: what it is called.
        tensors: the parameters.
    """

    number: int
    tensors: tuple[Tensor, ...]


@dataclass
class _Set:
    """One set of parameters.

    Attributes:
        number: what it is called.
        addresses: of its tensors.
        alike: whether so many tensors are laid out as these are.
        owners: weak references to the tensors that came with it last.
        storages: weak references to their memory, None where that is not known.
        gone: those of memory that is no longer there.
        fits: whether they are of the dtypes, sizes and devices that the pieces were compiled for.
        key: where it is remembered.
    """

    number: int
    addresses: tuple[int, ...]
    alike: Callable[..., bool]
    owners: list[weakref.ref[Tensor]]
    storages: list[weakref.ref[Any]] | None = None
    gone: list[weakref.ref[Any]] = field(default_factory=list)
    fits: bool = True
    key: Any = None

    def held(self) -> list[Tensor] | None:
        """Its tensors as they came last, None where one of them is no longer there."""
        held = [ref() for ref in self.owners]
        return None if any(tensor is None for tensor in held) else held  # type: ignore[return-value]


class States:
    """The latest sets of parameters.

    Args:
        positions: arguments of the graph that are parameters or buffers.
        traced: what the graph was made for at these positions, fake tensors.
        example_inputs: the first call's arguments.
        forget: called with a number whose set is dropped: weights that move at every step must not leave captures behind.
    """

    def __init__(
        self,
        positions: Sequence[int],
        traced: Sequence[Tensor],
        example_inputs: Sequence[Any],
        forget: Callable[[int], None],
    ) -> None:
        self.positions = list(positions)
        self._traced_for = [_kind(tensor) for tensor in traced]
        self._of = itemgetter(*self.positions) if len(self.positions) > 1 else self._few
        self._forget = forget
        self._known: OrderedDict[Any, _Set] = OrderedDict()  # the latest comes last
        self._at: dict[tuple[int, ...], _Set] = {}  # the latest of each set of addresses
        self._numbers = itertools.count()
        self._came_by: dict[int, int] = {}  # what the parameters were reached through -> the number that they had
        self._doubt = 0  # calls to come in which nothing is guessed
        self._traced = self._last = _Set(-1, (), lambda *tensors: True, self._weak(example_inputs))

    def __len__(self) -> int:
        return len(self._known)

    def of(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The parameters among the arguments of a call."""
        return self._of(args)

    def filled(self, args: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments of a call with its parameters among them."""
        filled = list(args)
        for position, tensor in zip(self.positions, tensors, strict=True):
            filled[position] = tensor
        return filled

    def keep(self, args: Sequence[Any]) -> Known | None:
        """The parameters of a call, for a caller who keeps them; None where their memory is not known."""
        tensors = self._of(args)
        number = self.number(tensors)
        return Known(number, tensors) if self._find(number).storages is not None else None

    def guess(self, owner: Any) -> int | None:
        """The number that the parameters of an owner had in its last call; None where guesses have been wrong."""
        if owner is None:
            return None
        if self._doubt:
            self._doubt -= 1
            return None
        return self._came_by.get(id(owner))

    def learn(self, owner: Any, number: int) -> None:
        """The parameters of an owner have this number. Without their memory nothing is to be guessed (`in_memory`)."""
        if owner is None or self._find(number).storages is None:
            return
        if self._came_by.get(id(owner), number) != number:
            self._doubt = _DOUBT
        if len(self._came_by) >= MAX_STATES:
            self._came_by.clear()
        self._came_by[id(owner)] = number

    def in_memory(self, number: int) -> bool:
        """Whether all of the memory that a number's parameters had is still there: a graph may read it."""
        known = self._find(number)
        return known.number == number and known.storages is not None and not known.gone

    def number(self, tensors: Sequence[Tensor]) -> int:
        """The number of a call's parameters."""
        number = self.number_at(tensors)
        return number if self.confirms(number, tensors) else self._note(tuple(map(_address, tensors)), tensors)

    def number_at(self, tensors: Sequence[Tensor]) -> int:
        """The number by the addresses alone: no result may be used before `confirms` says that it is right."""
        addresses = tuple(map(_address, tensors))
        last = self._last
        known = last if addresses == last.addresses else self._at.get(addresses)
        # Other memory, or another tower, may have come to lie at the addresses.
        if known is None or known.gone or (tensors and known.owners[0]() is not tensors[0]):
            return self._note(addresses, tensors)
        if known is not last:
            self._known.move_to_end(known.key)
            self._last = known
        return known.number

    def confirms(self, number: int, tensors: Sequence[Tensor]) -> bool:
        """Whether parameters at the number's addresses are laid out as the number's."""
        known = self._find(number)
        return known.number == number and known.alike(*tensors)

    def fits(self, number: int) -> bool:
        """Whether the compiled pieces are right for a number's parameters.

        Dynamo of torch 2.11 does not look at the tensors of modules whose dictionaries have not changed, and a kernel reads
        whatever lies at an address: ``norm.to(torch.bfloat16)`` is eager's business alone.
        """
        return self._find(number).fits

    def held(self, number: int) -> list[Tensor] | None:
        """The parameters that came with a number last; None where one of them is no longer there."""
        known = self._find(number)
        return known.held() if known.number == number else None

    def belongs_to(self, tensors: set[int]) -> bool:
        """Whether one of the latest towers owns any tensor of these ids."""
        owners = [ref() for known in self._latest() for ref in known.owners[:_OWNERS]]
        return any(id(owner) in tensors for owner in owners if owner is not None)

    def latest_of(self, tensors: set[int]) -> list[Tensor] | None:
        """The latest set with any tensor of these ids, in the order of the positions; None without one that is still there."""
        for known in reversed(self._latest()):
            held = known.held()
            if held is not None and (not held or any(id(owner) in tensors for owner in held)):
                return held
        return None

    def _find(self, number: int) -> _Set:
        """The set of a number; another where it has been dropped."""
        if self._last.number == number:
            return self._last
        return next((known for known in self._known.values() if known.number == number), self._last)

    def _latest(self) -> list[_Set]:
        return [self._traced, *self._known.values()]

    def _note(self, addresses: tuple[int, ...], tensors: Sequence[Tensor]) -> int:
        key = tuple((address, t.dtype, t.shape, t.stride()) for address, t in zip(addresses, tensors, strict=True))
        known = self._known.get(key)
        number = next(self._numbers) if known is None else known.number
        fits = [_kind(tensor) for tensor in tensors] == self._traced_for
        gone: list[weakref.ref[Any]] = []
        owners, storages = [weakref.ref(t) for t in tensors], _storages(tensors, gone)
        known = _Set(number, addresses, _torch.layout_check(tensors), owners, storages, gone, fits, key)
        self._known[key] = self._at[addresses] = self._last = known
        self._known.move_to_end(key)
        while len(self._known) > MAX_STATES:
            dropped = self._known.popitem(last=False)[1]
            if self._at.get(dropped.addresses) is dropped:
                del self._at[dropped.addresses]
            self._forget(dropped.number)
        return number

    def _weak(self, args: Sequence[Any]) -> list[weakref.ref[Tensor]]:
        return [weakref.ref(args[i]) for i in self.positions]

    def _few(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args[position] for position in self.positions)


def _storages(tensors: Sequence[Tensor], gone: list[weakref.ref[Any]]) -> list[weakref.ref[Any]] | None:
    """Weak references to the memory of tensors, each alive as long as any tensor that uses it; None for those without.

    Each that dies goes into `gone`: to ask hundreds of them in every call would be a tenth of what a small call waits for.
    """
    try:
        return [weakref.ref(tensor.untyped_storage(), gone.append) for tensor in tensors]
    except (NotImplementedError, RuntimeError):  # a tensor that has no storage of its own
        return None


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device
