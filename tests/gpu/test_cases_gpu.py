"""Cases from the field that need a GPU, or two: times beside eager's, memory, devices, errors of a deep tower."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import vitcg_backend
from vitcg_backend import testing
from vitcg_backend.backend import live_towers
from vitcg_backend.testing.image_families import image_families

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

WINDOWS = (((1, 16, 16),), ((1, 8, 32),), ((1, 4, 64),), ((4, 8, 8),), ((16, 4, 4),), ((64, 2, 2),))


def compile_tower(tower: Any, **options: Any) -> Any:
    return torch.compile(tower, backend="vitcg", options={"inner": "eager", "min_tokens": 1, **options})


def milliseconds(function: Any, repeats: int = 15) -> float:
    """Median of a call, host included."""
    times = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


@pytest.mark.slow
def test_b08_windows_of_any_number_are_not_slower_than_eager() -> None:
    """The published Qwen2.5-VL, 8 of its layers: in one bucket with few and with many windows each call is eager's, and at most
    a tenth slower.
    """
    tower = testing.published_tower("qwen2_5_vl", depth=8)
    compiled = torch.compile(tower, backend="vitcg", options={"token_budgets": [64], "min_tokens": 1})
    with torch.no_grad():
        for layout in (*WINDOWS, *WINDOWS):
            pixels, grid = testing.make_inputs(tower, layout)
            output, eager = compiled(pixels, grid_thw=grid), tower(pixels, grid_thw=grid)
            testing.assert_within_budget(output, eager, testing.reference_float64(tower, pixels, grid_thw=grid))
            ours = milliseconds(lambda pixels=pixels, grid=grid: compiled(pixels, grid_thw=grid))
            theirs = milliseconds(lambda pixels=pixels, grid=grid: tower(pixels, grid_thw=grid))
            assert ours <= 1.1 * theirs, (layout, ours, theirs)
    seen = vitcg_backend.stats(tower)
    assert seen.hits == seen.calls


@pytest.mark.parametrize("layout", [((1, 8, 8),) * 500, ((1, 128, 128),)], ids=["500 images", "one picture"])
def test_b30_memory_of_a_large_call_is_not_above_eagers(layout: Any) -> None:
    """Above the largest bucket the peak is at most that of eager, which has no table of all pairs either, and 1 MiB."""
    tower = testing.tiny_tower("qwen2_vl", dtype=torch.bfloat16, device="cuda")
    compiled = compile_tower(tower, token_budgets=[64], max_items=600, inner="inductor")
    pixels, grid = testing.make_inputs(tower, layout)

    def peak(call: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            call(pixels, grid_thw=grid)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for _ in range(2):
        ours, eager = peak(compiled), peak(tower)
    assert ours <= eager + (1 << 20)


def test_b32_a_complex_rotary_that_began_on_the_cpu() -> None:
    """Llama-4 made on the CPU and moved: eager's result from buckets, the buffer complex and on the device."""
    family = next(f for f in image_families() if f.name == "llama4")
    tower = family.tower(dtype=torch.bfloat16).to("cuda")
    compiled = compile_tower(tower, token_budgets=[1, 4])
    for tiles in (1, 3, 4, 1):
        inputs = {name: t.cuda() for name, t in family.inputs(tower, tiles, seed=tiles).items()}
        with torch.no_grad():
            output, eager = compiled(**inputs), tower(**inputs)
        testing.assert_within_budget(output, eager, testing.reference_float64(tower, **inputs))
    assert tower.rotary_embedding.freqs_ci.is_complex()
    assert vitcg_backend.stats(tower).hits == 4
    (part,) = live_towers(tower)
    devices = {n.meta["val"].device.type for n in part.body.bound.placeholders if isinstance(n.meta["val"], torch.Tensor)}
    assert devices == {"cuda"}


def check_on(compiled: Any, tower: Any, layout: Any, seed: int = 0) -> None:
    """One call on the tower's device, within the budget, that leaves the current device as it is."""
    pixels, grid = testing.make_inputs(tower, layout, seed=seed)
    before = torch.cuda.current_device()
    with torch.no_grad():
        output = compiled(pixels, grid_thw=grid)
        assert torch.cuda.current_device() == before
        with torch.cuda.device(pixels.device):
            eager = tower(pixels, grid_thw=grid)
    assert all(t.device == pixels.device for t in testing.flatten(output))
    testing.assert_within_budget(output, eager, testing.reference_float64(tower, pixels, grid_thw=grid))


@two_gpus
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_b40_a_tower_elsewhere_than_the_current_device(inner: str) -> None:
    """On the second GPU while the first is current: captured there, replayed from either, the current device unchanged."""
    tower = testing.tiny_tower("qwen3_vl", dtype=torch.bfloat16, device="cuda:1")
    compiled = compile_tower(tower, inner=inner, min_tokens="auto", token_budgets=[64, 100])
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for seed, layout in enumerate((((1, 16, 16),), ((1, 8, 8), (2, 8, 8)), ((1, 20, 32),))):
                check_on(compiled, tower, layout, seed)
    assert all(key_capture.graph is not None for part in live_towers(tower) for key_capture in part._captures.values())
    seen = vitcg_backend.stats(tower)
    assert set(seen.fallbacks) <= {"uncaptured_is_faster", "over_largest_budget"}
    assert not any("failed" in reason or "self_check" in reason for reason in seen.refusals), seen


@two_gpus
def test_b40_b69_one_tower_a_device_in_turns() -> None:
    """Towers on both GPUs, alternating, whatever device is current when a bucket is captured and when it is replayed."""
    towers = [testing.tiny_tower("qwen2_5_vl", dtype=torch.bfloat16, device=f"cuda:{i}", seed=i) for i in (0, 1)]
    compiled = [compile_tower(tower) for tower in towers]
    for step in range(12):
        with torch.cuda.device(step // 2 % 2):
            check_on(compiled[step % 2], towers[step % 2], WINDOWS[step // 4], step)
    assert all(vitcg_backend.stats(tower).hits == vitcg_backend.stats(tower).calls for tower in towers)


@two_gpus
def test_b69_a_tower_over_two_devices() -> None:
    """Blocks on two GPUs with hooks between them: eager's result and a reason, no bucket."""
    accelerate = pytest.importorskip("accelerate")
    tower = testing.tiny_tower("qwen2_vl", dtype=torch.bfloat16, device="cuda:0")
    places = dict.fromkeys((name for name, _ in tower.named_children()), 0)
    places.pop("blocks")
    places |= {f"blocks.{i}": i % 2 for i in range(len(tower.blocks))}
    tower = accelerate.dispatch_model(tower, places, force_hooks=True)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8),), device="cuda:0")
    with torch.no_grad():
        for _ in range(2):
            for a, b in zip(
                testing.flatten(compiled(pixels, grid_thw=grid)), testing.flatten(tower(pixels, grid_thw=grid)), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert vitcg_backend.stats(tower).hits == 0
    assert vitcg_backend.stats(tower).refusals


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_b70_weights_of_bitsandbytes(kind: str) -> None:
    """4 and 8 bits a weight: what eager makes of the same quantised tower, as a hit or with a reason."""
    layers = pytest.importorskip("bitsandbytes").nn
    tower = testing.tiny_tower("qwen2_vl", dtype=torch.float16)
    how = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {"compute_dtype": torch.float16}
    for block in tower.blocks:
        old = block.mlp.fc1
        block.mlp.fc1 = getattr(layers, kind)(old.in_features, old.out_features, **how)
        block.mlp.fc1.load_state_dict(old.state_dict())
    tower = tower.to("cuda").requires_grad_(False)
    compiled = compile_tower(tower)
    pixels, grid = testing.make_inputs(tower, ((1, 8, 8),))
    with torch.no_grad():
        for _ in range(3):
            output, eager = (testing.flatten(call(pixels, grid_thw=grid)) for call in (compiled, tower))
            for a, b in zip(output, eager, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    seen = vitcg_backend.stats(tower)
    assert seen.hits == seen.calls or seen.refusals


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_b60_errors_do_not_grow_over_32_layers(implementation: str) -> None:
    """1024 patches through 32 layers in bf16: the error against float32 is at most 1.2 times eager's, in any attention."""
    if implementation == "flash_attention_2":
        pytest.importorskip("flash_attn")
    tower = testing.tiny_tower("qwen2_vl", depth=32, dtype=torch.bfloat16, device="cuda", attn_implementation=implementation)
    exact = testing.tiny_tower("qwen2_vl", depth=32, device="cuda")
    with torch.no_grad():
        for a, b in zip(exact.parameters(), tower.parameters(), strict=True):
            a.copy_(b)
    compiled = compile_tower(tower, inner="inductor")
    for layout in (((1, 32, 32),), ((4, 16, 16),), ((1, 16, 16), (3, 16, 16))):
        pixels, grid = testing.make_inputs(tower, layout)
        with torch.no_grad():
            reference = exact(pixels.float(), grid_thw=grid).pooler_output
            errors = [
                float((call(pixels, grid_thw=grid).pooler_output.float() - reference).norm() / reference.norm())
                for call in (compiled, tower)
            ]
        assert errors[0] <= 1.2 * errors[1], (layout, errors)
    assert vitcg_backend.stats(tower).hits == 3
