"""Streams of calls through one tower: eager, reduce-overhead, powers of two with greedy packing, and this package as it is.

    python benchmarks/replay.py --out benchmarks/results/FILE.jsonl

Each stream runs once untimed, where buckets are captured, all is learnt that is to be learnt of layouts that keep coming, and
results are checked; then its calls are timed, every variant on a call before the next call, in changing order. Both are cut
off at a time limit, so that a stream is as long as there is time for. ``--device cpu --depth 2 --tiny`` tries the script.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from record import Recorder, check, environment, matmul_tflops
from streams import load_workloads, stream, stream_names
from variants import Case, Towers, within_budget

import vitcg_backend
from vitcg_backend.backend import live_towers
from vitcg_backend.bucketing import Layout
from vitcg_backend.packing import Capacities, next_fit
from vitcg_backend.planning import REPEATED

VARIANTS = ("eager_sdpa", "reduce_overhead", "pow2_greedy", "vitcg_call", "vitcg_unseen")
MIX = "8mix"  # one call of workloads.json, repeated: a stream of its own
MIX_CALLS = 30
POWERS = tuple(2**k for k in range(6, 14))  # 64 to 8192 output tokens: what servers capture
CHECKED = 2  # calls of each stream whose results are checked
CHILD_LIMIT_S = 240.0


class PowersOfTwo:
    """The policy of servers, on our own graphs: items in order, as many as the largest budget holds, onto powers of two."""

    def __init__(self, eager: torch.nn.Module) -> None:
        self.eager = copy.deepcopy(eager)  # statistics go by parameters
        options: Any = {"token_budgets": list(POWERS), "min_tokens": 1}
        self.compiled: Any = torch.compile(self.eager, backend="vitcg", options=options)
        config: Any = eager.config
        self.unit = config.spatial_merge_size**2
        self._whole: set[Layout] = set()

    def __call__(self, pixels: torch.Tensor, grid: torch.Tensor, layout: Layout) -> list[Any]:
        """The results of the sub-batches; joining them is left out, in this variant's favour."""
        patches = [t * h * w for t, h, w in layout]
        capacities = Capacities(POWERS, [float(budget) for budget in POWERS], 1.0)
        groups = next_fit([rows // self.unit for rows in patches], [t for t, _, _ in layout], capacities)
        results, row = [], 0
        for group in groups:
            rows = sum(patches[index] for index in group)
            self._keep_whole(tuple(layout[index] for index in group))
            results.append(self.compiled(pixels[row : row + rows], grid_thw=grid[group[0] : group[-1] + 1]))
            row += rows
        return results

    def _keep_whole(self, layout: Layout) -> None:
        """Our own packing would cut this batch further."""
        parts = live_towers(self.eager)
        if layout not in self._whole and parts:
            self._whole.add(layout)
            for part in parts:
                part.planner.keep_whole(layout)


@dataclass
class Tally:
    """What the timed calls of one variant came to."""

    ms: list[float] = field(default_factory=list)
    tokens: int = 0
    computed: int = 0
    uncaptured: int = 0


class Replay:
    """One run over all streams."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.perf_counter()
        self.device = torch.device(args.device)
        tflops = args.matmul_tflops or (matmul_tflops(self.device) if self.device.type == "cuda" else None)
        self.recorder = Recorder(args.out, environment(self.device, tflops, args.git))
        self.towers = Towers(args.tower, self.device, args.depth, args.tiny)
        self.powers = PowersOfTwo(self.towers.eager)
        self.failed = False
        self.timed_calls: dict[str, int] = {}  # by stream

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.perf_counter() - self.started:6.1f}s] {text}", flush=True)

    def runner(self, variant: str, case: Case, layout: Layout) -> Callable[[], Any]:
        """One call by one variant."""
        if variant == "pow2_greedy":
            grid = case.grid_thw
            assert grid is not None  # streams are of towers with grids
            return lambda: self.powers(case.pixel_values, grid, layout)
        return self.towers.runner(variant, case)

    def owner(self, variant: str) -> torch.nn.Module | None:
        """The tower that a variant of ours compiles."""
        return {"pow2_greedy": self.powers.eager, "vitcg_call": self.towers.eager}.get(variant)

    @torch.no_grad()
    def stream(self, name: str, layouts: Sequence[Layout], variants: Sequence[str]) -> None:
        """First the untimed pass, then the timed one over as many calls as that had time for."""
        before = {variant: self.counts(variant) for variant in variants}
        done = self.first_pass(name, layouts, variants)
        self.timed_calls[name] = 0
        tallies: dict[str, Tally] = {variant: Tally() for variant in variants}
        started = time.perf_counter()
        for number, layout in enumerate(layouts[:done]):
            if time.perf_counter() - started > self.args.stream_limit_s:
                break
            self.timed_calls[name] += 1
            case = self.towers.case(name, [list(item) for item in layout])
            for variant in in_turns(variants, number):
                self.timed(variant, case, layout, tallies[variant])
        for variant, tally in tallies.items():
            self.record(name, variant, tally, before[variant])
        means = {variant: round(sum(t.ms) / len(t.ms), 2) for variant, t in tallies.items() if t.ms}
        self.say(f"{name}: {len(next(iter(tallies.values())).ms)} calls, mean ms {means}")

    def first_pass(self, name: str, layouts: Sequence[Layout], variants: Sequence[str]) -> int:
        """Every call once, untimed: captures, checks. Returns the number of calls that there was time for."""
        started = time.perf_counter()
        for number, layout in enumerate(layouts):
            if number == CHECKED:  # compiles and checks take what they take
                started = time.perf_counter()
            if number >= CHECKED and time.perf_counter() - started > self.args.stream_limit_s:
                return number
            case = self.towers.case(name, [list(item) for item in layout])
            expected = None
            if number < CHECKED:
                eager = self.towers.eager(case.pixel_values, case.grid_thw)
                dtype = next(self.towers.reference.parameters()).dtype
                expected = eager, self.towers.reference(case.pixel_values.to(dtype), case.grid_thw)
            for variant in variants:
                output = self.runner(variant, case, layout)()
                if expected is not None and variant not in ("eager_sdpa", "pow2_greedy"):
                    self.check(name, variant, output, *expected)
                if variant == "vitcg_call":  # until nothing is learnt any more: the timed pass is steady
                    for _ in range(REPEATED):
                        self.runner(variant, case, layout)()
        return len(layouts)

    def check(self, name: str, variant: str, output: Any, eager: Any, exact: Any) -> None:
        """Within the error budget, or the run fails."""
        right, share = within_budget(output, eager, exact)
        if not right:
            self.failed = True
            self.say(f"{name} {variant}: WRONG, error is {share:.2f} of what is allowed")

    def timed(self, variant: str, case: Case, layout: Layout, tally: Tally) -> None:
        """One timed call, and what served it."""
        run = self.runner(variant, case, layout)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        output = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        tally.ms.append((time.perf_counter() - started) * 1e3)
        del output
        owner = self.owner(variant)
        if owner is not None:
            last = vitcg_backend.stats(owner).last
            assert last is not None
            tally.tokens += last.num_tokens
            tally.computed += last.bucket_tokens or last.num_tokens
            tally.uncaptured += not last.hit

    def counts(self, variant: str) -> tuple[int, float]:
        """Captures and their seconds so far."""
        owner = self.owner(variant)
        if owner is None:
            return 0, 0.0
        seen = vitcg_backend.stats(owner)
        return seen.captures, sum(bucket.capture_s for bucket in seen.buckets.values())

    def record(self, name: str, variant: str, tally: Tally, before: tuple[int, float]) -> None:
        """The rows of one stream and variant."""
        if not tally.ms:
            return
        add, tower = self.recorder.add, self.args.tower
        add(tower, name, variant, "latency", tally.ms)
        owner = self.owner(variant)
        if owner is None:
            return
        captures, seconds = self.counts(variant)
        held = sum(part.captured_bytes for part in live_towers(owner))
        add(tower, name, variant, "padding", [1 - tally.tokens / tally.computed if tally.computed else 0.0])
        add(tower, name, variant, "uncaptured", [tally.uncaptured / len(tally.ms)])
        add(tower, name, variant, "captures", [captures - before[0]])
        add(tower, name, variant, "capture_s", [seconds - before[1]])
        add(tower, name, variant, "memory_mib", [held / 2**20])

    def child(self) -> None:
        """reduce-overhead on the same calls, in a process of its own: it compiles for minutes, and is ended at its limit."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            command = [sys.executable, __file__, "--child", "--tower", self.args.tower, "--out", str(out)]
            command += ["--device", self.args.device, "--streams", ",".join(self.timed_calls)]
            command += ["--stream-limit-s", "inf", "--most-calls", ",".join(map(str, self.timed_calls.values()))]
            command += ["--depth", str(self.args.depth)] if self.args.depth else []
            command += ["--tiny"] if self.args.tiny else []
            command += ["--matmul-tflops", str(self.recorder.environment["matmul_tflops"] or 1)]
            try:
                subprocess.run(command, timeout=self.args.child_limit_s, check=False)
            except subprocess.TimeoutExpired:
                self.say(f"reduce_overhead: ended at its limit of {self.args.child_limit_s:.0f} s")
            rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        for row in rows:
            kept = ("command", "git", "matmul_tflops")
            self.recorder.append(row | {key: self.recorder.environment[key] for key in kept})

    def table(self) -> None:
        """One line a stream: milliseconds and how they compare."""
        rows = [row for row in self.recorder.rows if row["metric"] == "latency"]
        for name in dict.fromkeys(row["case"] for row in rows):
            found = {row["variant"]: row for row in rows if row["case"] == name}
            ours = found.get("vitcg_call")
            parts = [f"{variant} {row['mean']:.2f} / {row['p50']:.2f} / {row['p99']:.2f} ms" for variant, row in found.items()]
            if ours:
                parts += [f"{v} {row['mean'] / ours['mean']:.2f}x" for v, row in found.items() if v != "vitcg_call"]
            print(f"{name:12} mean / p50 / p99: " + "  ".join(parts))


def in_turns(variants: Sequence[str], number: int) -> list[str]:
    """The order of a call's variants: over calls each comes after each of the others as often (a Williams design).

    What runs after a heavy variant runs at the clock that this has left behind.
    """
    n = len(variants)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    order = [variants[(place + number) % n] for place in zigzag]
    return order if number // n % 2 == 0 else order[::-1]


def layouts_of(name: str, tiny: bool) -> list[Layout]:
    """The calls of a stream; of a tiny run the first few, with sides and frames cut down."""
    if name == MIX:
        layouts = [tuple((t, h, w) for t, h, w in load_workloads()["calls"][MIX])] * MIX_CALLS
    else:
        layouts = stream(name)
    if not tiny:
        return layouts
    return [tuple((min(t, 3), max(h // 8 * 2, 2), max(w // 8 * 2, 2)) for t, h, w in layout) for layout in layouts[:12]]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append JSON lines (default on a GPU: results/DATE_GPU_TORCH_streams.jsonl)")
    parser.add_argument("--tower", default="qwen3_vl")
    parser.add_argument("--streams", default=",".join([MIX, *stream_names()]), help="default: %(default)s")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--depth", type=int, help="layers (default: as published)")
    parser.add_argument("--stream-limit-s", type=float, default=12, help="of each of the two passes over a stream")
    parser.add_argument("--child-limit-s", type=float, default=CHILD_LIMIT_S, help="of reduce-overhead, all streams together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny tower and calls: to try the script without a GPU")
    parser.add_argument("--git", help="commit to record, where there is no checkout")
    parser.add_argument("--matmul-tflops", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--most-calls", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.streams, args.variants = args.streams.split(","), args.variants.split(",")
    check(parser, args, "streams", streams=(MIX, *stream_names()), variants=VARIANTS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table; 1 if a result was wrong."""
    args = parse(argv)
    replay = Replay(args)
    here = ["reduce_overhead"] if args.child else [v for v in args.variants if v != "reduce_overhead"]
    most = args.most_calls.split(",") if args.most_calls else [None] * len(args.streams)
    for name, calls in zip(args.streams, most, strict=True):
        layouts = layouts_of(name, args.tiny)[: None if calls is None else int(calls)]
        attempt(replay, name, lambda name=name, layouts=layouts: replay.stream(name, layouts, here))  # type: ignore[misc]
    if args.child:
        return int(replay.failed)
    for variant in here:
        owner = replay.owner(variant)
        if owner is not None:
            print(f"\n{variant}\n{vitcg_backend.stats(owner).table()}")
    if "reduce_overhead" in args.variants:
        replay.child()
    replay.table()
    return int(replay.failed)


def attempt(replay: Replay, name: str, work: Callable[[], None]) -> None:
    """One stream; if it fails say so and go on."""
    try:
        work()
    except Exception as error:
        replay.failed = True
        replay.say(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    sys.exit(main())
