"""Calls of a compiled tower that go round Dynamo: ``lane = fast_lane(tower)``, then ``lane(pixel_values, grid_thw=grid)``.

Dynamo looks at a tower's modules and at much else in each call, which takes longer than all else that the host does for a
replay, several times as long where it cannot pass over whole layers (before Python 3.12). The user of a lane promises that the
tower's modules stay as they are. What can still change from call to call is looked at: shapes and dtypes of the arguments,
modes, and, while the device works, which parameters the tower has, their addresses and layouts.

::

    call ─▶ kind of call (names, dtypes, fixed sizes, modes) ─▶ route known? ─▶ runtime (parameters as they were?) ─▶ output
                                                             └▶ the compiled tower, watched: a route for the next call
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _torch
from .backend import live_towers
from .owners import not_compiled
from .passes.graph import Role
from .runtime import CompiledTower
from .size_guards import SizeGuards
from .states import Known, StateChanged

__all__ = ["FastLane", "fast_lane"]

_MAX_ROUTES = 64


def fast_lane(tower: nn.Module) -> FastLane:
    """A function that calls a compiled tower without Dynamo's guards.

    Use it where a tower is served and nothing is done to its modules. After hooks, submodules or attributes have been added,
    replaced or taken away, or parameters added, `FastLane.forget` the routes, or make another lane: until then calls are served
    with those that the lane has seen. These are seen without it: weights edited in place, loaded by ``load_state_dict``,
    replaced (``assign=True``) or moved through ``.data`` (``tower.to(...)``), ``train()`` and ``eval()``, autocast, grad mode,
    and every kind of argument.

    Args:
        tower: what `torch.compile` with ``backend="vitcg"`` returned, or a module after ``.compile(backend="vitcg")``.

    Raises:
        TypeError: `tower` is no module that is compiled with this backend.
    """
    wrong = not_compiled(tower) if isinstance(tower, nn.Module) else "is no module"
    if wrong is not None:
        raise TypeError(
            "fast_lane() takes a tower compiled with this backend, torch.compile(tower, backend='vitcg') or the tower after "
            f"tower.compile(backend='vitcg'): {type(getattr(tower, '_orig_mod', tower)).__name__} {wrong}."
        )
    return FastLane(tower)


@dataclass(frozen=True)
class _Route:
    """How a kind of call is served without Dynamo.

    Attributes:
        callee: the graph that serves it.
        template: its arguments: parameters and buffers as they are, None for what each call brings.
        leaves: (position of an argument, which leaf of the call's arguments it is).
        sizes: what Dynamo has decided by the sizes of those.
        known: its parameters.
        results: which result of the graph each leaf of the output is, None for `constants`.
        constants: leaves of the output that are the same in each call.
        spec: structure of the output.
    """

    callee: CompiledTower
    template: list[Any]
    leaves: list[tuple[int, int]]
    sizes: SizeGuards
    known: Known
    results: list[int | None]
    constants: list[Any]
    spec: Any


class FastLane:
    """See `fast_lane`.

    Attributes:
        tower: the compiled tower.
        refusals: reason -> text, for kinds of call that have no route; they are served by the compiled tower.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower
        self.refusals: dict[str, str] = {}
        self._refused: set[Any] = set()  # kinds of call
        self._module: nn.Module = getattr(tower, "_orig_mod", tower)
        self._routes: dict[Any, list[_Route]] = {}  # kind of call -> routes for calls of different sizes
        self._ambient = _torch.Ambient()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also one that was pickled, is a lane of the copied tower, and looks at that for itself."""
        return FastLane, (self.tower,)

    def __repr__(self) -> str:
        kinds = f"kinds of calls routed: {len(self._routes)}"
        return f"FastLane({type(self._module).__name__}, {kinds}, refusals: {self.refusals or 'none'})"

    def forget(self) -> None:
        """Look at the tower once more: its modules have changed."""
        self._routes.clear()
        self.refusals.clear()
        self._refused.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's output. Raises what the tower raises."""
        given = (*args, *kwargs.values())
        kind = self._kind(len(args), kwargs, given)
        for route in self._routes.get(kind, ()) if kind is not None else ():
            arguments = _arguments(route, given)
            if arguments is not None:
                try:
                    results = route.callee.serve(arguments, known=route.known)
                    if self._has_parameters_of(route):  # looked at while the device works
                        return _output(route, results)
                except StateChanged:
                    pass
                self._routes.clear()  # Dynamo may have another graph for them; each route would keep the memory of the old ones
                break
        return self._watched(kind, given, args, kwargs)

    def _has_parameters_of(self, route: _Route) -> bool:
        """Whether the tower has the very parameters of a route."""
        try:
            now = route.callee.reached_through(self._module)
        except Exception:  # a module that they were in is gone
            return False
        return now is not None and all(map(operator.is_, now, route.known.tensors))

    def _kind(self, positional: int, kwargs: dict[str, Any], given: Sequence[Any]) -> Any:
        """What tells calls apart, None where that is not known."""
        ambient = self._ambient.now()
        if ambient[0] or _torch.watched_by_modes():  # grad mode
            return None
        described = [_described(value) for value in given]
        tensors = [id(value) for value in given if isinstance(value, Tensor)]
        if None in described or len(set(tensors)) < len(tensors):
            return None
        modes = torch.is_inference_mode_enabled(), self._module.training, ambient, _torch.numeric_state()
        return positional, tuple(kwargs), tuple(described), modes

    def _watched(self, kind: Any, given: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the compiled tower; where one graph alone has served it, the route for the next of its kind."""
        parts = [] if kind is None or kind in self._refused else live_towers(self._module)
        if not parts:
            return self.tower(*args, **kwargs)
        seen: list[tuple[CompiledTower, Sequence[Any], Sequence[Any]]] = []
        me, inference = threading.get_ident(), torch.is_inference_mode_enabled()
        modes: set[bool] = set()

        def watch(callee: CompiledTower, arguments: Sequence[Any], results: Sequence[Any]) -> None:
            if threading.get_ident() == me:
                seen.append((callee, arguments, results))
                modes.add(torch.is_inference_mode_enabled())

        for part in parts:
            part.watchers.append(watch)
        try:
            output = self.tower(*args, **kwargs)
        finally:
            for part in parts:
                part.watchers.remove(watch)
        if not seen:  # traced just now, or on the ordinary path
            return output
        try:
            if len(seen) > 1:
                raise _NoRoute("several_graphs", f"it is served by {len(seen)} graphs, a lane needs one")
            if modes != {inference}:
                raise _NoRoute("own_inference_mode", "the tower enters inference mode by itself")
            hooked = [type(m).__name__ for m in self.tower.modules() if m._forward_hooks or m._forward_pre_hooks]
            if hooked or _torch.has_global_hooks():
                which = hooked[0] if hooked else "every module"
                raise _NoRoute("hooks", f"{which} has hooks, and what they do besides the output would be left out")
            if not seen[0][0].owners.is_whole(self._module):
                raise _NoRoute(
                    "more_than_graph",
                    "the graph is not all that the tower does: Python code runs around it, or it keeps something besides",
                )
            route = _route(*seen[0], given, output)
            if not self._has_parameters_of(route):
                raise _NoRoute("parameter_paths", "it is not known how the tower reaches its parameters")
        except _NoRoute as error:
            self._refuse(kind, *error.args)
            return output
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.pop(next(iter(self._routes)), None)
        others = [other for other in self._routes.get(kind, ()) if _arguments(other, given) is None]
        self._routes[kind] = [route, *others]
        return output

    def _refuse(self, kind: Any, reason: str, text: str) -> None:
        if len(self._refused) < _MAX_ROUTES:
            self._refused.add(kind)
        self.refusals[reason] = text
        _torch.log.info("no fast lane for a kind of call [%s]: %s", reason, text)


class _NoRoute(Exception):
    """Why a call has no route: the reason's name, and a text."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)


def _described(value: Any) -> Any:
    """What Dynamo would look at of an argument, apart from the number of its rows; None for what no lane knows."""
    if isinstance(value, Tensor):
        few = value.dim() > 2 and value.shape[0] < 2  # a batch of one image is special to Dynamo
        laid = value.is_contiguous() or value.stride()
        return type(value), value.dtype, value.device, value.shape[1:], value.dim(), few, laid
    return (type(value), value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _route(
    callee: CompiledTower, arguments: Sequence[Any], results: Sequence[Any], given: Sequence[Any], output: Any
) -> _Route:
    """The route of a call that `callee` has served.

    Raises:
        _NoRoute: some argument or some part of the output is neither the caller's nor the graph's.
    """
    body = callee.body
    template, leaves = list(arguments), []
    for position, (node, value) in enumerate(zip(body.bound.placeholders, arguments, strict=True)):
        role = node.meta["role"]
        if role == Role.STATE:
            continue
        template[position] = None
        if role == Role.SIZE:
            continue
        leaf = next((i for i, g in enumerate(given) if g is value), None)
        if leaf is None:
            raise _NoRoute("other_inputs", f"{node.name} is not an argument of the call")
        leaves.append((position, leaf))
    if body.bound.pixel_axis != 0:
        raise _NoRoute("pixel_axis", "rows are not the first axis of the pixels")
    flat, spec = pytree.tree_flatten(output)
    places: list[int | None] = []
    for leaf in flat:
        if leaf is not None and not isinstance(leaf, (Tensor, bool, str)):  # a number may follow the rows
            raise _NoRoute("other_outputs", f"the output holds a {type(leaf).__name__}")
        places.append(next((i for i, r in enumerate(results) if r is leaf), None) if isinstance(leaf, Tensor) else None)
        if isinstance(leaf, Tensor) and places[-1] is None:
            raise _NoRoute("other_outputs", "a tensor of the output is made outside of the graph")
    try:
        sizes = SizeGuards(body.bound.placeholders, [position for position, _ in leaves])
    except ValueError as error:
        raise _NoRoute("sizes", str(error)) from error
    constants = [leaf if place is None else None for leaf, place in zip(flat, places, strict=True)]
    known = callee.known(arguments)
    if known is None:
        raise _NoRoute("parameter_memory", "the memory of its parameters is not known: one of them has no storage of its own")
    route = _Route(callee, template, leaves, sizes, known, places, constants, spec)
    again = _filled(route, given)
    if any(a is not b and (isinstance(a, Tensor) or a != b) for a, b in zip(again, arguments, strict=True)):
        raise _NoRoute("sizes", "a size in the graph is neither a number of tokens nor the number of items")
    return route


class _Arguments(Sequence[Any]):
    """The graph's arguments for a call: its own over those of a route, which are not copied for each call."""

    def __init__(self, route: _Route, own: dict[int, Any]) -> None:
        self._template, self._own = route.template, own

    def __len__(self) -> int:
        return len(self._template)

    def __getitem__(self, position: Any) -> Any:
        return self._own[position] if position in self._own else self._template[position]

    def __setitem__(self, position: int, value: Any) -> None:
        self._own[position] = value


def _filled(route: _Route, given: Sequence[Any]) -> _Arguments:
    """The graph's arguments for a call."""
    own = {position: given[leaf] for position, leaf in route.leaves}
    bound = route.callee.body.bound
    items = 0 if bound.grid is None else len(own[bound.grid])
    tokens = own[bound.pixels].shape[0] // bound.pixels_per_row // bound.symbols.unit
    arguments = _Arguments(route, own)
    route.callee.parts.layouts.sizes.fill(arguments, tokens, items)
    return arguments


def _arguments(route: _Route, given: Sequence[Any]) -> _Arguments | None:
    """The graph's arguments for a call; None where its sizes are not those of the graph: Dynamo may have another for them."""
    arguments = _filled(route, given)
    bound = route.callee.body.bound
    if not route.sizes.hold(arguments):
        return None
    rows = arguments[bound.pixels].shape[0]
    return None if rows == 0 or rows % (bound.pixels_per_row * bound.symbols.unit) else arguments


def _output(route: _Route, results: Sequence[Any]) -> Any:
    leaves = [c if place is None else results[place] for place, c in zip(route.results, route.constants, strict=True)]
    return pytree.tree_unflatten(leaves, route.spec)
