"""Budgets that fit traffic: from sizes that were seen, and from inputs that are expected. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from .bucketing import Ladder

__all__ = ["fit_budgets", "mean_padding", "round_budget", "tightened"]

FREQUENT = 0.02
"""A size with this share of the calls gets a budget of its own."""

_MAX_SIZES = 192  # different sizes that `fit_budgets` looks at one by one


def tightened(ladder: Ladder, sizes: Mapping[int, int]) -> Ladder:
    """The ladder with a budget of its own for each frequent size, which then has no padding.

    No call is padded more than before, seen or not; at most 50 budgets are added. Linear in the number of sizes: a few
    hundred microseconds at most, so it may run between two calls.

    Args:
        ladder: the budgets to begin with.
        sizes: output tokens of a call -> calls.
    """
    least = max(FREQUENT * sum(sizes.values()), 2)
    frequent = {size for size, count in sizes.items() if count >= least and size <= ladder.budgets[-1]}
    return ladder.including(frequent)


def fit_budgets(sizes: Mapping[int, float], most: int) -> tuple[int, ...]:
    """At most `most` budgets that pad the given sizes least in all.

    Exact, by dynamic programming over the sorted sizes (each budget is one of them). Of more than 192 different sizes only
    the heaviest and evenly spread others may become budgets.

    Args:
        sizes: output tokens -> weight (calls, or shares of them).
        most: budgets at most, at least 1.

    Raises:
        ValueError: there is no size, or `most` is below 1.
    """
    if not sizes or most < 1:
        raise ValueError(f"fit_budgets needs at least one size and one budget, got {len(sizes)} sizes and most={most}.")
    ordered = sorted(sizes)
    stride = -(-len(ordered) // (_MAX_SIZES // 2))
    heaviest = sorted(sizes, key=lambda size: -sizes[size])[: _MAX_SIZES // 2]
    kept = ordered if len(ordered) <= _MAX_SIZES else sorted({*ordered[::-stride], *heaviest})
    weights = [0.0] * len(kept)
    for size, weight in sizes.items():
        weights[bisect_left(kept, size)] += weight
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    # least[k][j]: rows computed for the j smallest sizes with k budgets, the largest of them being size j.
    least = [0.0] + [before[j] * kept[j - 1] for j in range(1, len(kept) + 1)]
    chosen = [[0] * (len(kept) + 1)]
    for _ in range(min(most, len(kept)) - 1):
        following, cut = list(least), [0] * (len(kept) + 1)
        for j in range(1, len(kept) + 1):
            cut[j] = min(range(j), key=lambda i, j=j: least[i] + (before[j] - before[i]) * kept[j - 1])  # type: ignore[misc]
            following[j] = least[cut[j]] + (before[j] - before[cut[j]]) * kept[j - 1]
        least = following
        chosen.append(cut)
    budgets, j = [], len(kept)
    for cut in reversed(chosen):
        if j == 0:
            break
        budgets.append(kept[j - 1])
        j = cut[j]
    return tuple(sorted(budgets))


def round_budget(tokens: int) -> int:
    """The smallest ``2**k`` or ``3 * 2**k`` that holds `tokens`: what people set by hand."""
    power = 1 << max(tokens - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= tokens else power


def mean_padding(sizes: Mapping[int, float], budgets: Sequence[int]) -> float:
    """Padded share of the computed tokens when each size takes the smallest budget that holds it.

    Raises:
        ValueError: a size is above the largest budget.
    """
    ordered = sorted(budgets)
    if max(sizes) > ordered[-1]:
        raise ValueError(f"a size of {max(sizes)} tokens is above the largest budget, {ordered[-1]}.")
    real = sum(size * weight for size, weight in sizes.items())
    computed = sum(ordered[bisect_left(ordered, size)] * weight for size, weight in sizes.items())
    return 1 - real / computed
