"""CUDA graphs: what only a GPU can show. The CPU's tests run on it too: ``VITCG_TEST_DEVICE=cuda pytest tests``."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import vitcg_backend
from vitcg_backend import _torch, backend, capture, runtime, testing
from vitcg_backend.attention import KERNELS
from vitcg_backend.backend import replay_of

pytestmark = pytest.mark.gpu

LAYOUTS = (((1, 4, 4),), ((1, 8, 4), (1, 4, 4)), ((2, 8, 8),), ((1, 4, 4), (2, 8, 4)), ((1, 16, 16),), ((16, 4, 4),))
TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def compiled_tower(name: str, *, dtype: torch.dtype = torch.bfloat16, inner: str = "eager", **options):
    tower = testing.tiny_tower(name, dtype=dtype, device="cuda")
    return tower, torch.compile(tower, backend="vitcg", options={"inner": inner, "min_tokens": 1, **options})


def check(compiled, tower, layout, seed: int = 0):
    pixels, grid = testing.make_inputs(tower, layout, seed=seed)
    with torch.no_grad():
        output, eager = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
    testing.assert_within_budget(output, eager, testing.reference_float64(tower, pixels, grid_thw=grid))
    return testing.flatten(output)


def captures(tower) -> list:
    owned = {id(p) for p in tower.parameters()}
    parts = [p for p in backend._live if isinstance(p, runtime.CompiledTower) and p.belongs_to(owned)]
    return [c for part in parts for c in part._captures.values()]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", TOWERS)
def test_calls_are_served_by_cuda_graphs(name: str, inner: str) -> None:
    """Every layout is a hit, each capture is a CUDA graph, results stay within the budget when repeated."""
    tower, compiled = compiled_tower(name, inner=inner)
    for _ in range(2):
        for seed, layout in enumerate(LAYOUTS):
            check(compiled, tower, layout, seed)
    assert vitcg_backend.stats(tower).hits == vitcg_backend.stats(tower).calls == 2 * len(LAYOUTS)
    assert captures(tower)
    assert all(c.graph is not None for c in captures(tower))


def test_what_runs_beside_the_layers_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deepstack features of small captures come from a second stream: the bits are those of one stream, call after call."""
    asked: list[int] = []
    stream = _torch.second_capture_stream
    monkeypatch.setattr(_torch, "second_capture_stream", lambda index: asked.append(index) or stream(index))
    results: dict[int, list] = {}
    for most in (0, 64):
        monkeypatch.setattr(capture, "BESIDE", most)
        torch._dynamo.reset()
        tower, compiled = compiled_tower("qwen3_vl", inner="inductor")
        results[most] = [check(compiled, tower, layout, seed) for _ in range(3) for seed, layout in enumerate(LAYOUTS)]
        sizes = [c.bucket.patches for c in captures(tower)]
        assert len(asked) == sum(size <= most for size in sizes)
        assert vitcg_backend.stats(tower).hits == 3 * len(LAYOUTS)
    assert 0 < len(asked) < len(sizes)
    for one, other in zip(*results.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_failure_beside_the_layers_costs_the_caller_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that breaks off while the second stream is part of it is refused; the next one, of another size, is made."""
    tower, compiled = compiled_tower("qwen3_vl", token_budgets=[16, 64])
    body = None
    run = capture.run_body

    def fails(*args, **kwargs):
        nonlocal body
        body = args[0]
        if torch.cuda.is_current_stream_capturing() and args[2] == 16:
            original = list(body.functions)
            aside = next(step.piece for step in body.program.steps if getattr(step, "aside", False))
            body.functions[aside] = lambda arguments: [*original[aside](arguments), torch.zeros(1, device="cuda").item()]
            try:
                return run(*args, **kwargs)
            finally:
                body.functions[:] = original
        return run(*args, **kwargs)

    monkeypatch.setattr(capture, "run_body", fails)
    with pytest.warns(UserWarning, match=r"does not use its bucket of 16 tokens \[capture_failed\]"):
        check(compiled, tower, ((1, 8, 8),))
    for _ in range(2):
        check(compiled, tower, ((1, 8, 8),))
        check(compiled, tower, ((1, 16, 16),))
    seen = vitcg_backend.stats(tower)
    assert seen.captures == 1
    assert seen.hits >= 2


@pytest.mark.parametrize("name", TOWERS)
def test_metadata_is_made_on_the_host_by_frame(name: str) -> None:
    """Also where the first layout has a padded tail: what a capture reads lies in one pinned buffer, nothing on the device."""
    tower, compiled = compiled_tower(name, token_budgets=[64])
    for layout in (((1, 8, 8), (1, 4, 8)), ((1, 4, 8), (1, 8, 8), (1, 4, 8))):
        check(compiled, tower, layout)
    (part,) = backend.live_towers(tower)
    assert part._layouts._by_frame is not None
    packed = [values for values in part._layouts._values.values() if values.packed is not None]
    assert len(packed) == 2
    assert all(values.packed.is_pinned() and values.stream is None for values in packed)


@pytest.mark.parametrize("attention", ["triton", "torch", "flash_attn", "flashinfer", "auto"])
def test_attention_kernels(attention: str) -> None:
    """Each capturable kernel serves the three towers, and so does what is measured to be the fastest."""
    reason = None if attention == "auto" else KERNELS[attention].unusable(torch.device("cuda"), torch.bfloat16, 16)
    if reason is not None:
        pytest.skip(f"{attention}: {reason}")
    for name in TOWERS:
        tower, compiled = compiled_tower(name, attention=attention)
        for layout in (*LAYOUTS, *LAYOUTS):
            check(compiled, tower, layout)
        assert vitcg_backend.stats(tower).fallbacks == {}


def test_b04_nan_of_one_call_and_of_the_pool_reaches_nobody() -> None:
    """NaN in freed memory before the captures, and NaN pixels between clean calls of several buckets."""
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del junk
    tower, compiled = compiled_tower("qwen2_5_vl")
    for layout in (((1, 4, 4),), ((1, 34, 32),), ((1, 4, 4),), ((1, 16, 16),)):
        check(compiled, tower, layout)
        pixels, grid = testing.make_inputs(tower, layout)
        with torch.no_grad():
            compiled(torch.full_like(pixels, float("nan")), grid_thw=grid)
        assert all(t.isfinite().all() for t in check(compiled, tower, layout))


def test_b36_two_streams_without_a_sync() -> None:
    """Calls from alternating streams, pixels made there, outputs read late: nothing is overwritten too early."""
    tower, compiled = compiled_tower("qwen3_vl")
    inputs = [testing.make_inputs(tower, ((1, 16, 16),), seed=seed) for seed in range(8)]
    with torch.no_grad():
        expected = [testing.flatten(compiled(p, grid_thw=g)) for p, g in inputs]
        expected = [testing.flatten(compiled(p, grid_thw=g)) for p, g in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        for step in range(500):
            pixels, grid = inputs[step % 8]
            with torch.cuda.stream(streams[step % 2]):
                results.append((step % 8, testing.flatten(compiled(pixels.clone(), grid_thw=grid))))
        torch.cuda.synchronize()
    for number, outputs in results:
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected[number], strict=True))


def test_b41_another_thread_pins_memory_during_captures() -> None:
    """A loader thread's pin_memory and copies neither break a capture nor are broken by it."""
    tower, compiled = compiled_tower("qwen2_vl")
    check(compiled, tower, ((1, 4, 4),))
    stop, errors = threading.Event(), []

    def load() -> None:
        try:
            while not stop.is_set():
                torch.randn(1 << 16).pin_memory().to("cuda", non_blocking=True)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for side in (8, 12, 16, 20, 24):
            check(compiled, tower, ((1, side, side),))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert vitcg_backend.stats(tower).fallbacks == {}


def test_b43_first_cuda_work_of_a_process_is_a_call() -> None:
    """Nothing warmed up: the first call of a fresh process captures and is right."""
    script = textwrap.dedent(
        """
        import torch
        from vitcg_backend import testing
        import vitcg_backend
        tower = testing.tiny_tower("qwen3_vl", dtype=torch.bfloat16, device="cuda")
        compiled = torch.compile(tower, backend="vitcg", options={"inner": "eager"})
        pixels, grid = testing.make_inputs(tower, ((1, 8, 8),))
        with torch.no_grad():
            for _ in range(2):
                out = compiled(pixels, grid_thw=grid)
            testing.assert_within_budget(
                out, tower(pixels, grid_thw=grid), testing.reference_float64(tower, pixels, grid_thw=grid))
        assert vitcg_backend.stats(tower).hits == 2, vitcg_backend.stats(tower)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_b44_a_host_sync_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails in the middle: eager's result, CUDA healthy, other buckets captured, no retry."""
    from vitcg_backend import capture

    tower, compiled = compiled_tower("qwen2_vl")
    original = capture.run_body

    def with_sync(*args):
        results = original(*args)
        float(results[0].sum())
        return results

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="capture_failed"):
        patch.setattr(capture, "run_body", with_sync)
        for _ in range(3):
            check(compiled, tower, ((2, 8, 8),))
    torch.randn(8, device="cuda").sum().item()
    assert not torch.cuda.is_current_stream_capturing()
    check(compiled, tower, ((1, 4, 4),))
    counted = vitcg_backend.stats(tower)
    assert (counted.hits, counted.fallbacks) == (1, {"capture_failed": 3})


def test_b46_no_sync_after_the_grid_is_read() -> None:
    """A call on a layout seen before waits for the device only to read the grid; with the grid on the host, never."""
    tower, compiled = compiled_tower("qwen3_vl")
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8),))
    (capture,) = [check(compiled, tower, ((1, 8, 8),)) and captures(tower)[0]]
    owned = {id(p) for p in tower.parameters()}
    part = next(p for p in backend._live if isinstance(p, runtime.CompiledTower) and p.belongs_to(owned))
    with torch.no_grad():
        compiled(pixels, grid_thw=grid)
        values = next(v for k, v in part._layouts._values.items() if k[3] is not None)
        arguments = [None] * len(part.body.bound.placeholders)
        arguments[part.body.bound.pixels] = pixels
        torch.cuda.set_sync_debug_mode("error")
        try:
            capture.write(arguments, values, 64)
            capture.replay(arguments)
            capture.copy_out(64)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_b49_memory_comes_back() -> None:
    """Rounds of create, use and delete leave memory where it was."""

    def round_trip() -> None:
        tower, compiled = compiled_tower("qwen2_vl")
        for layout in LAYOUTS:
            check(compiled, tower, layout)
        del tower, compiled
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()

    round_trip()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        round_trip()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_replay_alone_refuses_the_static_inputs_of_another_capture() -> None:
    """What `replay_of` gives would read the tables of another bucket out of bounds once that has served a call."""
    tower, compiled = compiled_tower("qwen3_vl", token_budgets=[16, 32], min_tokens=1)
    for layout in (((1, 8, 16),), ((1, 8, 8),)):
        for _ in range(2):  # the self-check of the first use leaves other metadata behind
            check(compiled, tower, layout)
        replay = replay_of(tower)
        replay()
    check(compiled, tower, ((1, 8, 16),))
    with pytest.raises(RuntimeError, match="do not hold a call of the capture of 16 tokens"):
        replay()
    replay_of(tower)()
    torch.cuda.synchronize()


def test_b50_buckets_share_one_pool() -> None:
    """Six buckets captured small to large, or large to small, take about what the largest takes, not the sum; counters tell."""

    def reserved(sides: tuple[int, ...]) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        tower, compiled = compiled_tower("qwen2_vl")
        for side in sides:
            pixels, grid = testing.make_inputs(tower, ((1, side, side),))
            with torch.no_grad():
                compiled(pixels, grid_thw=grid)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        after = torch.cuda.memory_reserved() - before
        assert sum(bucket.pool_bytes for bucket in vitcg_backend.stats(tower).buckets.values()) > 0
        del tower, compiled
        torch._dynamo.reset()
        return after

    alone = reserved((128,))
    for sides in ((96, 104, 112, 116, 120, 128), (128, 120, 116, 112, 104, 96)):
        assert reserved(sides) <= 2.5 * alone + (64 << 20)
