"""``attention="auto"`` on a GPU: the candidates are timed once for each kind and size of segments, and the fastest serves.

::

    bounds of a layout ─▶ size class, known? ─▶ that kernel (in this process, or from the file of `kept_choices`)
                       └▶ each candidate: run once, compared with SDPA ─▶ timed in turns ─▶ the fastest, kept

A class is what stays of exact bounds when rows, segments and the longest one are rounded up to powers of two. What is timed
has the bounds of the layout that came first: one segment that is the longest, the others even.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from ..kept_choices import KeptChoices, environment
from .base import AttentionShape, SegmentBounds, VarlenKernel
from .tiers import tiered

__all__ = ["MeasuredChoice", "agrees", "even_segments", "seconds", "size_class"]

MARGIN, LEAST_GAIN = 0.1, 2e-6
"""Another kernel than the first has to be faster by this share, and by so many seconds: several kernels in a tower are several
captures of a bucket."""

CLOSE_MARGIN, CLOSE_GAIN = 0.25, 10e-6
"""The same where it wants close bounds and the first does not: a bucket is then captured once for each tier of them."""

_FEW_ROWS = 512
_MAX_SERVED = 4096
_ROUNDS = 3
_LAUNCHES = 2  # of a round: the second reads inputs that the first has left in the cache, as the next layer's does
_HOPELESS = 1.5  # a candidate that takes so many times the best of a round is not run again


class MeasuredChoice:
    """The fastest of several kernels for each size class. See `KernelChoice`.

    Args:
        kernels: candidates that may be captured, the first of them usable; it serves whatever cannot be measured.
        shapes: index of a cu_seqlens -> the attention calls over its segments.
        folder: see `KeptChoices`.
    """

    def __init__(
        self,
        kernels: Sequence[VarlenKernel],
        shapes: Mapping[int, Sequence[AttentionShape]],
        folder: Path | None = None,
    ) -> None:
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self.default = kernels[0]
        self.shapes = shapes
        self._folder = folder
        self._kept: KeptChoices | None = None
        self._chosen: dict[str, str] = {}
        self._usable: list[VarlenKernel] | None = None
        self._served: dict[tuple[int, SegmentBounds], VarlenKernel] = {}  # what has been found for exact bounds
        self._early: threading.Thread | None = None
        self._ran = threading.Event()  # the thread has run the candidates

    def start(
        self, bounds: Mapping[int, SegmentBounds], later: Mapping[int, Sequence[SegmentBounds]] = MappingProxyType({})
    ) -> None:
        """Let a thread run each candidate once on such segments, while the caller has other things to compile.

        A kernel takes seconds to compile, most of them in C++ and in other processes; `at` waits for the candidates before it
        measures. Nothing for what is known. What fails here is met again by whoever runs that kernel.

        Args:
            bounds: index of a cu_seqlens -> exact bounds of the layout that will come first.
            later: index of a cu_seqlens -> bounds of captures to come, for which the first candidate is compiled after that.
        """
        unknown = {index: each for index, each in bounds.items() if each.rows and self._known(index, each) is None}
        if unknown and self._early is None:
            self._early = threading.Thread(target=self._run_early, args=(unknown, later), name="vitcg-attention", daemon=True)
            self._early.start()

    def _run_early(self, bounds: Mapping[int, SegmentBounds], later: Mapping[int, Sequence[SegmentBounds]]) -> None:
        try:
            self._run_once(bounds)
        finally:
            self._ran.set()
        try:
            for index, some in later.items():
                for shape in self.shapes[index]:
                    with torch.inference_mode(False), torch.no_grad(), _on(shape.device):
                        q, k, v = _inputs(shape, _FEW_ROWS)
                        self.default.load(q, k, v, some, shape.head_dim**-0.5)
        except Exception as error:
            _torch.log.info("attention kernels were not compiled early: %s: %s", type(error).__name__, error)

    def _run_once(self, bounds: Mapping[int, SegmentBounds]) -> None:
        try:
            usable = self._find_usable()
            device = self.shapes[next(iter(bounds))][0].device
            with torch.inference_mode(False), torch.no_grad(), _on(device):
                for index, exact in bounds.items():
                    for shape in self.shapes[index] if len(usable) > 1 else ():
                        q, k, v = _inputs(shape, exact.rows)
                        for kernel in usable:
                            with contextlib.suppress(Exception):
                                _prepared(kernel, q, k, v, even_segments(exact), tiered(exact, kernel), shape.head_dim**-0.5)()
        except Exception as error:  # out of memory, say
            _torch.log.info("attention kernels were not run early: %s: %s", type(error).__name__, error)

    def _find_usable(self) -> list[VarlenKernel]:
        if self._usable is None:  # asked for where they are needed and not before: it imports packages
            self._usable = [kernel for kernel in self.kernels.values() if self._can_serve(kernel)]
        return self._usable

    def _known(self, segments: int, bounds: SegmentBounds) -> VarlenKernel | None:
        """The kernel that was chosen for such bounds, in this process or before."""
        shapes = self.shapes[segments]
        if self._kept is None:
            kept = KeptChoices(environment(shapes[0].device), "attention", self._folder)
            self._chosen = {key: name for key, name in kept.read().items() if name in self.kernels}
            self._kept = kept
        name = self._chosen.get(size_class(shapes, bounds))
        return self.kernels[name] if name is not None and self._can_serve(self.kernels[name]) else None

    @property
    def capturable(self) -> bool:
        """All candidates are."""
        return self.default.capturable

    def at(self, segments: int, bounds: SegmentBounds, *, measure: bool, shared: bool = False) -> VarlenKernel:
        """As `KernelChoice.at`; it waits for the device where it measures."""
        if shared and not self.default.needs_longest:
            return self.default
        known = self._served.get((segments, bounds))
        if known is None:
            known, final = self._find(segments, bounds, measure)
            if final:
                if len(self._served) >= _MAX_SERVED:
                    self._served.clear()
                self._served[segments, bounds] = known
        return known

    def _find(self, segments: int, bounds: SegmentBounds, measure: bool) -> tuple[VarlenKernel, bool]:
        """The kernel of a size class, and whether it is that from now on."""
        shapes = self.shapes[segments]
        device = shapes[0].device
        known = self._known(segments, bounds)
        if known is not None:
            return known, True
        if not measure or bounds.rows == 0 or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self.default, False
        if self._early is not None:
            self._ran.wait()
        key = size_class(shapes, bounds)
        times = self._measured(shapes, bounds) if len(self._find_usable()) > 1 else {}
        self._chosen[key] = self._fastest(times)
        if times and self._kept is not None:
            _torch.log.info("attention of %s: %s, of %s", key, self._chosen[key], times)
            self._kept.add(key, self._chosen[key], times)
        return self.kernels[self._chosen[key]], True

    def _fastest(self, seconds: Mapping[str, float]) -> str:
        """The fastest that is worth it; without times, and where that is itself near the best, the first."""

        def at_least(name: str) -> float:
            close = self.kernels[name].needs_longest and not self.default.needs_longest
            margin, gain = (CLOSE_MARGIN, CLOSE_GAIN) if close else (MARGIN, LEAST_GAIN)
            return seconds[name] + max(margin * seconds[name], gain)

        default = self.default.name
        wanted = [name for name in seconds if default not in seconds or at_least(name) < seconds[default]]
        return min(wanted, key=lambda name: seconds[name], default=default)

    def _can_serve(self, kernel: VarlenKernel) -> bool:
        """Whether a kernel takes every attention call of the tower."""
        calls = [shape for shapes in self.shapes.values() for shape in shapes]
        return all(kernel.unusable(call.device, call.dtype, call.head_dim) is None for call in calls)

    def _measured(self, shapes: Sequence[AttentionShape], bounds: SegmentBounds) -> dict[str, float]:
        """Seconds of each usable kernel whose results are right; nothing where the device has no room for that."""
        total: dict[str, float] = {kernel.name: 0.0 for kernel in self._find_usable()}
        try:
            with torch.inference_mode(False), torch.no_grad(), _on(shapes[0].device):
                for shape in shapes:
                    times = _times([self.kernels[name] for name in total], shape, bounds)
                    total = {name: total[name] + seconds for name, seconds in times.items()}
        except Exception as error:  # out of memory, say
            _torch.log.info("attention kernels were not measured at %s: %s: %s", bounds, type(error).__name__, error)
            return {}
        return total


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels, events and the clock are those of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def size_class(shapes: Sequence[AttentionShape], bounds: SegmentBounds) -> str:
    """The key of a choice: the attention calls, and the bounds rounded up to powers of two."""
    calls = "; ".join(f"heads {s.heads}/{s.kv_heads} of {s.head_dim}/{s.value_dim}, {s.dtype}" for s in shapes)
    rows, segments, longest = (1 << max(x - 1, 0).bit_length() for x in (bounds.rows, bounds.segments, bounds.longest))
    return f"{calls}, {rows} rows, {segments} segments, longest {longest}"


def even_segments(bounds: SegmentBounds) -> list[int]:
    """Lengths of ``bounds.segments`` segments that have these bounds: the longest first, the others differ by at most one."""
    others, rows = bounds.segments - 1, bounds.rows - bounds.longest
    if others <= 0:
        return [bounds.rows]
    each, more = divmod(rows, others)
    return [bounds.longest] + [each + 1] * more + [each] * (others - more)


def _times(kernels: Sequence[VarlenKernel], shape: AttentionShape, exact: SegmentBounds) -> dict[str, float]:
    """Seconds of one launch of each of `kernels` whose result is right, on inputs of one shape."""
    lengths = even_segments(exact)
    q, k, v = _inputs(shape, exact.rows)
    scale = shape.head_dim**-0.5
    expected = _by_sdpa(q, k, v, lengths, scale)
    runs: dict[str, Callable[[], Tensor]] = {}
    for kernel in kernels:
        try:
            run = _prepared(kernel, q, k, v, lengths, tiered(exact, kernel), scale)
            torch.full_like(expected, math.nan)  # what it leaves unwritten is not what was right there before
            if agrees(run(), expected):
                runs[kernel.name] = run
            else:
                _torch.log.warning("attention %r is not used at %s: its results are not those of SDPA", kernel.name, exact)
        except Exception as error:  # a device or a version that `unusable` does not know of
            _torch.log.info("attention %r does not run at %s: %s: %s", kernel.name, exact, type(error).__name__, error)
    return dict(zip(runs, seconds(list(runs.values()), shape.device), strict=True))


def _prepared(
    kernel: VarlenKernel, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], bounds: SegmentBounds, scale: float
) -> Callable[[], Tensor]:
    metadata = kernel.metadata(list(itertools.accumulate(lengths, initial=0)), bounds).to(q.device)
    return lambda: kernel.forward(q, k, v, metadata, bounds, scale)


def _inputs(shape: AttentionShape, rows: int) -> list[Tensor]:
    """Random q, k and v, the same each time, as parts of one product: the generators of the caller are left alone."""
    generator = torch.Generator(shape.device).manual_seed(0)
    widths = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.value_dim]
    fused = torch.randn(rows, sum(widths), generator=generator, device=shape.device, dtype=shape.dtype)
    dims = (shape.head_dim, shape.head_dim, shape.value_dim)
    return [x.unflatten(1, (-1, dim)) for x, dim in zip(fused.split(widths, dim=1), dims, strict=True)]


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """The result by `scaled_dot_product_attention`, segments of one length at once."""
    parts, start = [], 0
    for length, group in itertools.groupby(lengths):
        count = len(list(group))
        if length:
            rows = slice(start, start + count * length)
            q_, k_, v_ = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q_, k_, v_, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            parts.append(out.transpose(1, 2).flatten(0, 1))
            start += count * length
    return torch.cat(parts)


def agrees(result: Tensor, expected: Tensor) -> bool:
    """Whether each head of each row is the same up to rounding: within 8 steps of the dtype, relative to its own norm.

    Two kernels round weights and results once each and differ by less than one such step; a row of another segment, or one
    that was not written, differs by its own norm.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    error, norm = ((x.float()).norm(dim=-1) for x in (result - expected, expected))
    return bool((error <= 8 * torch.finfo(expected.dtype).eps * norm).all())


def seconds(runs: Sequence[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """The least time of each of `runs` on the device, in turns; what is far behind after the first round is run no more."""
    best = [math.inf] * len(runs)
    for number in range(_ROUNDS):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        limit = _HOPELESS * min(best, default=math.inf)
        for index in order:
            if best[index] <= limit:
                best[index] = min(best[index], _once(runs[index], device))
    return best


def _once(run: Callable[[], Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    torch.cuda.current_stream().synchronize()
    # The device waits until all launches are in its queue: in a graph, too, the host's time does not count.
    _torch.keep_busy(2 * _LAUNCHES * host)
    begin.record()
    for _ in range(_LAUNCHES):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / _LAUNCHES
