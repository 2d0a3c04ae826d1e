"""Rows of a result file: one measured quantity each, with what it was measured on.

A row is one line of JSON: ``tower, case, variant, metric, unit, p20, p50, p80, p99, mean, n, num_patches, num_tokens,
bucket_tokens, padded_fraction, gpu, matmul_tflops, torch, triton, transformers, git, command, time``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import torch

__all__ = ["Recorder", "check", "environment", "matmul_tflops", "quantile"]

UNITS = {
    "latency": "ms",
    "host_us": "us",
    "capture_s": "s",
    "cold_start_s": "s",
    "warm_start_s": "s",
    "memory_mib": "MiB",
    "padding": "1",
    "uncaptured": "1",
    "captures": "1",
}


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, what: str, **known: Iterable[str]) -> None:
    """End with a usage error for what cannot be run; give `args.out` its default on a GPU, results/DATE_GPU_TORCH_what.jsonl.

    Args:
        parser: of the script.
        args: with `device`, `out` and a list of names for each key of `known`.
        what: end of the file's name.
        known: for each list, the names that it may have.
    """
    for name, names in known.items():
        if unknown := [value for value in getattr(args, name) if value not in names]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; known: {', '.join(names)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --depth 2 --tiny tries the script without one")
    if args.out is None and args.device == "cuda":
        gpu = torch.cuda.get_device_name().replace(" ", "-")
        args.out = Path(__file__).parent / "results" / f"{date.today()}_{gpu}_torch{torch.__version__}_{what}.jsonl"


class Recorder:
    """Writes rows as they come, so that a run that is cut short keeps what it has."""

    def __init__(self, out: Path | None, environment: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.environment = environment
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
        self._file = out.open("a") if out else None

    def add(self, tower: str, case: str, variant: str, metric: str, values: Sequence[float], **sizes: Any) -> None:
        """Add one row.

        Args:
            tower: name of the tower.
            case: name of the call, or "-" for what belongs to no one call.
            variant: who was measured.
            metric: a key of `UNITS`.
            values: measurements in that unit.
            sizes: num_patches, num_tokens, bucket_tokens, padded_fraction, where they apply.
        """
        row: dict[str, Any] = {
            "tower": tower,
            "case": case,
            "variant": variant,
            "metric": metric,
            "unit": UNITS[metric],
        }
        row |= {f"p{percent}": round(quantile(values, percent / 100), 5) for percent in (20, 50, 80, 99)}
        row["mean"] = round(sum(values) / len(values), 5)
        row["n"] = len(values)
        for size in ("num_patches", "num_tokens", "bucket_tokens", "padded_fraction"):
            row[size] = sizes.get(size)
        self.append(row | self.environment | {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")})

    def append(self, row: dict[str, Any]) -> None:
        """Add a row that is complete already."""
        self.rows.append(row)
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def environment(device: torch.device, tflops: float | None, git: str | None) -> dict[str, Any]:
    """What every row says about the machine and the code."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "gpu": gpu,
        "matmul_tflops": tflops,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "git": git or _git(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> str | None:
    """The commit, with ``-dirty`` where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def matmul_tflops(device: torch.device, side: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a square bf16 matmul of random numbers: the rate that the device offers, beside its data sheet."""
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    right = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    for _ in range(5):
        left @ right
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        left @ right
    stop.record()
    torch.cuda.synchronize(device)
    return round(2 * side**3 * repeats / (start.elapsed_time(stop) * 1e-3) / 1e12, 1)
