"""The life of a call: layouts in any order, buckets, capacities, bad input, outputs that stay, state that changes."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import (
    DEVICE,
    IMAGE,
    LAYOUTS,
    MIXED,
    TOWERS,
    TWO_IMAGES,
    VIDEO,
    assert_equal,
    assert_same,
    assert_sequence,
    compile_tower,
    run,
    stats,
    tensor,
    tiny_tower,
)
from transformers import vision_utils

import vitcg_backend
from vitcg_backend import capture, testing
from vitcg_backend.backend import live_towers
from vitcg_backend.bucketing import num_patches
from vitcg_backend.errors import Refused
from vitcg_backend.passes.program import AttentionStep
from vitcg_backend.runtime import CompiledTower

SAME_ROWS = (
    ((1, 16, 16),),
    ((1, 8, 32),),
    ((1, 4, 64),),
    ((4, 8, 8),),
    ((16, 4, 4),),
    ((64, 2, 2),),
    ((1, 16, 8), (1, 8, 16)),
)


@pytest.mark.parametrize("name", TOWERS)
def test_b01_layouts_of_the_same_size(name: str) -> None:
    """Grids with the same number of patches share a bucket and never each other's borders."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower)
    assert_sequence(compiled, tower, SAME_ROWS)
    results = [testing.flatten(run(compiled, layout))[0] for layout in SAME_ROWS]
    for i, a in enumerate(results):
        assert not any(torch.equal(a, b) for b in results[i + 1 :])
    assert stats(tower).hits == stats(tower).calls == 4 * len(SAME_ROWS)


@pytest.mark.parametrize("name", TOWERS)
def test_shuffled_sequence(name: str) -> None:
    """Every layout repeated in a shuffled order, all earlier results re-checked."""
    tower = tiny_tower(name, depth=None)
    assert_sequence(compile_tower(tower), tower, LAYOUTS)


@pytest.mark.parametrize("name", TOWERS)
def test_bfloat16_within_budget(name: str) -> None:
    """bf16 towers, also with outlier channels, stay within twice eager's own error."""
    for heavy in (False, True):
        tower = tiny_tower(name, depth=None, dtype=torch.bfloat16, heavy_tailed=heavy)
        compiled = compile_tower(tower)
        for layout in (*LAYOUTS, *LAYOUTS):
            pixels, grid = testing.make_inputs(tower, layout)
            reference = testing.reference_float64(tower, pixels, grid_thw=grid)
            testing.assert_within_budget(run(compiled, layout), run(tower, layout), reference)
        assert stats(tower).hits == stats(tower).calls


@pytest.mark.parametrize("name", TOWERS)
def test_b04_nan_in_padded_rows_reaches_nobody(name: str) -> None:
    """NaN pixels of one call, left in the padded rows, do not reach the next call."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, ((1, 16, 16),))
    pixels, grid = testing.make_inputs(tower, ((1, 16, 16),))
    with torch.no_grad():
        bad = compiled(torch.full_like(pixels, float("nan")), grid_thw=grid)
    assert testing.flatten(bad)[0].isnan().all()
    for layout in (((1, 14, 16),), ((1, 4, 4), (3, 8, 8)), ((1, 16, 16),)):
        assert all(result.isfinite().all() for result in assert_same(compiled, tower, layout))


def test_b03_b18_small_results_are_stable_while_buckets_grow() -> None:
    """A canary is bit-equal to its first result while larger buckets appear, calls exceed the largest, memory is churned; its
    static buffers stay where they are.
    """
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, token_budgets=[16, 64, 256])
    canary = [t.clone() for t in assert_same(compiled, tower, ((1, 8, 8),))]

    def addresses() -> list[int]:
        held = [c for part in live_towers(tower) for key, c in part._captures.items() if key[0].tokens == 16]
        return [t.data_ptr() for c in held for t in (c.pixels, *(c.tensors[i] for i in c.copied), *c.segments.values())]

    first = addresses()
    assert first
    for number in range(20):
        side = 8 * (1 + number % 6)
        assert_same(compiled, tower, ((1, side, side),), seed=number)
        junk = [torch.full((1 + 97 * k,), float("nan"), device=DEVICE) for k in range(20)]
        del junk
        now = testing.flatten(run(compiled, ((1, 8, 8),)))
        assert all(torch.equal(a, b) for a, b in zip(now, canary, strict=True))
        assert addresses() == first
    assert stats(tower).fallbacks == {"over_largest_budget": 6}  # sides of 40 and 48 patches


def test_b07_long_segments_after_short_ones() -> None:
    """A bucket captured with short segments serves long ones."""
    for name in ("qwen2_vl", "qwen2_5_vl"):
        tower = tiny_tower(name)
        compiled = compile_tower(tower)
        for layout in (((16, 4, 4),), ((1, 16, 16),), ((1, 64, 4),), ((16, 4, 4),)):
            assert_same(compiled, tower, layout)
            (part,) = live_towers(tower)
            bounds = list(next(reversed(part._captures.values())).bounds.values())  # of the capture that served the call
            assert all(layout[0][1] * layout[0][2] <= b.longest <= b.rows for b in bounds[:1] if name == "qwen2_vl")
            assert all(b.longest <= b.rows == stats(tower).last.bucket_tokens * 4 for b in bounds)
        assert stats(tower).hits == 4


def test_b09_items_at_their_boundary() -> None:
    """At the bound of items: one replay. One above: two, within the bound, and later calls take one again."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, max_items=3, token_budgets=[64])
    for items, replays in ((2, 1), (3, 1), (4, 2), (6, 2), (7, 3), (3, 1)):
        assert_same(compiled, tower, ((1, 4, 4),) * items)
        assert stats(tower).last.hit
        assert len(stats(tower).last.replays) == replays


def test_the_latest_call_of_several_graphs() -> None:
    """Two kinds of calls in turns, each layout known: `last` is that of the call just made, and its number rises."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    numbers = []
    for _ in range(4):
        for mode, layout in ((torch.no_grad, IMAGE), (torch.inference_mode, VIDEO)):
            with mode():
                pixels, grid = testing.make_inputs(tower, layout)
                compiled(pixels, grid_thw=grid)
            assert stats(tower).last.num_patches == len(pixels)
            numbers.append(stats(tower).last.number)
    assert numbers == sorted(set(numbers))


def test_b09_frames_at_their_boundary() -> None:
    """`max_frames` counts attention segments of the call, none of the padding; a longer video is cut between frames."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, max_frames=4, token_budgets=[16, 20, 64])
    for frames, replays in ((3, 1), (4, 1), (5, 2), (9, 3), (4, 1)):
        assert_same(compiled, tower, ((frames, 4, 4),))
        assert stats(tower).last.hit, stats(tower).last
        assert len(stats(tower).last.replays) == replays
    assert_same(compiled, tower, ((4, 4, 6),))  # 24 tokens in the bucket of 64: its tail's segments do not count
    assert len(stats(tower).last.replays) == 1


def test_b09_windows_over_their_bound() -> None:
    """Windows of one frame cannot be cut apart: at the bound a hit, above it eager's result and a counted reason."""
    tower = tiny_tower("qwen2_5_vl")
    compiled = compile_tower(tower, max_frames=4, token_budgets=[16, 64])
    for layout, hit in ((((1, 8, 8),), True), (((1, 8, 10),), False), (((1, 8, 8),), True)):
        assert_same(compiled, tower, layout)
        assert stats(tower).last.hit is hit
    assert stats(tower).fallbacks == {"over_max_frames": 1}


def test_b08_b09_windows_up_to_one_per_token() -> None:
    """Qwen2.5-VL with 4 to 64 windows in the same number of rows: one bucket serves them all."""
    tower = tiny_tower("qwen2_5_vl")
    assert_sequence(compile_tower(tower, token_budgets=[64]), tower, SAME_ROWS, rounds=2)
    assert stats(tower).hits == stats(tower).calls == 2 * len(SAME_ROWS)


def test_b10_b11_budgets_and_boundaries() -> None:
    """The smallest bucket that fits, exact at its boundary; above the largest, a counted reason."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, token_budgets=[64, 16, 16])
    expected = {1: 16, 15: 16, 16: 16, 17: 64, 63: 64, 64: 64, 65: None}
    for tokens, bucket in expected.items():
        assert_same(compiled, tower, ((1, 2, 2 * tokens),), exact=False)
        assert stats(tower).last.bucket_tokens == bucket
    assert stats(tower).fallbacks == {"over_largest_budget": 1}
    for images in range(1, 10):
        assert_same(compiled, tower, ((1, 4, 4),) * images, exact=False)
        assert stats(tower).last.bucket_tokens == (16 if images <= 4 else 64)


@pytest.mark.parametrize("budgets", [[4], [4, 1024], [250], [256, 256]], ids=str)
def test_b10_any_budgets_serve_from_the_first_call(budgets: list[int]) -> None:
    """Budgets below a picture, far apart, of no round number, twice the same: right from the first call, with buckets that hold
    the calls they serve.
    """
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=budgets)
    for layout in (IMAGE, VIDEO, MIXED, IMAGE):
        assert_same(compiled, tower, layout)
        last = stats(tower).last
        assert last.hit is (sum(budget for budget, _ in last.replays) >= last.num_tokens)
        assert all(budget in budgets and tokens <= budget for budget, tokens in last.replays)


def test_min_tokens_and_capture_never() -> None:
    """Small calls under `min_tokens`, and all calls under `capture="never"`, take the uncaptured pieces."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, min_tokens=8)
    assert_same(compiled, tower, IMAGE)
    assert_same(compiled, tower, VIDEO)
    assert (stats(tower).hits, stats(tower).fallbacks) == (1, {"under_min_tokens": 1})
    other = tiny_tower("qwen2_vl", seed=1)
    assert_same(compile_tower(other, capture="never"), other, IMAGE)
    assert stats(other).fallbacks == {"capture_never": 1}


def test_b17_deepstack_is_refreshed() -> None:
    """Every deepstack level is eager's, of the right length, after a capture on an all-zero image."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower, token_budgets=[32])
    grid = tensor([[1, 8, 8]])
    held = []
    for seed in (None, 1, 2, 3, 1):
        pixels, _ = testing.make_inputs(tower, ((1, 8, 8),), seed=seed or 0)
        pixels = torch.zeros_like(pixels) if seed is None else pixels
        with torch.no_grad():
            output, expected = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
        assert_equal(output, expected, tower, pixels, grid_thw=grid)
        assert len(output.deepstack_features) == 2
        assert all(level.shape[0] == 16 for level in output.deepstack_features)
        held.append((output, [t.clone() for t in testing.flatten(output)]))
    for output, copies in held:
        assert all(torch.equal(a, b) for a, b in zip(testing.flatten(output), copies, strict=True))


def test_b20_a_neighbour_does_not_leak() -> None:
    """Rows of image A are the same beside B and beside B + 5."""
    for name in TOWERS:
        tower = tiny_tower(name)
        compiled = compile_tower(tower, token_budgets=[64])
        pixels, grid = testing.make_inputs(tower, ((1, 8, 8), (1, 8, 8)))
        other = pixels.clone()
        other[64:] += 5
        with torch.no_grad():
            for _ in range(2):
                a, b = compiled(pixels, grid_thw=grid), compiled(other, grid_thw=grid)
                assert torch.equal(a.pooler_output[:16], b.pooler_output[:16])
                assert not torch.equal(a.pooler_output[16:], b.pooler_output[16:])
                alone = compiled(pixels[:64], grid_thw=grid[:1])
                torch.testing.assert_close(alone.pooler_output, a.pooler_output[:16], rtol=1e-4, atol=1e-5)
        assert stats(tower).hits == stats(tower).calls == 6


@pytest.mark.parametrize("name", TOWERS)
def test_b24_every_form_of_grid(name: str) -> None:
    """int64, int32, and a slice of a bigger tensor, alternating: eager's result each time."""
    tower = tiny_tower(name, depth=1)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, TWO_IMAGES)
    wide = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)
    wide[:, ::2] = grid
    forms = [grid, grid.int(), wide[:, ::2], grid, torch.cat([grid, grid])[::2][:1].repeat(1, 1)]
    if DEVICE == "cuda":
        forms += [grid.cpu(), grid.cpu().int(), grid.cpu().pin_memory()]
    for form in (*forms, *forms):
        rows = int(form.prod(1).sum())
        with torch.no_grad():
            try:
                tower(pixels[:rows], grid_thw=form)
            except RuntimeError:  # some towers take no grid on another device than their weights
                assert form.device.type != DEVICE
                with pytest.raises(RuntimeError):
                    compiled(pixels[:rows], grid_thw=form)
                continue
            assert_equal(
                compiled(pixels[:rows], grid_thw=form),
                tower(pixels[:rows], grid_thw=form),
                tower,
                pixels[:rows],
                grid_thw=form,
            )


def test_b26_pixels_of_any_stride() -> None:
    """Transposed storage, every second row, an offset of one element, one row for all, a batch of one: eager's result."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8),))
    rows, width = pixels.shape
    flat = torch.cat([torch.zeros(1, device=DEVICE), pixels.flatten()])
    double = torch.stack([pixels, -pixels], 1).reshape(2 * rows, width)
    expanded = pixels[:1].expand(rows, width)
    forms = (pixels, pixels.t().contiguous().t(), double[::2], flat[1:].view(rows, width), expanded, pixels[None], pixels)
    for form in (*forms, *forms):
        with torch.no_grad():
            assert_equal(compiled(form, grid_thw=grid), tower(form, grid_thw=grid), tower, form, grid_thw=grid)


def test_b27_pixels_of_any_dtype() -> None:
    """fp32, fp16, bf16 and uint8 pixels into one bf16 tower, alternating, then the tower in half precision."""
    tower = tiny_tower("qwen2_vl", depth=1, dtype=torch.bfloat16)
    compiled = compile_tower(tower, token_budgets=[16])
    pixels, grid = testing.make_inputs(tower, IMAGE, dtype=torch.float32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bfloat16, torch.float32):
        given = (pixels * 50).to(dtype) if dtype == torch.uint8 else pixels.to(dtype)
        with torch.no_grad():
            assert_equal(compiled(given, grid_thw=grid), tower(given, grid_thw=grid), tower, given, grid_thw=grid)
    tower.half()
    with torch.no_grad():
        assert_equal(compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid), tower, pixels, grid_thw=grid)


def test_b35_outputs_belong_to_the_caller() -> None:
    """Results, their views and in-place edits of them are independent of later calls."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower)
    first = run(compiled, MIXED, seed=1)
    first = run(compiled, MIXED, seed=1)
    views = [first.pooler_output.detach(), *torch.split(first.pooler_output, 4), *first.deepstack_features]
    copies = [v.clone() for v in views]
    assert_same(compiled, tower, MIXED, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))
    first.pooler_output.add_(100)
    first.last_hidden_state.fill_(float("nan"))
    assert_same(compiled, tower, MIXED, seed=1)


def test_borrowed_outputs_are_views() -> None:
    """`outputs="borrow"` hands out the static outputs: right now, overwritten by the next call."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, outputs="borrow")
    for seed in range(3):
        assert_same(compiled, tower, VIDEO, seed=seed)


BAD = {
    "odd height": (torch.zeros(15, 96), [[1, 3, 5]]),
    "more rows than the grid": (torch.zeros(20, 96), [[1, 4, 4]]),
    "fewer rows than the grid": (torch.zeros(12, 96), [[1, 4, 4]]),
    "no item": (torch.zeros(0, 96), []),
}


@pytest.mark.parametrize("name", TOWERS)
def test_b22_b29_bad_input_gives_eagers_own_error(name: str) -> None:
    """What eager rejects is rejected right after a good call, with eager's type of error or that of torch.compile itself."""
    tower = tiny_tower(name, depth=1)
    calls = {}
    for case, (pixels, rows) in BAD.items():
        if DEVICE == "cuda" and (name, case) == ("qwen2_5_vl", "fewer rows than the grid"):
            continue  # eager's own window gather is a device-side assert there, which ends the process
        given = pixels.to(DEVICE), tensor(rows, dtype=torch.int64).reshape(-1, 3)
        torch._dynamo.reset()
        with torch.no_grad():
            with pytest.raises(Exception) as eager:
                tower(given[0], grid_thw=given[1])
            with pytest.raises(Exception) as stock:
                torch.compile(tower, backend="eager")(given[0], grid_thw=given[1])
        calls[case] = (*given, type(eager.value), type(stock.value))
    torch._dynamo.reset()
    compiled = compile_tower(tower)
    for case, (pixels, grid, eagers, stocks) in calls.items():
        assert_same(compiled, tower, IMAGE)
        with torch.no_grad(), pytest.raises(Exception) as ours:
            compiled(pixels, grid_thw=grid)
        assert isinstance(ours.value, (eagers, stocks)) or issubclass(eagers, type(ours.value)), case
    assert_same(compiled, tower, IMAGE)


@pytest.mark.parametrize("name", TOWERS)
def test_b22_empty_item_beside_a_real_one(name: str) -> None:
    """A row with t = 0 beside a real image is what eager makes of it."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower)
    for layout in (((1, 4, 4), (0, 4, 4)), IMAGE):
        grid = tensor(layout)
        pixels, _ = testing.make_inputs(tower, IMAGE)
        with torch.no_grad():
            assert_equal(compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid), tower, pixels, grid_thw=grid)


def test_b29_tiny_and_thin_images() -> None:
    """One token, forty of them, one very wide strip."""
    for name in TOWERS:
        tower = tiny_tower(name)
        assert_sequence(compile_tower(tower), tower, (((1, 2, 2),), ((1, 2, 2),) * 40, ((1, 2, 200),)), rounds=2, exact=False)


def test_b57_options_do_not_leak_between_towers() -> None:
    """Two towers with other options each keep their own."""
    a, b = tiny_tower("qwen2_vl"), tiny_tower("qwen3_vl")
    assert_same(compile_tower(a, token_budgets=[100]), a, IMAGE)
    assert_same(compile_tower(b, token_budgets=[40]), b, IMAGE)
    assert (stats(a).last.bucket_tokens, stats(b).last.bucket_tokens) == (100, 40)


def _edit_in_place(tower: torch.nn.Module) -> None:
    for p in tower.parameters():
        p.mul_(1.5)


def _edit_data(tower: torch.nn.Module) -> None:
    for p in tower.parameters():
        p.data = p.data.clone() * 0.5


def _new_parameters(tower: torch.nn.Module) -> None:
    for module in tower.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(p.detach() * 1.25))


def _assign(tower: torch.nn.Module) -> None:
    tower.load_state_dict({k: v * 0.75 for k, v in tower.state_dict().items()}, assign=True)


def _load(tower: torch.nn.Module) -> None:
    tower.load_state_dict({k: v * 1.1 for k, v in tower.state_dict().items()})


def _buffers(tower: torch.nn.Module) -> None:
    for b in tower.buffers():
        b.mul_(0.5)


def _buffer_data(tower: torch.nn.Module) -> None:
    for b in tower.buffers():
        b.data.mul_(1.5)  # leaves no trace in the version counter


@pytest.mark.parametrize("name", TOWERS)
def test_b62_changed_weights_are_seen_by_the_next_call(name: str) -> None:
    """Every way to change a weight or a buffer shows in the very next call of a captured bucket."""
    tower = tiny_tower(name)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, VIDEO)
    for edit in (_edit_in_place, _edit_data, _new_parameters, _assign, _load, _buffers, _buffer_data, _edit_data):
        before = testing.flatten(run(tower, VIDEO))[0]
        with torch.no_grad():
            edit(tower)
        gc.collect()
        for _ in range(2):
            assert_same(compiled, tower, VIDEO)
        assert not torch.equal(before, testing.flatten(run(tower, VIDEO))[0]), edit.__name__


def test_b63_a_number_of_a_module_that_changes_is_seen() -> None:
    """A scale on a module (an adapter's, say) takes many values: Dynamo hands it over as an input, and each counts."""

    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    tower = tiny_tower("qwen2_vl")
    tower.blocks[0].attn.proj = Scaled(tower.blocks[0].attn.proj)
    compiled = compile_tower(tower)
    for scale in (1.0, 2.0, 3.0, 0.5, 2.0, 1.0, 0.25):
        tower.blocks[0].attn.proj.scale = scale
        for layout in (IMAGE, MIXED):
            assert_same(compiled, tower, layout)


def _with_metadata_of_the_whole_grid(tower: torch.nn.Module):
    return lambda pixels, grid: tower(pixels, grid_thw=grid).pooler_output / grid.max()


def test_metadata_that_padding_changes_is_never_used() -> None:
    """A value over all items, as the largest side, differs with the dummy item: refused on every call, not only at first."""
    tower = tiny_tower("qwen2_vl", depth=1)
    function = _with_metadata_of_the_whole_grid(tower)
    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager", "token_budgets": [64]})
    pixels, grid = testing.make_inputs(tower, ((1, 4, 4),))
    with torch.no_grad():
        for _ in range(70):
            torch.testing.assert_close(compiled(pixels, grid), function(pixels, grid))


def test_results_beside_the_features() -> None:
    """Split sizes returned with the features are the unpadded grid's, and the caller may write into them."""
    tower = tiny_tower("qwen2_vl", depth=1)

    def function(pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tower(pixels, grid_thw=grid).pooler_output, grid.prod(-1) // 4

    for options in ({"inner": "eager"}, {"inner": "eager", "capture": "never"}):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="vitcg", options=options)
        pixels, grid = testing.make_inputs(tower, ((1, 8, 8), (1, 4, 6)))
        with torch.no_grad():
            for _ in range(3):
                features, sizes = compiled(pixels, grid)
                assert sizes.tolist() == [16, 6]
                torch.testing.assert_close(features, function(pixels, grid)[0])
                sizes -= 1


def test_a_result_that_is_a_view_of_an_argument() -> None:
    """A write into it reaches the caller's own tensor, as in eager; no static buffer stands for that: no bucket serves it."""
    tower = tiny_tower("qwen2_vl", depth=1)

    def function(pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tower(pixels, grid_thw=grid).pooler_output, pixels[:, :4]

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    pixels, grid = testing.make_inputs(tower, IMAGE)
    with torch.no_grad():
        for value in (7.0, 8.0):
            expected = function(pixels.clone(), grid)[0]
            features, view = compiled(pixels, grid)
            torch.testing.assert_close(features, expected)
            view.fill_(value)
            assert bool((pixels[:, :4] == value).all())
    assert stats(tower).fallbacks == {"aliased_input": 2}


def test_b16_an_empty_segment_of_the_caller_adds_nothing() -> None:
    """Where eager takes one (sdpa of transformers 5.24 does not), its result; anywhere that of the same call without it."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    for empty, plain in (([0, 8, 8, 16], [0, 8, 16]), ([0, 0, 16], [0, 16]), ([0, 16, 16], [0, 16])):
        with torch.no_grad():
            output = compiled(pixels, grid_thw=grid, cu_seqlens=tensor(empty, dtype=torch.int32))
            expected = tower(pixels, grid_thw=grid, cu_seqlens=tensor(plain, dtype=torch.int32))
        assert_equal(output, expected, tower, pixels, grid_thw=grid, cu_seqlens=tensor(plain, dtype=torch.int32))
    assert stats(tower).fallbacks == {"caller_metadata": 3}


def test_in_place_by_any_name_is_not_cut_apart() -> None:
    """An in-place activation given by position is seen, and its graph takes the ordinary path."""
    tower = tiny_tower("qwen2_vl", depth=1)
    act = torch.nn.LeakyReLU(-0.5, inplace=True)

    def function(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        y = tower(pixels, grid_thw=grid).pooler_output * 1
        return y + act(y * 1) + y

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager"})
    pixels, grid = testing.make_inputs(tower, MIXED)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(pixels, grid), function(pixels, grid))
    assert stats(tower).fallbacks == {"side_effect": 2}


def test_random_numbers_are_drawn_anew() -> None:
    """Noise in the forward pass is not kept as metadata of a layout."""
    tower = tiny_tower("qwen2_vl", depth=1)

    def function(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return tower(pixels, grid_thw=grid).pooler_output.sum() * 0 + torch.rand(4, device=pixels.device)

    compiled = torch.compile(function, backend="vitcg", options={"inner": "eager"})
    pixels, grid = testing.make_inputs(tower, IMAGE)
    with torch.no_grad():
        assert len({tuple(compiled(pixels, grid).tolist()) for _ in range(4)}) == 4


def test_other_backends_may_be_given_the_same_tensors() -> None:
    """No mark stays on a caller's tensors: another backend compiles the tower with them as if we had not."""
    tower = tiny_tower("qwen3_vl", depth=1)
    pixels, grid = testing.make_inputs(tower, MIXED)
    with torch.no_grad():
        compile_tower(tower)(pixels, grid_thw=grid)
        assert not [name for t in (pixels, grid) for name in vars(t) if "dynamo" in name or "vitcg" in name]
        other = torch.compile(tower, backend="eager")(pixels, grid_thw=grid)
    assert_equal(other, tower(pixels, grid_thw=grid), tower, pixels, grid_thw=grid)


def test_weights_that_move_at_every_step_leave_nothing_behind() -> None:
    """Fifty reloads into new storage: each is seen, and only the captures of the latest few are kept."""
    from vitcg_backend import backend, runtime

    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, self_check=False)
    alive = []
    for _ in range(50):
        with torch.no_grad():
            _edit_data(tower)
        alive.append([p.data for p in tower.parameters()])  # so that no address comes back
        assert_same(compiled, tower, IMAGE)
    owned = {id(p) for p in tower.parameters()}
    (part,) = [p for p in backend._live if isinstance(p, runtime.CompiledTower) and p.belongs_to(owned)]
    assert len(part._captures) <= 8
    assert len(part._states) <= 8
    assert stats(tower).captures == 50


def test_b64_gradients_then_inference_then_gradients() -> None:
    """With gradients the ordinary path gives eager's gradients; without, buckets are used; in any order."""
    tower = tiny_tower("qwen3_vl")
    twin = copy.deepcopy(tower)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, MIXED)
    for _ in range(2):
        assert_same(compiled, tower, MIXED)
        for t in (tower, twin):
            t.zero_grad()
        compiled(pixels, grid_thw=grid).pooler_output.square().sum().backward()
        twin(pixels, grid_thw=grid).pooler_output.square().sum().backward()
        for (name, p), q in zip(tower.named_parameters(), twin.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None, name
            else:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert stats(tower).fallbacks == {"gradients": 2}
    assert stats(tower).hits == 2


def test_inference_mode_and_no_grad_alternate() -> None:
    """Pixels made in either mode, calls in either mode."""
    tower = tiny_tower("qwen2_5_vl", depth=1)
    compiled = compile_tower(tower)
    for made in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with made():
            pixels, grid = testing.make_inputs(tower, MIXED)
        for called in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with called():
                assert_equal(compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid), tower, pixels, grid_thw=grid)


def test_b67_autocast_in_any_order() -> None:
    """none, bf16, none, bf16 over one tower, with weights edited in between."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, VIDEO)
    for dtype in (None, torch.bfloat16, None, torch.bfloat16):
        with torch.no_grad(), torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            a, b = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
        assert_equal(a, b, tower, pixels, grid_thw=grid)
        with torch.no_grad():
            _edit_in_place(tower)


class _Meanwhile:
    """A lock; what another thread does just before somebody gets it."""

    def __init__(self, lock: Any, work: Any) -> None:
        self.lock, self.work = lock, work

    def __enter__(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work()
        self.lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(*error)


def test_another_thread_drops_the_capture_of_a_known_layout() -> None:
    """Between the look at the layout and the replay: evicted, and another layout made known since."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    for _ in range(3):
        assert_same(compiled, tower, IMAGE)
    (part,) = live_towers(tower)

    def evict() -> None:
        part._captures.popitem(last=False)
        part._captures_changed()
        run(compiled, VIDEO)
        run(compiled, VIDEO)

    part._lock = _Meanwhile(part._lock, evict)  # type: ignore[assignment]  # a lock, too
    assert_same(compiled, tower, IMAGE)
    assert part._lock.work is None  # type: ignore[attr-defined]
    assert stats(tower).last.hit


def test_four_threads_share_a_tower() -> None:
    """Concurrent callers with other layouts each get their own result."""
    tower = tiny_tower("qwen3_vl")
    compiled = compile_tower(tower)
    for layout in LAYOUTS:
        assert_same(compiled, tower, layout)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            assert_sequence(compiled, tower, LAYOUTS, rounds=2, seed=seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_strict_raises_with_the_reason() -> None:
    """`strict=True` turns a slower path into an error that names its reason."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, strict=True, token_budgets=[8])
    assert_same(compiled, tower, IMAGE)
    with pytest.raises(
        Refused, match=r"vitcg refused \[over_largest_budget\]: a call of 32 tokens \(128 patches\) in 1 items; budgets"
    ):
        run(compiled, VIDEO)


def test_strict_names_what_the_caller_gave() -> None:
    """Metadata of the caller's is refused by its name, not with a list of budgets."""
    tower = tiny_tower("qwen2_vl", depth=1)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    with torch.no_grad(), pytest.raises(Refused, match=r"caller_metadata\]: metadata that the caller computed.*cu_seqlens"):
        compile_tower(tower, strict=True)(pixels, grid_thw=grid, cu_seqlens=tensor([0, 16], dtype=torch.int32))


def test_strict_says_which_option_refused() -> None:
    """`min_tokens` and `capture="never"` are named with what was seen."""
    for options, text in (
        ({"min_tokens": 8}, r"\[under_min_tokens\]: the call has 4 output tokens, the option min_tokens is 8"),
        ({"capture": "never"}, r"\[capture_never\]: the option capture='never' asks for uncaptured calls"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Refused, match=text):
            run(compile_tower(tiny_tower("qwen2_vl", depth=1), strict=True, **options), IMAGE)


def test_b45_a_bucket_over_the_memory_limit_by_itself_is_not_tried() -> None:
    """One bucket alone is above the cap: no capture at all, one warning, a counted reason, and smaller buckets stay."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, memory_limit_mib=1, token_budgets=[8, 4000])
    assert_same(compiled, tower, IMAGE)
    with pytest.warns(UserWarning, match=r"\[over_memory_limit\]: it needs [0-9.]+ MiB .*, memory_limit_mib is 1"):
        for _ in range(3):
            assert_same(compiled, tower, ((1, 2, 2 * 60),))
    assert_same(compiled, tower, IMAGE)
    counted = stats(tower)
    assert (counted.captures, counted.evictions, counted.hits) == (1, 0, 2)
    assert counted.fallbacks == {"over_memory_limit": 3}


def test_layouts_are_capped_by_their_bytes() -> None:
    """Metadata that is kept for layouts never takes more than its part of the cap, and many grids leave it there."""
    from vitcg_backend import backend, runtime

    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, memory_limit_mib=1, self_check=False, token_budgets=[64, 256])
    for number in range(40):
        run(compiled, ((1, 2 * (2 + number % 10), 2 * (2 + number // 2)),))
    owned = {id(p) for p in tower.parameters()}
    parts = [p for p in backend._live if isinstance(p, runtime.CompiledTower) and p.belongs_to(owned)]
    layouts = max((part._layouts for part in parts), key=len)
    assert layouts.num_bytes == sum(v.num_bytes for v in layouts._values.values()) <= 1 << 18
    assert 1 < len(layouts) < 60


def test_a_piece_that_fails_gives_way_to_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled piece that raises in a capture and outside of it: eager's result, a reason, one attempt at the capture."""
    from vitcg_backend import backend, runtime

    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    owned = {id(p) for p in tower.parameters()}
    (part,) = [p for p in backend._live if isinstance(p, runtime.CompiledTower) and p.belongs_to(owned)]
    calls = []

    def fail(arguments: object) -> None:
        calls.append(1)
        raise MemoryError("no memory for a piece")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"\[capture_failed\]: MemoryError: no memory"):
        patch.setattr(part.body, "functions", [fail] * len(part.body.functions))
        for _ in range(3):
            assert_same(compiled, tower, VIDEO)
    assert (
        len(calls) == 4
    )  # one attempt at the capture, which breaks off in the run that it would be compared with; three calls
    assert_same(compiled, tower, IMAGE)
    assert (stats(tower).hits, stats(tower).fallbacks) == (2, {"capture_failed": 3})
    assert stats(tower).refusals["pieces_failed"] == "MemoryError: no memory for a piece"


def test_b16_metadata_of_the_caller_is_eagers_or_eagers_error() -> None:
    """cu_seqlens of any integer dtype serve; what eager rejects, or what belongs to other rows, raises as in eager."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, IMAGE)
    for dtype in (torch.int32, torch.int16, torch.int64):
        assert_same(compiled, tower, IMAGE, cu_seqlens=tensor([0, 8, 16], dtype=dtype))
    for values, dtype in (([0, 8], torch.int32), ([0, 8, 20], torch.int32), ([0, 8, 16], torch.float32)):
        with torch.no_grad():
            with pytest.raises(Exception) as eager:
                tower(pixels, grid_thw=grid, cu_seqlens=tensor(values, dtype=dtype))
            with pytest.raises(type(eager.value)):
                compiled(pixels, grid_thw=grid, cu_seqlens=tensor(values, dtype=dtype))
    positions = torch.zeros(16, 2, dtype=torch.int64, device=DEVICE)
    assert_same(compiled, tower, IMAGE, position_ids=positions)
    # The first call of a kind is traced, and what does not fit there is Dynamo's error, with its words for the same fault.
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"size of tensor|broadcast a dimension"):
        compiled(pixels, grid_thw=grid, position_ids=positions[:12])
    assert set(stats(tower).fallbacks) == {"caller_metadata"}


@pytest.mark.parametrize("reason", ["segments_differ", "metadata_differs"])
@pytest.mark.parametrize("always", [False, True], ids=["by frame", "always"])
def test_a_layout_that_padding_changes_is_never_used(reason: str, always: bool) -> None:
    """Windows that depend on all items, the dummy included, would cut real rows elsewhere, and so would positions: each such
    layout is refused, though its check comes after the replay, and not computed again. Where only what was put together from
    frames is other, it is that which is not used again.
    """
    from vitcg_backend import layouts

    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[64])
    assert_same(compiled, tower, IMAGE)
    prologue, assembled = layouts.LayoutCache._prologue, layouts.LayoutCache._assembled
    runs = []

    def moved(cache: layouts.LayoutCache, made: Sequence[Any]) -> list[torch.Tensor]:
        tensors = [layouts.tensor_of(value) for value in made]
        for index, value in enumerate(tensors):
            if index in cache.segment_rows and reason == "segments_differ":
                tensors[index] = torch.cat([value[:1], value[1:2] // 2, value[1:]])
            elif index not in cache.segment_rows and reason == "metadata_differs":
                tensors[index] = value + 1
        return tensors

    def by_itself(self: layouts.LayoutCache, args: Any, layout: Any, tail: Any, total: int) -> Sequence[torch.Tensor]:
        runs.append((total, False))
        found = prologue(self, args, layout, tail, total)
        return moved(self, found) if tail and always else found

    def by_frame(self: layouts.LayoutCache, args: Any, layout: Any, tail: Any = ()) -> Sequence[Any] | None:
        found = assembled(self, args, layout, tail)
        if found is None:
            return None
        runs.append((num_patches((*layout, *tail)), True))
        return moved(self, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts.LayoutCache, "_prologue", by_itself)
        patch.setattr(layouts.LayoutCache, "_assembled", by_frame)
        for _ in range(3):
            assert_same(compiled, tower, MIXED)
    assert stats(tower).fallbacks == {reason: 3 if always else 1}
    # Padded, real for the check, real for the uncaptured call; then once more without what was known of frames.
    assert runs == [(256, True), (96, False), (96, False), (256, False), (96, False)]
    assert_same(compiled, tower, TWO_IMAGES)
    assert stats(tower).last.hit


@pytest.mark.parametrize("strict", [False, True])
def test_a_bad_call_leaves_nothing_behind(strict: bool) -> None:
    """After a call that eager rejects, good calls are served as before: no graph of the bad call answers them."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower, strict=strict)
    assert_same(compiled, tower, IMAGE)
    pixels = torch.zeros(63, testing.make_inputs(tower, IMAGE)[0].shape[1], device=DEVICE)
    for grid in ([[1, 7, 9]], [[1, 7, 9]]):
        with torch.no_grad():
            with pytest.raises(RuntimeError):
                tower(pixels, grid_thw=tensor(grid))
            with pytest.raises(RuntimeError):
                compiled(pixels, grid_thw=tensor(grid))
    for layout in (IMAGE, TWO_IMAGES, VIDEO):
        assert_same(compiled, tower, layout)
    assert (stats(tower).graphs, stats(tower).hits, stats(tower).calls) == (1, 4, 4)


@pytest.mark.parametrize("grid", [[[1, 4, 6]], [[1, 3, 5]], [[1, -4, -4]]])
def test_a_bad_grid_is_eagers_error_alone(grid: list[list[int]], capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed beside it: graphs are not called as modules, which would show their code."""
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    pixels = testing.make_inputs(tower, ((1, 4, 4),))[0]
    assert_same(compiled, tower, ((1, 4, 4),))
    capfd.readouterr()
    with torch.no_grad(), pytest.raises(RuntimeError):
        compiled(pixels, grid_thw=tensor(grid))
    assert "FX-traced" not in capfd.readouterr().err
    assert stats(tower).fallbacks == {"invalid_grid": 1}


def test_a_failing_self_check_refuses_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket whose result is wrong is refused once, with one warning; every result stays right."""
    from vitcg_backend import capture

    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower)
    original = capture.Capture.replay

    def corrupt(self: capture.Capture, args: object) -> None:
        original(self, args)
        self._results[0][-1] += 1

    monkeypatch.setattr(capture.Capture, "replay", corrupt)
    with pytest.warns(UserWarning, match=r"does not use its bucket of 32 tokens \[self_check\]: result 0 .* relative error"):
        assert_same(compiled, tower, VIDEO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(compiled, tower, VIDEO)
    assert stats(tower).fallbacks == {"self_check": 2}


def test_b44_a_failed_capture_costs_the_caller_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while capturing: eager's result, a reason, no retry, other buckets captured."""
    from vitcg_backend import capture

    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower)
    calls = []

    def fail(self: capture.Capture, args: object, pool: object, warm: bool = False) -> None:
        calls.append(self)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with (
        monkeypatch.context() as patch,
        pytest.warns(UserWarning, match=r"\[capture_failed\]: RuntimeError: CUDA error"),
    ):
        patch.setattr(capture.Capture, "record", fail)
        for _ in range(3):
            assert_same(compiled, tower, VIDEO)
    assert len(calls) == 1
    assert_same(compiled, tower, IMAGE)
    assert (stats(tower).hits, stats(tower).fallbacks) == (1, {"capture_failed": 3})


def test_b47_many_grids_are_bounded() -> None:
    """A hundred random grids: no more captures than budgets, and hits plus reasons are all calls."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, token_budgets=[32, 64, 128])
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        t, h, w = (int(torch.randint(1, high, (1,), generator=generator)) for high in (4, 5, 9))
        assert_same(compiled, tower, ((t, 2 * h, 2 * w),), exact=False)
    counted = stats(tower)
    assert counted.hits + sum(counted.fallbacks.values()) == counted.calls == 100
    assert counted.captures <= 3 * 4


def test_what_was_served_before_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known layout goes straight to its replay, by all checks again once anything that the plan stands on has changed."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    for layout in (IMAGE, MIXED) * 10:  # a layout of several items is counted first
        assert_same(compiled, tower, layout)
    asked = []
    ask = CompiledTower._ask
    monkeypatch.setattr(CompiledTower, "_ask", lambda self, *args: asked.append(args) or ask(self, *args))
    before = stats(tower).hits
    for seed, layout in enumerate((IMAGE, MIXED, MIXED, IMAGE)):
        assert_same(compiled, tower, layout, seed=seed)
    assert not asked
    assert stats(tower).hits == before + 4
    (part,) = live_towers(tower)
    weight = tower.blocks[0].mlp.linear_fc1.weight
    changes = {
        "a layout is forgotten": part.forget_layouts,
        "captures are given back": vitcg_backend.reset,
        "a plan is made anew": lambda: part.planner.learn_uncaptured(IMAGE, 16, 1.0),
        "weights lie elsewhere": lambda: setattr(weight, "data", weight.data * 2),
        "weights lie otherwise": lambda: setattr(weight, "data", weight.data.t().contiguous().t()),
        "kernels are chosen otherwise": lambda: torch.set_float32_matmul_precision("high"),
    }
    try:
        for what, change in changes.items():
            captures = stats(tower).captures
            asked.clear()
            change()
            assert_same(compiled, tower, IMAGE)
            assert len(asked) == 1, what
            captured = stats(tower).captures > captures
            for seed in range(3):
                assert_same(compiled, tower, IMAGE, seed=seed)
            assert len(asked) == (2 if captured else 1), what  # a first use notes nothing
    finally:
        torch.set_float32_matmul_precision("highest")


def test_b45_a_memory_limit_evicts_and_does_not_thrash() -> None:
    """Under a small cap the least recently used capture goes, and results stay right; ten more calls of one size capture
    nothing.
    """
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower, memory_limit_mib=1, token_budgets=[100, 200, 300])
    for tokens in (100, 200, 300, 100, 300):
        assert_same(compiled, tower, ((1, 2, 2 * tokens),))
    assert stats(tower).evictions > 0
    before = stats(tower)
    for _ in range(10):
        assert_same(compiled, tower, ((1, 2, 2 * 300),))
    after = stats(tower)
    assert (after.captures, after.evictions) == (before.captures, before.evictions)


def test_b49_everything_goes_with_the_tower() -> None:
    """A deleted tower leaves no parameter alive through the backend, also without a reset."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower)
    run(compiled, IMAGE)
    parameter = weakref.ref(next(tower.parameters()))
    del tower, compiled
    torch._dynamo.reset()
    gc.collect()
    assert parameter() is None


def test_reset_gives_captures_back() -> None:
    """`vitcg_backend.reset()` drops captures; the next call captures again and is right."""
    tower = tiny_tower("qwen2_vl")
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    vitcg_backend.reset()
    assert_same(compiled, tower, IMAGE)
    assert stats(tower).captures == 2


def test_b72_copies_and_state_dict_after_a_capture() -> None:
    """Compiled in place, a tower keeps its keys; a deepcopy works and is its own tower."""
    tower = tiny_tower("qwen2_vl")
    keys = list(tower.state_dict())
    tower.compile(backend="vitcg", options={"inner": "eager"})
    eager = tiny_tower("qwen2_vl")
    assert_same(tower, eager, IMAGE)
    assert list(tower.state_dict()) == keys
    twin = copy.deepcopy(tower)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
        for p in eager.parameters():
            p.mul_(2)
    assert_same(twin, eager, IMAGE)


class _GivesViews(torch.nn.Module):
    """A packed module with results that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows, their first column and the first row."""
        ids = vision_utils.get_vision_position_ids(grid_thw, 1)
        out = self.linear(pixels) + ids.sum(-1, keepdim=True)
        return out, out[:, 1], out[0]


def test_results_that_share_memory_share_it_in_the_callers_hands() -> None:
    """A write into one result shows in the results that are views of it, as in eager."""
    tower = _GivesViews().to(DEVICE)
    compiled = compile_tower(tower)
    for layout in (((1, 2, 4),), ((1, 2, 4), (1, 4, 4)), ((1, 2, 4),)):
        grid = tensor(layout)
        pixels = torch.randn(int(grid.prod(1).sum()), 8, device=DEVICE)
        with torch.no_grad():
            results = [tower(pixels, grid), compiled(pixels, grid)]
            for out, column, row in results:
                out.add_(1)
                column.mul_(2)
                row[2] = 7
        for expected, result in zip(*results, strict=True):
            torch.testing.assert_close(result, expected)
    assert stats(tower).hits == 3, stats(tower)


def test_a_piece_holds_the_last_reference_to_what_it_reads() -> None:
    """What no later step reads is the piece's to free while it runs: a large call's peak is not above eager's."""
    tower = tiny_tower("qwen2_vl", depth=2)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    (part,) = live_towers(tower)
    original, freed = list(part.body.functions), []

    def watched(function: Any) -> Any:
        def call(arguments: list[Any]) -> Any:
            results = function(arguments)
            given = [weakref.ref(a) for a in arguments if isinstance(a, torch.Tensor)]
            arguments.clear()
            freed.append(sum(ref() is None for ref in given))
            return results

        return call

    part.body.functions[:] = map(watched, original)
    try:
        assert_same(compiled, tower, MIXED)
    finally:
        part.body.functions[:] = original
    assert any(freed)  # not all: pixels and weights are the caller's


def test_what_attention_has_read_is_given_back_before_the_next_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values lie in the largest tensors of a layer but one: kept for a piece longer, they add to the peak."""
    original = capture.run_body
    alive: list[bool] = []

    def watched(body: Any, *args: Any) -> list[Any]:
        read = [step for step in body.program.steps if isinstance(step, AttentionStep)]
        slots = {slot for step in read for slot in (step.query, step.key, step.value)}
        pairs = list(itertools.pairwise([None, *body.program.steps]))
        steps = iter([(a in read, step) for a, step in pairs if step not in read])
        made: list[weakref.ref[Any]] = []

        def watch(function: Any) -> Any:
            def piece(arguments: list[Any]) -> Any:
                attended, step = next(steps)
                if attended:
                    alive.extend(storage() is not None for storage in made)
                results = function(arguments)
                made[:] = [weakref.ref(r.untyped_storage()) for r, s in zip(results, step.outputs, strict=True) if s in slots]
                return results

            return piece

        return original(SimpleNamespace(program=body.program, functions=[watch(f) for f in body.functions]), *args)

    monkeypatch.setattr(capture, "run_body", watched)
    tower = tiny_tower("qwen3_vl", depth=3)
    assert_same(compile_tower(tower), tower, VIDEO)
    assert len(alive) >= 6
    assert not any(alive)
