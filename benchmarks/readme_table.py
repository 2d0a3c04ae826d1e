"""Write the results tables of README.md from files of `benchmarks/results/`: those of bench.py, and those of replay.py.

python benchmarks/readme_table.py benchmarks/results/FILE.jsonl [FILE.jsonl]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
COLUMNS = ("vitcg_call", "vitcg_lane", "vitcg_unseen", "vitcg_replay", "opbyop_graph", "eager_flash", "eager_sdpa")
HEADS = ("vitcg, ms", "fast lane, ms", "new layout, ms", "graph alone, ms", "op by op graph", "eager, flash", "eager, sdpa")
STREAMS = {
    "vitcg_call": "vitcg, mean / p99 ms",
    "vitcg_unseen": "each layout new",
    "pow2_greedy": "powers of two, greedy packing",
    "reduce_overhead": "reduce-overhead",
    "eager_sdpa": "eager, sdpa",
}


def tables(paths: Sequence[Path]) -> str:
    """Markdown: a table for each file, of the towers that no file before it has timed."""
    seen: set[str] = set()
    texts = []
    for path in paths:
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        timed = {row["tower"] for row in rows if row["metric"] == "latency" and row["variant"] == "vitcg_call"} - seen
        texts.append(table(path, [row for row in rows if row["tower"] in timed]))
        seen |= timed
    return "\n\n".join(texts)


def table(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row a call, our time and what the others take as multiples of it (medians)."""
    latency = {(r["tower"], r["case"], r["variant"]): r for r in rows if r["metric"] == "latency"}
    columns = [(v, head) for v, head in zip(COLUMNS, HEADS, strict=True) if any(v == variant for _, _, variant in latency)]
    heads = [head for _, head in columns]
    lines = [f"| tower | call | patches | padding | {' | '.join(heads)} |", "|---" * (4 + len(heads)) + "|"]
    for tower, case in dict.fromkeys((t, c) for t, c, _ in latency):
        found = {v: latency.get((tower, case, v)) for v, _ in columns}
        ours = found.get("vitcg_call")
        if ours is None:
            continue
        cells = [tower, case, str(ours["num_patches"]), f"{ours['padded_fraction']:.1%}"]
        for variant, row in found.items():
            own = variant.startswith("vitcg_")  # our own in ms, the others as multiples
            cells.append("" if row is None else f"{row['p50']:.2f}" if own else f"{row['p50'] / ours['p50']:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _source(path, rows[0])]
    for row in rows:
        if row["metric"] in ("cold_start_s", "memory_mib") and row["variant"] == "vitcg_call":
            what = "from nothing to the first result" if row["metric"] == "cold_start_s" else "added by all its captures"
            unit = "s" if row["metric"] == "cold_start_s" else "MiB"
            lines.append(f"{row['tower']}: {row['p50']:.0f} {unit} {what}.")
    return "\n".join(lines)


def streams(paths: Sequence[Path]) -> str:
    """Markdown: one row a stream, of the last file that has it; mean and 99th percentile of a call, and ours against each."""
    latency: dict[tuple[str, str], dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for path in paths:
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        found = {(r["case"], r["variant"]): r for r in rows if r["metric"] == "latency"}
        cases = {case for case, _ in found}
        latency = {key: row for key, row in latency.items() if key[0] not in cases} | found
        sources |= dict.fromkeys(cases, _source(path, rows[0]))
    variants = [(v, head) for v, head in STREAMS.items() if any(v == variant for _, variant in latency)]
    lines = [f"| stream | calls | {' | '.join(head for _, head in variants)} |", "|---" * (2 + len(variants)) + "|"]
    timed = [case for case in dict.fromkeys(case for case, _ in latency) if (case, "vitcg_call") in latency]
    for case in timed:
        ours = latency[case, "vitcg_call"]
        cells = [case, str(ours["n"])]
        for variant, _ in variants:
            row = latency.get((case, variant))
            against = "" if row is ours or row is None else f", {row['mean'] / ours['mean']:.2f}x"
            cells.append("" if row is None else f"{row['mean']:.1f} / {row['p99']:.1f}{against}")
        lines.append(f"| {' | '.join(cells)} |")
    texts = dict.fromkeys(sources[case] for case in timed)
    return "\n".join([*lines, "", *(f"{', '.join(c for c in timed if sources[c] == text)}: {text}" for text in texts)])


def _source(path: Path, row: dict[str, Any]) -> str:
    return (
        f"{row['gpu']}, torch {row['torch']}, triton {row['triton']}, transformers {row['transformers']}, bfloat16, a "
        f"matrix product at {row['matmul_tflops']:.0f} TFLOP/s; from `{path.name}`."
    )


def main() -> int:
    """Replace what stands between the markers in README.md."""
    readme = README.read_text()
    paths = [Path(name) for name in sys.argv[1:]]
    of_streams = [path for path in paths if '"pow2_greedy"' in path.read_text()]
    of_calls = [path for path in paths if path not in of_streams]
    texts = [("streams", streams(of_streams))] * bool(of_streams) + [("results", tables(of_calls))] * bool(of_calls)
    for name, text in texts:
        pattern = re.compile(rf"(<!-- {name}:begin.*?-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        readme = pattern.sub(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", readme)  # type: ignore[misc]
    README.write_text(readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
