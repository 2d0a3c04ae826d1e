"""Latency of vision towers on one GPU: eager, ``torch.compile``, captured op by op, and this package, in one run.

    python benchmarks/bench.py --out benchmarks/results/FILE.jsonl

Results are checked against eager's error budget before they are timed. All calls of a tower and all variants of a call are
timed in turns, round after round: a ratio compares neighbours in time, and a slow spell of the host is shared by all.
``--device cpu --depth 2 --tiny`` tries the script itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Cold starts are cold: caches of an earlier run would hide the compilation. Before torch reads these.
    _caches = tempfile.mkdtemp(prefix="vitcg-bench-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_caches, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(_caches, "triton")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from record import Recorder, check, environment, matmul_tflops, quantile
from table import Samples, print_table
from variants import ISOLATED, VARIANTS, Case, Towers, within_budget

import vitcg_backend
from vitcg_backend.backend import replay_of

WORKLOADS = Path(__file__).with_name("workloads.json")
ISOLATED_CALLS = ("1x256", "v16f256", "8mix")
ISOLATED_LIMIT_S = 90.0  # of one tower and one variant
CASE_LIMIT_S = 7.0  # of the rounds of one call
MIN_ROUNDS = 3
BLOCK = 4  # runs in a row


class Bench:
    """One run: what is left of its time, where its rows go, and whether a check failed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.perf_counter()
        self.device = torch.device(args.device)
        on_gpu = self.device.type == "cuda"
        tflops = args.matmul_tflops or (matmul_tflops(self.device) if on_gpu else None)
        self.recorder = Recorder(args.out, environment(self.device, tflops, args.git))
        if args.out:
            print(f"rows go to {args.out}")
        self.tflops = tflops
        self.failed = False
        self.samples: dict[tuple[str, str], Samples] = {}

    def left_s(self) -> float:
        """Seconds of the time limit that are left."""
        return self.args.time_limit_s - (time.perf_counter() - self.started)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.perf_counter() - self.started:6.1f}s] {text}", flush=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reserved_mib(self) -> float:
        """Device memory that torch holds, graph pools included."""
        gc.collect()
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) / 2**20

    # --- one tower ---

    @torch.no_grad()
    def tower(self, name: str, calls: dict[str, Any], variants: Sequence[str]) -> None:
        """Every call of one tower, by the variants that run in this process."""
        towers = Towers(name, self.device, self.args.depth, self.args.tiny)
        cases = [towers.case(call, grid) for call, grid in calls.items()]
        if any(variant.startswith("vitcg") for variant in variants):
            self.attempt(f"{name} first calls", partial(self.first_calls, towers, cases))
        runners: dict[str, dict[str, Any]] = {}
        sizes: dict[str, dict[str, Any]] = {}
        for case in cases:
            checked = self.attempt(f"{name} {case.name}", partial(self.checked_variants, towers, case, variants))
            if checked:
                runners[case.name], sizes[case.name] = checked
        self.say(f"{name}: {len(runners)} calls checked")
        for call, samples in self.rounds(towers, runners).items():
            self.report(towers, call, samples, sizes[call])

    def attempt(self, what: str, work: Callable[[], Any]) -> Any:
        """Do a part of the run; if it fails say so and go on, so that it does not cost the rest."""
        try:
            return work()
        except Exception as error:
            self.failed = True
            self.say(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return None

    def first_calls(self, towers: Towers, cases: Sequence[Case]) -> None:
        """What vitcg costs before its first steady call: cold start, captures, memory. Before the others allocate."""
        before = self.reserved_mib()
        for index, case in enumerate(cases):
            captured_before = self.capture_seconds(towers)
            started = time.perf_counter()
            towers.runner("vitcg_call", case)()
            self.synchronize()
            seconds = time.perf_counter() - started
            if index == 0:
                self.recorder.add(towers.name, case.name, "vitcg_call", "cold_start_s", [seconds], **self.sizes(case))
                self.say(f"{towers.name}: cold start {seconds:.1f} s")
            captured = self.capture_seconds(towers) - captured_before
            if captured:
                sizes = self.vitcg_sizes(towers, case)
                self.recorder.add(towers.name, case.name, "vitcg_call", "capture_s", [captured], **sizes)
        added = self.reserved_mib() - before
        self.recorder.add(towers.name, "-", "vitcg_call", "memory_mib", [added])
        self.say(f"{towers.name}: {len(cases)} first calls; memory {added:.0f} MiB\n{vitcg_backend.stats(towers.vitcg)}")

    def capture_seconds(self, towers: Towers) -> float:
        """Seconds spent in captures so far."""
        return sum(bucket.capture_s for bucket in vitcg_backend.stats(towers.vitcg).buckets.values())

    def sizes(self, case: Case) -> dict[str, Any]:
        """Size fields of a row."""
        return {"num_patches": case.num_patches, "num_tokens": case.num_tokens}

    def vitcg_sizes(self, towers: Towers, case: Case) -> dict[str, Any]:
        """Size fields of a row of ours: the bucket that served the latest call, too."""
        last = vitcg_backend.stats(towers.vitcg).last
        assert last is not None
        return self.sizes(case) | {
            "bucket_tokens": last.bucket_tokens,
            "padded_fraction": round(last.padded_fraction, 5),
        }

    # --- one call ---

    def checked_variants(self, towers: Towers, case: Case, variants: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The variants of one call whose results are right, as functions; and the size fields of our rows."""
        eager = towers.eager(*case.inputs())
        exact = towers.reference(*case.inputs(next(towers.reference.parameters()).dtype))
        runners: dict[str, Any] = {}
        for variant in variants:
            if case.grid_thw is None and variant in ("eager_flash", "vitcg_unseen"):  # without segments, without layouts
                continue
            check = partial(self.checked, towers, case, variant, eager, exact)
            runner = self.attempt(f"{towers.name} {case.name} {variant}", check)
            if runner:
                runners[variant] = runner
        ours = any(variant.startswith("vitcg") for variant in runners)
        return runners, self.vitcg_sizes(towers, case) if ours else self.sizes(case)

    def report(self, towers: Towers, call: str, samples: Samples, sizes: dict[str, Any]) -> None:
        """Write the rows of one call."""
        self.samples[towers.name, call] = samples
        for variant, pairs in samples.items():
            fields = dict(sizes)
            if not variant.startswith("vitcg"):
                fields = {key: value for key, value in sizes.items() if key.startswith("num_")}
            self.recorder.add(towers.name, call, variant, "latency", [ms for ms, _ in pairs], **fields)
            if variant in ("vitcg_call", "vitcg_lane"):
                self.recorder.add(towers.name, call, variant, "host_us", [us for _, us in pairs], **fields)
        medians = {variant: round(quantile([ms for ms, _ in pairs], 0.5), 3) for variant, pairs in samples.items()}
        self.say(f"{towers.name} {call} ({sizes['num_patches']} patches): {medians}")

    def checked(self, towers: Towers, case: Case, variant: str, eager: Any, exact: Any) -> Any:
        """The variant's function once its result has been found right; None if it is not to be timed."""
        if variant == "vitcg_replay":
            towers.runner("vitcg_call", case)()  # what the replay repeats; its result is checked as vitcg_call
            if self.replayed(towers):
                return replay_of(towers.vitcg)
            last = vitcg_backend.stats(towers.vitcg).last
            self.say(f"{towers.name} {case.name}: no replay, {last.reason if last else 'no call'}")
            return None
        self.synchronize()
        started = time.perf_counter()
        runner = towers.runner(variant, case)
        outputs = runner()
        self.synchronize()
        if variant in ISOLATED and not self.samples:
            seconds = time.perf_counter() - started
            self.recorder.add(towers.name, case.name, variant, "cold_start_s", [seconds], **self.sizes(case))
        if variant == "opbyop_graph":
            seconds = time.perf_counter() - started
            self.recorder.add(towers.name, case.name, variant, "capture_s", [seconds], **self.sizes(case))
        right, share = within_budget(outputs, eager, exact)
        if not right:
            self.failed = True
            self.say(f"{towers.name} {case.name} {variant}: WRONG, error is {share:.2f} of what is allowed; not timed")
            return None
        return runner

    def rounds(self, towers: Towers, runners: dict[str, dict[str, Any]]) -> dict[str, Samples]:
        """Time everything in turns: each round runs each variant of each call `BLOCK` times in a row and times the last two."""
        samples: dict[str, Samples] = {call: {name: [] for name in functions} for call, functions in runners.items()}
        spent = dict.fromkeys(runners, 0.0)
        for functions in runners.values():
            for name in functions.keys() - {"vitcg_replay"}:
                functions[name]()
        for index in range(self.args.rounds):
            for call, functions in runners.items():
                if index >= MIN_ROUNDS and (spent[call] > CASE_LIMIT_S or self.left_s() <= 0):
                    continue
                started = time.perf_counter()
                names = list(functions)
                turn = index % max(len(names), 1)
                for name in names[turn:] + names[:turn]:
                    if name == "vitcg_replay":
                        functions["vitcg_call"]()
                        if not self.replayed(towers):
                            continue
                        functions[name] = replay_of(towers.vitcg)  # what serves a layout may change while it keeps coming
                    block = [self.timed(functions[name]) for _ in range(BLOCK)]
                    samples[call][name] += block[-2:]  # in a loop of its calls, code and data are in the caches by then
                spent[call] += time.perf_counter() - started
        return samples

    def replayed(self, towers: Towers) -> bool:
        """Whether one replay has served the latest call."""
        last = vitcg_backend.stats(towers.vitcg).last
        return last is not None and last.hit and self.device.type == "cuda"  # a CPU has no graph to replay

    def timed(self, runner: Any) -> tuple[float, float]:
        """Milliseconds until the device is done, and microseconds until the host is free."""
        self.synchronize()
        started = time.perf_counter()
        outputs = runner()
        returned = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        del outputs
        return (done - started) * 1e3, (returned - started) * 1e6

    # --- variants that need a process of their own ---

    def isolated(self, name: str, variant: str, calls: Sequence[str]) -> None:
        """Run one variant beside eager in another process, ended at its time limit; take over the rows it wrote."""
        limit = min(ISOLATED_LIMIT_S, self.left_s())
        if limit < 20 or not calls:
            self.say(f"{name} {variant}: skipped, out of time")
            return
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            command = [sys.executable, __file__, "--child", "--towers", name, "--variants", f"eager_sdpa,{variant}"]
            command += ["--calls", ",".join(calls), "--out", str(out), "--rounds", str(min(self.args.rounds, 15))]
            command += ["--device", self.args.device, "--time-limit-s", str(limit)]
            command += ["--matmul-tflops", str(self.tflops)] if self.tflops else []
            command += ["--depth", str(self.args.depth)] if self.args.depth else []
            command += ["--tiny"] if self.args.tiny else []
            try:
                subprocess.run(command, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                self.say(f"{name} {variant}: ended at its limit of {limit:.0f} s")
            rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        for row in rows:
            if row["variant"] == variant:
                self.recorder.append(row | {key: self.recorder.environment[key] for key in ("command", "git")})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments, checked."""
    workloads = json.loads(WORKLOADS.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="append JSON lines to this file (default on a GPU: results/DATE_GPU_TORCH_bench.jsonl)"
    )
    parser.add_argument("--towers", default="qwen3_vl,qwen2_5_vl", help="comma-separated (default: %(default)s)")
    parser.add_argument("--calls", default=",".join(workloads["calls"]), help="names in workloads.json (default: all)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--depth", type=int, help="layers (default: as published)")
    parser.add_argument("--rounds", type=int, default=30, help="timed runs of each variant of a call")
    parser.add_argument("--time-limit-s", type=float, default=420, help="start nothing new after this many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny towers: to try the script without a GPU")
    parser.add_argument("--git", help="commit to record, where there is no checkout")
    parser.add_argument("--matmul-tflops", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.towers, args.calls, args.variants = (value.split(",") for value in (args.towers, args.calls, args.variants))
    check(parser, args, "bench", calls=workloads["calls"], variants=VARIANTS)
    args.grids = {call: workloads["calls"][call] for call in args.calls}
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table; 1 if a result was wrong."""
    args = parse(argv)
    bench = Bench(args)
    here = args.variants if args.child else [variant for variant in args.variants if variant not in ISOLATED]
    for name in args.towers:
        if here:
            bench.tower(name, args.grids, here)
            torch._dynamo.reset()
            bench.reserved_mib()  # gives the tower's memory back before the next one is built
    if args.child:
        return int(bench.failed)
    calls = [call for call in args.calls if call in ISOLATED_CALLS]
    for name in args.towers:
        for variant in ISOLATED:
            if variant in args.variants:
                bench.isolated(name, variant, calls)
    print_table(bench.recorder.rows, bench.samples)
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
