"""The plan of a call: which replays serve it, or the reason why none does. Pure Python, made once per layout and kept.

::

    grid ─▶ units: items, and runs of frames of an item that exceeds a limit
         ─▶ groups of units, each within every limit (packing.py), at the least cost (costs.py)
         ─▶ one replay of everything | several replays | uncaptured, where that is known to be faster
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from .bucketing import Bucket, Ladder, Layout, num_patches
from .budgets import tightened
from .costs import MARGIN, Costs
from .options import Options
from .packing import UNBOUNDED, Capacities, Group, pack

__all__ = ["REPEATED", "Part", "Plan", "Planner"]

_MAX_PLANS = 1024
_MAX_SIZES = 4096
_MAX_OWN = 16  # budgets at most that the automatic ladder gives to sizes that keep coming
_LEAST_OWN = 256  # output tokens: below, launches count for more than rows
_MUCH_PADDING = 1 / 64
_REFIT_AFTER = 64  # calls until budgets are first fitted to the traffic; then twice as many, up to _REFIT_EVERY
_REFIT_EVERY = 4096
WORTH = 0.1  # share of a call's cost that several replays have to save in place of one, at once
REPEATED = 8  # calls of one layout from which on they only have to save something, as measured
_WANTED = 4  # calls that a captured bucket serves until a better fitting one is captured

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """What one replay serves.

    Attributes:
        layout: its grid, None for a tower without one.
        rows: its rows (patches).
        bucket: the bucket that is replayed.
        ranges: (first row, rows) in the call, in the order of `layout`.
    """

    layout: Layout | None
    rows: int
    bucket: Bucket
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Plan:
    """The replays of a call in order, or none and the reason.

    Attributes:
        parts: the replays.
        reason: why there is none.
        rival: one replay of everything, where these several were chosen by estimates and are to be measured beside it.
    """

    parts: tuple[Part, ...]
    reason: str | None = None
    rival: Plan | None = None

    @property
    def bucket_tokens(self) -> int | None:
        """Output tokens that all its replays compute, None without one."""
        return sum(part.bucket.tokens for part in self.parts) if self.parts else None


@dataclass
class Planner:
    """Makes the plans of one tower.

    Attributes:
        options: the user's options.
        unit: patches per output token.
        cuttable: calls may be cut into parts where their layout allows it.
        tokens_of_image: output tokens of a row, for a tower whose rows are whole images: budgets then count images, and
            the automatic ladder ends at as many as `max_tokens` holds. 0 for a tower of patches.
        fits: whether the compiled pieces are right for a plan, of a call of so many rows.
        costs: what has been measured.
        captured: budgets that have a capture.
        warming: threads that may capture although ``capture="warmup"`` is set, with the layout that their calls stand for;
            their plans are not kept for others.
        version: goes up whenever a plan may have become another.
    """

    options: Options
    unit: int
    cuttable: bool = True
    tokens_of_image: int = 0
    fits: Callable[[Plan, int], bool] = lambda plan, rows: True
    costs: Costs = field(default_factory=Costs)
    captured: set[int] = field(default_factory=set)
    warming: dict[int, Layout | None] = field(default_factory=dict)
    version: int = 0
    ladder: Ladder = field(init=False)
    _plans: dict[object, Plan] = field(default_factory=dict)
    _capacities: dict[tuple[int, ...], Capacities] = field(default_factory=dict)
    _repeats: dict[Layout, int] = field(default_factory=dict)
    _whole: set[Layout] = field(default_factory=set)
    _several: dict[Layout, bool] = field(default_factory=dict)  # whether several replays were measured to be faster than one
    _sizes: Counter[int] = field(default_factory=Counter)
    _wanted: Counter[int] = field(default_factory=Counter)
    _settled: bool = True
    _calls: int = 0
    _refit_at: int = _REFIT_AFTER
    _own: int = 0  # budgets that sizes have got for coming again

    def __post_init__(self) -> None:
        budgets = self.options.token_budgets
        self._observes = budgets == "observed"
        automatic = budgets is None or isinstance(budgets, str)
        if not automatic:
            self.ladder = Ladder.from_budgets(budgets, self.unit)  # type: ignore[arg-type]  # the two other forms are above
        elif self.tokens_of_image:
            self.ladder = Ladder.automatic(max(self.options.max_tokens // self.tokens_of_image, 1), self.unit, 1)
        else:
            self.ladder = Ladder.automatic(self.options.max_tokens, self.unit)
        self._automatic = self.ladder

    @property
    def measures(self) -> bool:
        """Whether the faster of replay and uncaptured pieces is to be found out."""
        return self.options.min_tokens == "auto"

    @property
    def warms(self) -> bool:
        """Whether the current thread is in a warm-up."""
        return threading.get_ident() in self.warming

    @property
    def stands_for(self) -> Layout | None:
        """The layout that calls of the current thread stand for in a warm-up."""
        return self.warming.get(threading.get_ident())

    @property
    def most_frames(self) -> int:
        """Images at most, one frame each, of one replay."""
        return min(self.options.max_items or UNBOUNDED, self.options.max_frames or UNBOUNDED)

    @property
    def may_capture(self) -> bool:
        """Whether a bucket without a capture may get one now."""
        return self.options.capture != "warmup" or self.warms

    def plan(self, layout: Layout | None, rows: int) -> Plan:
        """The plan of a call of whole tokens."""
        if self._observes:
            self._observe(rows // self.unit)
        key = rows if layout is None else layout
        if layout is not None and self._counts(layout, rows):
            self._count(layout)
        plan = None if self.warms else self._plans.get(key)
        if plan is None:
            plan = self._make(layout, rows)
            if not self.fits(plan, rows):
                plan = Plan((), "outside_compiled_sizes")
            if self._settled:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.pop(next(iter(self._plans)))
                self._plans[key] = plan
        return plan

    def is_final(self, layout: Layout | None, rows: int) -> bool:
        """Whether the next call of this layout gets the plan that is kept for it, and need not be counted."""
        counted = layout is None or not self._counts(layout, rows) or self._repeats.get(layout, 0) >= REPEATED
        return counted and (rows if layout is None else layout) in self._plans and not self._observes

    def learn(self, part: Part, replay_s: float, uncaptured_s: float) -> None:
        """The seconds of a part's first use, replayed and uncaptured."""
        self.costs.learn_replay(part.bucket.tokens, part.layout, replay_s)
        self.learn_uncaptured(part.layout, part.rows, uncaptured_s)

    def learn_uncaptured(self, layout: Layout | None, rows: int, uncaptured_s: float) -> None:
        """The seconds of an uncaptured run."""
        bucket = self.ladder.fit(rows)
        if bucket is not None:
            self.costs.learn_uncaptured(bucket.tokens, rows // self.unit, layout, uncaptured_s)
        self._forget()

    def lacks(self, rows: int) -> bool:
        """Whether the uncaptured time of such a call is wanted and unknown."""
        bucket = self.ladder.fit(rows)
        return self.measures and bucket is not None and not self.costs.knows_uncaptured(bucket.tokens)

    def warm(self, warming: bool, stands_for: Layout | None = None) -> None:
        """Whether the current thread may capture although ``capture="warmup"`` is set."""
        if warming:
            self.warming[threading.get_ident()] = stands_for
        else:
            self.warming.pop(threading.get_ident(), None)
        self._forget()

    def use(self, captured: set[int]) -> None:
        """These budgets have a capture now."""
        if captured != self.captured:
            self.captured = captured
            self._several.clear()
            self._forget()

    def keep_whole(self, layout: Layout | None) -> None:
        """Never cut this layout again: its items are not independent. None = no call of this tower."""
        if layout is None:
            self.cuttable = False
        else:
            if len(self._whole) >= _MAX_PLANS:
                self._whole.clear()
            self._whole.add(layout)
        self._forget()

    def settle(self, layout: Layout, several: bool) -> None:
        """Several replays were, or were not, faster than one on this layout."""
        if len(self._several) >= _MAX_PLANS:
            self._several.clear()
        self._several[layout] = several
        self._plans.pop(layout, None)
        self.version += 1

    def _counts(self, layout: Layout, rows: int) -> bool:
        """Whether a layout may be served otherwise once it has come again: in several replays, or with a budget of its own."""
        return len(layout) > 1 or rows // self.unit >= _LEAST_OWN

    def _count(self, layout: Layout) -> None:
        if len(self._repeats) >= _MAX_PLANS and layout not in self._repeats:
            self._repeats.pop(next(iter(self._repeats)))
        self._repeats[layout] = self._repeats.get(layout, 0) + 1
        if self._repeats[layout] == REPEATED:
            self._plans.pop(layout, None)
            self._give_budget(num_patches(layout) // self.unit)

    # --- a plan -----------------------------------------------------------------------------------------------------

    def _make(self, layout: Layout | None, rows: int) -> Plan:
        tokens, options = rows // self.unit, self.options
        if not isinstance(options.min_tokens, str) and tokens < options.min_tokens:
            return Plan((), "under_min_tokens")
        budgets = self._budgets(tokens)
        if not budgets:
            return Plan((), "not_warmed_up")
        capacities = self._capacities_of(tuple(budgets))
        plan = self._whole_plan(layout, rows, capacities) if self._stays_whole(layout) else None
        return self._faster(plan or self._packed(layout or (), rows, capacities), tokens, capacities)

    def _capacities_of(self, budgets: tuple[int, ...]) -> Capacities:
        """Limits and costs of these budgets, kept until a cost changes."""
        if budgets not in self._capacities:
            limits = (self.options.max_items or UNBOUNDED, self.options.max_frames or UNBOUNDED)
            self._capacities[budgets] = Capacities(budgets, self.costs.table(budgets), self.costs.rate, *limits)
        return self._capacities[budgets]

    def _forget(self) -> None:
        """Plans are made anew: what they were made from has changed."""
        self.version += 1
        self._plans.clear()
        self._capacities.clear()

    def _stays_whole(self, layout: Layout | None) -> bool:
        return layout is None or not self.cuttable or layout in self._whole

    def _whole_plan(self, layout: Layout | None, rows: int, capacities: Capacities) -> Plan:
        tokens = rows // self.unit
        most = min(capacities.budgets[-1], capacities.max_items) if self.tokens_of_image else capacities.budgets[-1]
        if tokens > most and self.tokens_of_image and self.cuttable:
            return self._by_images(tokens, most, capacities)
        if tokens > most:
            return Plan((), "over_largest_budget")
        if layout is not None and len(layout) > capacities.max_items:
            return Plan((), "over_max_items")
        bucket = Bucket(capacities.budgets[capacities.rung(tokens)], self.unit)
        return Plan((Part(layout, rows, bucket, ((0, rows),)),))

    def _by_images(self, images: int, most: int, capacities: Capacities) -> Plan:
        """Replays of `most` images each, and one of the rest."""
        parts = []
        for first in range(0, images, most):
            count = min(most, images - first)
            bucket = Bucket(capacities.budgets[capacities.rung(count)], self.unit)
            parts.append(Part(None, count * self.unit, bucket, ((first * self.unit, count * self.unit),)))
        return Plan(tuple(parts))

    def _packed(self, layout: Layout, rows: int, capacities: Capacities) -> Plan:
        units = self._units(layout, capacities)
        if len(units) == 1 or self.stands_for is not None:  # the one picture that it stands for is not cut
            return self._whole_plan(layout, rows, capacities)
        patches = [t * h * w for t, h, w in units]
        groups = self._groups(layout, [p // self.unit for p in patches], [t for t, _, _ in units], capacities)
        if groups is None:  # a single frame exceeds a limit
            return Plan((), "over_largest_budget")
        if len(groups) == 1:
            bucket = Bucket(groups[0][1], self.unit)
            return Plan((Part(layout, rows, bucket, ((0, rows),)),))
        starts = list(accumulate(patches, initial=0))
        plan = Plan(tuple(self._part(group, units, starts) for group in groups))
        unknown = self.measures and self._repeats.get(layout, 0) >= REPEATED and layout not in self._several
        if unknown and self._fits_one(layout, capacities):
            return replace(plan, rival=self._whole_plan(layout, rows, capacities))
        return plan

    def _groups(
        self, layout: Layout, tokens: Sequence[int], frames: Sequence[int], capacities: Capacities
    ) -> list[Group] | None:
        """The cheapest groups. Where one replay would do, several have to save much, or to be captured and of a layout that
        comes again: each part's metadata is computed for itself, once for a layout.
        """
        groups = pack(tokens, frames, capacities)
        total = sum(tokens)
        if groups is None or len(groups) == 1:
            return groups
        if not self._fits_one(layout, capacities):
            return groups
        whole = capacities.budgets[capacities.rung(total)]
        one = [(list(range(len(tokens))), whole)]
        if self._several.get(layout) is False:
            return one
        if _cost(groups, capacities) < (1 - WORTH) * capacities.cost(total):
            return groups
        if self._repeats.get(layout, 0) < REPEATED:
            return one
        known = [(b, c) for b, c in zip(capacities.budgets, capacities.costs, strict=True) if b in self.captured or b == whole]
        budgets, costs = zip(*known, strict=True)
        groups = pack(tokens, frames, replace(capacities, budgets=budgets, costs=costs))
        return groups if groups and _cost(groups, capacities) < (1 - MARGIN) * capacities.cost(total) else one

    def _fits_one(self, layout: Layout, capacities: Capacities) -> bool:
        """Whether one replay may serve all of a layout."""
        tokens = num_patches(layout) // self.unit
        frames = sum(t for t, _, _ in layout)
        within = tokens <= capacities.budgets[-1] and frames <= capacities.max_frames
        return within and len(layout) <= capacities.max_items

    def _units(self, layout: Layout, capacities: Capacities) -> Layout:
        """The items; one that exceeds a limit by itself as runs of its frames."""
        units: list[tuple[int, int, int]] = []
        for t, h, w in layout:
            most = min(capacities.budgets[-1] * self.unit // (h * w), capacities.max_frames)
            if t <= most or most == 0 or h * w % self.unit:
                units.append((t, h, w))
            else:
                units += [(min(most, t - first), h, w) for first in range(0, t, most)]
        return tuple(units)

    def _part(self, group: Group, units: Layout, starts: Sequence[int]) -> Part:
        indices, budget = group
        ranges: list[Range] = []
        for index in indices:
            start, rows = starts[index], starts[index + 1] - starts[index]
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + rows)
            else:
                ranges.append((start, rows))
        layout = tuple(units[index] for index in indices)
        return Part(layout, sum(rows for _, rows in ranges), Bucket(budget, self.unit), tuple(ranges))

    def _faster(self, plan: Plan, tokens: int, capacities: Capacities) -> Plan:
        """The plan, or none where the uncaptured pieces are known to be faster."""
        bucket = self.ladder.fit(tokens * self.unit)
        if not self.measures or not plan.parts or bucket is None:
            return plan
        if any(not self.costs.knows(part.bucket.tokens) for part in plan.parts):
            return plan  # its first use will tell
        uncaptured = self.costs.uncaptured(bucket.tokens, tokens)
        if uncaptured is None:
            return plan
        replays = sum(capacities.costs[capacities.budgets.index(part.bucket.tokens)] for part in plan.parts)
        return Plan((), "uncaptured_is_faster") if uncaptured < replays * (1 - MARGIN) else plan

    # --- which budgets ----------------------------------------------------------------------------------------------

    def _budgets(self, tokens: int) -> Sequence[int]:
        """Budgets that may serve a call now. A plan with others than those to come is not settled, so not kept."""
        captured = self.captured
        self._settled = not self.warms
        if not self.may_capture:
            return sorted(captured)
        if self.ladder is self._automatic:
            return self.ladder.budgets
        target = self.ladder.fit(tokens * self.unit)
        if target is None or target.tokens in captured or max(captured, default=0) < tokens:
            return self.ladder.budgets
        self._wanted[target.tokens] += 1
        if self._wanted[target.tokens] <= _WANTED:
            self._settled = False
            return sorted(captured)
        del self._wanted[target.tokens]
        return self.ladder.budgets

    def _give_budget(self, tokens: int) -> None:
        """A budget for a size that keeps coming, where the automatic ladder pads it much and work outweighs the host."""
        automatic = self.options.token_budgets is None and not self.tokens_of_image and self.may_capture
        bucket = self.ladder.fit(tokens * self.unit)
        if not automatic or self._own >= _MAX_OWN or tokens < _LEAST_OWN or bucket is None:
            return
        if bucket.tokens - tokens > _MUCH_PADDING * bucket.tokens:
            self._own += 1
            self.ladder = self._automatic = self.ladder.including([tokens])
            self._forget()

    def _observe(self, tokens: int) -> None:
        self._sizes[tokens] += 1
        self._calls += 1
        if self._calls < self._refit_at:
            return
        self._refit_at = self._calls + min(self._calls, _REFIT_EVERY)
        ladder = tightened(self._automatic, self._sizes)
        if ladder != self.ladder:
            self.ladder = ladder
            self._wanted.clear()
            self._forget()
        self._sizes = Counter({size: count // 2 for size, count in self._sizes.most_common(_MAX_SIZES) if count > 1})


def _cost(groups: Sequence[Group], capacities: Capacities) -> float:
    return sum(capacities.cost(budget) for _, budget in groups)
