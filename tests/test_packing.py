"""Packing: every item once, every limit kept, never dearer than servers' policy, near the best there is, and quick."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitcg_backend.bucketing import Ladder
from vitcg_backend.packing import UNBOUNDED, Capacities, next_fit, pack

untimed = settings(deadline=None)
LADDER = Ladder.automatic(16384, 4).budgets
MIX = [713, 300, 768, 100, 972, 475, 196, 588]  # the items of `8mix`, in tokens


def capacities(budgets, fixed=160.0, **limits):
    return Capacities(budgets, [fixed + budget for budget in budgets], 1.0, **limits)


def cost(groups, tokens, caps):
    return sum(caps.cost(sum(tokens[i] for i in group)) for group in groups)


@st.composite
def problems(draw, most=64):
    """Items, frames and capacities; costs grow with the bucket but not evenly."""
    budgets = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=12)))
    costs = list(itertools.accumulate(draw(st.floats(1, 300)) for _ in budgets))
    rate = draw(st.sampled_from([0.0, 0.1, 1.0]))
    tokens = draw(st.lists(st.integers(1, 1024), min_size=1, max_size=most))
    frames = [draw(st.integers(1, 8)) for _ in tokens]
    limits = {"max_items": draw(st.sampled_from([1, 2, 5, UNBOUNDED])), "max_frames": draw(st.sampled_from([8, 20, UNBOUNDED]))}
    return tokens, frames, Capacities(budgets, costs, rate, **limits)


@untimed
@given(problems())
def test_every_item_once_within_every_limit(problem):
    """Groups partition the items, in ascending order each; no group exceeds its bucket, the items or the frames."""
    tokens, frames, caps = problem
    groups = pack(tokens, frames, caps)
    if groups is None:
        assert max(tokens) > caps.budgets[-1] or max(frames) > caps.max_frames
        return
    assert sorted(index for group, _ in groups for index in group) == list(range(len(tokens)))
    for group, budget in groups:
        assert group == sorted(group)
        assert sum(tokens[i] for i in group) <= budget
        assert budget in caps.budgets
        assert len(group) <= caps.max_items
        assert sum(frames[i] for i in group) <= caps.max_frames


@untimed
@given(problems())
def test_never_dearer_than_next_fit_or_than_one_replay(problem):
    """Where one replay holds everything it costs at most that; otherwise at most what servers' policy costs."""
    tokens, frames, caps = problem
    groups = pack(tokens, frames, caps)
    if groups is not None:
        yardstick = next_fit(tokens, frames, caps)
        assert cost([group for group, _ in groups], tokens, caps) <= cost(yardstick, tokens, caps) * (1 + 1e-9)


@untimed
@given(problems(), st.integers(1, 6))
def test_the_bound_that_ends_the_search_is_one(problem, replays):
    """`least` is below the cost of any replays that hold the tokens, so nothing cheaper is cut off."""
    tokens, _, caps = problem
    tokens = [min(size, caps.budgets[-1]) for size in tokens[:replays]]
    assert caps.least(sum(tokens), len(tokens)) <= sum(caps.cost(size) for size in tokens) * (1 + 1e-9)


def cheapest(tokens, frames, caps):
    """By looking at every partition."""
    best = float("inf")
    for labels in itertools.product(range(len(tokens)), repeat=len(tokens)):
        groups = [[i for i, label in enumerate(labels) if label == number] for number in set(labels)]
        fits = all(
            sum(tokens[i] for i in g) <= caps.budgets[-1]
            and len(g) <= caps.max_items
            and sum(frames[i] for i in g) <= caps.max_frames
            for g in groups
        )
        if fits:
            best = min(best, cost(groups, tokens, caps))
    return best


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=5),
    st.sampled_from([(64, 256, 1024), (512, 1024, 4096), (100, 700), LADDER]),
    st.sampled_from([20.0, 160.0]),
)
def test_close_to_the_best_partition(tokens, budgets, fixed):
    """With costs as they are measured, at most a quarter above the best of all partitions."""
    caps = capacities(budgets, fixed)
    groups = pack(tokens, [1] * len(tokens), caps)
    assert cost([group for group, _ in groups], tokens, caps) <= 1.25 * cheapest(tokens, [1] * len(tokens), caps)


def test_one_replay_unless_a_second_one_pays():
    """8mix: two replays save more padding than a second launch costs; with dear launches it stays one."""
    assert [budget for _, budget in pack(MIX, [1] * 8, capacities(LADDER, fixed=1000))] == [4352]
    groups = pack(MIX, [1] * 8, capacities(LADDER))
    assert len(groups) == 2
    assert sum(budget for _, budget in groups) - sum(MIX) < 32


def test_a_coarse_ladder_is_packed():
    """With the powers of two that servers capture, 8mix takes two replays with little padding instead of 8192 tokens."""
    groups = pack(MIX, [1] * 8, capacities([512, 1024, 2048, 4096, 8192]))
    assert sum(budget for _, budget in groups) <= 4096 + 512


def test_a_bucket_known_to_be_dearer_is_passed_over():
    """Where 56 tokens have been measured slower than 64, a call of 50 takes 64."""
    assert pack([50], [1], Capacities([56, 64], [1.6, 1.5], 0.01)) == [([0], 64)]
    assert pack([50], [1], Capacities([56, 64], [1.4, 1.5], 0.01)) == [([0], 56)]
    assert pack([50], [1], Capacities([56, 64], [1.52, 1.5], 0.01)) == [([0], 56)]  # as much may be noise


@pytest.mark.parametrize(("tokens", "frames"), [([65], [1]), ([4, 65], [1, 1]), ([4], [9])])
def test_what_no_replay_holds(tokens, frames):
    """An item above the largest budget or the frame limit by itself gives None."""
    assert pack(tokens, frames, capacities([64], max_frames=8)) is None


@pytest.mark.parametrize("tokens", [MIX * 8, [20] * 64, list(range(100, 164)), [136] * 64])
def test_the_search_is_quick(tokens):
    """64 items take less than 50 us on an idle core; the best of many runs may be twice that here, whatever else runs."""
    caps = capacities(Ladder.automatic(65536, 4).budgets if sum(tokens) > 16384 else LADDER)

    def once():
        start = time.perf_counter()
        pack(tokens, [1] * len(tokens), caps)
        return time.perf_counter() - start

    assert min(once() for _ in range(300)) < 100e-6
