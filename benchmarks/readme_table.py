"""Write the results table of README.md from a file of `benchmarks/results/`.

python benchmarks/readme_table.py benchmarks/results/FILE.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
COLUMNS = ("vitcg_call", "vitcg_lane", "vitcg_unseen", "vitcg_replay", "opbyop_graph", "eager_flash", "eager_sdpa")
HEADS = ("vitcg, ms", "fast lane, ms", "new layout, ms", "graph alone, ms", "op by op graph", "eager, flash", "eager, sdpa")


def table(path: Path) -> str:
    """Markdown: one row a call, our time and what the others take as multiples of it (medians)."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
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
    first = rows[0]
    lines += [
        "",
        f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}, transformers {first['transformers']}, bfloat16, a "
        f"matrix product at {first['matmul_tflops']:.0f} TFLOP/s; from `{path.name}`.",
    ]
    for row in rows:
        if row["metric"] in ("cold_start_s", "memory_mib") and row["variant"] == "vitcg_call":
            what = "from nothing to the first result" if row["metric"] == "cold_start_s" else "added by all its captures"
            unit = "s" if row["metric"] == "cold_start_s" else "MiB"
            lines.append(f"{row['tower']}: {row['p50']:.0f} {unit} {what}.")
    return "\n".join(lines)


def main() -> int:
    """Replace what stands between the markers in README.md."""
    text = table(Path(sys.argv[1]))
    readme = README.read_text()
    pattern = re.compile(r"(<!-- results:begin.*?-->\n).*?(<!-- results:end -->)", re.DOTALL)
    README.write_text(pattern.sub(lambda m: f"{m[1]}{text}\n{m[2]}", readme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
