"""The command line: one module a command, each with `HELP`, `add_arguments(parser)` and `run(args) -> int`.

A mistake of the user's ends in one line on stderr and exit code 2, whatever the command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from . import demo, families, plan
from .errors import UserError

__all__ = ["main"]

PROGRAM = "python -m vitcg_backend"
COMMANDS = {"demo": demo, "families": families, "plan": plan}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`: argparse's own print the usage before the line that matters."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: COMMAND"):
            message += f"; commands: {', '.join(COMMANDS)}"
        raise UserError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = _Parser(prog=PROGRAM, description="Vision towers from CUDA graphs: torch.compile(tower, backend='vitcg').")
    parser.add_argument("--version", action="version", version=f"vitcg-backend {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 if what it checked is wrong, 2 if what it was given is."""
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except BrokenPipeError:  # whoever read the lines, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does Python's last flush say so
        return 1
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
