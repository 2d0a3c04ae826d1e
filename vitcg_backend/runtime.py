"""The life of a call: guards, layout, bucket, replay; or a slower path with a counted reason.

::

    call ─▶ what is asked (rows, layout) ─▶ bucket, or a reason
         ─▶ layout values (kept) ─▶ capture (kept, by bucket, bounds and parameter addresses)
         ─▶ rows in ─▶ replay ─▶ rows out
         └▶ uncaptured: the same compiled pieces on the exact rows
         └▶ operators: the lowered graph op by op; for what the tower itself rejects this raises eager's own error
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .attention import VarlenKernel
from .bucketing import Bucket, Ladder, Layout
from .capture import Arena, Capture, run_body
from .counters import BucketStats, CallRecord, Stats
from .errors import Refused, VitcgError
from .layouts import LayoutCache, LayoutValues, Misfit
from .options import Options
from .passes import CompiledBody
from .passes.graph import Role
from .self_check import disagreement

__all__ = ["CompiledTower"]

log = _torch.log
_MAX_CAPTURES = 128
_MAX_STATES = 8  # sets of parameter addresses: towers of one class share an artifact, adapters are switched
_address = Tensor.data_ptr


@dataclass(frozen=True)
class _Ask:
    """What a call asks for: its grid, its rows, and the bucket that holds them or the reason why none does."""

    layout: Layout | None
    rows: int
    bucket: Bucket | None
    reason: str | None

    @property
    def items(self) -> int:
        return 0 if self.layout is None else len(self.layout)


class CompiledTower:
    """What Dynamo calls in place of a graph of the tower.

    Args:
        body: the compiled graph.
        kernel: attention of the body, None without attention.
        options: the user's options.
        stats: counters to keep.
        operators: the lowered graph as Dynamo made it, no number in it made a constant.
        example_inputs: the first call's arguments, to tell whose graph this is; only weak references are kept.
    """

    def __init__(
        self,
        body: CompiledBody,
        kernel: VarlenKernel | None,
        options: Options,
        stats: Stats,
        operators: Callable[..., Any],
        example_inputs: Sequence[Any],
    ) -> None:
        self.body, self.kernel, self.options, self.stats = body, kernel, options, stats
        self._lowered = operators
        bound = body.bound
        unit = bound.symbols.unit
        self.ladder = (
            Ladder.automatic(options.max_tokens, unit)
            if options.token_budgets is None
            else Ladder.from_budgets(options.token_budgets, unit)
        )
        roles = [node.meta["role"] for node in bound.placeholders]
        self._state_positions = [i for i, role in enumerate(roles) if role == Role.STATE]
        self._extra = [i for i, role in enumerate(roles) if role == Role.EXTRA]
        self._state_of = _getter(self._state_positions)
        self._layouts = LayoutCache(body, kernel)
        self._captures: OrderedDict[Any, Capture] = OrderedDict()
        self._states: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._state_numbers = itertools.count()
        self._last_state: tuple[list[int], int] = ([], -1)
        self._refused: dict[Any, str] = {}
        self._arena = Arena()
        self._pool: Any = None
        self._last_use: Any = None
        self._lock = threading.RLock()
        self._owners = self._weak_owners(example_inputs)

    # --- a call -----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> list[Any]:
        """Serve one call with the arguments of the Dynamo graph; results as the graph returns them."""
        ask = self._ask(args)
        if ask.bucket is not None:
            results, ask = self._replay(args, ask)
            if results is not None:
                return results
        self._record(ask, None)
        if self.options.strict and ask.reason != "invalid_grid":
            raise Refused(ask.reason or "unknown", self._explain(ask))
        return self._operators(args) if ask.reason in _BY_OPERATORS else self._uncaptured(args, ask)

    def _ask(self, args: Sequence[Any]) -> _Ask:
        bound = self.body.bound
        rows, rest = divmod(args[bound.pixels].shape[bound.pixel_axis], bound.pixels_per_row)
        if rest:
            return _Ask(None, rows, None, "invalid_grid")
        for position, number in bound.numbers:
            if args[position] != number:
                return _Ask(None, rows, None, "other_number")
        if self._extra:
            allowed = rows % bound.symbols.unit == 0 and self.body.allows(rows // bound.symbols.unit)
            return _Ask(None, rows, None, "caller_metadata" if allowed else "outside_compiled_sizes")
        layout: Layout | None = None
        if bound.grid is not None:
            layout = tuple(tuple(row) for row in args[bound.grid].tolist())
            if not _is_valid(layout, rows, bound.symbols.unit):
                return _Ask(layout, rows, None, "invalid_grid")
        elif rows % bound.symbols.unit or rows == 0:
            return _Ask(layout, rows, None, "invalid_grid")
        reason = self._misfit(layout, rows)
        bucket = None if reason else self.ladder.fit(rows)
        if not self.body.allows(bucket.tokens if bucket else rows // bound.symbols.unit):
            self.stats.refusals["outside_compiled_sizes"] = self.body.assumptions()
            return _Ask(layout, rows, None, "outside_compiled_sizes")
        return _Ask(layout, rows, bucket, reason or (None if bucket else "over_largest_budget"))

    def _misfit(self, layout: Layout | None, rows: int) -> str | None:
        options = self.options
        if self.body.refusal is not None:
            return self.body.refusal.reason
        if options.capture == "never":
            return "capture_never"
        if self.kernel is not None and not self.kernel.capturable and self._device_type() == "cuda":
            return "attention_not_capturable"
        if rows // self.body.bound.symbols.unit < options.min_tokens:
            return "under_min_tokens"
        if options.max_items is not None and layout is not None and len(layout) > options.max_items:
            return "over_max_items"
        return None

    def _device_type(self) -> str:
        return self.body.bound.placeholders[self.body.bound.pixels].meta["val"].device.type

    def _replay(self, args: Sequence[Any], ask: _Ask) -> tuple[list[Any] | None, _Ask]:
        bucket = ask.bucket
        assert bucket is not None  # the caller asks for a replay only with a bucket
        with self._lock, self._on_stream(args):
            try:
                values = self._layouts.get(args, ask.layout, ask.rows, bucket)
            except Misfit as misfit:
                return None, _Ask(ask.layout, ask.rows, None, misfit.reason)
            except Exception as error:  # the tower's own functions reject the grid: let eager's path say so
                log.info("metadata of %s: %s", ask.layout, error)
                return None, _Ask(ask.layout, ask.rows, None, "invalid_grid")
            if self.options.max_frames is not None and values.num_segments > self.options.max_frames:
                return None, _Ask(ask.layout, ask.rows, None, "over_max_frames")
            key = (bucket, tuple(values.bounds.items()), self._state(args))
            if key in self._refused:
                return None, _Ask(ask.layout, ask.rows, None, self._refused[key])
            capture = self._captures.get(key)
            if capture is None:
                return self._first_use(key, args, ask, values)
            self._captures.move_to_end(key)
            capture.write(args, values, ask.rows)
            capture.replay(args)
            results = self._take(capture, args, ask)
        self._record(ask, bucket)
        return results, ask

    def _take(self, capture: Capture, args: Sequence[Any], ask: _Ask) -> list[Any]:
        results = self._take_rows(capture, ask.rows)
        for number, (kind, index) in enumerate(self.body.program.outputs):
            if kind == "metadata":  # as the unpadded grid gives it
                results[number] = self._layouts.get(args, ask.layout, ask.rows, None).tensors[index].clone()
        if self.body.tail is not None:
            exact = self._layouts.get(args, ask.layout, ask.rows, None).tensors
            results = self.body.tail(ask.rows // self.body.bound.symbols.unit, args, results, exact)
        return results

    def _take_rows(self, capture: Capture, rows: int) -> list[Any]:
        return list(capture.real_rows(rows)) if self.options.outputs == "borrow" else capture.copy_out(rows)

    def _uncaptured(self, args: Sequence[Any], ask: _Ask) -> list[Any]:
        """The compiled pieces on the exact rows."""
        bound = self.body.bound
        try:
            with self._lock:
                values = self._layouts.get(args, ask.layout, ask.rows, None, keep=not self._extra)
        except Exception as error:  # eager's own error comes from the operators
            log.info("metadata of %s: %s", ask.layout, error)
            return self._operators(args)
        arguments = list(args)
        arguments[bound.pixels] = args[bound.pixels].contiguous()
        with torch.no_grad():
            n = ask.rows // bound.symbols.unit
            results = run_body(self.body, self.kernel, arguments, n, values.tensors, values.segments, values.bounds)
            return results if self.body.tail is None else self.body.tail(n, args, results, values.tensors)

    def _operators(self, args: Sequence[Any]) -> list[Any]:
        """The lowered graph, one operator at a time, on whatever the caller gave."""
        results = self._lowered(*args)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    # --- captures ---------------------------------------------------------------------------------------------------

    def _first_use(self, key: Any, args: Sequence[Any], ask: _Ask, values: LayoutValues) -> tuple[list[Any] | None, _Ask]:
        """Capture a bucket, check it against the unpadded run, and serve the call from it."""
        bucket = ask.bucket
        assert bucket is not None  # see _replay
        start = time.perf_counter()
        exact = self._uncaptured(args, ask) if self.options.self_check else []
        try:
            capture = Capture(self.body, self.kernel, bucket, args, values, self._arena)
            capture.write(args, values, ask.rows)
            if self.options.self_check:
                capture.fill_tail(ask.rows, float("nan"))
            capture.record(args, self._graph_pool())
            capture.replay(args)
            results = self._take(capture, args, ask)
            trouble = self._check(capture, results, exact) if self.options.self_check else None
            capture.fill_tail(ask.rows, 0.0)
        except VitcgError:
            raise
        except Exception as error:  # a failed capture must cost the caller nothing but time
            trouble = ("capture_failed", f"{type(error).__name__}: {error}")
        self._arena.owner = None
        if trouble is not None:
            return self._refuse(key, ask, *trouble)
        self._keep(key, capture, time.perf_counter() - start)
        self._record(ask, bucket)
        return results, ask  # not `exact`: a bucket answers the same call with the same bits each time

    def _check(self, capture: Capture, results: list[Any], exact: list[Any]) -> tuple[str, str] | None:
        for number, (result, expected) in enumerate(zip(results, exact, strict=True)):
            if isinstance(result, Tensor):
                text = disagreement(result, expected)
                if text is not None:
                    return "self_check", f"result {number} of bucket {capture.bucket.tokens}: {text}"
        return None

    def _refuse(self, key: Any, ask: _Ask, reason: str, text: str) -> tuple[None, _Ask]:
        self._refused[key] = reason
        self.stats.refusals[f"{reason} at {key[0].tokens} tokens"] = text
        warnings.warn(f"vitcg does not use its bucket of {key[0].tokens} tokens [{reason}]: {text}", stacklevel=2)
        return None, _Ask(ask.layout, ask.rows, None, reason)

    def _keep(self, key: Any, capture: Capture, seconds: float) -> None:
        bucket = self.stats.buckets.setdefault(key[0].tokens, BucketStats())
        again = any(k[:2] == key[:2] for k in self._captures)
        self._captures[key] = capture
        bucket.captures += 1
        bucket.capture_s += seconds
        bucket.static_bytes = capture.static_bytes
        self.stats.captures += 1
        self.stats.recaptures += again
        limit = self.options.memory_limit_mib
        while len(self._captures) > 1 and (len(self._captures) > _MAX_CAPTURES or self._over(limit)):
            self._captures.popitem(last=False)
            self.stats.evictions += 1

    def _over(self, limit_mib: int | None) -> bool:
        return limit_mib is not None and sum(c.static_bytes for c in self._captures.values()) > limit_mib << 20

    def _graph_pool(self) -> Any:
        if self._pool is None and self._device_type() == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _state(self, args: Sequence[Any]) -> int:
        """A number for "these parameters at these addresses"; a graph replays only for the number it was captured with."""
        addresses = list(map(_address, self._state_of(args)))
        if addresses != self._last_state[0]:
            key = tuple(addresses)
            if key not in self._states:
                self._states[key] = next(self._state_numbers)
                self._forget_old_states()
            self._states.move_to_end(key)
            self._last_state = (addresses, self._states[key])
            self._owners = self._weak_owners(args)
        return self._last_state[1]

    def _forget_old_states(self) -> None:
        """Weights that move at every step (reloads, say) must not leave their captures behind."""
        while len(self._states) > _MAX_STATES:
            number = self._states.popitem(last=False)[1]
            for kept in (self._captures, self._refused):
                for key in [key for key in kept if key[2] == number]:
                    del kept[key]

    def _weak_owners(self, args: Sequence[Any]) -> list[weakref.ref[Tensor]]:
        return [weakref.ref(args[i]) for i in self._state_positions[:8]]

    def _on_stream(self, args: Sequence[Any]) -> Any:
        device = args[self.body.bound.pixels].device
        return _InOrder(self, device) if device.type == "cuda" else _NO_STREAM

    # --- housekeeping -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Give every capture, static buffer and layout back."""
        with self._lock:
            self._captures.clear()
            self._refused.clear()
            self._layouts.clear()
            self._arena.clear()
            self._pool = self._last_use = None

    def belongs_to(self, tensors: set[int]) -> bool:
        """Whether the latest call used any tensor of these ids."""
        return any(id(ref()) in tensors for ref in self._owners if ref() is not None)

    def replay_last(self) -> Callable[[], None]:
        """The capture used last, as a function that replays it and copies nothing."""
        if not self._captures:
            raise RuntimeError("no bucket has been captured yet: call the tower on an input that fits a bucket first")
        capture = next(reversed(self._captures.values()))
        if capture.graph is None:
            raise RuntimeError("the capture used last is not a CUDA graph: this tower runs on a CPU")
        return capture.graph.replay

    def _record(self, ask: _Ask, bucket: Bucket | None) -> None:
        unit = self.body.bound.symbols.unit
        padded = 0.0 if bucket is None else 1.0 - ask.rows / bucket.patches
        tokens = None if bucket is None else bucket.tokens
        reason = None if bucket is not None else ask.reason
        self.stats.record(CallRecord(bucket is not None, reason, ask.items, ask.rows, ask.rows // unit, tokens, padded))
        self.stats.layouts = len(self._layouts)

    def _explain(self, ask: _Ask) -> str:
        if self.body.refusal is not None:
            return self.body.refusal.detail
        return f"a call of {ask.rows} patches in {ask.items} items; budgets in tokens: {list(self.ladder.budgets)}"


class _InOrder:
    """Static memory is used by one stream after another: each use waits for the one before."""

    def __init__(self, tower: CompiledTower, device: torch.device) -> None:
        self.tower, self.device = tower, device

    def __enter__(self) -> None:
        if self.tower._last_use is not None:
            stream, event = self.tower._last_use
            current = torch.cuda.current_stream(self.device)
            if stream != current:
                current.wait_event(event)

    def __exit__(self, *_: Any) -> None:
        current = torch.cuda.current_stream(self.device)
        last = self.tower._last_use
        event = last[1] if last is not None else torch.cuda.Event()
        event.record(current)
        self.tower._last_use = (current, event)


class _NoStream:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


_NO_STREAM = _NoStream()
_BY_OPERATORS = {"invalid_grid", "outside_compiled_sizes", "other_number"}


def _getter(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda args: tuple(args[p] for p in positions)


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
