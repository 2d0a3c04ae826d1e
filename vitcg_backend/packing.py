"""Packing: the items of one call onto replays of buckets, at the least cost. Pure Python, no torch.

A replay costs about ``fixed + rate * bucket tokens``: what it launches, and what its rows take. One replay of everything is
best where its padding costs less than a second replay's fixed part, which is nearly always and is seen at once. Otherwise

1. the items are cut into two groups whose sizes lie closest below two buckets: subset sums, as the bits of an integer;
2. while they do not fit one replay (tokens, items or frames), a group is filled with the largest items that fit;
3. next-fit in the order of the call is tried as well, so that the result never costs more than it;
4. where all that may have left out something better and the items are few, every way to group them is looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .costs import MARGIN

__all__ = ["Capacities", "Group", "next_fit", "pack"]

Group = tuple[list[int], int]
"""Ascending indices of items, and the budget of the bucket that holds them."""

UNBOUNDED = 1 << 62
CLOSE = 1.2  # within this factor of the least cost that there can be, nothing better is looked for
ALL_PARTITIONS = 5  # items: there are 52 ways to group them
EXACT_ITEMS = 14  # the smallest items, whose subsets are all looked at; the larger ones go where the largest goes


@dataclass(frozen=True)
class Capacities:
    """What one replay may hold, and what it costs.

    Attributes:
        budgets: output tokens of the buckets, ascending.
        costs: cost of a replay of each, in any unit. A smaller bucket may cost more than a larger one, which is preferred
            to it where that saves more than `costs.MARGIN`.
        rate: cost of one more token of a bucket, at least 0.
        max_items: most items of a replay.
        max_frames: most frames of a replay.
    """

    budgets: Sequence[int]
    costs: Sequence[float]
    rate: float
    max_items: int = UNBOUNDED
    max_frames: int = UNBOUNDED
    _best: list[int] = field(init=False, repr=False)
    _fixed: float = field(init=False, repr=False)
    _rate: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        best = len(self.budgets) - 1
        cheapest = []
        for rung in range(len(self.budgets) - 1, -1, -1):
            best = rung if self.costs[rung] * (1 - MARGIN) <= self.costs[best] else best
            cheapest.append(best)
        object.__setattr__(self, "_best", cheapest[::-1])
        pairs = list(zip(self.costs, self.budgets, strict=True))
        rate = min(self.rate, *(cost / budget for cost, budget in pairs))  # then no fixed part is negative
        object.__setattr__(self, "_rate", rate)
        object.__setattr__(self, "_fixed", min(cost - rate * budget for cost, budget in pairs))

    def rung(self, tokens: int) -> int:
        """Index of the cheapest bucket that holds `tokens`, which at most equals the largest budget."""
        return self._best[bisect_left(self.budgets, tokens)]

    def cost(self, tokens: int) -> float:
        """Cost of the cheapest replay that holds `tokens`."""
        return self.costs[self._best[bisect_left(self.budgets, tokens)]]

    def least(self, tokens: int, replays: int) -> float:
        """No `replays` replays that hold `tokens` together cost less than this."""
        return replays * self._fixed + self._rate * tokens


def pack(tokens: Sequence[int], frames: Sequence[int], capacities: Capacities) -> list[Group] | None:
    """Distribute items over replays.

    Args:
        tokens: output tokens of each item, at least 1.
        frames: frames of each item.
        capacities: limits and costs.

    Returns:
        The groups, each within all limits, every item in exactly one; None when a single item exceeds a limit.
    """
    total, largest = sum(tokens), capacities.budgets[-1]
    count = len(tokens)
    if total <= largest and count <= capacities.max_items and sum(frames) <= capacities.max_frames:
        groups = [list(range(count))]
        if count > 1 and capacities.cost(total) > capacities.least(total, 2):
            groups = _halved(sorted(groups[0], key=tokens.__getitem__, reverse=True), tokens, capacities)
    elif max(tokens) > largest or max(frames) > capacities.max_frames:
        return None
    else:
        groups = _filled(tokens, frames, capacities)
        cost = _cost(groups, tokens, capacities)
        if cost > capacities.least(total, -(-total // largest)):
            in_order = next_fit(tokens, frames, capacities)
            groups = in_order if _cost(in_order, tokens, capacities) <= cost else groups
    if 1 < count <= ALL_PARTITIONS and _cost(groups, tokens, capacities) > CLOSE * capacities.least(
        total, -(-total // largest)
    ):
        groups = _best(tokens, frames, capacities)
    return [(sorted(group), capacities.budgets[capacities.rung(_total(group, tokens))]) for group in groups]


def next_fit(tokens: Sequence[int], frames: Sequence[int], capacities: Capacities) -> list[list[int]]:
    """Items in order, a new group where the next one does not fit: the policy of servers, kept as the yardstick."""
    largest, max_items, max_frames = capacities.budgets[-1], capacities.max_items, capacities.max_frames
    groups: list[list[int]] = [[]]
    rows = segments = 0
    for index, (size, length) in enumerate(zip(tokens, frames, strict=True)):
        rows, segments = rows + size, segments + length
        if groups[-1] and (rows > largest or segments > max_frames or len(groups[-1]) == max_items):
            groups.append([])
            rows, segments = size, length
        groups[-1].append(index)
    return groups


def _cost(groups: Sequence[Sequence[int]], tokens: Sequence[int], capacities: Capacities) -> float:
    return sum(capacities.cost(_total(group, tokens)) for group in groups)


def _total(group: Sequence[int], tokens: Sequence[int]) -> int:
    return sum(map(tokens.__getitem__, group))


def _filled(tokens: Sequence[int], frames: Sequence[int], capacities: Capacities) -> list[list[int]]:
    """Groups filled with the largest items that still fit, until the rest fits one replay."""
    rest = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
    rows, segments = sum(tokens), sum(frames)
    largest, max_items, max_frames = capacities.budgets[-1], capacities.max_items, capacities.max_frames
    groups = []
    while rows > largest or segments > max_frames or len(rest) > max_items:
        group: list[int] = []
        left: list[int] = []
        free, places, least = largest, max_frames, tokens[rest[-1]]
        for position, index in enumerate(rest):
            if tokens[index] <= free and frames[index] <= places:
                group.append(index)
                free -= tokens[index]
                places -= frames[index]
                if free < least or len(group) == max_items:
                    left += rest[position + 1 :]
                    break
            else:
                left.append(index)
        groups.append(group)
        rows -= largest - free
        segments -= max_frames - places
        rest = left
    if len(rest) > 1 and capacities.cost(rows) > capacities.least(rows, 2):
        return groups + _halved(rest, tokens, capacities)
    return groups + [rest] if rest else groups


def _best(tokens: Sequence[int], frames: Sequence[int], capacities: Capacities) -> list[list[int]]:
    """The cheapest of all ways to group the items within the limits."""

    def fits(group: Sequence[int]) -> bool:
        whole = _total(group, tokens) <= capacities.budgets[-1] and len(group) <= capacities.max_items
        return whole and _total(group, frames) <= capacities.max_frames

    ways = (way for way in _partitions(range(len(tokens))) if all(map(fits, way)))
    return min(ways, key=lambda way: _cost(way, tokens, capacities))


def _partitions(items: Sequence[int]) -> list[list[list[int]]]:
    """All ways to put items into groups."""
    found: list[list[list[int]]] = [[]]
    for item in items:
        grown = [[*groups, [item]] for groups in found]
        grown += [[*g[:i], [*g[i], item], *g[i + 1 :]] for g in found for i in range(len(g))]
        found = grown
    return found


def _halved(order: list[int], tokens: Sequence[int], capacities: Capacities) -> list[list[int]]:
    """Items (largest first) that fit one replay, in one group or in the two that cost least."""
    small = order[-EXACT_ITEMS:]
    base = _total(order[: len(order) - len(small)], tokens)
    total = base + _total(small, tokens)
    steps = list(accumulate(small, lambda sums, index: sums | sums << tokens[index], initial=1))
    sums, budgets = steps[-1], capacities.budgets
    best, chosen = capacities.cost(total), None
    floor = capacities.least(total, 2)
    for rung in range(bisect_left(budgets, (total + 1) // 2), bisect_left(budgets, total)):
        room = budgets[rung] - base
        if room < 0:
            continue
        reached = (sums & ((2 << room) - 1)).bit_length() - 1 + base
        cost = capacities.cost(reached) + capacities.cost(total - reached) if reached else best
        if cost < best:
            best, chosen = cost, reached - base
            if best <= floor:
                break
    if chosen is None:
        return [order]
    first, second = order[: len(order) - len(small)], []
    for step in range(len(small) - 1, -1, -1):  # an item is in the subset where the sum cannot be reached without it
        if steps[step] >> chosen & 1:
            second.append(small[step])
        else:
            first.append(small[step])
            chosen -= tokens[small[step]]
    return [first, second]
