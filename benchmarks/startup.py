"""Start-up of a tower: seconds until 24 buckets up to 8192 tokens are captured, and the memory that they take.

    python benchmarks/startup.py --out benchmarks/results/FILE.jsonl

Each measurement is a process of its own: first with empty caches of Inductor, Triton and our own, then with what that one left
there. Loading torch, transformers and the tower is not counted; importing this package, tracing, compiling, choosing kernels,
capturing and checking are. ``--device cpu --tiny`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record import Recorder, check, environment, matmul_tflops

from vitcg_backend import testing
from vitcg_backend.testing.architectures import ARCHITECTURES

LADDER = (
    64,
    96,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
    640,
    768,
    896,
    1024,
    1280,
    1536,
    1792,
    2048,
    2560,
    3072,
    4096,
    6144,
    8192,
)
LIMIT_S = 150.0


def start(name: str, device: torch.device, tiny: bool) -> dict[str, float]:
    """Seconds to the first result, to the last capture, and MiB that torch holds for it beyond the tower."""
    if tiny:
        tower = testing.tiny_tower(name, device=device, seed=0)
    else:
        tower = testing.published_tower(name, device=device, seed=0)
    pixels, grid = testing.make_inputs(tower, [[1, 16, 16]])
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device) if on_gpu else 0
    started = time.perf_counter()
    import vitcg_backend

    options: dict[str, Any] = {"token_budgets": LADDER[:4] if tiny else LADDER}
    compiled: Any = torch.compile(tower, backend="vitcg", options=options)
    with torch.no_grad():
        compiled(pixels, grid_thw=grid)  # as `warmup` calls it: by position it is another kind of call to Dynamo
        if on_gpu:
            torch.cuda.synchronize(device)
        first = time.perf_counter() - started
        warmed = vitcg_backend.warmup(compiled, progress=lambda line: None)
    print(f"first result after {first:.1f} s, then {warmed}", flush=True)
    seconds = time.perf_counter() - started
    if on_gpu:
        torch.cuda.empty_cache()
    held = (torch.cuda.memory_reserved(device) - before) / 2**20 if on_gpu else 0.0
    return {"first": first, "all": seconds, "mib": held, "captured": len(vitcg_backend.stats(tower).buckets)}


def measured(args: argparse.Namespace, caches: str) -> dict[str, float]:
    """`start` in another process with these caches."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", "--tower", args.tower, "--device", args.device]
    command += ["--tiny"] if args.tiny else []
    done = subprocess.run(command, env=os.environ | variables, timeout=LIMIT_S, check=True, stdout=subprocess.PIPE, text=True)
    *said, last = done.stdout.splitlines()
    print("\n".join(said), flush=True)
    found: dict[str, float] = json.loads(last)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run both, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--tower", default="qwen3_vl", choices=sorted(ARCHITECTURES), help="default: %(default)s")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny tower: to try the script without a GPU")
    parser.add_argument("--git", help="commit to record, where there is no checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.child:
        print(json.dumps(start(args.tower, device, args.tiny)))
        return
    check(parser, args, "startup")
    with tempfile.TemporaryDirectory(prefix="vitcg-startup-") as caches:
        cold, warm = measured(args, caches), measured(args, caches)
    tflops = matmul_tflops(device) if device.type == "cuda" else None
    recorder = Recorder(args.out, environment(device, tflops, args.git))
    for metric, found in (("cold_start_s", cold), ("warm_start_s", warm)):
        recorder.add(args.tower, "1x256", "vitcg_call", metric, [found["first"]])
        recorder.add(args.tower, f"{len(LADDER)} buckets", "vitcg_call", metric, [found["all"]])
        print(
            f"{metric}: {found['first']:.1f} s to the first result, {found['all']:.1f} s with {found['captured']:.0f} buckets"
        )
    recorder.add(args.tower, f"{len(LADDER)} buckets", "vitcg_call", "memory_mib", [cold["mib"]])
    print(f"memory: {cold['mib']:.0f} MiB")


if __name__ == "__main__":
    main()
