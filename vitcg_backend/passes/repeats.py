"""What the nodes of a bound graph hold: an operation that has run on equal inputs does not run again.

Why: an operation on fake tensors with symbolic sizes takes milliseconds, for strides and all that follows from them are worked
out in Python. A tower repeats its layers, so all but the first of them hold operations that have been seen.

Equal inputs are alike in all that an operation can see of fakes: dtype, device, sizes, strides and offset in terms of the same
symbols, which of them are one tensor or lie in one memory; and every number and option beside them. What an equal operation
would assume about a symbol the first has assumed already, and the symbol environment keeps it.

Never taken over: what is no tensor, which costs little; results with a size that no input has, for each run has its own; and
tensors whose values the fake knows.

Memory: a tensor that is taken over is a second fake over the first one's storage, although it stands for memory of its own. So
whether two nodes share memory is what `Repeats.memory_of` says, and not their storages; and no operation or piece is shown two
fakes with one storage that stand for two memories (`apart`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .. import _torch

__all__ = ["Repeats", "apart"]

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _Output:
    """A tensor that an operation gave.

    Attributes:
        tensor: the fake.
        same: number of the input that it is, or None.
        view_of: number of an input that it shares memory with, or None.
        kin: number of the first output that it shares memory with, which may be its own.
    """

    tensor: Tensor
    same: int | None
    view_of: int | None
    kin: int


class Repeats:
    """The operations of one graph that have run, and the memory that each of its fake tensors stands for."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[type, list[_Output]]] = {}
        self._memory: dict[int, int] = {}  # id of a fake -> its memory
        self._kind: dict[int, Hashable] = {}  # id of a fake -> what an operation can see of it
        self._alive: list[Tensor] = []  # so that no id is given twice
        self._numbers = itertools.count()

    def memory_of(self, value: Any) -> int | None:
        """A number for the memory of a tensor, the same for its views; None for what is no tensor."""
        return self._memory[id(value)] if isinstance(value, Tensor) else None

    def add(self, value: Any) -> Any:
        """Note a value that no operation gave: a tensor with memory of its own, or anything else. Returns it."""
        if isinstance(value, Tensor):
            self._note(value, _kind_of(value), next(self._numbers))
        return value

    def run(self, node: fx.Node, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """The value of a node with these inputs: taken over, or ``compute(args, kwargs, tensors in them)``."""
        inputs: list[Tensor] = []
        key: Hashable = (node.op, node.target, self._key((args, kwargs), inputs))
        known: tuple[type, list[_Output]] | None
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that has no hash
            key, known = None, None
        if known is not None:
            return self._take_over(*known, inputs)
        shown = apart(inputs, [self._memory[id(t)] for t in inputs])
        to_shown = {id(a): b for a, b in zip(inputs, shown, strict=True) if a is not b}
        if to_shown:
            args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: to_shown.get(id(a), a))
        value = compute(args, kwargs, shown)
        if to_shown:
            to_inputs = {id(b): a for a, b in zip(inputs, shown, strict=True)}
            value = fx.node.map_aggregate(value, lambda a: to_inputs.get(id(a), a))
        outputs = self._note_outputs(_tensors(value), inputs, shown)
        if key is not None and self._may_repeat(value, inputs, key):
            self._known[key] = type(value), outputs
        return value

    def _key(self, argument: Any, inputs: list[Tensor]) -> Hashable:
        """What an operation can see of an argument; its tensors go to `inputs`, each once."""
        if isinstance(argument, Tensor):
            place = next((i for i, t in enumerate(inputs) if t is argument), len(inputs))
            if place == len(inputs):
                inputs.append(argument)
            memory = self._memory[id(argument)]
            first = next(i for i, t in enumerate(inputs) if self._memory[id(t)] == memory)
            return Tensor, place, first, self._kind[id(argument)]
        if isinstance(argument, _NUMBERS):
            return type(argument), argument.node.expr
        if isinstance(argument, (tuple, list)):
            return type(argument), tuple(self._key(a, inputs) for a in argument)
        if isinstance(argument, dict):
            return dict, tuple((name, self._key(a, inputs)) for name, a in argument.items())
        if isinstance(argument, slice):
            return slice, self._key((argument.start, argument.stop, argument.step), inputs)
        return type(argument), argument

    def _note_outputs(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor], shown: Sequence[Tensor]) -> list[_Output]:
        identities, storages = [id(t) for t in inputs], [_storage(t) for t in shown]
        made: dict[Any, int] = {}
        outputs = []
        for number, tensor in enumerate(tensors):
            place = _storage(tensor)
            same = identities.index(id(tensor)) if id(tensor) in identities else None
            view_of = storages.index(place) if place in storages else None
            kin = made.setdefault(place, number)
            outputs.append(_Output(tensor, same, view_of, kin))
        self._note_memories(tensors, outputs, inputs)
        return outputs

    def _note_memories(self, tensors: Sequence[Tensor], outputs: Sequence[_Output], inputs: Sequence[Tensor]) -> None:
        for tensor, output in zip(tensors, outputs, strict=True):
            if output.same is None and id(tensor) not in self._memory:
                of = tensors[output.kin] if output.view_of is None else inputs[output.view_of]
                memory = self._memory.get(id(of))
                kind = self._kind.get(id(output.tensor)) or _kind_of(tensor)
                self._note(tensor, kind, next(self._numbers) if memory is None else memory)

    def _note(self, tensor: Tensor, kind: Hashable, memory: int) -> None:
        self._alive.append(tensor)
        self._kind[id(tensor)], self._memory[id(tensor)] = kind, memory

    def _may_repeat(self, value: Any, inputs: Sequence[Tensor], key: Hashable) -> bool:
        tensors = _tensors(value)
        whole = isinstance(value, Tensor) or (type(value) in (tuple, list) and len(tensors) == len(value) > 0)
        if not whole or any(isinstance(self._kind[id(t)], _Unlike) for t in (*inputs, *tensors)):
            return False
        return all(_symbols(self._kind[id(t)]) <= _symbols(key) for t in tensors)

    def _take_over(self, kind: type, outputs: Sequence[_Output], inputs: Sequence[Tensor]) -> Any:
        copies: dict[int, Tensor] = {}
        for output in outputs:
            if id(output.tensor) not in copies:
                copy = _torch.second_fake(output.tensor) if output.same is None else inputs[output.same]
                copies[id(output.tensor)] = copy
        tensors = [copies[id(output.tensor)] for output in outputs]
        self._note_memories(tensors, outputs, inputs)
        return kind(tensors) if kind in (tuple, list) else tensors[0]


class _Unlike:
    """In place of what an operation can see of a tensor that is like no other."""


def _kind_of(tensor: Tensor) -> Hashable:
    """What an operation can see of a fake tensor."""
    if tensor.layout != torch.strided or _torch.known_value(tensor) is not None:
        return _Unlike()
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    expressions = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes)
    flags = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_inference(), type(tensor)
    return tensor.dtype, tensor.device, expressions, flags


def _symbols(key: Any) -> set[Any]:
    """The symbols of all expressions in a key."""
    if isinstance(key, tuple):
        return set().union(*map(_symbols, key))
    return key.free_symbols if isinstance(key, sympy.Basic) else set()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _storage(tensor: Tensor) -> Any:
    """What tells one storage from another; a layout without a storage is like no other."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def apart(tensors: Sequence[Tensor], memories: Sequence[int | None]) -> list[Tensor]:
    """The fakes, each in a storage of its own where another memory lies in the same one."""
    owners: dict[Any, int | None] = {}
    return [
        t if owners.setdefault(_storage(t), memory) == memory else _in_own_storage(t)
        for t, memory in zip(tensors, memories, strict=True)
    ]


def _in_own_storage(fake: Tensor) -> Tensor:
    length = fake.untyped_storage().nbytes() // fake.element_size()
    return torch.empty(length, dtype=fake.dtype, device=fake.device).as_strided(
        fake.shape, fake.stride(), fake.storage_offset()
    )
