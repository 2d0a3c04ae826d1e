"""Which token budgets to set: from a model's processor rules and the inputs to expect."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..errors import UnknownInput
from ..grids import FAMILIES
from ..guide import recommend_budgets
from .errors import UserError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "grids, tokens, budgets and padding of the inputs to expect"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``plan``."""
    parser.add_argument("--model", metavar="NAME", help=f"family: {', '.join(FAMILIES)}")
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="instead: folder with config.json, processor files beside it"
    )
    parser.add_argument(
        "--input", action="append", default=[], metavar="FxHxW", help="frames x height x width in pixels; may be repeated"
    )
    parser.add_argument("--budgets", type=int, default=12, metavar="N", help="budgets at most (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0.

    Raises:
        UserError: an argument is wrong or a package is missing.
    """
    if (args.model is None) == (args.config is None):
        raise UserError("give either --model NAME or --config DIR")
    if args.config is not None and not args.config.is_dir():
        raise UserError(f"--config: no such folder: {args.config}")
    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json: no such folder: {args.json.absolute().parent}")
    if args.model is not None and args.model not in FAMILIES:
        raise UserError(f"--model: unknown model {args.model!r}; known: {', '.join(FAMILIES)}")
    try:
        if args.budgets < 1:
            raise UserError(f"--budgets {args.budgets}: expected at least one budget")
        plan = recommend_budgets(args.config or args.model, args.input, most=args.budgets)
    except UnknownInput as error:
        raise UserError(str(error)) from None
    print(plan)
    if args.json:
        args.json.write_text(json.dumps(asdict(plan), indent=1) + "\n")
    return 0
