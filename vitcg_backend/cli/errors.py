"""What the command line says about a user's mistake."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Something the user gave is wrong or missing. The text is one line: what, what was seen, what to do."""
