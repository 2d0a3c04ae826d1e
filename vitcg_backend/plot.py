"""A picture of the traffic against the buckets (matplotlib, extra ``bench``)."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

from .counters import Stats

__all__ = ["draw_traffic"]


def draw_traffic(stats: Stats, path: str | os.PathLike[str]) -> Path:
    """Draw calls by output tokens over replays by bucket, each bucket's padded part set off, as an image file.

    Args:
        stats: counters of a tower, see `vitcg_backend.stats`.
        path: file to write; its ending decides the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, no global state
    except ImportError as error:
        raise ImportError("draw_traffic needs matplotlib: pip install 'vitcg-backend[bench]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    calls: Counter[float] = Counter()
    for tokens, count in stats.sizes.items():
        calls[_column(tokens)] += count
    above.bar(list(calls), list(calls.values()), width=0.12, color="tab:blue")
    above.set_ylabel("calls")
    above.set_title(f"{stats.calls} calls, {stats.hits} from buckets, padding {stats.padded_fraction:.1%}")
    columns = [math.log2(budget) for budget in stats.buckets]
    real = [bucket.tokens for bucket in stats.buckets.values()]
    padded = [bucket.padded_tokens for bucket in stats.buckets.values()]
    below.bar(columns, real, width=0.08, color="tab:green", label="real")
    below.bar(columns, padded, width=0.08, bottom=real, color="tab:red", label="padded")
    below.set_ylabel("tokens computed")
    below.set_xlabel("output tokens")
    below.legend()
    ticks = range(int(min([*calls, *columns], default=0)), math.ceil(max([*calls, *columns], default=1)) + 1)
    below.set_xticks(list(ticks), [str(1 << max(tick, 0)) for tick in ticks])
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target


def _column(tokens: int) -> float:
    """Eight columns for each doubling."""
    return round(8 * math.log2(max(tokens, 1))) / 8
