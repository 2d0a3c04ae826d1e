"""Ladders, the bucket that a call takes, the dummy item that fills it, and the padding that follows on the streams."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitcg_backend.bucketing import (
    Bucket,
    Ladder,
    capacity_tier,
    max_tail_items,
    num_patches,
    num_tokens,
    tail_grid,
    tier,
)

UNIT = 4
untimed = settings(deadline=None)  # properties of values: a busy machine must not fail them
ROOT = Path(__file__).resolve().parent.parent


sys.path.insert(0, str(ROOT / "benchmarks"))  # a folder of scripts, not a package
streams = importlib.import_module("streams")

budget_lists = st.lists(st.integers(1, 20_000), min_size=1, max_size=12)
units = st.sampled_from([1, 4, 9, 16])


# --- fit --------------------------------------------------------------------------------------------------------------


@untimed
@given(budget_lists, units, st.integers(1, 25_000))
def test_fit_is_the_smallest_that_holds(budgets, unit, tokens):
    """The bucket holds the call and no smaller budget does; None exactly where none holds it."""
    bucket = Ladder.from_budgets(budgets, unit).fit(tokens * unit)
    holding = [budget for budget in budgets if budget >= tokens]
    assert bucket == (Bucket(min(holding), unit) if holding else None)
    assert bucket is None or bucket.patches == bucket.tokens * unit >= tokens * unit


@untimed
@given(budget_lists, units)
def test_boundary_values_are_exact(budgets, unit):
    """A call of exactly a budget takes it without padding; one token more takes the next or none."""
    ladder = Ladder.from_budgets(budgets, unit)
    for budget, following in zip(ladder.budgets, (*ladder.budgets[1:], None), strict=True):
        assert ladder.fit(budget * unit) == Bucket(budget, unit)
        expected = Bucket(following, unit) if following else None
        assert ladder.fit((budget + 1) * unit) == expected


@pytest.mark.parametrize(("patches", "tokens"), [(4, 16), (60, 16), (64, 16), (68, 64), (252, 64), (256, 64), (260, None)])
def test_two_user_buckets(patches, tokens):
    """With buckets of 64 and 256 patches each call takes the smaller that fits, and none above the larger."""
    bucket = Ladder.from_budgets([64, 16], UNIT).fit(patches)
    assert (bucket and bucket.tokens) == tokens


@pytest.mark.parametrize("patches", [0, -4, 3, 15, 1001])
def test_rows_that_no_bucket_can_hold(patches):
    """No rows, or rows that are not whole tokens, fit nothing: eager answers such a call."""
    assert Ladder.automatic(1024, UNIT).fit(patches) is None


def test_bucket_is_a_key():
    """Buckets are equal and hash equal by value."""
    assert {Bucket(16, 4): "a"}[Bucket(16, 4)] == "a"
    assert Bucket(16, 4) != Bucket(16, 1)


# --- ladders ----------------------------------------------------------------------------------------------------------


@untimed
@given(st.integers(1, 40_000), units)
def test_automatic_ladder_ascends_to_the_largest(max_tokens, unit):
    """Strictly ascending from at most 8 tokens to `max_tokens` itself, whatever that is."""
    budgets = Ladder.automatic(max_tokens, unit).budgets
    assert list(budgets) == sorted(set(budgets))
    assert budgets[0] == min(8, max_tokens)
    assert budgets[-1] == max_tokens


@untimed
@given(st.integers(1, 40_000), st.data())
def test_automatic_waste_is_bounded(max_tokens, data):
    """Padding takes at most 7 tokens below 64, less than 1/9 of the bucket up to 1024 tokens, less than 1/17 above."""
    tokens = data.draw(st.integers(1, max_tokens))
    bucket = Ladder.automatic(max_tokens, UNIT).fit(tokens * UNIT).tokens
    padded = bucket - tokens
    assert padded <= 7 if tokens <= 64 else padded * (9 if tokens <= 1024 else 17) < bucket


def test_every_waste_bound_up_to_16384():
    """The stated bounds hold for each size of the default ladder, not only for sampled ones."""
    ladder = Ladder.automatic(16384, UNIT)
    for tokens in range(1, 16385):
        padded = ladder.fit(tokens * UNIT).tokens - tokens
        assert padded <= 7 if tokens <= 64 else padded * (9 if tokens <= 1024 else 17) < tokens + padded


@pytest.mark.parametrize(("max_tokens", "count"), [(1, 1), (8, 1), (64, 8), (1024, 40), (8192, 88), (16384, 104)])
def test_number_of_automatic_budgets(max_tokens, count):
    """The numbers of graphs that the docstring states."""
    assert len(Ladder.automatic(max_tokens, UNIT).budgets) == count


def test_powers_of_two_are_budgets():
    """Videos whose tokens are a power of two are never padded."""
    budgets = Ladder.automatic(16384, UNIT).budgets
    assert {2**exponent for exponent in range(3, 15)} <= set(budgets)


@pytest.mark.parametrize(
    ("grid", "budget", "padded"),
    [((2, 16, 16), 128, 0), ((8, 16, 16), 512, 0), ((8, 18, 18), 704, 56), ((8, 32, 32), 2048, 0)],
)
def test_worked_cases(grid, budget, padded):
    """The budget guide's videos: no padding where the tokens are a power of two, 8 % for 648 tokens."""
    bucket = Ladder.automatic(16384, UNIT).fit(num_patches((grid,)))
    assert (bucket.tokens, bucket.tokens - num_tokens((grid,), 2)) == (budget, padded)


@untimed
@given(budget_lists, units)
def test_users_list_in_any_order(budgets, unit):
    """Order and duplicates do not matter, and no budget is added or lost."""
    ladder = Ladder.from_budgets(budgets, unit)
    assert ladder.budgets == tuple(sorted(set(budgets)))
    assert ladder == Ladder.from_budgets(tuple(reversed(budgets + budgets)), unit)


# --- error texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ([], "token_budgets=[] is empty: expected output tokens per bucket, such as [256, 1024]; leave it out"),
        ((), "token_budgets=() is empty: expected"),
        (None, "token_budgets=None (NoneType) is not a list: expected"),
        (512, "token_budgets=512 (int) is not a list: expected"),
        ("256", "token_budgets='256' (str) is not a list: expected"),
        ([256, 0], "token_budgets=[256, 0]: the budget 0 (int) is not allowed: expected a whole number of at least 1"),
        ([-4], "token_budgets=[-4]: the budget -4 (int) is not allowed: expected a whole number of at least 1"),
        ([True], "token_budgets=[True]: the budget True (bool) is not allowed"),
        ([64.0], "the budget 64.0 (float) is not allowed: expected a whole number of at least 1, in output tokens"),
        (["64"], "the budget '64' (str) is not allowed"),
        ([64, None], "the budget None (NoneType) is not allowed"),
    ],
)
def test_bad_budgets(budgets, text):
    """The message says what was wrong, what was seen, what is allowed."""
    with pytest.raises(ValueError) as caught:
        Ladder.from_budgets(budgets, UNIT)
    assert text in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_bad_sizes(value):
    """`max_tokens` and `unit` are whole numbers of at least 1."""
    with pytest.raises(ValueError, match=r"^max_tokens .* is not allowed: expected a whole number of at least 1"):
        Ladder.automatic(value, UNIT)
    with pytest.raises(ValueError, match=r"^unit .* is not allowed: .* patches per output token"):
        Ladder.automatic(64, value)


@pytest.mark.parametrize("budgets", [[], [64, 16], [16, 16]])
def test_a_ladder_ascends(budgets):
    """The constructor takes budgets as they are and so refuses any other order."""
    with pytest.raises(ValueError, match=r"strictly ascending.*from_budgets"):
        Ladder(budgets, UNIT)


# --- the dummy item ---------------------------------------------------------------------------------------------------


@untimed
@given(st.integers(0, 20_000), st.sampled_from([1, 2, 3, 4]), st.sampled_from([4, 8, 14, 16]))
def test_tail_covers_exactly(tokens, merge, max_side):
    """The dummy items have exactly the rows asked for, in bounded frames of whole merge blocks, as few as possible."""
    pad = tokens * merge**2
    tail = tail_grid(pad, merge, max_side)
    assert num_patches(tail) == pad
    assert num_tokens(tail, merge) == tokens
    assert len(tail) <= max_tail_items()
    assert all(t >= 1 and h >= merge and w >= merge and h % merge == w % merge == 0 for t, h, w in tail)
    assert all(h * w <= max_side**2 for _, h, w in tail)
    side = max_side // merge
    assert sum(t for t, _, _ in tail) == -(-tokens // side**2)


def test_tail_for_every_padding_of_a_step():
    """With the towers' merge of 2 every multiple of 4 rows up to the widest step is covered by frames of at most 64."""
    for pad in range(0, 2048 + 1, UNIT):
        tail = tail_grid(pad, merge=2)
        assert num_patches(tail) == pad
        assert all(h * w <= 64 for _, h, w in tail)


@pytest.mark.parametrize(
    ("pad", "tail"),
    [
        (0, ()),
        (4, ((1, 2, 2),)),
        (28, ((1, 2, 14),)),
        (60, ((1, 6, 10),)),
        (64, ((1, 8, 8),)),
        (68, ((1, 8, 8), (1, 2, 2))),
        (72, ((2, 6, 6),)),
        (640, ((10, 8, 8),)),
        (652, ((10, 8, 8), (1, 2, 6))),
    ],
)
def test_tail_examples(pad, tail):
    """One item where its frames can be equal, else full frames and a smaller one."""
    assert tail_grid(pad, merge=2) == tail


def test_merge_blocks_larger_than_the_frames():
    """A frame is never smaller than one merge block."""
    assert tail_grid(200, merge=10) == ((2, 10, 10),)


@pytest.mark.parametrize("pad", [-4, 2, 63])
def test_tail_of_part_of_a_block(pad):
    """Rows that no dummy item can cover are an error of the caller."""
    with pytest.raises(ValueError, match=rf"pad_patches={pad}: expected a multiple of 4 \(merge=2\), at least 0"):
        tail_grid(pad, merge=2)


# --- tiers ------------------------------------------------------------------------------------------------------------


@untimed
@given(st.integers(0, 1_000_000))
def test_capacity_is_the_smallest_power_of_two(value):
    """A power of two, at least 16, at least the value, and no smaller one would do."""
    capacity = capacity_tier(value)
    assert capacity & (capacity - 1) == 0
    assert capacity >= max(value, 16)
    assert capacity == 16 or capacity // 2 < value


@pytest.mark.parametrize(("value", "expected"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_tier_is_the_smallest_that_holds(value, expected):
    """Boundary values take the tier of their own size."""
    assert tier(value, (4, 8)) == expected


def test_no_tier():
    """A value above the last tier is an error that names both."""
    with pytest.raises(ValueError, match=r"value=9 is above every tier of \[4, 8\]"):
        tier(9, (4, 8))


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smart_resize():
    """The processor's own function, in the variant that does without torchvision."""
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    return pytest.importorskip(name, exc_type=ImportError).smart_resize


@untimed
@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    sides=st.sampled_from([(14, 2), (16, 2)]),
    pixels=st.sampled_from([(56 * 56, 28 * 28 * 1280), (65536, 16777216), (3136, 16777216)]),
)
def test_image_grid_is_the_processors(smart_resize, width, height, sides, pixels):
    """The grid is that of the processor's own resize, or an error where it raises one."""
    (patch, merge), (least, most) = sides, pixels
    arguments = {"patch": patch, "merge": merge, "min_pixels": least, "max_pixels": most}
    try:
        rows, columns = smart_resize(height, width, patch * merge, least, most)
    except ValueError:
        with pytest.raises(ValueError, match=r"at most 200 times each other"):
            streams.image_grid(width, height, **arguments)
        return
    assert streams.image_grid(width, height, **arguments) == (1, rows // patch, columns // patch)


@pytest.mark.parametrize("name", ["mixed_web", "camera", "video_fixed", "video_mixed"])
def test_streams_are_seeded(name):
    """The same seed gives the same calls, and each has whole merge blocks; the data gives the number of calls."""
    layouts = streams.stream(name, seed=3)
    assert layouts == streams.stream(name, seed=3)
    assert name == "video_fixed" or layouts != streams.stream(name, seed=4)
    assert len(layouts) == streams.load_workloads()["streams"][name]["calls"]
    assert all(h % 2 == w % 2 == 0 and t >= 1 for layout in layouts for t, h, w in layout)


def test_stream_contents():
    """One image a call, one to eight, one video of one shape, one video of 1 to 32 frames of a listed side."""
    assert {len(layout) for layout in streams.stream("mixed_web")} == {1}
    assert {len(layout) for layout in streams.stream("camera")} == set(range(1, 9))
    assert set(streams.stream("video_fixed")) == {((8, 16, 16),)}
    videos = [layout[0] for layout in streams.stream("video_mixed")]
    assert {t for t, _, _ in videos} == set(range(1, 33))
    assert {h for _, h, _ in videos} == {w for _, _, w in videos} == {8, 12, 14, 16, 20, 28}


def test_unknown_stream():
    """The message lists the names that exist."""
    with pytest.raises(ValueError, match=r"unknown stream 'nope'; known streams: mixed_web, camera, video_fixed"):
        streams.stream("nope")


PADDING = {"mixed_web": 0.03, "camera": 0.03, "video_fixed": 0.0, "video_mixed": 0.03}


@pytest.mark.parametrize("name", PADDING)
@pytest.mark.parametrize("seed", range(3))
def test_padding_of_the_streams(name, seed):
    """Padding takes at most 3 % of the buckets' tokens on each stream, and nothing on the fixed video."""
    result = streams.padding(Ladder.automatic(16384, UNIT), streams.stream(name, seed))
    assert result.calls > 0
    assert result.fraction <= PADDING[name], f"{100 * result.fraction:.2f} % in {result.buckets} buckets"


def test_oversize_calls_are_counted_apart():
    """Calls above the largest budget do not enter the padding: they are not padded."""
    result = streams.padding(Ladder.from_budgets([64], UNIT), [((1, 16, 16),), ((1, 2, 2),), ((1, 16, 18),)])
    assert (result.calls, result.oversize, result.buckets) == (2, 1, 1)
    assert (result.tokens, result.bucket_tokens) == (65, 128)
    assert streams.padding(Ladder.from_budgets([1], UNIT), [((1, 4, 4),)]).fraction == 0.0


def test_streams_script_prints_each_stream(capsys):
    """The script states the number of budgets and one line a stream."""
    streams.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "automatic ladder up to 16384 tokens: 104 budgets"
    assert [line.split()[0] for line in lines[1:]] == streams.stream_names()


def test_workloads_are_data():
    """The file holds four towers, the named calls and the four streams."""
    workloads = json.loads((ROOT / "benchmarks" / "workloads.json").read_text(encoding="utf-8"))
    assert set(workloads) == {"towers", "processor", "calls", "streams"}
    assert set(workloads["towers"]) == {"qwen3_vl", "qwen2_5_vl", "qwen2_vl", "llama4"}
    assert num_tokens(workloads["calls"]["8mix"], 2) == 4112


def test_ladder_of_images_has_every_small_number() -> None:
    """With a smallest step of one row: each number up to 16, then steps of an eighth, and less than 1/9 of padding."""
    budgets = Ladder.automatic(40, 1, smallest_step=1).budgets
    assert budgets == (*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 32, 36, 40)
