"""Which vision towers of transformers run from graphs: the record of this release, family by family."""

from __future__ import annotations

import argparse
import pathlib

from ..family_record import dump, families
from .errors import UserError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "which vision towers of transformers run from graphs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="only these families")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record there, too")


def run(args: argparse.Namespace) -> int:
    """Print the record."""
    known = {status.family: status for status in families()}
    unknown = [name for name in args.names if name not in known]
    if unknown:
        raise UserError(f"no family named {unknown[0]!r}; known: {', '.join(known)}")
    chosen = tuple(known[name] for name in args.names or known)
    width = max(len(status.family) for status in chosen)
    for status in chosen:
        print(f"{status.family:{width}}  {status.status:8}  {status.tower}  {status.reason[:100]}".rstrip())
    graphed = sum(status.status == "graphed" for status in chosen)
    print(f"{graphed} of {len(chosen)} graphed; transformers {chosen[0].transformers}, torch {chosen[0].torch}")
    if args.json is not None:
        try:
            args.json.write_text(dump(chosen), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {args.json}: {error.strerror}") from error
    return 0
