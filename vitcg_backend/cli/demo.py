"""Real photographs and a clip through a vision tower, eager and compiled, one line per call."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch

from ..backend import stats
from ..plot import draw_traffic
from .errors import UserError
from .photos import bundled_photographs, load_photographs, make_clip
from .processing import PROCESSORS, Packed, Preprocessor, concatenate

if TYPE_CHECKING:
    from .compare import Comparison, Row

__all__ = ["HELP", "add_arguments", "run"]

HELP = "photographs and a clip through a tower, eager and compiled"

CPU_DEPTH = 2  # layers, so that the demo takes less than two minutes without a GPU
MAX_PIXELS = {"cpu": 150 * 150, "cuda": 768 * 768}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``demo``."""
    parser.add_argument("--model", default="qwen3_vl", help=f"tower: {', '.join(PROCESSORS)} (default: %(default)s)")
    parser.add_argument("--images", nargs="+", type=Path, metavar="PATH", help="image files instead of scikit-image's")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--dtype", help="float32 (default on a CPU), bfloat16 (default on CUDA) or float16")
    parser.add_argument("--depth", type=int, metavar="N", help=f"layers (default: {CPU_DEPTH} on a CPU, all on CUDA)")
    parser.add_argument("--max-pixels", type=int, metavar="N", help="photographs are scaled down to this many pixels")
    parser.add_argument("--inner", default="inductor", help="how pieces are compiled: inductor (default) or eager")
    parser.add_argument(
        "--buckets", action="store_true", help="also print a table of the buckets: replays, padding, times, bytes"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the traffic against the buckets (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows and the totals to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0, or 1 if an output leaves the error budget.

    Raises:
        UserError: an argument is wrong or a package is missing.
    """
    device, dtype, depth, max_pixels = _settings(args)
    pictures = load_photographs(args.images or bundled_photographs())
    calls = make_calls(pictures, Preprocessor(args.model, max_pixels))
    comparison = _compare(args.model, device, dtype, depth, args.inner)
    print(_headline(args, comparison))
    print(_table_line(_COLUMNS), flush=True)
    rows = []
    for name, packed in calls:
        rows.append(comparison.row(name, packed))
        print(_table_line(_cells(rows[-1])), flush=True)
    totals = _totals(comparison, rows)
    print(_totals_text(totals))
    if args.buckets:
        print(stats(comparison.compiled).table())
    if args.png:
        draw_traffic(stats(comparison.compiled), args.png)
    if args.json:
        settings = {"model": args.model, "device": str(device), "dtype": str(dtype), "torch": torch.__version__}
        report = {"settings": settings, "rows": [asdict(row) for row in rows], "totals": totals}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if totals["within_budget"] else 1


def make_calls(pictures: dict[str, Any], preprocessor: Preprocessor, seed: int = 0) -> list[tuple[str, Packed]]:
    """Each photograph, several together, the clip, the clip with photographs; then all again in another order."""
    photos = {name: preprocessor.image(picture) for name, picture in pictures.items()}
    clip = preprocessor.clip(make_clip(next(iter(pictures.values()))))
    calls = list(photos.items())
    if len(photos) > 1:
        calls.append((f"{len(photos)} photos", concatenate(list(photos.values()))))
    calls.append(("clip", clip))
    last = list(photos.values())[-2:]
    calls.append((f"clip, {len(last)} photo{'s' * (len(last) > 1)}", concatenate([clip, *last])))
    again = list(calls)
    random.Random(seed).shuffle(again)
    return calls + [(f"again: {name}", packed) for name, packed in again]


def _settings(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, int | None, int]:
    """Check the arguments, so that nothing fails after a minute of work."""
    if args.model not in PROCESSORS:
        raise UserError(f"--model: unknown model {args.model!r}; known: {', '.join(PROCESSORS)}")
    if args.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: unknown device {args.device!r}; allowed: auto, cpu, cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch sees no CUDA device here; use --device cpu or auto")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or DTYPES[device]
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"--dtype: unknown dtype {dtype!r}; allowed: float32, bfloat16, float16")
    if args.inner not in ("inductor", "eager"):
        raise UserError(f"--inner: unknown choice {args.inner!r}; allowed: inductor, eager")
    depth = args.depth if args.depth is not None else CPU_DEPTH if device == "cpu" else None
    if depth is not None and depth < 1:
        raise UserError(f"--depth: {depth} layers; at least 1 is needed")
    max_pixels = args.max_pixels if args.max_pixels is not None else MAX_PIXELS[device]
    if max_pixels < 64 * 64:
        raise UserError(f"--max-pixels: {max_pixels} is less than the 4096 that a picture needs")
    for name, path in (("--json", args.json), ("--png", args.png)):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{name}: no such folder: {path.absolute().parent}")
    if args.png and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png: drawing needs matplotlib: pip install 'vitcg-backend[bench]'")
    return torch.device(device), getattr(torch, dtype), depth, max_pixels


def _compare(model: str, device: torch.device, dtype: torch.dtype, depth: int | None, inner: str) -> Comparison:
    try:
        import transformers  # noqa: F401  # testing builds its towers from it, and says so less plainly
    except ImportError:
        raise UserError("the towers come from transformers: pip install 'transformers>=5.17'") from None
    from vitcg_backend.testing import published_tower

    from .compare import Comparison

    tower = published_tower(model, depth=depth, dtype=dtype, device=device, seed=0)
    # Without a GPU there is nothing to gain from a bucket but its trial: there they serve whatever a clock says.
    return Comparison(tower, {"inner": inner, "min_tokens": 1 if device.type == "cpu" else "auto"})


def _headline(args: argparse.Namespace, comparison: Comparison) -> str:
    device = comparison.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    config: Any = comparison.tower.config
    depth = getattr(config, "depth", None) or config.num_hidden_layers
    return (
        f"{args.model}: {depth} layers, {str(comparison.dtype).removeprefix('torch.')}, on {place}; "
        f"pieces: {args.inner}; torch {torch.__version__}; times are medians, in milliseconds"
    )


_COLUMNS = ("input", "grid", "tokens", "bucket", "pad", "served", "max err", "budget", "eager", "vitcg", "ratio")
_WIDTHS = (26, 25, 6, 6, 4, 12, 8, 6, 8, 8, 6)


def _table_line(cells: Sequence[str]) -> str:
    left = {0, 1, 5}
    parts = [
        cell.ljust(width) if index in left else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(parts).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.input,
        _grid_text(row.grid),
        str(row.num_tokens),
        "-" if row.bucket_tokens is None else str(row.bucket_tokens),
        f"{row.padded_fraction:.0%}",
        "hit" if row.hit else str(row.reason),
        f"{row.max_error:.1e}",
        f"{row.budget_used:.0%}",
        f"{row.eager_ms:.2f}",
        f"{row.vitcg_ms:.2f}",
        f"{row.ratio:.2f}x",
    )


def _grid_text(grid: list[list[int]]) -> str:
    """``2x14x14 1x10x12 +3``: the first items, and how many more."""
    shown = " ".join("x".join(map(str, item)) for item in grid[:2])
    return shown if len(grid) <= 2 else f"{shown} +{len(grid) - 2}"


def _totals(comparison: Comparison, rows: Sequence[Row]) -> dict[str, Any]:
    """What the sequence came to. Calls that were repeated for timing are in `calls_with_timing` only."""
    counted = stats(comparison.compiled)
    hits = [row for row in rows if row.hit]
    reasons: dict[str, int] = {}
    for row in rows:
        if not row.hit:
            reasons[str(row.reason)] = reasons.get(str(row.reason), 0) + 1
    return {
        "calls": len(rows),
        "hits": len(hits),
        "reasons": reasons,
        "captures": counted.captures,
        "calls_with_timing": counted.calls,
        "graphs": counted.graphs,
        "pieces": counted.pieces,
        "unique_pieces": counted.unique_pieces,
        "mean_padding": sum(row.padded_fraction for row in hits) / len(hits) if hits else 0.0,
        "first_call_s": rows[0].first_s,
        "within_budget": all(row.budget_used <= 1 for row in rows),
        "worst_budget_used": max(row.budget_used for row in rows),
        "ratio": geometric_mean(row.ratio for row in rows),
    }


def _totals_text(totals: dict[str, Any]) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in totals["reasons"].items()) or "none"
    verdict = "all outputs are within the error budget" if totals["within_budget"] else "AN OUTPUT LEAVES THE BUDGET"
    return (
        f"{totals['calls']} calls: {totals['hits']} hits, {totals['captures']} captures, other reasons: {reasons}; "
        f"{totals['graphs']} graph, {totals['pieces']} pieces, {totals['unique_pieces']} compiled\n"
        f"mean padding {totals['mean_padding']:.1%}; first call {totals['first_call_s']:.1f} s; "
        f"eager / vitcg {totals['ratio']:.2f}x (geometric mean)\n"
        f"{verdict} (at most {totals['worst_budget_used']:.0%} used: error against float64, allowed twice eager's)"
    )
