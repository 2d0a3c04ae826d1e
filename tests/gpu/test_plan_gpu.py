"""Plans on a GPU: packed and split calls from CUDA graphs, measured costs, no clock in a steady call, memory of a large one."""

from __future__ import annotations

import pytest
import torch

import vitcg_backend
from vitcg_backend import testing
from vitcg_backend.backend import live_towers

pytestmark = pytest.mark.gpu

PACKED = (
    ((1, 8, 8), (1, 4, 6), (2, 8, 8), (1, 6, 6), (1, 8, 8)),
    ((9, 8, 8),),
    ((1, 4, 4), (7, 8, 8), (1, 6, 6)),
)


def compiled_tower(name: str, **options):
    tower = testing.tiny_tower(name, dtype=torch.bfloat16, device="cuda")
    return tower, torch.compile(tower, backend="vitcg", options={"inner": "eager", **options})


def check(compiled, tower, layout, seed: int = 0) -> None:
    pixels, grid = testing.make_inputs(tower, layout, seed=seed)
    with torch.no_grad():
        output, eager = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
    testing.assert_within_budget(output, eager, testing.reference_float64(tower, pixels, grid_thw=grid))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_packed_and_split_calls(name: str) -> None:
    """Several replays a call, in order, twice over, without a reason for a slower path."""
    tower, compiled = compiled_tower(name, token_budgets=[16, 32, 40], max_items=4, min_tokens=1, strict=True)
    for seed in range(2):
        for layout in PACKED:
            check(compiled, tower, layout, seed)
            assert len(vitcg_backend.stats(tower).last.replays) > 1


def test_two_streams_and_packed_calls() -> None:
    """Packed calls from alternating streams: joined results are complete before the buckets are written again."""
    tower, compiled = compiled_tower("qwen3_vl", token_budgets=[16, 32, 40], min_tokens=1)
    inputs = [testing.make_inputs(tower, layout, seed=seed) for seed in range(3) for layout in PACKED]
    with torch.no_grad():
        expected = [testing.flatten(compiled(p, grid_thw=g)) for p, g in inputs]
        expected = [testing.flatten(compiled(p, grid_thw=g)) for p, g in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        for step in range(100):
            pixels, grid = inputs[step % len(inputs)]
            with torch.cuda.stream(streams[step % 2]):
                results.append((step % len(inputs), testing.flatten(compiled(pixels.clone(), grid_thw=grid))))
        torch.cuda.synchronize()
    for number, outputs in results:
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected[number], strict=True))


def test_measured_costs() -> None:
    """By default a bucket is timed at its first use; a graph of a launch-bound tower is the faster path."""
    tower, compiled = compiled_tower("qwen3_vl")
    for layout in (((1, 16, 16),), ((2, 8, 8),), ((1, 16, 16),)):
        check(compiled, tower, layout)
    counted = vitcg_backend.stats(tower)
    assert counted.hits == counted.calls
    for bucket in counted.buckets.values():
        assert 0 < bucket.copy_s < bucket.uncaptured_s
        assert 0 < bucket.replay_s < bucket.uncaptured_s


def test_a_steady_call_is_not_timed() -> None:
    """After the first use of its buckets a packed call asks no clock."""
    tower, compiled = compiled_tower("qwen3_vl", token_budgets=[16, 32, 40])
    pixels, grid = testing.make_inputs(tower, PACKED[0])
    with torch.no_grad():
        for _ in range(4):
            compiled(pixels, grid_thw=grid)
        (part,) = live_towers(tower)
        clock = part._time
        part._time = lambda *runs: pytest.fail("a steady call was timed")
        try:
            for _ in range(4):
                compiled(pixels, grid_thw=grid)
        finally:
            part._time = clock


def test_peak_memory_of_an_oversize_call() -> None:
    """Cut at items and frames or not, a call above the largest budget takes no more memory than eager."""
    tower, compiled = compiled_tower("qwen3_vl", token_budgets=[64, 256], min_tokens=1)
    for layout in (((1, 16, 16),) * 40, ((60, 16, 16),), ((1, 128, 128),)):
        pixels, grid = testing.make_inputs(tower, layout)
        peaks = []
        with torch.no_grad():
            for run in (tower, compiled, compiled):
                run(pixels, grid_thw=grid)
                torch.cuda.synchronize()
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run(pixels, grid_thw=grid)
                torch.cuda.synchronize()
                peaks.append(torch.cuda.max_memory_allocated() - held)
        assert peaks[-1] <= peaks[0] * 1.02, (layout, peaks)


@pytest.mark.parametrize("windows", [((4, 4, 4), (1, 8, 8)), ((1, 4, 4),) * 40, ((1, 6, 10),) * 17])
def test_a_warmed_bucket_takes_layouts_with_more_segments(windows) -> None:
    """The picture that a bucket is warmed up with has whole windows; small or odd pictures cut the rows into far more."""
    tower, compiled = compiled_tower("qwen2_5_vl", token_budgets=[256], capture="warmup", min_tokens=1, strict=True)
    vitcg_backend.warmup(compiled)
    check(compiled, tower, windows)
    assert vitcg_backend.stats(tower).last.hit


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_large_bucket_warmed_up_by_several_pictures(name: str) -> None:
    """It serves one picture of its whole size, a clip and many small pictures, from the one capture."""
    tower, compiled = compiled_tower(name, token_budgets=[1088], capture="warmup", min_tokens=1, strict=True)
    assert vitcg_backend.warmup(compiled).captured == (1088,)
    for layout in (((1, 64, 68),), ((17, 16, 16),), ((1, 8, 8),) * 60, ((1, 64, 64),)):
        check(compiled, tower, layout)
        assert vitcg_backend.stats(tower).last.hit
    assert vitcg_backend.stats(tower).captures == 1


def test_a_bucket_is_captured_without_another_run_where_its_check_has_run_as_many_rows() -> None:
    """The unpadded run warms up for the capture; replays of other layouts, new weights and other sizes are right after it."""
    tower, compiled = compiled_tower("qwen3_vl", min_tokens=1, strict=True)
    for layout in (((1, 16, 16),), ((4, 8, 8),), ((1, 8, 16), (1, 8, 16)), ((1, 12, 16),), ((1, 16, 16),)):
        check(compiled, tower, layout)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.01)
    check(compiled, tower, ((1, 16, 16),), seed=1)


def test_warmup() -> None:
    """The whole ladder, largest first: bytes and seconds are reported, and later calls capture nothing."""
    tower, compiled = compiled_tower("qwen2_5_vl", token_budgets=[16, 64, 256], capture="warmup")
    warmed = vitcg_backend.warmup(compiled)
    assert warmed.captured == (256, 64, 16)
    assert warmed.bytes > 0
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held  # of the uncaptured runs nothing is left
    before = vitcg_backend.stats(tower).captures
    for layout in (((1, 8, 8),), ((1, 16, 16),), ((1, 4, 4),) * 4, ((4, 4, 4), (1, 8, 8))):
        check(compiled, tower, layout)
        assert vitcg_backend.stats(tower).last.reason in (None, "uncaptured_is_faster")
    assert vitcg_backend.stats(tower).captures == before
