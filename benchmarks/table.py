"""The table that a run prints: ratios, with the spread of rounds that ran side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from record import quantile

__all__ = ["Samples", "print_table"]

Samples = dict[str, list[tuple[float, float]]]
"""Variant -> (milliseconds, host microseconds) of each round."""


def print_table(rows: Sequence[dict[str, Any]], samples: Mapping[tuple[str, str], Samples]) -> None:
    """Print each variant's time over vitcg's.

    Args:
        rows: rows of a result file.
        samples: the rounds of each (tower, case) that ran in this process; without them a ratio has no spread.
    """
    latencies = [row for row in rows if row["metric"] == "latency"]
    for tower in dict.fromkeys(row["tower"] for row in latencies):
        print(f"\n{tower}: vitcg_call in ms; the others as multiples of it, with p20 to p80 of paired rounds")
        for case in dict.fromkeys(row["case"] for row in latencies if row["tower"] == tower):
            found = {row["variant"]: row for row in latencies if (row["tower"], row["case"]) == (tower, case)}
            print(_line(case, found, samples.get((tower, case), {})))


def _line(case: str, found: Mapping[str, Any], samples: Samples) -> str:
    """``1x256  1.200 ms (64/64 tokens)  eager_sdpa 25.12x (24.80-25.30)  ...``."""
    ours = found.get("vitcg_call")
    if ours is None:
        return f"  {case:9}" + "  ".join(f"{variant} {row['p50']:.3f} ms" for variant, row in found.items())
    parts = [f"  {case:9}{ours['p50']:9.3f} ms ({ours['num_tokens']}/{ours['bucket_tokens']} tokens)"]
    for variant, row in found.items():
        if variant == "vitcg_call":
            continue
        ratio = f"{variant} {row['p50'] / ours['p50']:.2f}x"
        if variant in samples:
            paired = [other[0] / own[0] for other, own in zip(samples[variant], samples["vitcg_call"], strict=True)]
            ratio += f" ({quantile(paired, 0.2):.2f}-{quantile(paired, 0.8):.2f})"
        parts.append(ratio)
    return "  ".join(parts)
