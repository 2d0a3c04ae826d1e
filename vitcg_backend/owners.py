"""Whose graph it is, and what Dynamo says of the code of a tower that gave no graph: what `stats(tower)` looks up.

A graph is found by the modules that its traced frame holds (a tower need not have parameters, and its weights may be plain
tensors) and by tensors that it was called with (towers of one class share a graph, and Dynamo traces only the first of them).
A frame that Dynamo gives up runs in eager mode without reaching any backend. It is found in Dynamo's own record of compiles.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from . import _torch
from .marking import inputs_of

__all__ = ["Owners", "compiled_part", "ids_of", "not_compiled", "not_traced", "why_in_parts"]

_TOWERS = 8  # towers of one class that are told apart
_TENSORS = 8  # that stand for their tower

NO_GRAPH = (
    "no graph of this tower has reached the backend: it was not called since it was compiled, it is compiled for another "
    "backend, or Dynamo leaves it to eager mode (torch.compiler.disable, the limit of recompiles); "
    "TORCH_LOGS=graph_breaks,recompiles tells which"
)


class Owners:
    """The towers that a graph belongs to. Weak references only.

    Args:
        example_inputs: the inputs of the graph's first call. Made while Dynamo compiles, it also knows the traced modules.
    """

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        trace = _torch.current_trace()
        given = {id(t) for t in inputs_of(trace)} if trace is not None else set()
        tensors = [(i, t) for i, t in enumerate(example_inputs) if isinstance(t, Tensor) and id(t) not in given]
        tensors.sort(key=lambda pair: not isinstance(pair[1], nn.Parameter))
        self._positions = [i for i, _ in tensors[:_TENSORS]]
        self._modules = [weakref.ref(module) for module in _modules_of(trace)]
        self._whole: dict[type, Any] = {}
        if trace is not None and not why_in_parts() and not _torch.leaves_traces(trace):
            self._whole = {type(module): _torch.traced_code(trace) for module in _modules_of(trace)}
        self._towers: deque[list[weakref.ref[Tensor]]] = deque(maxlen=_TOWERS)
        self._place: tuple[str, int] | None = None
        if trace is not None and not self._modules and not self._positions:
            code = _torch.traced_code(trace)  # what follows a graph break begins at the line of the break
            self._place = code.co_filename, code.co_firstlineno
        self.note(example_inputs)

    def note(self, args: Sequence[Any]) -> None:
        """The graph is called with these arguments."""
        if self._positions and not any(refs[0]() is args[self._positions[0]] for refs in self._towers):
            self._towers.append([weakref.ref(args[i]) for i in self._positions])

    def belongs_to(self, ids: set[int]) -> bool:
        """Whether a module or tensor of these ids is an owner."""
        references: list[Any] = [*self._modules, *(ref for refs in list(self._towers) for ref in refs)]
        owners = [ref() for ref in references]
        return any(id(owner) in ids for owner in owners if owner is not None)

    def is_whole(self, tower: nn.Module) -> bool:
        """Whether the graph is all that a tower's forward does: no Python runs around it, and nothing else is changed."""
        forward = getattr(tower.forward, "__func__", tower.forward)
        return type(tower) in self._whole and getattr(forward, "__code__", None) is self._whole[type(tower)]

    def traced_in(self, tower: nn.Module) -> bool:
        """Whether it is of a tower's code, where nothing else tells: what follows a graph break need not hold the module."""
        return self._place is not None and any(_within(self._place, place) for place in _places_of(tower))


def ids_of(tower: nn.Module) -> set[int]:
    """Ids of all that makes a tower: its modules, parameters and buffers."""
    return {id(part) for part in (*tower.modules(), *tower.parameters(), *tower.buffers())}


def compiled_part(tower: nn.Module) -> str | None:
    """The first part of a module that is compiled, by its path; None without one."""
    return next((name for name, part in tower.named_modules() if name and _torch.backend_of(part)), None)


def not_compiled(tower: nn.Module) -> str | None:
    """Why no call of a tower can reach this backend: it is not compiled, or with a backend of torch's.

    None where it can: a function of the user's may call this backend.
    """
    backend = _torch.backend_of(tower)
    if backend is None:
        inner = compiled_part(tower)
        return "is not compiled" if inner is None else f"is not compiled, its part .{inner} is: give that"
    name, function, _ = backend
    home = getattr(function, "__module__", None) or type(function).__module__
    return f"is compiled with backend={name!r}" if home.partition(".")[0] == "torch" else None


def why_in_parts() -> dict[str, str]:
    """In the backend: reason -> text where the running trace covers only a part of its function."""
    trace = _torch.current_trace()
    if trace is None:
        return {}
    broken, found = _torch.graph_break(trace), {}
    if broken is not None:
        found["graph_break"] = broken
    if _torch.is_resumed(trace):
        found["after_graph_break"] = f"Dynamo has broken the tower, what follows is {_torch.traced_code(trace).co_name}"
    return found


def not_traced(tower: nn.Module) -> dict[str, str]:
    """Reason -> text for functions of the tower's classes that Dynamo gave up, among its latest compiles."""
    failures = _torch.failed_compiles()
    places = _places_of(tower) if failures else []
    texts = [text for frame, line, text in failures if any(_within(at, place) for place in places for at in (frame, line))]
    return {"not_traced": "; ".join(dict.fromkeys(texts))} if texts else {}


def _within(at: tuple[str, int], place: tuple[str, int, int]) -> bool:
    return at[0] == place[0] and place[1] <= at[1] < place[2]


def _places_of(tower: nn.Module) -> list[tuple[str, int, int]]:
    """(file, first line, line after the last) of the classes of a tower's modules, those of torch left out."""
    classes = {cls for module in tower.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    places = [_place_of(cls) for cls in classes if cls.__module__.partition(".")[0] != "torch"]  # type: ignore[arg-type]
    return [place for place in places if place is not None]


@functools.lru_cache(maxsize=1024)  # to look into a file takes milliseconds
def _place_of(cls: type) -> tuple[str, int, int] | None:
    try:
        lines, first = inspect.getsourcelines(cls)
        return inspect.getsourcefile(cls) or "", first, first + len(lines)
    except (OSError, TypeError):  # a class without source: nothing to compare with
        return None


def _modules_of(trace: Any) -> Iterator[nn.Module]:
    """The modules among the arguments of the traced frame."""
    values = list(_torch.root_of(trace).f_locals.values()) if trace is not None else []
    for value in values:
        for held in value if isinstance(value, tuple) else (value,):
            if isinstance(held, nn.Module):
                yield held
