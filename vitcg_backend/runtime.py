"""The life of a call: guards, layout, bucket, replay; or a slower path with a counted reason.

::

    call ─▶ what is asked (rows, layout) ─▶ plan (planning.py): one replay, several, or a reason
         ─▶ for each part of the plan (parts.py): layout values (kept)
            ─▶ capture (kept, by bucket, bounds and parameter addresses) ─▶ rows in ─▶ replay ─▶ rows out
         └▶ one part, its capture there: replayed at once, and what it depends on is looked at while the device works
         └▶ uncaptured: the same compiled pieces on the exact rows
         └▶ operators: the lowered graph op by op; for what the tower itself rejects this raises eager's own error
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from . import _dynamo_call, _torch, costs
from .attention import KernelChoice, SegmentBounds
from .attention.op import differentiable
from .batch_inputs import dense
from .bucketing import Layout
from .capture import Arena, Capture, bytes_needed, run_body
from .counters import BucketStats, CallRecord, Stats
from .errors import Refused, VitcgError
from .example_call import ExampleCall
from .layouts import MAX_BYTES, LayoutCache, LayoutValues, Misfit
from .options import Options
from .owners import Owners
from .parts import Parts, tokens_of_image
from .passes import CompiledBody
from .passes.graph import Role
from .planning import Part, Plan, Planner
from .self_check import spoilt, trouble
from .states import Known, StateChanged, States
from .stream_order import StreamOrder

__all__ = ["CompiledTower"]

log = _torch.log
_MAX_CAPTURES = 128
_MAX_AGAIN = 256
_BY_OPERATORS = {"invalid_grid", "outside_compiled_sizes", "other_number", "other_parameters", "forward_ad"}
_NO_REFUSAL = {"invalid_grid", "uncaptured_is_faster"}  # under `strict`: eager's own error, and a choice for speed


@dataclass(frozen=True)
class _Ask:
    """What a call asks for: its grid, its rows, and the replays that serve it or the reason why none does."""

    layout: Layout | None
    rows: int
    plan: Plan

    @classmethod
    def refused(cls, layout: Layout | None, rows: int, reason: str) -> _Ask:
        """A call that no replay serves."""
        return cls(layout, rows, Plan((), reason))

    @property
    def reason(self) -> str | None:
        return self.plan.reason

    def because(self, reason: str | None) -> _Ask:
        """The same call, not served as planned."""
        return _Ask(self.layout, self.rows, Plan((), reason))


@dataclass(frozen=True)
class _Again:
    """How a layout was served by one replay: the next call of it is served alike, as long as nothing has changed.

    Attributes:
        key: of the capture.
        record: what is counted.
    """

    key: Any
    capture: Capture
    part: Part
    values: LayoutValues
    record: CallRecord


class CompiledTower:
    """What Dynamo calls in place of a graph of the tower.

    Args:
        body: the compiled graph.
        choice: of the body's attention kernels, None without attention.
        options: the user's options.
        stats: counters to keep.
        operators: the lowered graph as Dynamo made it, no number in it made a constant.
        example_inputs: the first call's arguments, to tell whose graph this is; only weak references are kept.
    """

    def __init__(
        self,
        body: CompiledBody,
        choice: KernelChoice | None,
        options: Options,
        stats: Stats,
        operators: fx.GraphModule,
        example_inputs: Sequence[Any],
    ) -> None:
        self.body, self.choice, self.options, self.stats = body, choice, options, stats
        self._lowered = operators
        bound = body.bound
        self._device: torch.device = bound.placeholders[bound.pixels].meta["val"].device
        roles = [node.meta["role"] for node in bound.placeholders]
        numbers = {position for position, _ in bound.numbers}  # compared by value, and given in a new tensor each time
        positions = [i for i, role in enumerate(roles) if role == Role.STATE and i not in numbers]
        traced = [bound.placeholders[i].meta["val"] for i in positions]
        self._states = States(positions, traced, example_inputs, self._forget_state)
        self._gather: Any = None  # what the parameters are reached through -> the parameters
        self.owners = Owners(example_inputs)
        self._extra = [i for i, role in enumerate(roles) if role == Role.EXTRA]
        self._elsewhere = self._state_elsewhere(positions)
        self._again: dict[Any, _Again] = {}  # layout and pixel rows -> how it was served
        self._again_at: tuple[int, ...] = ()  # `_versions` when it was
        self._version = 0  # goes up whenever captures or refusals change
        limit = options.memory_limit_mib
        self._layouts = LayoutCache(body, choice, MAX_BYTES if limit is None else min(MAX_BYTES, limit << 18))
        self.parts = Parts(body, self._layouts)
        self._example = ExampleCall(body, self.parts, positions, example_inputs)
        more = self._extra or numbers or body.checks or self._layouts.items or self._layouts.other_sizes
        self._plain = not (more or body.hoisted.reads_state)  # nothing but its layout and its parameters tells calls apart
        self.planner = Planner(options, bound.symbols.unit, self.parts.possible(), tokens_of_image(body), self._fits)
        self.watchers: list[Callable[[CompiledTower, Sequence[Any], Sequence[Any]], None]] = []  # told of each call
        self._captures: OrderedDict[Any, Capture] = OrderedDict()
        self._refused: dict[Any, str] = {}
        self._arena = Arena()
        self._pool: Any = None
        self._order = StreamOrder()
        self._lock = threading.RLock()

    # --- a call -----------------------------------------------------------------------------------------------------

    def leave_out_parameters(self) -> None:
        """Inside a compile: calls by Dynamo bring what the parameters are reached through, in place of the first of them."""
        self._gather = _dynamo_call.leave_out(self._states.positions)

    def __call__(self, *args: Any) -> list[Any]:
        """Serve one call with the arguments of the Dynamo graph; results as the graph returns them."""
        owner = None if self._gather is None else args[self._states.positions[0]]
        watchers = list(self.watchers)
        if watchers and owner is not None:
            args, owner = tuple(self._states.filled(args, self._gather(owner))), None
        results = self.serve(args, owner=owner)
        for watcher in watchers:
            watcher(self, args, results)
        return results

    def known(self, args: Sequence[Any]) -> Known | None:
        """The parameters of a call, for a caller who keeps them and has looked at all else that Dynamo would look at.

        None where their memory is not known.
        """
        with self._lock:
            return self._states.keep(args)

    def reached_through(self, owner: Any) -> tuple[Any, ...] | None:
        """The parameters that are reached through a tower now, None where that is not known."""
        if not self._states.positions:
            return ()
        return None if self._gather is None else self._gather(owner)

    def serve(self, args: Sequence[Any], known: Known | None = None, owner: Any = None) -> list[Any]:
        """As a call of this object.

        Args:
            args: arguments of the graph.
            known: what the caller expects the parameters among them to be.
            owner: what the parameters are reached through, where they are not among the arguments.

        Raises:
            StateChanged: they are not that.
        """
        device = self._device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return self._served(args, known, owner)
        with torch.cuda.device(device):  # kernels, events and the clock are those of the current device
            return self._served(args, known, owner)

    def _served(self, args: Sequence[Any], known: Known | None, owner: Any) -> list[Any]:
        bound = self.body.bound
        layout = None if bound.grid is None else tuple(map(tuple, args[bound.grid].tolist()))  # once: a GPU is waited for
        place, results = (layout, args[bound.pixels].shape[bound.pixel_axis]), None
        again = self._again.get(place)
        if again is not None and self._again_at == self._versions:
            results = self._by_one_replay(args, known, owner, partial(self._still, place))
            if results is not None:
                self.stats.record(again.record)
                return results
            ask = self._ask(args, layout)
        else:
            ask = self._ask(args, layout)
            if self._plain and ask.reason is None and len(ask.plan.parts) == 1:
                try:
                    results = self._by_one_replay(args, known, owner, partial(self._anew, args, ask))
                except Misfit as misfit:
                    ask = ask.because(misfit.reason)
                if results is not None:
                    self._record(ask)
                    return results
        args = list(args) if owner is None else self._states.filled(args, self._gather(owner))
        with self._lock:
            state = self._states.number(self._states.of(args))
            self._states.learn(owner, state)
            fits = self._states.fits(state)
        if known is not None and known.number != state:
            raise StateChanged
        if not fits and ask.reason not in _BY_OPERATORS:
            ask = ask.because("other_parameters")
        if ask.plan.parts:
            results, ask = self._planned(args, ask, state)
        self._record(ask)
        if ask.reason is None:
            assert results is not None  # a call without a reason was replayed
            return results
        if self.options.strict and ask.reason not in _NO_REFUSAL:
            raise Refused(ask.reason, self._explain(ask))
        if results is not None:  # some of its parts ran uncaptured
            return results
        return self._operators(args) if ask.reason in _BY_OPERATORS else self._uncaptured(args, ask.layout, ask.rows)

    def _by_one_replay(
        self, args: Sequence[Any], known: Known | None, owner: Any, find: Callable[[int], _Again | None]
    ) -> list[Any] | None:
        """Results of the replay that `find` names for the number of the call's parameters, None where it does not serve.

        Nothing is looked at before the replay that can be looked at while it runs: small calls wait for the host. Of the
        parameters that is all but that their memory is there, of a layout's values all but that they are made. Whatever is
        found then, the results are dropped and the call goes by way of all checks.

        Raises:
            Misfit: the layout is not one for its bucket.
            StateChanged: as in `serve`.
        """
        if _torch.in_forward_ad():
            return None
        with self._lock, self._order.on(self._device):
            states, tensors = self._states, None if known is None else known.tensors
            guess = states.guess(owner) if known is None else known.number
            state = guess
            if state is None:
                tensors = states.of(args) if owner is None else self._gather(owner)
                state = states.number_at(tensors)
            again = find(state)
            if again is None or (guess is not None and not states.in_memory(guess)):
                return None
            if owner is not None and (again.capture.graph is None or self.body.tail is not None):  # their values are wanted now
                held = states.held(state) if tensors is None else tensors
                if held is None:
                    return None
                args = states.filled(args, held)
            again.values.wait()
            try:
                results = self._serve(again.capture, args, again.part, again.values, borrow=False)
            except Exception as error:  # once more, by way of all checks
                log.info("replay of %d tokens: %s", again.part.bucket.tokens, error)
                return None
            tensors = self._gather(owner) if tensors is None else tensors
            if guess is not None and states.number_at(tensors) != guess:
                if known is not None:
                    raise StateChanged
                return None
            if not states.confirms(state, tensors):
                return None
            reason = self._misfit_of(args, again.part, again.values)
            if reason is not None:
                raise Misfit(reason, "found by the check of its layout")
            self._captures.move_to_end(again.key)
            self._note_how(again)
        return results

    def _still(self, place: Any, state: int) -> _Again | None:
        """The way in which a layout was served before, if nothing that it depends on has changed."""
        again = self._again.get(place)  # another thread may have had it dropped, or made anew
        same = again is not None and self._again_at == self._versions and again.key[2:] == (state, _torch.numeric_state())
        return again if same else None

    def _anew(self, args: Sequence[Any], ask: _Ask, state: int) -> _Again | None:
        """The way in which one capture that is there can serve a call of one part."""
        (part,) = ask.plan.parts
        try:
            values = self._values(args, part)
        except Exception:  # whatever it is, it comes again by way of all checks
            return None
        key = (part.bucket, values.launches, state, _torch.numeric_state())
        capture = self._captures.get(key)
        if capture is None or self._is_over(values) or not self._states.fits(state):
            return None
        return _Again(key, capture, part, values, self._call_record(ask))

    @property
    def _versions(self) -> tuple[int, ...]:
        return self._version, self._layouts.version, self.planner.version

    def _ask(self, args: Sequence[Any], layout: Layout | None) -> _Ask:
        bound = self.body.bound
        self.body.check(args)
        rows, rest = divmod(args[bound.pixels].shape[bound.pixel_axis], bound.pixels_per_row)
        if rest:
            return _Ask.refused(None, rows, "invalid_grid")
        if _torch.in_forward_ad():  # a copy into a static buffer would lose the tangents
            return _Ask.refused(None, rows, "forward_ad")
        for position, number in bound.numbers:
            if args[position] != number:
                return _Ask.refused(None, rows, "other_number")
        if layout is not None:
            if not _is_valid(layout, rows, bound.symbols.unit):
                return _Ask.refused(layout, rows, "invalid_grid")
        elif rows % bound.symbols.unit or rows == 0:
            return _Ask.refused(layout, rows, "invalid_grid")
        if self._extra:
            return _Ask.refused(layout, rows, "caller_metadata")
        return _Ask(layout, rows, self._plan(layout, rows))

    def _plan(self, layout: Layout | None, rows: int) -> Plan:
        reason = self._misfit()
        with self._lock:
            return Plan((), reason) if reason else self.planner.plan(layout, rows)

    def _fits(self, plan: Plan, rows: int) -> bool:
        """Whether the compiled pieces are right for the sizes of a plan, or without one for the exact rows."""
        unit = self.body.bound.symbols.unit
        sizes = [part.bucket.tokens for part in plan.parts] or [rows // unit]
        fits = all(map(self.body.allows, sizes)) and all(self.body.may_be_padded(p.rows // unit) for p in plan.parts)
        if not fits:
            self.stats.refusals["outside_compiled_sizes"] = self.body.assumptions()
        return fits

    def _misfit(self) -> str | None:
        if self.body.refusal is not None:
            return self.body.refusal.reason
        if self.options.capture == "never":
            return "capture_never"
        if self._elsewhere is not None:
            return "state_elsewhere"
        if self.choice is not None and not self.choice.capturable and self._device.type == "cuda":
            return "attention_not_capturable"
        return None

    def _state_elsewhere(self, positions: Sequence[int]) -> str | None:
        """A parameter or buffer on another device than the pixels: a graph would keep the value that it had at the capture."""
        for node in (self.body.bound.placeholders[i] for i in positions):
            if node.meta["val"].device != self._device:
                return f"{node.name} is on {node.meta['val'].device} and the pixels are on {self._device}"
        return None

    def _planned(self, args: Sequence[Any], ask: _Ask, state: int) -> tuple[list[Any] | None, _Ask]:
        """Results of the replays of a plan. The call that comes back has a reason where a bucket could not be used."""
        with self._lock, self._order.on(self._device):
            if len(ask.plan.parts) > 1:
                return self._in_parts(args, ask, state)
            results, reason = self._replay(args, ask.plan.parts[0], state)
            return results, ask if reason is None else ask.because(reason)

    def _in_parts(self, args: Sequence[Any], ask: _Ask, state: int) -> tuple[list[Any] | None, _Ask]:
        refused = None
        try:
            joined = self.parts.joined(args, ask.layout, ask.rows)
        except Exception as error:
            return None, self._rejected(ask, error)
        for part in ask.plan.parts:
            own = self.parts.cut(args, part)
            results, reason = self._replay(own, part, state, borrow=True)
            refused = refused or reason
            joined.add(part, self._uncaptured(own, part.layout, part.rows) if results is None else results)
        try:
            self.parts.check(args, ask.layout, ask.rows, ask.plan)
        except Misfit as misfit:
            del joined, results
            self.stats.refusals[misfit.reason] = str(misfit)
            self.planner.keep_whole(ask.layout)
            ask = _Ask(ask.layout, ask.rows, self._plan(ask.layout, ask.rows))
            return self._planned(args, ask, state) if ask.plan.parts else (None, ask)
        except Exception as error:
            return None, self._rejected(ask, error)
        if ask.plan.rival is not None and refused is None:
            self._choose(args, ask, state)
        if self.planner.lacks(ask.rows):
            self.planner.learn_uncaptured(ask.layout, ask.rows, self._uncaptured_s(args, ask.layout, ask.rows))
        return joined.results, ask if refused is None else ask.because(refused)

    def _rejected(self, ask: _Ask, error: Exception) -> _Ask:
        """A call whose grid the tower's own functions do not take: eager's path says so."""
        log.info("metadata of %s: %s", ask.layout, error)
        return ask.because("invalid_grid")

    def _choose(self, args: Sequence[Any], ask: _Ask, state: int) -> None:
        """Measure several replays beside one of everything: once for a layout that comes again."""
        assert ask.plan.rival is not None
        assert ask.layout is not None
        several = _Ask(ask.layout, ask.rows, Plan(ask.plan.parts))
        whole = ask.plan.rival.parts[0]

        def one() -> None:
            results, reason = self._replay(args, whole, state)
            if results is None:
                raise RuntimeError(reason)

        try:
            one()  # the time of a first use, with its capture, would not be that of a replay
            times = self._time(lambda: self._in_parts(args, several, state), one)
        except Exception as error:  # one replay cannot serve it
            log.info("one replay of %d rows was not measured: %s", ask.rows, error)
            times = [0.0, math.inf]
        self.planner.settle(ask.layout, times[0] < times[1])

    def _replay(self, args: Sequence[Any], part: Part, state: int, borrow: bool = False) -> tuple[list[Any] | None, str | None]:
        """One replay. With `borrow` the results are views of the static outputs."""
        try:
            values = self._values(args, part)
        except Misfit as misfit:
            return None, misfit.reason
        except Exception as error:  # the tower's own functions reject the grid: let eager's path say so
            log.info("metadata of %s: %s", part.layout, error)
            return None, "invalid_grid"
        if self._is_over(values):
            return None, "over_max_frames"
        key = (part.bucket, values.launches, state, _torch.numeric_state())
        if key in self._refused:
            return None, self._refused[key]
        capture = self._captures.get(key)
        if capture is None and not self.planner.may_capture:
            return None, "not_warmed_up"
        if capture is None:
            reason = self._misfit_of(args, part, values)
            return (None, reason) if reason else self._first_use(key, args, part, values, borrow)
        self._captures.move_to_end(key)
        try:
            results = self._serve(capture, args, part, values, borrow)
        except Exception as error:  # out of memory for the results, say
            del self._captures[key]
            self._captures_changed()
            return None, self._refuse(key, "replay_failed", f"{type(error).__name__}: {error}")
        reason = self._misfit_of(args, part, values)  # while the device works
        if reason is None and not borrow and self._plain:
            record = self._call_record(_Ask(part.layout, part.rows, Plan((part,))))
            self._note_how(_Again(key, capture, part, values, record))
        return (None, reason) if reason else (results, None)

    def _values(self, args: Sequence[Any], part: Part) -> LayoutValues:
        # The exact rows of a call run with what its bucket was measured for, and cost no measurement of their own.
        measure, shared, like = self.planner.may_capture, self.planner.warms, self.planner.stands_for
        values = self._layouts.get(args, part.layout, part.rows, part.bucket, measure=measure, shared=shared, like=like)
        if shared and any(key[:2] == (part.bucket, values.launches) for key in self._captures):  # before the warm-up, maybe
            self._layouts.share(part.bucket, values.kernels, values.bounds)
        return values

    def _is_over(self, values: LayoutValues) -> bool:
        return self.options.max_frames is not None and values.num_segments > self.options.max_frames

    def _note_how(self, again: _Again) -> None:
        """The next call of the layout may be served in the same way, if its plan is final."""
        layout, rows = again.part.layout, again.part.rows
        place = layout, rows * self.body.bound.pixels_per_row
        if self._again.get(place) is again or not self.planner.is_final(layout, rows):
            return
        if self._again_at != self._versions or len(self._again) >= _MAX_AGAIN:
            self._again.clear()  # they hold values that may have been dropped
        self._again_at = self._versions
        self._again[place] = again

    def _misfit_of(self, args: Sequence[Any], part: Part, values: LayoutValues) -> str | None:
        """Why a bucket must not serve a part, found by the check of its layout, which each layout passes once."""
        try:
            self._layouts.check(args, part.layout, part.rows, values)
        except Misfit as misfit:
            return misfit.reason
        except Exception as error:  # the tower's own functions reject the grid: let eager's path say so
            log.info("metadata of %s: %s", part.layout, error)
            return "invalid_grid"
        return None

    def _serve(self, capture: Capture, args: Sequence[Any], part: Part, values: LayoutValues, borrow: bool) -> list[Any]:
        """Rows in, replay, rows out."""
        capture.write(args, values, part.rows)
        capture.replay(args)
        return self._take(capture, args, part, borrow)

    def _take(self, capture: Capture, args: Sequence[Any], part: Part, borrow: bool = False) -> list[Any]:
        borrow = borrow or self.options.outputs == "borrow"
        results = list(capture.real_rows(part.rows)) if borrow else capture.copy_out(part.rows)
        for number, (kind, index) in enumerate(self.body.program.outputs):
            if kind == "metadata":  # as the unpadded grid gives it
                results[number] = self._exact(args, part.layout, part.rows)[0][index].clone()
        if self.body.tail is not None:
            exact, _ = self._exact(args, part.layout, part.rows)
            results = self.body.tail(part.rows // self.body.bound.symbols.unit, args, results, exact)
        return results

    def _exact(self, args: Sequence[Any], layout: Layout | None, rows: int) -> tuple[Sequence[Tensor], dict[int, Tensor]]:
        """Metadata of the unpadded grid on the device, and what attention reads of it."""
        return self._layouts.get(args, layout, rows, None).on(self._device)

    def _uncaptured(self, args: Sequence[Any], layout: Layout | None, rows: int) -> list[Any]:
        """The compiled pieces on the exact rows, where they are right for that many."""
        bound = self.body.bound
        if not self.body.allows(rows // bound.symbols.unit):
            return self._operators(args)
        try:
            with self._lock:
                values = self._layouts.get(args, layout, rows, None, keep=not self._extra)
                tensors, segments = values.on(self._device)
        except Exception as error:  # eager's own error comes from the operators
            log.info("metadata of %s: %s", layout, error)
            return self._operators(args)
        try:
            return self._pieces(args, rows, tensors, segments, values)
        except Exception as error:  # a compiled piece or a kernel fails where the operators may not
            n = rows // bound.symbols.unit
            log.warning("vitcg runs a call of %d tokens by operators: %s: %s", n, type(error).__name__, error)
            self.stats.refusals["pieces_failed"] = f"{type(error).__name__}: {error}"
            return self._operators(args)

    def _unpadded(self, args: Sequence[Any], part: Part, values: LayoutValues | None) -> list[Any]:
        """The compiled pieces on the exact rows of a part, attention as in the capture for `values` where they are given.

        They must be of as many rows. All that the pieces and these kernels load when they first run so many is loaded then.
        """
        if values is None:
            return self._uncaptured(args, part.layout, part.rows)
        tensors, _ = self._exact(args, part.layout, part.rows)
        _, segments = values.on(self._device)
        return self._pieces(args, part.rows, tensors, segments, values)

    def _pieces(
        self, args: Sequence[Any], rows: int, tensors: Sequence[Tensor], segments: dict[int, Tensor], values: LayoutValues
    ) -> list[Any]:
        n = rows // self.body.bound.symbols.unit
        arguments = dense(self.body.bound, args)
        with torch.no_grad():
            results = run_body(self.body, arguments, n, tensors, segments, values.kernels, values.bounds)
            return results if self.body.tail is None else self.body.tail(n, args, results, tensors)

    def _operators(self, args: Sequence[Any]) -> list[Any]:
        """The lowered graph, one operator at a time, on whatever the caller gave."""
        graph = differentiable(self._lowered) if _torch.in_forward_ad() else self._lowered
        results = graph.forward(*args)  # calling the module would print the graph beside an error that is the caller's own
        return list(results) if isinstance(results, (tuple, list)) else [results]

    # --- captures ---------------------------------------------------------------------------------------------------

    def _first_use(
        self, key: Any, args: Sequence[Any], part: Part, values: LayoutValues, borrow: bool
    ) -> tuple[list[Any] | None, str | None]:
        """Capture a bucket, check it against the unpadded run, and serve the call from it."""
        needed, limit = bytes_needed(self.body, part.bucket, args, values), self.options.memory_limit_mib
        if limit is not None and needed > limit << 20:
            text = f"it needs {needed / 2**20:.1f} MiB of static memory, memory_limit_mib is {limit}"
            return None, self._refuse(key, "over_memory_limit", text)
        start = time.perf_counter()
        whole = self.options.self_check and part.rows == part.bucket.patches
        begun = False
        try:
            # First what stays: its buffers would pin the memory of what is large and goes.
            capture = Capture(self.body, part.bucket, args, values, self._arena)
            # Before the capture: what pieces need for their very first run, to choose kernels, is no memory of the graph pool.
            begin, watch = time.perf_counter(), costs.Stopwatch(self._device)
            exact = self._unpadded(args, part, values if whole else None) if self.options.self_check else None
            exact_s = time.perf_counter() - begin
            watch.stop()
            capture.write(args, values, part.rows)
            begun = True
            capture.record(args, self._graph_pool(), warm=whole)
            results, check_s, replay_s = self._first_results(capture, args, part, borrow, exact)
            exact = None  # as large as the results
        except _Disagrees as error:
            return None, self._refuse(key, "self_check", str(error))
        except VitcgError:
            raise
        except Exception as error:  # a failed capture must cost the caller nothing but time
            self._arena.owner = None
            if begun:  # the pool is of no use after a capture that broke off in it (`_torch.end_failed_capture`)
                self._pool = None
            return None, self._refuse(key, "capture_failed", f"{type(error).__name__}: {error}")
        self._keep(key, capture, time.perf_counter() - start, exact_s + check_s)
        if self.planner.measures and not self.planner.costs.knows(part.bucket.tokens):
            try:
                warm = self.options.self_check and self.stats.captures > 1  # the first run of all loads and compiles
                unpadded_s = watch.seconds() if warm else 0.0
                self._measure(capture, args, part, values, borrow, replay_s, unpadded_s)
            except Exception as error:  # out of memory, say: nothing is known of the bucket, and the results stand
                log.info("the bucket of %d tokens was not measured: %s", part.bucket.tokens, error)
        return results, None  # not those of the unpadded run: a bucket answers the same call with the same bits each time

    def _first_results(
        self, capture: Capture, args: Sequence[Any], part: Part, borrow: bool, exact: list[Any] | None
    ) -> tuple[list[Any], float, float]:
        """Results of the first replay, compared with the unpadded run's; seconds of the comparison, and of the replay in it."""
        if exact is None:
            capture.replay(args)
            return self._take(capture, args, part, borrow), 0.0, 0.0
        start = time.perf_counter()
        results: list[Any] = []

        def replay() -> None:
            capture.replay(args)
            results.extend(self._take(capture, args, part, borrow))

        with spoilt(capture, part.rows, self._pool):
            replay_s = costs.once(replay, self._device)
        text = trouble(capture, results, exact)
        if text is not None:
            raise _Disagrees(text)
        return results, time.perf_counter() - start, replay_s

    def _measure(
        self,
        capture: Capture,
        args: Sequence[Any],
        part: Part,
        values: LayoutValues,
        borrow: bool,
        replay_s: float,
        unpadded_s: float,
    ) -> None:
        """Times of a bucket, once. Its first replay took `replay_s`, which stands where that is long, and the unpadded run
        before that `unpadded_s`, which stands where it is clearly more (0 = it is not known).
        """
        bucket = self.stats.buckets[part.bucket.tokens]

        def serve() -> None:
            self._serve(capture, args, part, values, borrow)

        def copy() -> None:
            capture.write(args, values, part.rows)
            capture.copy_out(part.rows)

        def uncaptured() -> None:
            # A layout that stands for one of longer segments may suit other kernels than those of the capture.
            whole = self.planner.stands_for is not None and part.rows == part.bucket.patches
            self._unpadded(args, part, values if whole else None)

        long = capture.graph is not None and replay_s >= costs.LONG_S  # without a graph the check itself slows a run down
        known, replays = ([replay_s], [copy]) if long else ([], [serve, copy])
        clear = capture.graph is not None and unpadded_s > costs.CLEAR * replay_s
        try:
            bucket.uncaptured_s, *times = [unpadded_s, *self._time(*replays)] if clear else self._time(uncaptured, *replays)
        except Exception as error:  # out of memory, say: no alternative
            log.info("the uncaptured pieces were not measured at %d rows: %s", part.rows, error)
            bucket.uncaptured_s, times = math.inf, self._time(*replays)
        bucket.replay_s, bucket.copy_s = [*known, *times]
        self.planner.learn(part, bucket.replay_s, bucket.uncaptured_s)

    def _uncaptured_s(self, args: Sequence[Any], layout: Layout | None, rows: int) -> float:
        """Seconds of the uncaptured pieces; infinite where they fail."""
        try:
            return self._time(lambda: self._uncaptured(args, layout, rows))[0]
        except Exception as error:
            log.info("the uncaptured pieces were not measured at %d rows: %s", rows, error)
            return math.inf

    def _time(self, *runs: Callable[[], Any]) -> list[float]:
        return costs.seconds(runs, self._device)

    def _refuse(self, key: Any, reason: str, text: str) -> str:
        self._refused[key] = reason
        self._version += 1
        self.stats.refusals[f"{reason} at {key[0].tokens} tokens"] = text
        warnings.warn(f"vitcg does not use its bucket of {key[0].tokens} tokens [{reason}]: {text}", stacklevel=2)
        return reason

    def _keep(self, key: Any, capture: Capture, seconds: float, check_s: float) -> None:
        bucket = self.stats.buckets.setdefault(key[0].tokens, BucketStats())
        again = any(k[:2] == key[:2] for k in self._captures)
        self._captures[key] = capture
        bucket.captures += 1
        bucket.attention.update({kernel.name for kernel in capture.kernels.values()})
        bucket.capture_s += seconds
        bucket.self_check_s += check_s
        bucket.static_bytes = capture.static_bytes
        bucket.pool_bytes += capture.pool_bytes
        self.stats.captures += 1
        self.stats.recaptures += again
        if self.planner.warms:  # what comes later is to be served by what is captured now
            self._layouts.share(key[0], capture.kernels, capture.bounds)
        limit = self.options.memory_limit_mib
        while len(self._captures) > 1 and (len(self._captures) > _MAX_CAPTURES or self._over(limit)):
            self._captures.popitem(last=False)
            self.stats.evictions += 1
        self._captures_changed()

    def _captures_changed(self) -> None:
        self._version += 1
        self._again.clear()
        if not self._captures:  # a graph pool ends with the last graph in it, and its handle is of no use then
            self._pool = None
        self.planner.use(set(self.budgets_captured))

    def _over(self, limit_mib: int | None) -> bool:
        return limit_mib is not None and self._held_bytes() > limit_mib << 20

    def _held_bytes(self) -> int:
        """What counts towards `memory_limit_mib`."""
        return self._layouts.num_bytes + sum(c.static_bytes + c.pool_bytes for c in self._captures.values())

    def _graph_pool(self) -> Any:
        if self._pool is None and self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _forget_state(self, number: int) -> None:
        for kept in (self._captures, self._refused):
            for key in [key for key in kept if key[2] == number]:
                del kept[key]
        self._captures_changed()

    # --- housekeeping -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Give every capture, static buffer and layout back."""
        with self._lock:
            self._captures.clear()
            self._refused.clear()
            self._layouts.clear()
            self.parts.clear()
            self._arena.clear()
            self._pool = None
            self._order.clear()
            self._captures_changed()

    def forget_layouts(self) -> None:
        """Drop the metadata that is kept, so that each layout is new once more: for benchmarks."""
        with self._lock:
            self._layouts.clear()

    @property
    def takes_any_segments(self) -> bool:
        """Whether a capture made in a warm-up serves segments of every length: no attention kernel wants close bounds."""
        choice, one = self.choice, SegmentBounds(1, 1, 1)
        indices = self._layouts.segment_rows
        return choice is None or not any(choice.at(i, one, measure=False, shared=True).needs_longest for i in indices)

    @contextlib.contextmanager
    def warming(self, stands_for: Layout | None = None) -> Iterator[None]:
        """Calls of this thread inside may capture although ``capture="warmup"`` is set.

        With `stands_for`, a layout of as many rows, what they capture has room for its segments and is what it would capture.

        No lock is held meanwhile: a call may compile, for which Dynamo has a lock, and `torch._dynamo.reset` has that one while
        it waits for ours.
        """
        with self._lock:
            self.planner.warm(True, stands_for)
        try:
            yield
        finally:
            with self._lock:
                self.planner.warm(False)

    def call_with(self, images: int, ids: set[int]) -> bool:
        """Serve so many black images with the parameters of the tower that these ids belong to; False where that cannot be."""
        with self._lock:
            state = self._states.latest_of(ids)
        args = None if state is None or self._extra else self._example.arguments(images, state)
        if args is not None:
            self.serve(args)
        return args is not None

    @property
    def budgets_captured(self) -> frozenset[int]:
        """Budgets that have a capture."""
        return frozenset(key[0].tokens for key in self._captures)

    @property
    def captured_bytes(self) -> int:
        """Bytes of the static buffers, which the captures share, and of their graph pool."""
        return self._arena.bytes + sum(capture.own_bytes for capture in self._captures.values())

    def has_room(self, tokens: int) -> bool:
        """Whether `memory_limit_mib` leaves room for a bucket of `tokens`, judged by what a token of those captured takes."""
        limit = self.options.memory_limit_mib
        if limit is None or not self._captures:
            return True
        captured = sum(key[0].tokens for key in self._captures)
        return self._held_bytes() * (1 + tokens / captured) <= limit << 20

    def belongs_to(self, ids: set[int]) -> bool:
        """Whether a tower with a module or tensor of these ids was traced for it, or is among the latest that used it."""
        return self.owners.belongs_to(ids) or self._states.belongs_to(ids)

    def replay_last(self) -> Callable[[], None]:
        """The capture used last, as a function that replays it and copies nothing.

        Captures share their static inputs. After a call that another one has served, metadata there belongs to that one, and
        a kernel that reads it as its own would go out of bounds: then the function raises RuntimeError.
        """
        if not self._captures:
            raise RuntimeError("no bucket has been captured yet: call the tower on an input that fits a bucket first")
        capture = next(reversed(self._captures.values()))
        if capture.graph is None:
            raise RuntimeError("the capture used last is not a CUDA graph: this tower runs on a CPU")

        def replay() -> None:
            if not capture.holds_inputs:
                raise RuntimeError(
                    f"the static inputs do not hold a call of the capture of {capture.bucket.tokens} tokens: another capture "
                    "has served a call since, or its first use was checked. Call the tower on an input of that size, and ask "
                    "for its replay again"
                )
            capture.graph.replay()

        return replay

    def _record(self, ask: _Ask) -> None:
        self.stats.record(self._call_record(ask))
        self.stats.layouts = len(self._layouts)

    def _call_record(self, ask: _Ask) -> CallRecord:
        unit, tokens = self.body.bound.symbols.unit, ask.plan.bucket_tokens
        padded = 0.0 if tokens is None else 1.0 - ask.rows / (tokens * unit)
        replays = tuple((part.bucket.tokens, part.rows // unit) for part in ask.plan.parts)
        hit = ask.reason is None
        return CallRecord(hit, ask.reason, self._items(ask), ask.rows, ask.rows // unit, tokens, padded, replays)

    def _items(self, ask: _Ask) -> int:
        if ask.layout is not None:
            return len(ask.layout)
        return ask.rows if self.planner.tokens_of_image else 0  # a row is an image

    def _explain(self, ask: _Ask) -> str:
        if self.body.refusal is not None:
            return self.body.refusal.detail
        tokens = ask.rows // self.body.bound.symbols.unit
        if ask.reason == "under_min_tokens":
            return f"the call has {tokens} output tokens, the option min_tokens is {self.options.min_tokens}"
        if ask.reason == "capture_never":
            return "the option capture='never' asks for uncaptured calls, strict=True for captured ones: leave one out"
        if ask.reason == "state_elsewhere":
            return self._elsewhere or ""
        if ask.reason == "caller_metadata":
            names = ", ".join(self.body.bound.placeholders[i].name for i in self._extra)
            return f"metadata that the caller computed is not padded: {names}. Leave it away: the tower has the grid"
        if ask.reason == "other_parameters":
            return "parameters have another dtype, size or device than those that the graph was compiled for"
        if ask.reason in ("outside_compiled_sizes", *{name.partition(" ")[0] for name in self.stats.refusals}):
            texts = [text for name, text in self.stats.refusals.items() if name.partition(" ")[0] == ask.reason]
            return texts[-1] if texts else self.body.assumptions()
        call = f"a call of {tokens} tokens ({ask.rows} patches) in {self._items(ask)} items"
        if ask.reason == "not_warmed_up":
            captured = sorted(self.budgets_captured)
            return f"{call}; captured are budgets of {captured or 'no'} tokens: warmup(tower, ...) captures more"
        budgets = self.planner.ladder.budgets
        shown = f"{list(budgets)}" if len(budgets) <= 24 else f"{len(budgets)} from {budgets[0]} to {budgets[-1]}"
        return f"{call}; budgets in tokens: {shown}"


class _Disagrees(Exception):
    """The self-check's verdict."""


def _is_valid(layout: Layout, rows: int, unit: int) -> bool:
    """Whether the pieces may see this grid: whole items that cover the rows exactly. The rest is for eager to reject."""
    total = 0
    for sizes in layout:
        patches = 1
        for size in sizes:
            if size < 1:
                return False
            patches *= size
        if patches % unit:
            return False
        total += patches
    return total == rows and rows > 0
