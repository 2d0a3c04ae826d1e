"""Buckets: which sizes are captured, which one a call takes, and the dummy item that fills the rest of it.

Two units of size meet here. ``num_patches`` counts rows into the tower, ``num_tokens`` rows out of it, after merging;
a token is ``unit = merge ** 2`` patches. Budgets are in tokens, as servers count them; rows are in patches, as kernels
see them. Nothing here imports torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = [
    "Bucket",
    "Ladder",
    "Layout",
    "capacity_tier",
    "max_tail_items",
    "num_patches",
    "num_tokens",
    "tail_grid",
    "tier",
]

Layout = tuple[tuple[int, int, int], ...]
"""The grid of one call: ``(frames, height, width)`` in patches, one triple per item (image or video)."""

# The automatic ladder, in tokens; `Ladder.automatic` states what follows from these four numbers.
SMALLEST_STEP = 8
FINE_FROM = 1024
STEPS_BELOW = 8
STEPS_ABOVE = 16

SMALLEST_CAPACITY = 16


@dataclass(frozen=True)
class Bucket:
    """One captured size.

    Attributes:
        tokens: the budget, in output tokens.
        unit: patches per token.
    """

    tokens: int
    unit: int

    @property
    def patches(self) -> int:
        """Rows into the tower."""
        return self.tokens * self.unit


@dataclass(frozen=True, init=False)
class Ladder:
    """The budgets that may be captured, ascending.

    Attributes:
        budgets: output tokens, strictly ascending, at least one.
        unit: patches per token.
    """

    budgets: tuple[int, ...]
    unit: int

    def __init__(self, budgets: Sequence[int], unit: int) -> None:
        _check_size("unit", unit, "patches per output token (spatial_merge_size ** 2)")
        if not budgets or any(low >= high for low, high in pairwise(budgets)):
            raise ValueError(
                f"budgets={list(budgets)!r}: expected at least one budget and strictly ascending ones; "
                "Ladder.from_budgets takes them in any order."
            )
        # The dataclass is frozen: these are its two fields, set once.
        object.__setattr__(self, "budgets", tuple(budgets))
        object.__setattr__(self, "unit", unit)

    def including(self, budgets: Iterable[int]) -> Ladder:
        """This ladder with more budgets, in any order."""
        return Ladder(sorted({*self.budgets, *budgets}), self.unit)

    @classmethod
    def automatic(cls, max_tokens: int, unit: int, smallest_step: int = SMALLEST_STEP) -> Ladder:
        """Steps that grow with the size, up to and including `max_tokens`.

        A step is an eighth of the power of two at or below the budget it starts from, at least 8 tokens, and from 1024
        tokens on a sixteenth. So the part of a bucket that padding can take is

        - below 64 tokens: at most 7 tokens;
        - from 64 to 1024 tokens: less than 1/9 (11.1 %); such calls are bound by launches rather than by rows;
        - above 1024 tokens: less than 1/17 (5.9 %), and about 2 % in the mean over mixed sizes.

        Every power of two from 8 tokens on is a budget. Number of budgets: 40 up to 1024 tokens and 16 for each
        doubling after, so 88 at 8192 and 104 at 16384. A bucket is captured when a call first needs it, so this bounds
        the sizes captured and is not what most processes come to.

        Args:
            max_tokens: the largest budget, in output tokens, on the ladder whatever its steps.
            unit: patches per token.
            smallest_step: the first budget and the smallest step. 1 where a row is a whole image: then every number of
                images up to 16 is a budget.

        Raises:
            ValueError: `max_tokens` or `unit` is not a whole number of at least 1.
        """
        _check_size("max_tokens", max_tokens, "output tokens of the largest bucket")
        budgets = [min(smallest_step, max_tokens)]
        while budgets[-1] < max_tokens:
            budgets.append(min(budgets[-1] + _step(budgets[-1], smallest_step), max_tokens))
        return cls(budgets, unit)

    @classmethod
    def from_budgets(cls, token_budgets: Sequence[int], unit: int) -> Ladder:
        """A user's own list: any order, duplicates merged.

        Args:
            token_budgets: output tokens per bucket. A budget in tokens is a whole number of merge blocks by itself.
            unit: patches per token.

        Raises:
            ValueError: the list is none or empty, or holds something that is not a whole number of at least 1.
        """
        hint = "expected output tokens per bucket, such as [256, 1024]; leave it out for an automatic ladder."
        if isinstance(token_budgets, (str, bytes)) or not isinstance(token_budgets, Iterable):
            raise ValueError(f"token_budgets={token_budgets!r} ({type(token_budgets).__name__}) is not a list: {hint}")
        given = list(token_budgets)
        if not given:
            raise ValueError(f"token_budgets={token_budgets!r} is empty: {hint}")
        for budget in given:
            _check_size(f"token_budgets={given!r}: the budget", budget, "output tokens; correct it or remove it")
        return cls(sorted(set(given)), unit)

    def fit(self, num_patches: int) -> Bucket | None:
        """The smallest bucket that holds `num_patches` rows.

        None where no bucket does: more rows than the largest, no row at all (an empty call has nothing to replay), or
        rows that are not whole tokens (the tower itself refuses such a grid).
        """
        if num_patches <= 0 or num_patches % self.unit:
            return None
        rung = bisect_left(self.budgets, num_patches // self.unit)
        return Bucket(self.budgets[rung], self.unit) if rung < len(self.budgets) else None


def num_patches(layout: Layout) -> int:
    """Rows into the tower for the grids of one call."""
    return sum(t * h * w for t, h, w in layout)


def num_tokens(layout: Layout, merge: int) -> int:
    """Rows out of a tower that merges `merge` x `merge` patches; h and w are multiples of `merge`."""
    return num_patches(layout) // merge**2


def tail_grid(pad_patches: int, merge: int, max_side: int = 8) -> Layout:
    """Grids of the dummy items that cover exactly `pad_patches` rows.

    Frames hold at most ``max_side ** 2`` patches, so that the attention segments of the tail stay short however long
    the tail is. There are as few frames as that allows: in one item where they can all be equal, else in two
    (`max_tail_items`), full square frames and one smaller frame for the remainder. Each frame is as near to a square as
    its size allows.

    Args:
        pad_patches: rows to cover, a multiple of ``merge ** 2``; 0 gives no item.
        merge: side of a merge block in patches; every h and w is a multiple of it.
        max_side: side of the largest frame in patches. A frame is never smaller than one merge block.

    Raises:
        ValueError: `pad_patches` is negative or not a whole number of merge blocks.
    """
    unit = merge**2
    if pad_patches < 0 or pad_patches % unit:
        raise ValueError(f"pad_patches={pad_patches}: expected a multiple of {unit} (merge={merge}), at least 0.")
    if pad_patches == 0:
        return ()
    tokens = pad_patches // unit
    side = max(max_side // merge, 1)
    frames = math.ceil(tokens / side**2)
    if tokens % frames == 0:
        return (_frames(frames, tokens // frames, merge),)
    full = frames - 1
    return _frames(full, side**2, merge), _frames(1, tokens - full * side**2, merge)


def max_tail_items() -> int:
    """The most items that `tail_grid` adds to a call."""
    return 2


def tier(value: int, tiers: Sequence[int]) -> int:
    """The smallest of the ascending `tiers` that is at least `value`.

    Raises:
        ValueError: `value` is above the last tier.
    """
    at = bisect_left(tiers, value)
    if at == len(tiers):
        raise ValueError(f"value={value} is above every tier of {list(tiers)!r}.")
    return tiers[at]


def capacity_tier(value: int) -> int:
    """The static capacity for `value` segments, rows of the longest segment, and the like.

    The smallest power of two that is at least `value` and at least 16: few capacities, so few captures of one bucket,
    and above 8 never twice what is needed (launch grids sized for the worst case make padded attention slow).
    """
    return max(SMALLEST_CAPACITY, 1 << max(value - 1, 0).bit_length())


def _step(tokens: int, smallest: int) -> int:
    """From the budget `tokens` of the automatic ladder to the next."""
    octave = 1 << (tokens.bit_length() - 1)
    return max(smallest, octave // (STEPS_ABOVE if tokens >= FINE_FROM else STEPS_BELOW))


def _frames(frames: int, tokens: int, merge: int) -> tuple[int, int, int]:
    """An item of `frames` frames of `tokens` merge blocks each, as near to a square as `tokens` factors."""
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    return frames, height * merge, tokens // height * merge


def _check_size(what: str, value: Any, meaning: str) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1 (True and 2.0 are not)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        seen = f"{what} {value!r} ({type(value).__name__})"
        raise ValueError(f"{seen} is not allowed: expected a whole number of at least 1, in {meaning}.")
