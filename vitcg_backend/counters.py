"""What happened: counters of one compiled tower, and of every tower together."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field, replace

__all__ = ["BucketStats", "CallRecord", "Stats"]

MAX_SIZES = 4096

_numbers = itertools.count()


@dataclass(frozen=True)
class CallRecord:
    """One call.

    Attributes:
        hit: a bucket was replayed.
        reason: why not, when `hit` is false.
        num_items: images and videos of the call, 0 where neither a grid nor a batch of images says how many.
        num_patches: rows into the tower.
        num_tokens: rows out, after the spatial merge.
        bucket_tokens: budget of the bucket that was used, of all of them together where there were several.
        padded_fraction: padded rows over the buckets' rows, 0 without a bucket.
        replays: (budget, real tokens) of each replay; several where the call was packed or split.
        number: rises with every call of the process.
    """

    hit: bool
    reason: str | None
    num_items: int
    num_patches: int
    num_tokens: int
    bucket_tokens: int | None
    padded_fraction: float
    replays: tuple[tuple[int, int], ...] = ()
    number: int = 0


@dataclass
class BucketStats:
    """One bucket: how often it was used and what it cost.

    Attributes:
        hits: replays.
        packs: those of them that served a part of a call.
        captures: captures, more than one when weights moved or a capacity grew.
        capture_s: seconds of all captures, self-checks included.
        self_check_s: seconds of the self-checks among them: the unpadded run, one replay, the comparison.
        static_bytes: bytes of its static inputs and outputs.
        pool_bytes: device memory that its captures took from the driver, graph pool included.
        replay_s: seconds of a replay with its copies, as measured at the first use; 0 where nothing was measured.
        copy_s: seconds of the copies in and out alone.
        uncaptured_s: seconds of the same call on the uncaptured pieces.
        tokens: real output tokens served.
        padded_tokens: padded output tokens computed beside them.
        attention: name of an attention kernel -> captures that run it.
    """

    hits: int = 0
    packs: int = 0
    captures: int = 0
    capture_s: float = 0.0
    self_check_s: float = 0.0
    static_bytes: int = 0
    pool_bytes: int = 0
    replay_s: float = 0.0
    copy_s: float = 0.0
    uncaptured_s: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    attention: Counter[str] = field(default_factory=Counter)


@dataclass
class Stats:
    """Counters. `calls == hits + sum(fallbacks.values())` always holds.

    Attributes:
        calls: calls that reached the backend.
        hits: calls served by a bucket.
        captures: buckets captured (on a CPU: static buffers built).
        recaptures: captures repeated because parameters moved.
        evictions: buckets dropped for the memory limit.
        graphs: graphs Dynamo handed over.
        pieces: pieces of those graphs, between attention calls.
        unique_pieces: pieces that had to be compiled; the rest shared one.
        layouts: layouts whose metadata is kept.
        fallbacks: reason -> calls that took a slower path for it.
        refusals: reason -> text, for graphs or buckets refused for good.
        buckets: budget in output tokens -> its counters.
        sizes: output tokens of a call -> calls, for the first 4096 different sizes.
        last: the latest call.
    """

    calls: int = 0
    hits: int = 0
    captures: int = 0
    recaptures: int = 0
    evictions: int = 0
    graphs: int = 0
    pieces: int = 0
    unique_pieces: int = 0
    layouts: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    sizes: Counter[int] = field(default_factory=Counter)
    last: CallRecord | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def record(self, call: CallRecord) -> None:
        """Count one call."""
        with self._lock:
            self.calls += 1
            self.last = replace(call, number=next(_numbers))  # a record may be counted many times
            if call.num_tokens in self.sizes or len(self.sizes) < MAX_SIZES:
                self.sizes[call.num_tokens] += 1
            if not call.hit:
                self.fallbacks[call.reason or "unknown"] += 1
                return
            self.hits += 1
            for budget, tokens in call.replays:
                bucket = self.buckets.setdefault(budget, BucketStats())
                bucket.hits += 1
                bucket.packs += len(call.replays) > 1
                bucket.tokens += tokens
                bucket.padded_tokens += budget - tokens

    @property
    def padded_fraction(self) -> float:
        """Padded over computed output tokens, of all hits."""
        padded = sum(bucket.padded_tokens for bucket in self.buckets.values())
        total = padded + sum(bucket.tokens for bucket in self.buckets.values())
        return padded / total if total else 0.0

    def table(self) -> str:
        """One line a bucket: replays, parts of calls among them, tokens, padding, captures, bytes, and measured times."""
        heads = (
            "bucket",
            "replays",
            "parts",
            "tokens",
            "padding",
            "captures",
            "s",
            "MiB",
            "replay ms",
            "copies ms",
            "uncaptured ms",
        )
        lines: list[tuple[str, ...]] = [heads]
        for budget, bucket in sorted(self.buckets.items()):
            computed = bucket.tokens + bucket.padded_tokens
            times = (bucket.replay_s, bucket.copy_s, bucket.uncaptured_s)
            lines.append(
                (
                    str(budget),
                    str(bucket.hits),
                    str(bucket.packs),
                    str(bucket.tokens),
                    f"{bucket.padded_tokens / computed:.1%}" if computed else "-",
                    str(bucket.captures),
                    f"{bucket.capture_s:.2f}",
                    f"{(bucket.static_bytes + bucket.pool_bytes) / 2**20:.1f}",
                    *(f"{time * 1e3:.3f}" if time else "-" for time in times),
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join(rows + [f"{reason}: {count} calls" for reason, count in self.fallbacks.most_common()])

    def __str__(self) -> str:
        lines = [
            f"calls {self.calls}, hits {self.hits}, captures {self.captures} ({self.recaptures} again), "
            f"graphs {self.graphs}, pieces {self.pieces} ({self.unique_pieces} unique), padding {self.padded_fraction:.1%}"
        ]
        lines += [f"  bucket {tokens:6d} tokens: {bucket.hits} replays" for tokens, bucket in sorted(self.buckets.items())]
        lines += [f"  fallback {reason}: {count}" for reason, count in self.fallbacks.most_common()]
        lines += [f"  refused {reason}: {text}" for reason, text in self.refusals.items()]
        return "\n".join(lines)


def combine(parts: list[Stats]) -> Stats:
    """The sum of several towers' counters; `last` is the latest call of them all. Other threads may count meanwhile."""
    total = Stats()
    for part in parts:
        for name in (
            "calls",
            "hits",
            "captures",
            "recaptures",
            "evictions",
            "graphs",
            "pieces",
            "unique_pieces",
            "layouts",
        ):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.fallbacks.update(dict(part.fallbacks))
        total.sizes.update(dict(part.sizes))
        total.refusals.update(part.refusals)
        if part.last is not None and (total.last is None or part.last.number > total.last.number):
            total.last = part.last
        for tokens, bucket in dict(part.buckets).items():
            into = total.buckets.setdefault(tokens, BucketStats())
            for name in vars(bucket):
                a, b = getattr(into, name), getattr(bucket, name)
                setattr(into, name, max(a, b) if name in ("replay_s", "copy_s", "uncaptured_s") else a + b)
    return total
