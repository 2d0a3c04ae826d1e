"""Plans: packing, cuts at items and frames, the faster path, budgets that follow the traffic; then the same on real towers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from common import DEVICE, IMAGE, TOWERS, VIDEO, assert_same, compile_tower, run, stats, tiny_tower

from vitcg_backend import costs, planning, runtime, testing
from vitcg_backend.backend import live_towers
from vitcg_backend.bucketing import Bucket, num_patches
from vitcg_backend.costs import FIXED_TOKENS, Costs
from vitcg_backend.options import Options
from vitcg_backend.planning import Part, Plan, Planner

IMAGE_16 = (1, 8, 8)  # tokens
IMAGE_20 = (1, 8, 10)


def planner(**options: Any) -> Planner:
    return Planner(Options.parse({"min_tokens": 1, **options}), 4)


def plan(plans: Planner, *layout: tuple[int, int, int]) -> Any:
    return plans.plan(layout, num_patches(layout))


# --- plans ------------------------------------------------------------------------------------------------------------


def test_one_item_is_one_replay_of_its_rows() -> None:
    """The identity: one range, from the first row on, whatever the ladder."""
    (part,) = plan(planner(), IMAGE_20).parts
    assert (part.ranges, part.layout, part.bucket.tokens) == (((0, 80),), (IMAGE_20,), 24)


def test_items_that_fit_are_not_cut() -> None:
    """A call with little padding stays whole, in its own order."""
    (part,) = plan(planner(), IMAGE_16, IMAGE_20, IMAGE_16).parts
    assert part.ranges == ((0, 208),)


def test_every_row_is_in_one_part() -> None:
    """Packed over several replays, the ranges cover the call once, and each part's layout says what they hold."""
    layout = tuple((1, 4, 2 * side) for side in (3, 9, 4, 1, 7, 5, 2, 8)) + ((9, 4, 4),)
    plans = planner(token_budgets=[8, 24, 32])
    parts = plan(plans, *layout).parts
    assert len(parts) > 2
    rows = sorted(row for part in parts for start, count in part.ranges for row in range(start, start + count))
    assert rows == list(range(num_patches(layout)))
    for part in parts:
        assert part.rows == num_patches(part.layout) == sum(count for _, count in part.ranges) <= part.bucket.patches


def test_a_video_above_the_largest_budget_is_cut_between_frames() -> None:
    """As many frames as the largest budget holds; a single frame above it is not cut."""
    plans = planner(token_budgets=[16, 64])
    parts = plan(plans, (9, 8, 8)).parts
    assert [(part.layout, part.ranges) for part in parts] == [
        (((4, 8, 8),), ((0, 256),)),
        (((4, 8, 8),), ((256, 256),)),
        (((1, 8, 8),), ((512, 64),)),
    ]
    assert [part.bucket.tokens for part in parts] == [64, 64, 16]
    assert plan(plans, (1, 16, 18)).reason == "over_largest_budget"
    assert plan(plans, (2, 16, 18), IMAGE_16).reason == "over_largest_budget"


def test_frames_of_part_of_a_token_are_not_cut() -> None:
    """A frame that is no whole number of tokens stays with its neighbours."""
    assert plan(planner(token_budgets=[4]), (8, 1, 6)).reason == "over_largest_budget"


def test_what_must_stay_whole_does() -> None:
    """Items that were found to depend on one another take one replay, or none."""
    plans = planner(token_budgets=[32], max_items=2)
    pair, three = (IMAGE_16, IMAGE_16), (IMAGE_16,) * 3
    for layout in (pair, three, (IMAGE_16, (1, 4, 4), (1, 2, 2))):
        plans.keep_whole(layout)
    assert len(plan(plans, *pair).parts) == 1
    assert plan(plans, *three).reason == "over_largest_budget"
    assert plan(plans, IMAGE_16, (1, 4, 4), (1, 2, 2)).reason == "over_max_items"


def test_plans_are_kept_and_bounded() -> None:
    """The same layout gets the same plan; a thousand layouts do not grow the table for ever."""
    plans = planner()
    assert plan(plans, IMAGE_16) is plan(plans, IMAGE_16)
    for width in range(2, 4200, 2):
        plan(plans, (1, 2, width))
    assert len(plans._plans) <= 1024


def test_a_second_replay_is_not_tried_out_for_little() -> None:
    """8mix: two replays save little, so only a layout that comes again takes them, and only onto buckets that are captured."""
    mix = [(1, 46, 62), (1, 30, 40), (1, 64, 48), (1, 20, 20), (1, 54, 72), (1, 38, 50), (1, 28, 28), (1, 42, 56)]
    plans = planner()
    plans.costs.fixed, plans._own = 80, planning._MAX_OWN  # the size gets no budget of its own
    served = [sorted(part.bucket.tokens for part in plan(plans, *mix).parts) for _ in range(20)]
    assert served == [[4352]] * 20
    plans.use({3712, 416})
    assert sorted(part.bucket.tokens for part in plan(plans, *mix).parts) == [416, 3712]
    plans = planner()
    plans.costs.fixed, plans._own = 80, planning._MAX_OWN  # the size gets no budget of its own
    plans.use({3712, 416})
    served = [sorted(part.bucket.tokens for part in plan(plans, *mix).parts) for _ in range(20)]
    assert served == [[4352]] * 7 + [[416, 3712]] * 13


def test_what_was_measured_is_preferred_to_an_estimate() -> None:
    """Two replays in place of one, by estimates, bring the one along to be measured beside them, until a verdict is there."""
    layout = [(1, 8, 8), (1, 8, 8), (1, 4, 4)]
    plans = planner(min_tokens="auto", token_budgets=[16, 32, 64])
    for budget, seconds in ((16, 1.5), (32, 2.0), (64, 5.0)):
        plans.costs.learn_replay(budget, None, seconds)
    made = [plan(plans, *layout) for _ in range(9)]
    assert [sorted(part.bucket.tokens for part in p.parts) for p in made] == [[16, 32]] * 9
    assert [p.rival is not None for p in made] == [False] * 7 + [True] * 2
    assert [part.bucket.tokens for part in made[-1].rival.parts] == [64]
    for several, expected in ((True, [16, 32]), (False, [64])):
        plans.settle(tuple(layout), several)
        assert sorted(part.bucket.tokens for part in plan(plans, *layout).parts) == expected
        assert plan(plans, *layout).rival is None
    plans.use({16, 32, 64})  # other buckets, another question
    assert plan(plans, *layout).rival is not None


def test_a_second_replay_is_tried_out_for_much() -> None:
    """With few budgets the padding of one replay is large, and other buckets are captured for the call."""
    mix = [(1, 46, 62), (1, 30, 40), (1, 64, 48), (1, 20, 20), (1, 54, 72), (1, 38, 50), (1, 28, 28), (1, 42, 56)]
    parts = plan(planner(token_budgets=[512, 1024, 2048, 4096, 8192]), *mix).parts
    assert sum(part.bucket.tokens for part in parts) <= 4608


# --- the faster path --------------------------------------------------------------------------------------------------


def measured(replay: float, uncaptured: float, tokens: int = 20) -> Planner:
    """A planner that has seen one bucket, that of 24 tokens, at a call of `tokens`."""
    plans = planner(min_tokens="auto")
    (part,) = plan(plans, (1, 2, 2 * tokens)).parts
    assert part.bucket.tokens == 24
    plans.learn(part, replay, uncaptured)
    return plans


def test_a_bucket_that_was_not_measured_is_tried() -> None:
    """Estimates alone never turn a bucket away."""
    plans = measured(2e-3, 1e-3)
    assert plan(plans, (1, 8, 32)).parts
    assert plan(plans, (1, 2, 2)).parts


@pytest.mark.parametrize(
    ("replay", "uncaptured", "reason"), [(1.0, 1.5, None), (1.0, 0.99, None), (1.0, 0.9, "uncaptured_is_faster")]
)
def test_the_faster_path_serves(replay: float, uncaptured: float, reason: str | None) -> None:
    """The replay unless the uncaptured pieces are clearly faster."""
    assert plan(measured(replay, uncaptured), IMAGE_20).reason == reason


def test_more_padding_turns_to_the_uncaptured_pieces() -> None:
    """The measured difference shrinks with the real rows: so a cap of padding follows from it."""
    plans = measured(1.0, 1.0, tokens=24)  # no padding: equal
    assert plan(plans, (1, 2, 48)).parts
    plans.costs.rate = 0.02  # seconds a token
    reasons = [plan(plans, (1, 2, 2 * tokens)).reason for tokens in range(24, 16, -1)]
    assert reasons[0] is None
    assert reasons[-1] == "uncaptured_is_faster"
    assert reasons == sorted(reasons, key=lambda reason: reason is not None)


def test_a_number_for_min_tokens_switches_the_clock_off() -> None:
    """``min_tokens=8``: smaller calls run uncaptured, all others use their bucket, whatever is known."""
    plans = planner(min_tokens=8)
    assert plan(plans, (1, 2, 14)).reason == "under_min_tokens"
    plans.learn(plan(plans, (1, 2, 16)).parts[0], 9.0, 1.0)
    assert plan(plans, (1, 2, 16)).parts


def test_costs_follow_the_measurements() -> None:
    """Fixed part, rate and attention are found from exact measurements, and a table has the measured values as they are."""
    known = Costs()
    assert known.table([64]) == [FIXED_TOKENS + 64]
    for budget, layout in ((64, ((1, 16, 16),)), (128, ((2, 16, 16),)), (512, ((8, 16, 16),)), (1024, ((1, 64, 64),))):
        squares = costs.squares(layout)
        known.learn_replay(budget, layout, 1e-3 + 7e-6 * budget + 1e-10 * squares)
    assert known.fixed == pytest.approx(1e-3, rel=1e-6)
    assert known.rate == pytest.approx(7e-6, rel=1e-6)
    assert known.quadratic == pytest.approx(1e-10, rel=1e-6)
    assert known.table([64, 256, 1024]) == pytest.approx([1e-3 + 7e-6 * b for b in (64, 256, 1024)], rel=1e-6)


def test_an_estimate_is_not_above_a_larger_buckets_measurement() -> None:
    """So the smaller bucket gets its first use."""
    known = Costs()
    known.learn_replay(1024, None, 1e-3)
    known.fixed, known.rate = 1.0, 1.0
    assert known.table([8, 512, 1024, 2048]) == [1e-3, 1e-3, 1e-3, 2049.0]


def test_only_a_measured_bucket_is_preferred_to_a_closer_fit() -> None:
    """A measurement of 64 that came out high sends its calls to 80, known to be faster, and never to 72, which is a guess."""
    known = Costs()
    known.learn_replay(64, None, 3e-3)
    known.learn_replay(80, None, 1e-3)
    assert known.table([8, 64, 72, 80]) == [min(known.fixed + 8 * known.rate, 3e-3), 3e-3, 3e-3, 1e-3]


def test_noise_gives_no_negative_terms() -> None:
    """Measurements that no straight line fits leave sane costs."""
    known = Costs()
    for budget, seconds in ((64, 5.0), (128, 4.0), (256, 3.0), (512, 2.0), (1024, 1.0)):
        known.learn_replay(budget, ((1, 16, budget // 4),), seconds)
    assert known.fixed > 0
    assert known.rate > 0
    assert min(known.table([8, 64, 4096])) > 0


# --- budgets that follow the traffic -------------------------------------------------------------------------------------


def test_observed_sizes_get_budgets_of_their_own() -> None:
    """After some calls of one size it has a budget; until it is captured the old one serves, and no call waits twice."""
    plans = planner(token_budgets="observed")
    video = (2, 14, 14)  # 98 tokens
    served = []
    for _ in range(80):
        (part,) = plan(plans, video).parts
        plans.use(plans.captured | {part.bucket.tokens})
        served.append(part.bucket.tokens)
    assert served[:64] == [104] * 63 + [104]
    assert served[-1] == 98
    assert served.index(98) > 64
    assert served[served.index(98) :] == [98] * (80 - served.index(98))
    assert plan(plans, (1, 20, 20)).parts[0].bucket.tokens == 104  # 100 tokens: the old budget is still there


def test_a_layout_that_keeps_coming_gets_a_budget() -> None:
    """By its eighth call; not with budgets of the user's, nor where the ladder hardly pads, nor for small calls."""
    mix = ((1, 64, 64),) * 4 + ((1, 8, 8),)  # 4112 tokens
    close = ((1, 64, 64),) * 3 + ((1, 64, 63),)  # 4080 of 4096
    video = ((8, 14, 14),)  # 392 of 416
    small = ((1, 16, 16),) * 3 + ((1, 10, 10),)  # 217 of 224
    for layout, options, expected in (
        (mix, {}, [4352] * 7 + [4112] * 5),
        (close, {}, [4096] * 12),
        (video, {}, [416] * 7 + [392] * 5),
        (small, {}, [224] * 12),
        (mix, {"token_budgets": [64, 5000]}, [5000] * 12),
    ):
        plans = planner(**options)
        served = []
        for _ in range(12):
            (part,) = plan(plans, *layout).parts
            plans.use(plans.captured | {part.bucket.tokens})
            served.append(part.bucket.tokens)
        assert served == expected


def test_budgets_of_their_own_are_few() -> None:
    """Many large layouts that keep coming: at most sixteen budgets more, and none where nothing may be captured."""
    for options, most in (({}, 16), ({"capture": "warmup"}, 0)):
        plans = planner(**options)
        before = plans.ladder.budgets
        for budget in before[-30:-1]:
            for _ in range(9):
                plan(plans, (1, 4, budget), (1, 4, 4))  # four tokens above a budget
        assert len(plans.ladder.budgets) == len(before) + most


def test_rare_sizes_change_nothing() -> None:
    """Traffic without a frequent size keeps the automatic ladder."""
    plans = planner(token_budgets="observed")
    before = plans.ladder.budgets
    for round_ in range(200):
        plan(plans, (1, 2, 2 * (1 + round_ * 7 % 151)))
    assert plans.ladder.budgets == before


# --- real towers ------------------------------------------------------------------------------------------------------------


def test_a_rival_is_captured_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replay of everything is measured beside several as it will serve, not with its capture."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[4, 8])
    assert_same(compiled, tower, ((1, 4, 4),))
    (part,) = live_towers(tower)
    image, captured = (1, 4, 4), []
    halves = tuple(Part((image,), 16, Bucket(4, 4), ((start, 16),)) for start in (0, 16))
    whole = Part((image, image), 32, Bucket(8, 4), ((0, 32),))
    monkeypatch.setattr(part.planner, "plan", lambda layout, rows: Plan(halves, rival=Plan((whole,))))

    def seconds(runs: Sequence[Any], device: torch.device) -> list[float]:
        captured.append(part.budgets_captured)
        return [1.0] * len(runs)

    monkeypatch.setattr(costs, "seconds", seconds)
    assert_same(compiled, tower, (image, image))
    assert captured == [{4, 8}]


PACKED = (
    ((1, 8, 8), (1, 4, 6), (2, 8, 8), (1, 6, 6), (1, 8, 8)),
    ((1, 4, 4),) * 20,
    ((9, 8, 8),),
    ((1, 4, 4), (7, 8, 8), (1, 6, 6)),
    ((3, 12, 4), (1, 4, 8), (5, 4, 4), (1, 8, 8)),
)


@pytest.mark.parametrize("name", TOWERS)
def test_packed_and_split_calls_are_eagers(name: str) -> None:
    """Items over several replays and videos cut between frames: every result and level in the order of the call."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower, token_budgets=[16, 32, 40], max_items=4, strict=True)
    for step in range(2):
        for layout in PACKED:
            assert_same(compiled, tower, layout, seed=step, exact=False)
            assert len(stats(tower).last.replays) > 1
            assert sum(tokens for _, tokens in stats(tower).last.replays) == num_patches(layout) // 4
    counted = stats(tower)
    assert counted.hits == counted.calls
    assert all(bucket.packs == bucket.hits for bucket in counted.buckets.values())


def test_packed_results_belong_to_the_caller() -> None:
    """Joined results are not the static outputs, also under ``outputs="borrow"``, and later calls do not change them."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, token_budgets=[16, 32], outputs="borrow")
    first = testing.flatten(run(compiled, PACKED[0], seed=1))
    copies = [t.clone() for t in first]
    run(compiled, PACKED[0], seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, copies, strict=True))


def test_attention_over_a_clip_is_not_cut() -> None:
    """A video whose frames attend to each other stays whole: above the largest budget it runs uncaptured, and is right."""
    tower = tiny_tower("qwen2_vl", depth=2)

    def clip(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        folded = torch.stack([torch.ones_like(grid[:, 0]), grid[:, 0] * grid[:, 1], grid[:, 2]], 1)
        return tower(pixels, grid_thw=folded).pooler_output

    options = {"inner": "eager", "token_budgets": [16, 64], "min_tokens": 1}
    compiled = torch.compile(clip, backend="vitcg", options=options)
    for layout, reason in ((((9, 8, 8),), "over_largest_budget"), (((2, 8, 8),), None), (((9, 8, 8),), "over_largest_budget")):
        pixels, grid = testing.make_inputs(tower, layout)
        with torch.no_grad():
            torch.testing.assert_close(compiled(pixels, grid), clip(pixels, grid), rtol=1e-4, atol=1e-5)
        assert stats(tower).last.reason == reason
    assert "parts_depend" in stats(tower).refusals


def test_items_that_know_of_each_other_are_not_cut() -> None:
    """A value over all items is not that of a part: one replay is refused for padding, several for packing."""
    tower = tiny_tower("qwen2_vl", depth=1)

    def function(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return tower(pixels, grid_thw=grid).pooler_output * grid.sum()

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager", "token_budgets": [16, 20], "min_tokens": 1})
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8), (1, 4, 4), (1, 8, 8)))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(pixels, grid), function(pixels, grid))
    assert stats(tower).fallbacks == {"over_largest_budget": 2}


def test_results_beside_packed_features() -> None:
    """Sizes returned with the features are those of the whole grid."""
    tower = tiny_tower("qwen2_vl", depth=1)

    def function(pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tower(pixels, grid_thw=grid).pooler_output, grid.prod(-1) // 4

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager", "token_budgets": [16], "min_tokens": 1})
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8), (1, 4, 6)))
    with torch.no_grad():
        for _ in range(2):
            features, sizes = compiled(pixels, grid)
            assert sizes.tolist() == [16, 6]
            torch.testing.assert_close(features, function(pixels, grid)[0])
            sizes += 1
    assert stats(tower).hits == 2


class Clock:
    """In place of the timer: what each measurement says, and how many were made."""

    def __init__(self, *times: float) -> None:
        self.times, self.asked = list(times), 0

    def __call__(self, runs: Any, device: torch.device) -> list[float]:
        """Run each once and say the next times."""
        for function in runs:
            function()
        self.asked += len(runs)
        return [self.times[number % len(self.times)] for number in range(self.asked - len(runs), self.asked)]


@pytest.mark.parametrize(("times", "reason"), [((2.0, 1.0, 0.1), None), ((1.0, 2.0, 0.1), "uncaptured_is_faster")])
def test_the_first_use_decides_and_later_calls_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], reason: str | None
) -> None:
    """Uncaptured, replay and copies are timed once a bucket; the faster serves from then on, and nothing is measured again."""
    clock = Clock(*times)
    monkeypatch.setattr(costs, "seconds", clock)
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, min_tokens="auto", strict=True)
    for step in range(4):
        assert_same(compiled, tower, VIDEO, seed=step)
        assert clock.asked == 3
        assert stats(tower).last.reason == (reason if step else None)
    bucket = stats(tower).buckets[32]
    assert (bucket.uncaptured_s, bucket.replay_s, bucket.copy_s) == times


def test_packed_calls_are_compared_with_the_uncaptured_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is packed is timed uncaptured once, and takes that path where it is faster than its replays together."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, min_tokens="auto", max_items=2, token_budgets=[16, 32, 64])
    clock = Clock(1.5, 1.0, 0.1, 1.5, 0.9, 0.1, 1.6)  # the bucket of 32, the bucket of 16, the call as a whole
    monkeypatch.setattr(costs, "CLEAR", math.inf)
    monkeypatch.setattr(costs, "seconds", clock)
    layout = ((1, 8, 8),) * 2 + ((1, 4, 4),)
    reasons = []
    for _ in range(3):
        assert_same(compiled, tower, layout)
        reasons.append(stats(tower).last.reason)
    assert reasons[0] is None
    assert reasons[1:] == ["uncaptured_is_faster"] * 2
    assert clock.asked == 7


@pytest.mark.parametrize("several", [True, False])
def test_packed_calls_that_come_again_are_compared_with_one_replay(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """By the eighth call of a layout its replays are timed beside one of everything, once; the faster serves from then on."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, min_tokens="auto", token_budgets=[16, 32, 64])
    layout = ((1, 8, 8),) * 2 + ((1, 4, 4),)
    monkeypatch.setattr(costs, "seconds", lambda runs, device: [9.0 for run in runs if run() or True])
    assert_same(compiled, tower, layout)
    (part,) = live_towers(tower)
    for budget, seconds in ((16, 1.5), (32, 2.0), (64, 5.0)):
        part.planner.costs.learn_replay(budget, None, seconds)
    part.planner.costs.learn_uncaptured(64, 36, None, 9.0)
    part.planner._forget()
    clock = Clock(*((1.0, 2.0) if several else (2.0, 1.0)))
    served = []
    for step in range(12):
        if step == 2:  # both small buckets are captured and measured
            monkeypatch.setattr(costs, "seconds", clock)
        assert_same(compiled, tower, layout, seed=step)
        served.append(sorted(budget for budget, _ in stats(tower).last.replays))
    assert clock.asked == 2
    assert served[2:7] == [[16, 32]] * 5
    assert served[8:] == ([[16, 32]] if several else [[64]]) * 4


def test_a_tower_captures_a_large_layout_that_keeps_coming() -> None:
    """Once, by its eighth call; results are eager's before and after, those of other layouts, too."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    layout = ((1, 8, 8),) * 64 + ((1, 4, 4),)  # 1028 tokens
    served = []
    for step in range(10):
        if step in (0, 7, 9):
            assert_same(compiled, tower, layout, seed=step)
        else:
            run(compiled, layout, seed=step)
        served.append(stats(tower).last.bucket_tokens)
    assert served == [1088] * 7 + [1028] * 3
    assert_same(compiled, tower, ((1, 8, 8),) * 64 + ((1, 8, 4),))
    assert stats(tower).last.bucket_tokens == 1088
    assert stats(tower).captures == 2
    assert stats(tower).hits == 11


def test_a_failing_measurement_costs_the_caller_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the uncaptured pieces run out of memory while they are timed, the results stand and the buckets serve."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, min_tokens="auto", max_items=2, token_budgets=[16, 32, 64])

    asked = []

    def fail(runs: Any, device: torch.device) -> list[float]:
        asked.append(len(runs))
        if len(runs) != 2:  # the uncaptured pieces are among them
            raise RuntimeError("CUDA out of memory")
        return [1.0] * len(runs)

    monkeypatch.setattr(costs, "CLEAR", math.inf)
    monkeypatch.setattr(costs, "seconds", fail)
    for _ in range(2):
        assert_same(compiled, tower, ((1, 8, 8),) * 2 + ((1, 4, 4),))
        assert_same(compiled, tower, VIDEO)
    assert stats(tower).hits == 4
    assert asked == [3, 2, 3, 2, 1]  # two buckets, each again without the pieces, and the packed call as a whole


def test_a_bucket_that_cannot_be_measured_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its own replays fail while they are timed, the results of the first use stand, and so does the bucket."""

    def fail(runs: Any, device: torch.device) -> list[float]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(costs, "seconds", fail)
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, min_tokens="auto")
    for step in range(2):
        assert_same(compiled, tower, VIDEO, seed=step)
    assert (stats(tower).hits, stats(tower).fallbacks) == (2, {})
    assert stats(tower).buckets[32].replay_s == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="a stand-in for a graph")
@pytest.mark.parametrize("long", [True, False])
def test_a_long_first_replay_is_its_bucket_s_time(monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    """What the self-check has replayed is timed no second time where it took long; on a short one the graph's upload shows."""
    from types import SimpleNamespace

    from vitcg_backend import capture

    def record(self: capture.Capture, args: Any, pool: Any, warm: bool = False) -> None:
        results = self.run(args)

        def replay() -> None:
            torch._foreach_copy_(results, self.run(args))

        self._results, self.graph = results, SimpleNamespace(replay=replay)

    clock = Clock(*((2.0, 0.1) if long else (2.0, 1.0, 0.1)))
    monkeypatch.setattr(capture.Capture, "record", record)
    monkeypatch.setattr(costs, "seconds", clock)
    monkeypatch.setattr(costs, "LONG_S", 0.0 if long else 60.0)
    tower = tiny_tower("qwen2_vl", depth=1)
    assert_same(compile_tower(tower, min_tokens="auto", strict=True), tower, VIDEO)
    bucket = stats(tower).buckets[32]
    assert clock.asked == (2 if long else 3)
    assert (bucket.uncaptured_s, bucket.copy_s) == (2.0, 0.1)
    assert 0 < bucket.replay_s < 1.0 if long else bucket.replay_s == 1.0


@pytest.mark.skipif(DEVICE != "cpu", reason="a stand-in for a graph")
def test_an_unpadded_run_that_took_much_longer_is_timed_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the self-check: not the tower's first, and not one that comes near the replay, which are timed in turns."""
    from types import SimpleNamespace

    from vitcg_backend import capture

    def record(self: capture.Capture, args: Any, pool: Any, warm: bool = False) -> None:
        results = self.run(args)
        self._results, self.graph = results, SimpleNamespace(replay=lambda: torch._foreach_copy_(results, self.run(args)))

    took = iter([1.0, 1.0, 9.0, 1.0, 1.9])  # the first replay of each bucket, and but for the first the unpadded run
    monkeypatch.setattr(capture.Capture, "record", record)
    monkeypatch.setattr(costs.Stopwatch, "seconds", lambda self: next(took))
    monkeypatch.setattr(costs, "LONG_S", 60.0)
    asked: list[int] = []

    def seconds(runs: Any, device: torch.device) -> list[float]:
        asked.append(len(runs))
        return [3.0, 1.0, 0.1][-len(runs) :]

    monkeypatch.setattr(costs, "seconds", seconds)
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, min_tokens="auto", strict=True, token_budgets=[4, 16, 32])
    for layout in (((1, 4, 4),), ((1, 8, 8),), VIDEO):
        assert_same(compiled, tower, layout)
    assert asked == [3, 2, 3]
    buckets = stats(tower).buckets
    assert [buckets[tokens].uncaptured_s for tokens in (4, 16, 32)] == [3.0, 9.0, 3.0]
    assert {(bucket.replay_s, bucket.copy_s) for bucket in buckets.values()} == {(1.0, 0.1)}


def test_the_self_check_s_run_warms_up_for_a_capture_of_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has then run as many rows by the same kernels; with padding, or without it, the capture makes a run of its own."""
    from vitcg_backend import capture

    runs: list[str] = []
    warmed: list[tuple[int, bool]] = []
    original = capture.Capture.record
    body = runtime.run_body

    def record(self: capture.Capture, args: Any, pool: Any, warm: bool = False) -> None:
        warmed.append((len(runs), warm))
        original(self, args, pool, warm)

    monkeypatch.setattr(runtime, "run_body", lambda *args: (runs.append("exact"), body(*args))[1])
    monkeypatch.setattr(capture.Capture, "record", record)
    for self_check, layout, warm in ((True, VIDEO, True), (True, ((1, 6, 10),), False), (False, VIDEO, False)):
        tower = tiny_tower("qwen2_vl", depth=1)
        assert_same(compile_tower(tower, self_check=self_check, token_budgets=[32]), tower, layout)
        assert warmed == [(int(self_check), warm)]
        assert len(runs) == int(self_check)
        runs.clear()
        warmed.clear()
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "seconds", "rounds"), [("cpu", 0.04, 3), ("cpu", 0.2, 1), ("cuda", 0.008, 3), ("cuda", 0.04, 1)]
)
def test_long_runs_are_timed_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch, kind: str, seconds: float, rounds: int) -> None:
    """What a clock varies by is small beside a long run, on a GPU sooner than on a CPU."""
    ran: list[int] = []
    monkeypatch.setattr(costs, "once", lambda run, device: run() or seconds)
    runs = [lambda number=number: ran.append(number) for number in range(2)]
    assert costs.seconds(runs, torch.device(kind)) == [seconds] * 2
    assert len(ran) == 2 * rounds


def test_runs_are_timed_in_turns() -> None:
    """A device gets slower while it is busy: each round has the other order, and the least time of each run counts."""
    order: list[str] = []
    runs = [lambda: order.append("a"), lambda: order.append("b")]
    assert len(costs.seconds(runs, torch.device("cpu"))) == 2
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_part_that_cannot_be_replayed_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket whose capture fails: its part runs uncaptured, the result is eager's, and the call counts its reason."""
    from vitcg_backend import capture

    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, token_budgets=[16, 64], max_items=1)
    original = capture.Capture.record

    def record(self: capture.Capture, args: Any, pool: Any, warm: bool = False) -> None:
        if self.bucket.tokens == 16:
            raise RuntimeError("CUDA out of memory")
        original(self, args, pool, warm)

    monkeypatch.setattr(capture.Capture, "record", record)
    with pytest.warns(UserWarning, match="bucket of 16 tokens"):
        assert_same(compiled, tower, (*IMAGE, *VIDEO, *IMAGE))
    assert stats(tower).fallbacks == {"capture_failed": 1}
    assert stats(tower).captures == 1


def test_pruned_video_tokens_are_eagers() -> None:
    """Pruning after the tower, by how little a place changes between frames: data dependent, and eager's with graphs on."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, strict=True)

    def pruned(vision: Any, pixels: torch.Tensor, grid: torch.Tensor, keep: float = 0.5) -> list[torch.Tensor]:
        output = vision(pixels, grid_thw=grid)
        frames, height, width = grid[0].tolist()
        tokens = output.pooler_output.view(frames, height * width // 4, -1)
        change = 1 - torch.nn.functional.cosine_similarity(tokens[1:], tokens[:-1], dim=-1)
        change = torch.cat([torch.full_like(change[:1], 2.0), change]).flatten()  # the first frame stays
        kept = torch.zeros_like(change, dtype=torch.bool)
        kept[change.topk(int(keep * len(change))).indices] = True
        return [kept, output.pooler_output[kept], *(level[kept] for level in output.deepstack_features)]

    with torch.no_grad():
        for seed, layout in enumerate((((4, 8, 8),), ((6, 4, 8),), ((4, 8, 8),))):
            pixels, grid = testing.make_inputs(tower, layout, seed=seed)
            pixels[: pixels.shape[0] // 2] = pixels[pixels.shape[0] // 2 :]  # repeated frames, as in a still video
            ours, eager = pruned(compiled, pixels, grid), pruned(tower, pixels, grid)
            for a, b in zip(ours, eager, strict=True):
                if DEVICE == "cpu":
                    assert torch.equal(a, b)
                else:
                    assert a.shape == b.shape
            assert stats(tower).last.hit
            assert 0 < int(ours[0].sum()) < len(ours[0])


def test_a_table_of_the_buckets() -> None:
    """One line a bucket, and the reasons below."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, token_budgets=[16, 32])
    for layout in (VIDEO, VIDEO, IMAGE, ((1, 16, 16),), PACKED[1]):
        run(compiled, layout)
    heads, *lines = stats(tower).table().splitlines()
    assert heads.split()[:5] == ["bucket", "replays", "parts", "tokens", "padding"]
    assert [line.split()[:2] for line in lines[:2]] == [["16", "2"], ["32", "4"]]
    assert lines[-1] == "over_largest_budget: 1 calls"
    assert stats(tower).sizes == {32: 2, 4: 1, 64: 1, 80: 1}
