"""Which families of transformers were run, and what came out: the record that the tests write and check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

__all__ = ["FamilyStatus", "document", "everything", "families", "read_record", "recorded", "table"]

RECORD = "families.json"


@dataclass(frozen=True)
class FamilyStatus:
    """What came out of one family's vision tower, run over a shuffled sequence of layouts; every output equalled eager's.

    Attributes:
        family: folder in `transformers.models`.
        tower: class of the tower; another family's where this one nests it.
        status: ``graphed``, one graph and every call served by a bucket; ``in parts``, Dynamo breaks the tower and some of the
            graphs are served by buckets, or some of the calls; ``refused``, no bucket was used, for `reason`.
        graphs: graphs that Dynamo handed over during the sequence.
        calls: calls of these graphs.
        hits: how many of them a bucket served.
        reason: why not all, name and text; empty for ``graphed``.
        torch: version that it was seen with.
        transformers: version that it was seen with.
    """

    family: str
    tower: str
    status: str
    graphs: int
    calls: int
    hits: int
    reason: str
    torch: str
    transformers: str


def families(transformers: str | None = None) -> tuple[FamilyStatus, ...]:
    """The record of this release, by family: written by the test run of the versions that it names.

    Args:
        transformers: the release of transformers, one of `recorded()`; None: the newest of them.

    Raises:
        ValueError: nothing is recorded of that release.
    """
    known = recorded()
    chosen = known[0] if transformers is None else transformers
    if chosen not in known:
        raise ValueError(f"no record of transformers {chosen}; there is one of {', '.join(known)}")
    return tuple(status for status in everything() if status.transformers == chosen)


def recorded() -> tuple[str, ...]:
    """Releases of transformers that the record knows, the newest first."""
    return tuple(dict.fromkeys(status.transformers for status in everything()))


def everything() -> tuple[FamilyStatus, ...]:
    """The rows of the record, all releases of transformers, in the order of the file."""
    return tuple(FamilyStatus(**row) for row in read_record())


def read_record() -> list[dict[str, Any]]:
    """The rows of the record file."""
    rows: list[dict[str, Any]] = json.loads(files(__package__).joinpath(RECORD).read_text(encoding="utf-8"))
    return rows


def document(statuses: tuple[FamilyStatus, ...]) -> str:
    """The tables of a record in Markdown, one a release of transformers."""
    releases = dict.fromkeys(status.transformers for status in statuses)
    return "\n".join(
        f"## transformers {release}\n\n{table(tuple(s for s in statuses if s.transformers == release))}" for release in releases
    )


def table(statuses: tuple[FamilyStatus, ...]) -> str:
    """A record as a table in Markdown, with the counts and versions in front."""
    counts: Mapping[str, int] = {s: sum(f.status == s for f in statuses) for s in ("graphed", "in parts", "refused")}
    versions = sorted({f"transformers {f.transformers}, torch {f.torch}" for f in statuses})
    lines = [f"{len(statuses)} families: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + ".", ""]
    lines += [f"Seen with {'; '.join(versions)}.", "", "| family | tower | status | graphs | reason |", "|---|---|---|---|---|"]
    for f in statuses:
        reason = f.reason.replace("|", "\\|")
        lines.append(f"| {f.family} | `{f.tower}` | {f.status} | {f.graphs} | {reason} |")
    return "\n".join(lines) + "\n"


def dump(statuses: tuple[FamilyStatus, ...]) -> str:
    """The record as JSON, one family a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(status)) for status in statuses) + "\n]\n"
