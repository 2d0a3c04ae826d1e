"""Warm-up: what is captured before the first call, in which order, and what `capture="warmup"` leaves alone."""

from __future__ import annotations

import threading

import pytest
import torch
from common import DEVICE, IMAGE, MIXED, TWO_IMAGES, VIDEO, assert_same, compile_tower, stats, tiny_tower
from torch import Tensor, nn

import vitcg_backend
from vitcg_backend import OptionError, testing, warming
from vitcg_backend.attention import SegmentBounds
from vitcg_backend.attention.segments import SdpaKernel
from vitcg_backend.backend import live_towers
from vitcg_backend.bucketing import Ladder, num_tokens
from vitcg_backend.costs import Costs, squares
from vitcg_backend.planning import UNBOUNDED
from vitcg_backend.warming import picture, pictures, stand_ins

# tests/gpu/test_plan_gpu.py warms up the kernel for half precision, which is as indifferent to them as that of a CPU.
any_bounds = pytest.mark.skipif(DEVICE != "cpu", reason="larger segment bounds cost the float32 kernel of CUDA time")


def test_the_whole_ladder_largest_first() -> None:
    """Without arguments every budget is captured, the largest first, and one line a step says so."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, token_budgets=[8, 64, 16])
    lines: list[str] = []
    warmed = vitcg_backend.warmup(compiled, progress=lines.append)
    assert warmed.captured == (8, 64, 16)  # the call of 8 tokens compiled the graph
    assert set(stats(tower).buckets) == {8, 16, 64}
    assert warmed.bytes > 0
    assert warmed.seconds > 0
    assert [line.split(":")[0] for line in lines] == ["warm-up 1/3", "warm-up 2/3", "warm-up 3/3"]
    if DEVICE == "cpu":  # as for `any_bounds`
        captures = stats(tower).captures
        assert_same(compiled, tower, IMAGE)
        assert stats(tower).captures == captures


@any_bounds
@pytest.mark.parametrize("capture", ["lazy", "warmup"])
def test_other_segments_need_no_other_capture(capture: str) -> None:
    """One long segment was warmed up; calls of many short ones of the same bucket are served by that capture."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, token_budgets=[320], capture=capture)
    assert vitcg_backend.warmup(compiled).captured == (320,)
    captures = stats(tower).captures
    for layout in (((1, 4, 4),) * 4, ((1, 32, 32),), ((4, 8, 8),) * 5, ((1, 4, 4),) * 4):
        assert_same(compiled, tower, layout)
        assert stats(tower).last.hit
    assert stats(tower).captures == captures


@any_bounds
@pytest.mark.parametrize("layout", [((4, 4, 4), (1, 8, 8)), ((1, 4, 4),) * 40, ((1, 6, 10),) * 17])
def test_cut_off_windows_need_no_other_capture(layout) -> None:
    """The picture that a bucket is warmed up with has whole windows; small or odd pictures cut its rows into far more."""
    tower = tiny_tower("qwen2_5_vl")
    compiled = compile_tower(tower, token_budgets=[256], capture="warmup", strict=True)
    vitcg_backend.warmup(compiled)
    assert_same(compiled, tower, layout)
    assert stats(tower).last.hit


def test_more_segments_than_were_warmed_up() -> None:
    """What does not fit into the bounds of the captures is not captured on a call's time, and is right."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, token_budgets=[64], capture="warmup")
    vitcg_backend.warmup(compiled)
    captures = stats(tower).captures
    for _ in range(2):
        assert_same(compiled, tower, ((1, 2, 4),) * 20)
        assert stats(tower).last.reason == "not_warmed_up"
    assert_same(compiled, tower, ((1, 16, 16),))
    assert (stats(tower).last.hit, stats(tower).captures) == (True, captures)


def test_calls_that_were_not_warmed_up_run_uncaptured() -> None:
    """Under ``capture="warmup"`` nothing is captured on a call's time; calls use the buckets that there are."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, capture="warmup", token_budgets=[16, 32, 64])
    assert_same(compiled, tower, IMAGE)
    assert (stats(tower).captures, stats(tower).last.reason) == (0, "not_warmed_up")
    warmed = vitcg_backend.warmup(compiled, grids=[VIDEO])
    assert warmed.captured == (32,)
    for layout, bucket in ((IMAGE, 32), (VIDEO, 32), (((1, 16, 16),), None), (TWO_IMAGES, 32)):
        assert_same(compiled, tower, layout)
        assert stats(tower).last.bucket_tokens == bucket
    assert stats(tower).captures == 1
    assert stats(tower).last.hit


def test_only_reachable_buckets_are_captured() -> None:
    """The calls that are expected decide: one capture each, and no other budget of the automatic ladder."""
    tower = tiny_tower("qwen2_5_vl")
    compiled = compile_tower(tower)
    warmed = vitcg_backend.warmup(compiled, grids=[MIXED, IMAGE[0]])
    assert len(stats(tower).buckets) == stats(tower).captures == 2
    assert set(warmed.captured) <= set(stats(tower).buckets)
    for layout in (MIXED, IMAGE):
        assert_same(compiled, tower, layout)
    assert stats(tower).captures == 2


def test_largest_first() -> None:
    """Nothing is captured before the largest where no call was needed to compile."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, capture="warmup", token_budgets=[8, 64, 16])
    assert vitcg_backend.warmup(compiled, sizes=[16, 8, 64]).captured == (64, 16, 8)


@pytest.mark.skipif(DEVICE != "cpu", reason="the sizes are those of a CPU, which has no graph pool")
def test_the_memory_limit_is_kept() -> None:
    """Under a cap the warm-up leaves the small ones out and evicts nothing."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, memory_limit_mib=6, capture="warmup", token_budgets=[400, 500, 600, 700, 800])
    warmed = vitcg_backend.warmup(compiled)
    assert warmed.captured == (800, 700, 600)  # 2.0, 1.75 and 1.5 MiB
    assert set(warmed.skipped) == {500, 400}
    assert set(warmed.skipped.values()) == {"memory_limit_mib is reached"}
    assert stats(tower).evictions == 0
    assert "800" not in str(warmed)
    assert "tokens: memory_limit_mib is reached" in str(warmed)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 64, 97, 392, 1009, 1568, 4352])
def test_a_picture_of_any_size(tokens: int) -> None:
    """Exactly the tokens asked for, and no strip."""
    layout = picture(tokens, 2)
    assert num_tokens(layout, 2) == tokens
    _, high, wide = layout[0]
    assert wide <= 4 * high or tokens < 4


@pytest.mark.parametrize("tokens", [1, 97, 256, 1024, 1025, 1568, 4352, 8192])
@pytest.mark.parametrize("largest", [256, 1024])
def test_pictures_of_any_size(tokens: int, largest: int) -> None:
    """Exactly the tokens asked for, none of more than the largest."""
    layout = pictures(tokens, 2, largest)
    assert num_tokens(layout, 2) == tokens
    assert all(num_tokens((item,), 2) <= largest for item in layout)


def test_several_pictures_stand_for_one() -> None:
    """Of 1024 tokens and of 256 in turns, where there may be so many; small ones stand for themselves."""
    sizes = [64, 512, 1024, 2048, 2112]
    calls = stand_ins(sizes[::-1], 2, UNBOUNDED)
    assert [size for size, _, _ in calls] == sizes
    assert [len(call) for _, call, _ in calls] == [1, 2, 1, 8, 3]
    assert [one for _, _, one in calls] == [None, picture(512, 2), None, picture(2048, 2), picture(2112, 2)]
    few = stand_ins(sizes, 2, 3)
    assert [len(call) for _, call, _ in few] == [1, 2, 1, 1, 3]
    assert few[3] == (2048, picture(2048, 2), None)


def test_what_a_warm_up_teaches_of_costs() -> None:
    """Its pictures tell attention from all else: estimates are near a model of an H200, whatever the ladder."""
    square_s, token_s = 2.65e-10, 7.7e-6
    for ladder in (Ladder.automatic(8192, 4).budgets, (1024, 2048, 4096, 6144, 8192), tuple(range(64, 1100, 64))):
        rest = {budget: max(1.35e-3, 0.9e-3 + token_s * budget) for budget in ladder}  # small ones wait for the host
        known = Costs()
        for budget, call, _ in stand_ins(ladder, 2, UNBOUNDED):
            known.learn_replay(budget, call, rest[budget] + square_s * squares(call))
        assert known.quadratic == pytest.approx(square_s, rel=0.1)
        assert known.table(ladder) == pytest.approx(list(rest.values()), rel=0.06)


def made_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The layouts that a warm-up calls a tower with."""
    made: list[object] = []
    call = warming._call
    monkeypatch.setattr(warming, "_call", lambda *args: (made.append(args[-1]), call(*args)))
    return made


@any_bounds
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_large_picture_is_stood_for_by_several(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same captures as one picture would make: they serve that one, clips, and many small pictures."""
    made = made_calls(monkeypatch)
    launches = []
    for several in (True, False):
        tower = tiny_tower(name, depth=1, seed=int(several))
        compiled = compile_tower(tower, token_budgets=[2112], capture="warmup", strict=True)
        with monkeypatch.context() as patch:
            if not several:
                patch.setattr(warming, "pictures", lambda tokens, merge, largest: picture(tokens, merge))
            assert vitcg_backend.warmup(compiled).captured == (2112,)
        assert made[-1] == ((1, 64, 64), (1, 64, 64), (1, 16, 16)) if several else picture(2112, 2)
        (part,) = live_towers(tower)
        (key,) = part._captures
        launches.append(key[:2])
        torch._dynamo.reset()
    assert launches[0] == launches[1]

    tower = tiny_tower(name, depth=1, seed=2)
    compiled = compile_tower(tower, token_budgets=[2112], capture="warmup", strict=True)
    vitcg_backend.warmup(compiled)
    for layout in (picture(2112, 2), ((16, 16, 32),), ((1, 8, 8),) * 100):
        assert_same(compiled, tower, layout)
        assert stats(tower).last.hit
    assert stats(tower).captures == 1


def test_one_picture_where_several_would_capture_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that launch for the longest segment, and limits on the items of a replay, leave a large picture as it is."""
    made = made_calls(monkeypatch)
    for options, close in (({"max_items": 2}, False), ({"max_frames": 2}, False), ({}, True)):
        tower = tiny_tower("qwen2_vl", depth=1)
        with monkeypatch.context() as patch:
            patch.setattr(SdpaKernel, "needs_longest", close)
            compiled = compile_tower(tower, token_budgets=[2112], capture="warmup", **options)
            vitcg_backend.warmup(compiled, sizes=[2112])
        assert made[-1] == picture(2112, 2)
        torch._dynamo.reset()


@any_bounds
def test_what_stands_for_one_picture_is_not_cut() -> None:
    """A picture that pads its bucket much: several could be cut into smaller buckets, and its own would never be captured."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[256, 2048], capture="warmup", strict=True)
    assert vitcg_backend.warmup(compiled, sizes=[200, 700]).captured == (2048, 256)
    assert_same(compiled, tower, picture(700, 2))
    assert stats(tower).last.replays == ((2048, 700),)


@any_bounds
def test_windows_are_counted_of_the_picture_that_is_stood_for() -> None:
    """Several pictures have more windows than one of as many tokens: `max_frames` is about the one."""
    tower = tiny_tower("qwen2_5_vl")
    compiled = compile_tower(tower, token_budgets=[16, 660], capture="warmup", max_frames=165)
    warmed = vitcg_backend.warmup(compiled, sizes=[16, 660])
    assert (warmed.captured, warmed.skipped) == ((660, 16), {})
    assert_same(compiled, tower, picture(660, 2))
    assert stats(tower).last.hit


@any_bounds
def test_a_layout_that_was_warmed_up_for_itself_stands_for_a_picture_too() -> None:
    """What is known of a layout since an earlier warm-up, of its own segments, has no room for those of one picture."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[128, 640], capture="warmup", strict=True)
    vitcg_backend.warmup(compiled, grids=[pictures(640, 2, 256)] * 2)
    vitcg_backend.warmup(compiled, sizes=[128, 640])
    assert_same(compiled, tower, picture(640, 2))
    assert stats(tower).last.hit


@any_bounds
@pytest.mark.parametrize("budget", [64, 256])  # the capture of a call is that of a warm-up, or it has room for fewer segments
def test_what_was_captured_before_serves_other_segments_too(budget: int) -> None:
    """A bucket that a call has captured is warm for layouts of more and shorter segments after the warm-up."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[budget])
    assert_same(compiled, tower, picture(budget, 2))
    vitcg_backend.warmup(compiled)
    captures = stats(tower).captures
    assert captures == (1 if budget == 64 else 2)
    for layout in (((1, 4, 4),) * (budget // 4), ((1, 4, 4),) * (budget // 6)):
        assert_same(compiled, tower, layout)
        assert stats(tower).last.hit
    assert stats(tower).captures == captures


@any_bounds
def test_one_picture_is_compared_with_the_pieces_by_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pictures that stand for one: the pieces uncaptured are timed with the bounds of that one, too."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[16, 1088], capture="warmup", min_tokens="auto")
    bounds: list[SegmentBounds] = []
    forward = SdpaKernel.forward

    def watched(
        self: SdpaKernel, q: Tensor, k: Tensor, v: Tensor, metadata: Tensor, own: SegmentBounds, scale: float
    ) -> Tensor:
        bounds.append(own)
        return forward(self, q, k, v, metadata, own, scale)

    monkeypatch.setattr(SdpaKernel, "forward", watched)
    vitcg_backend.warmup(compiled, sizes=[16, 1088])
    (part,) = live_towers(tower)
    (captured,) = [launches[0][2] for bucket, launches, *_ in part._captures if bucket.tokens == 1088]
    assert captured.longest == 4352
    assert [own.rows for own in bounds].count(4352) >= 4
    assert {own for own in bounds if own.rows == 4352} == {captured}
    assert stats(tower).buckets[1088].uncaptured_s > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"grids": [VIDEO], "sizes": [4]}, "warmup: give grids or sizes, not both"),
        ({"sizes": [0]}, "warmup: size 0: expected output tokens, a whole number of at least 1"),
        ({"grids": [[(1, 3, 4)]]}, r"expected \(frames, height, width\) in patches .* multiples of 2"),
        ({"grids": [[(1, 4)]]}, r"expected \(frames, height, width\) in patches"),
        ({"grids": [torch.tensor([[1.0, 4.0, 4.0]])]}, r"grid tensor\(.*\): expected \(frames, height, width\) in patches"),
        ({"grids": torch.tensor([[[1, 4, 4]]])}, r"grid tensor\(.*\): expected \(frames, height, width\) in patches"),
        ({"grids": [[], IMAGE]}, r"grid \[\]: expected \(frames, height, width\) in patches"),
        ({"grids": 4}, r"warmup: grids=4: expected a list, with one call in each place and at least one\."),
        ({"grids": "1x8x8"}, r"warmup: grids='1x8x8': expected a list, with one call in each place and at least one\."),
        ({"grids": []}, r"warmup: grids=\[\]: expected a list, with one call in each place and at least one\."),
        ({"sizes": 64}, r"warmup: sizes=64: expected a list, with one call in each place and at least one\."),
        ({"sizes": [True]}, r"warmup: size True: expected output tokens, a whole number of at least 1"),
        ({"sizes": ["64"]}, r"warmup: size '64': expected output tokens, a whole number of at least 1"),
        (
            {"sizes": [64, 16385]},
            r"warmup: size 16385: the largest budget is 16384 output tokens, .* larger token_budgets or a larger max_tokens",
        ),
    ],
)
def test_mistakes(arguments: dict, text: str) -> None:
    """The message says what is expected, before anything runs."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    with pytest.raises(OptionError, match=text):
        vitcg_backend.warmup(compiled, **arguments)
    assert stats(tower).graphs == 0


def test_grids_as_the_tower_takes_them() -> None:
    """A tensor is the grid of one call, by itself or in a list; whole numbers of other kinds count, too."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, capture="warmup")
    three, four = (torch.tensor(layout, device=DEVICE) for layout in (((1, 4, 4), (1, 8, 8)), VIDEO))
    assert vitcg_backend.warmup(compiled, grids=three).captured == (24,)
    assert stats(tower).last.num_items == 2
    forms = [four, [row.cpu().numpy() for row in three], three[0]]
    assert vitcg_backend.warmup(compiled, grids=forms).captured == (24, 32, 8)
    assert vitcg_backend.warmup(compiled, sizes=torch.tensor([64, 16])).captured[-2:] == (64, 16)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_warmed_up_as_it_is_called(mode) -> None:
    """Calls in the mode of the warm-up, with inputs made there, are its graph's and warm."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, capture="warmup")
    with mode():
        vitcg_backend.warmup(compiled, grids=[IMAGE])
        pixels, grid = (t.clone() for t in testing.make_inputs(tower, IMAGE))
        testing.assert_within_budget(
            compiled(pixels, grid_thw=grid),
            tower(pixels, grid_thw=grid),
            testing.reference_float64(tower, pixels, grid_thw=grid),
        )
    assert (stats(tower).graphs, stats(tower).last.hit) == (1, True)


def test_what_this_backend_did_not_compile() -> None:
    """A tower of another backend, and what is no tower, are refused before anything runs."""
    tower = tiny_tower("qwen2_vl", depth=1)
    calls: list[object] = []
    tower.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(
        OptionError, match=r"VisionTransformerPretrainedModel is compiled with backend='eager': give the result"
    ):
        vitcg_backend.warmup(torch.compile(tower, backend="eager"))
    assert not calls
    with pytest.raises(
        OptionError, match=r"warmup: got str 'tower': give the result of torch.compile\(tower, backend='vitcg'\)"
    ):
        vitcg_backend.warmup("tower")


def test_the_graphs_of_an_earlier_compile_are_left_alone() -> None:
    """The ladder is that of the compile that is given, whichever of its graphs are still there."""
    tower = tiny_tower("qwen2_vl", depth=1)
    earlier = {budget: compile_tower(tower, token_budgets=[budget]) for budget in (8, 24, 32)}
    for compiled in earlier.values():
        assert_same(compiled, tower, IMAGE)
    assert len(live_towers(tower)) == 3
    for budget, compiled in earlier.items():
        captures = stats(tower).captures
        warmed = vitcg_backend.warmup(compiled)
        assert (warmed.captured, warmed.skipped) == ((budget,), {})
        assert all(part.budgets_captured <= set(part.options.token_budgets) for part in live_towers(tower))
        assert stats(tower).captures <= captures + 1


def test_the_graphs_of_an_earlier_compile_of_images_are_left_alone() -> None:
    """Numbers of images are captured for the compile that is given alone."""
    tower, first = of_images(token_budgets=[2, 4])
    second = compile_tower(tower, token_budgets=[8])
    for compiled in (first, second):
        call_images(compiled, tower, 2)
    assert vitcg_backend.warmup(second).captured == (8,)
    (other,) = [part for part in live_towers(tower) if part.options.token_budgets == (2, 4)]
    assert other.budgets_captured == {2}


def test_a_tower_that_is_not_compiled() -> None:
    """A plain tower is refused rather than run for nothing."""
    with pytest.raises(
        OptionError, match=r"this tower is not compiled with backend='vitcg', .* no_graph: no graph of this tower"
    ):
        vitcg_backend.warmup(tiny_tower("qwen2_vl"))


# --- towers of one image a row ----------------------------------------------------------------------------------------


class OfImages(nn.Module):
    """A patch embedding, and a table that is looked up by what comes beside the images, where anything does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.table = nn.Embedding(5, 8)

    def forward(self, pixels: Tensor, kinds: Tensor | None = None) -> Tensor:
        """``[batch, patches, 8]``."""
        rows = self.conv(pixels).flatten(2).transpose(1, 2).sin()
        return rows if kinds is None else rows * self.table(kinds)[:, None]


def of_images(**options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    tower = OfImages().eval().to(DEVICE)
    return tower, compile_tower(tower, **options)


def call_images(compiled: nn.Module, tower: nn.Module, batch: int, side: int = 8, **more: Tensor) -> None:
    """One call, equal to eager."""
    pixels = torch.randn(batch, 3, side, side, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(compiled(pixels, **more), tower(pixels, **more))


def test_numbers_of_images() -> None:
    """Sizes are numbers of images, the largest first; calls of as many are served by what was captured then."""
    tower, compiled = of_images(capture="warmup", token_budgets=[2, 4, 8])
    call_images(compiled, tower, 3)
    assert stats(tower).last.reason == "not_warmed_up"
    lines: list[str] = []
    warmed = vitcg_backend.warmup(compiled, sizes=[1, 8, 3], progress=lines.append)
    assert warmed.captured == (8, 4, 2)
    assert [line.split(",")[0] for line in lines] == [f"warm-up {n}/3: {size} images" for n, size in ((1, 8), (2, 3), (3, 1))]
    for batch in (1, 3, 8, 5, 2):
        call_images(compiled, tower, batch)
        assert stats(tower).last.hit
    assert (stats(tower).captures, stats(tower).graphs) == (3, 1)


def test_the_whole_ladder_of_each_image_size() -> None:
    """Without sizes every budget is captured, for each of the graphs that the tower was traced to, by replaced weights, too."""
    tower, compiled = of_images(token_budgets=[1, 3])
    for side in (8, 16):
        call_images(compiled, tower, 2, side)
    assert vitcg_backend.warmup(compiled).captured == (3, 1)
    assert stats(tower).captures == 4
    with torch.no_grad():
        tower.conv.weight.data = tower.conv.weight.data * 2
    vitcg_backend.warmup(compiled)
    assert stats(tower).captures == 8
    for side in (8, 16, 8):
        for batch in (1, 3):
            call_images(compiled, tower, batch, side)
    assert (stats(tower).captures, stats(tower).fallbacks) == (8, {})


def test_what_comes_beside_the_images_is_that_of_a_call() -> None:
    """A row an image that zeros may not stand for: the first row of the call that was traced does."""
    tower, compiled = of_images(capture="warmup", token_budgets=[4])
    with torch.no_grad():
        tower.table.weight[0] = float("nan")
    call_images(compiled, tower, 3, kinds=torch.tensor([2, 1, 4], device=DEVICE))
    assert vitcg_backend.warmup(compiled, sizes=[4]).captured == (4,)
    for kinds in ([1, 2, 3, 4], [4, 1]):
        call_images(compiled, tower, len(kinds), kinds=torch.tensor(kinds, device=DEVICE))
        assert stats(tower).last.hit


def test_each_tower_of_a_class_is_warmed_up_with_its_own_weights() -> None:
    """Two towers share a graph: what one of them warms up is captured on its own parameters."""
    (first, compiled_first), (second, compiled_second) = of_images(token_budgets=[2, 4]), of_images(token_budgets=[2, 4])
    call_images(compiled_first, first, 2)
    call_images(compiled_second, second, 2)
    vitcg_backend.warmup(compiled_first, sizes=[4])
    captures = stats(first).captures
    call_images(compiled_first, first, 4)
    assert stats(first).captures == captures
    call_images(compiled_second, second, 4)
    assert stats(first).captures == captures + 1


def test_a_tower_of_images_was_not_called_yet() -> None:
    """It says to call the tower once, and takes no grids; under another autocast than the call's nothing is captured."""
    tower, compiled = of_images()
    with pytest.raises(OptionError, match=r"OfImages has no config.spatial_merge_size, .* compile it and call it once first"):
        vitcg_backend.warmup(compiled, sizes=[1])
    call_images(compiled, tower, 2)
    with pytest.raises(OptionError, match="takes one image a row and no grid: give sizes, which are numbers of images"):
        vitcg_backend.warmup(compiled, grids=[VIDEO])
    with pytest.raises(OptionError, match="size 0: expected images, a whole number of at least 1"):
        vitcg_backend.warmup(compiled, sizes=[0])
    captures = stats(tower).captures
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(OptionError, match="another autocast is on"):
        vitcg_backend.warmup(compiled, sizes=[4])
    tower.conv.weight = nn.Parameter(tower.conv.weight.detach().clone())
    with pytest.raises(OptionError, match="has other parameters"):
        vitcg_backend.warmup(compiled, sizes=[4])
    assert stats(tower).captures == captures


def test_what_other_threads_do_during_a_warm_up() -> None:
    """A reset, which holds a lock of Dynamo that the warm-up may need, waits for nothing; their calls capture nothing."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, capture="warmup")
    assert_same(compiled, tower, IMAGE)
    (part,) = live_towers(tower)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            assert_same(compiled, tower, VIDEO)
        except BaseException as error:
            failed.append(error)

    def elsewhere(work: object) -> bool:
        thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
        thread.start()
        thread.join(60)
        return not thread.is_alive()

    with part.warming():
        called = elsewhere(call)
        reasons = [stats(tower).last.reason]
        assert_same(compiled, tower, VIDEO)
        reasons.append(stats(tower).last.reason)
        captures = stats(tower).captures
        reset = elsewhere(torch._dynamo.reset)
    assert called
    assert reset
    assert not failed
    assert reasons == ["not_warmed_up", None]
    assert captures == 1
