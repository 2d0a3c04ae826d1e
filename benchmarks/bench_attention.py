"""Packed attention kernels against each other: microseconds a launch, from CUDA-graph replays.

    python benchmarks/bench_attention.py --out results.jsonl [--layout 8x256 ...] [--head-dim 72 ...] [--rounds 30]

For each layout and head size: our tile-scheduled kernel, torch's FlashAttention 2, and what is installed of flash-attn and
FlashInfer, each with bounds that fit the layout ("tight") and with room for 1,000 more, empty segments ("spare"); torch's
also with the worst case a bucket could ask for, spare segments as long as the bucket ("worst"). Every result is checked
against float64 before it is timed: its error may be at most twice that of per-segment SDPA in the same dtype. The variants of
a case are replayed in turn, so that a change of the GPU's clock meets all of them. q, k and v are views of one fused buffer,
as in a tower; they stay in the L2 cache between launches, as they would not in one.

Prints medians and ratios, and appends one JSON line for each variant to --out: kernel, bounds, layout, head_dim, heads,
dtype, unit (us), p20, p50, p80, n, error, eager_error, gpu, versions, command, time.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitcg_backend import kept_choices
from vitcg_backend.attention import KERNELS, SegmentBounds, segments

LAYOUTS = {
    "8x256": [256] * 8,
    "8x784": [784] * 8,
    "1x4096": [4096],
    "64x64": [64] * 64,
    "8mix": [2852, 1200, 3072, 400, 3888, 1900, 784, 2352],
    "1x16384": [16384],
}
KERNELS_TIMED = ("triton", "torch", "flash_attn", "flashinfer")
SPARE_SEGMENTS = 1000
GRAPH_US = 400.0  # a graph holds launches for about this long, so that the start of a replay does not count


@dataclass(frozen=True)
class Case:
    """One layout and head size: q, k and v ``[rows, heads, head_dim]`` in one buffer, and the float64 result."""

    layout: str
    lengths: Sequence[int]
    qkv: tuple[Tensor, Tensor, Tensor]
    exact: Tensor
    eager_error: float


@dataclass(frozen=True)
class Variant:
    """One kernel under one set of bounds, captured: `launches` launches a replay."""

    kernel: str
    bounds: str
    error: float
    graph: torch.cuda.CUDAGraph
    launches: int


def prefix_sums(lengths: Sequence[int]) -> list[int]:
    """``[0, l0, l0 + l1, ...]``."""
    return list(itertools.accumulate(lengths, initial=0))


def float64_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """The exact result, ``[rows, heads, head_dim]`` in float64, one segment, head and 4,096 rows at a time."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for start, end in itertools.pairwise(prefix_sums(lengths)):
        for head in range(q.shape[1]):
            q_, k_, v_ = (x[start:end, head].double() for x in (q, k, v))
            for first in range(0, end - start, 4096):
                scores = q_[first : first + 4096] @ k_.T * q.shape[2] ** -0.5
                out[start + first : min(start + first + 4096, end), head] = scores.softmax(-1) @ v_
    return out


def make_case(layout: str, head_dim: int, heads: int, dtype: torch.dtype) -> Case:
    """Random inputs of a layout, with the exact result and the error of per-segment SDPA."""
    lengths = LAYOUTS[layout]
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(sum(lengths), 3, heads, head_dim, generator=generator, device="cuda").to(dtype)
    q, k, v = fused.unbind(1)
    exact = float64_attention(q, k, v, lengths)
    eager = segments.attention_by_segment(q, k, v, torch.tensor(prefix_sums(lengths)), None)
    return Case(layout, lengths, (q, k, v), exact, float((eager - exact).norm() / exact.norm()))


def bounds_of(lengths: Sequence[int], kind: str) -> SegmentBounds:
    """Bounds of the kind "tight", "spare" or "worst" for a layout."""
    rows = sum(lengths)
    segments_ = len(lengths) + (0 if kind == "tight" else SPARE_SEGMENTS)
    return SegmentBounds(rows, segments_, rows if kind == "worst" else max(lengths))


def prepare(case: Case, kernel: str, kind: str) -> Variant:
    """Check the result of a kernel, then capture it.

    Raises:
        SystemExit: its error is more than twice that of eager attention.
    """
    bounds = bounds_of(case.lengths, kind)
    metadata = KERNELS[kernel].metadata(prefix_sums(case.lengths), bounds).cuda()
    scale = case.qkv[0].shape[2] ** -0.5

    def launch() -> Tensor:
        return KERNELS[kernel].forward(*case.qkv, metadata, bounds, scale)

    error = float((launch() - case.exact).norm() / case.exact.norm())
    if not error <= 2 * case.eager_error:
        raise SystemExit(f"{kernel} ({kind}) on {case.layout}: error {error:.2e}, eager's is {case.eager_error:.2e}")
    once = capture(launch, 1)
    launches = max(1, round(GRAPH_US / min(replay(once) for _ in range(5))))
    return Variant(kernel, kind, error, capture(launch, launches), launches)


def capture(launch: Callable[[], Tensor], launches: int) -> torch.cuda.CUDAGraph:
    """`launches` back-to-back launches in one graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    graph.replay()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def measure(variants: Sequence[Variant], rounds: int) -> list[list[float]]:
    """Microseconds a launch, `rounds` times for each variant, the variants in turn."""
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds):
        for variant, series in zip(variants, times, strict=True):
            series.append(replay(variant.graph) / variant.launches)
    return times


def percentile(series: Sequence[float], percent: int) -> float:
    """The value at `percent` (20, 50, 80) of a sorted series, interpolated."""
    return statistics.quantiles(series, n=100, method="inclusive")[percent - 1]


def rows_of(case: Case, variants: Sequence[Variant], times: Sequence[Sequence[float]]) -> list[dict[str, object]]:
    """One result row for each variant."""
    _, heads, head_dim = case.qkv[0].shape
    common = {
        "layout": case.layout,
        "head_dim": head_dim,
        "heads": heads,
        "dtype": str(case.qkv[0].dtype).removeprefix("torch."),
        "unit": "us",
        "eager_error": case.eager_error,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: kept_choices.version(name) for name in ("triton", "flash-attn", "flashinfer-python", "nvidia-cudnn-frontend")},
        "cudnn": torch.backends.cudnn.version(),
        "command": shlex.join(["python", *sys.argv]),
        "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }
    return [
        {
            "kernel": variant.kernel,
            "bounds": variant.bounds,
            **{f"p{percent}": round(percentile(series, percent), 3) for percent in (20, 50, 80)},
            "n": len(series),
            "error": variant.error,
            **common,
        }
        for variant, series in zip(variants, times, strict=True)
    ]


def show(rows: Sequence[dict[str, object]]) -> None:
    """One line a case: medians, and how many times faster ours with spare segments is than each variant of the others."""
    median = {(row["kernel"], row["bounds"]): float(str(row["p50"])) for row in rows}
    ours = median["triton", "spare"]
    numbers = "  ".join(f"{kernel} {kind} {us:9.1f}" for (kernel, kind), us in median.items())
    ratios = "  ".join(f"x {kernel} {kind} {us / ours:5.2f}" for (kernel, kind), us in median.items() if kernel != "triton")
    print(f"{rows[0]['layout']:>8}/{rows[0]['head_dim']:<4} {numbers}   {ratios}", flush=True)


def main() -> None:
    """Measure every case asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file that result rows are appended to (JSON lines)")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 72, 80, 88, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=30, help="replays of each variant")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_attention needs a CUDA device")
    dtype = getattr(torch, args.dtype)
    for head_dim in args.head_dim:
        for kernel in KERNELS_TIMED:
            reason = KERNELS[kernel].unusable(torch.device("cuda"), dtype, head_dim)
            if reason and kernel in ("triton", "torch"):
                raise SystemExit(reason)
            if reason:
                print(f"{kernel} is left out at head size {head_dim}: {reason}", flush=True)
    for layout, head_dim in itertools.product(args.layout, args.head_dim):
        usable = [k for k in KERNELS_TIMED if KERNELS[k].unusable(torch.device("cuda"), dtype, head_dim) is None]
        case = make_case(layout, head_dim, args.heads, dtype)
        kinds = [*itertools.product(usable, ("tight", "spare")), ("torch", "worst")]
        variants = [prepare(case, kernel, kind) for kernel, kind in kinds]
        rows = rows_of(case, variants, measure(variants, args.rounds))
        show(rows)
        with open(args.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
