"""Run every family and write the record: ``vitcg_backend/families.json`` and ``docs/families.md``.

``python docs/make_families.py`` takes a few minutes on two cores, with names of families it renews these alone. It writes the
rows of the installed transformers; those of other releases stay. ``tests/test_families.py`` fails until what it finds is what
these files say. For the oldest release: ``PYTHONPATH=.oldest python docs/make_families.py``, after ``make tests-oldest``.
"""

from __future__ import annotations

import pathlib
import sys

import transformers

from vitcg_backend.family_record import RECORD, document, dump, everything
from vitcg_backend.testing.families import discover, measure
from vitcg_backend.testing.image_families import image_families

ROOT = pathlib.Path(__file__).parents[1]
HEAD = """# Vision towers of transformers

Written by `docs/make_families.py`, kept current by `tests/test_families.py`: every family whose modelling file takes its
metadata from `transformers.vision_utils`, or that nests such a tower, found in the installed transformers; after them towers
that take one image a row and no grid, which are listed by hand. A tiny tower of each ran over a shuffled sequence of layouts
(one item, several, videos where the tower takes them, repeats; or of numbers of images) and equalled eager in every output.

- **graphed**: one graph, and a bucket served every call;
- **in parts**: Dynamo breaks the tower into several graphs; some of them, or some calls, are served by buckets;
- **refused**: right, without buckets, for the reason given.

"""


def main() -> int:
    """Measure and write."""
    chosen = sys.argv[1:]
    here = transformers.__version__
    others = [status for status in everything() if status.transformers != here]
    known = {status.family: status for status in everything() if status.transformers == here} if chosen else {}
    statuses = []
    for family in (*discover(), *image_families()):
        kept = known.get(family.name)
        statuses.append(measure(family) if kept is None or family.name in chosen else kept)
        sys.stderr.write(f"{family.name}: {statuses[-1].status} {statuses[-1].reason[:80]}\n")
    # Newest first; the rows of a release keep their order.
    rows = sorted([*statuses, *others], key=lambda s: tuple(map(int, s.transformers.split(".")[:2])), reverse=True)
    (ROOT / "vitcg_backend" / RECORD).write_text(dump(tuple(rows)), encoding="utf-8")
    (ROOT / "docs" / "families.md").write_text(HEAD + document(tuple(rows)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
