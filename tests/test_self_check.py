"""The self-check: each of its parts catches a fault that no other part does, and its cost is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import DEVICE, MIXED, assert_same, compile_tower, stats, tiny_tower
from torch import Tensor

import vitcg_backend
from vitcg_backend import _torch, capture, runtime
from vitcg_backend.self_check import disagreement

# Each fault takes (capture, results of its run) and returns what a faulty body would have computed.


def _reads_padded_pixels(it: Any, results: list[Any]) -> list[Any]:
    return [results[0] + 0 * it.pixels[-1].sum(), *results[1:]]


def _reads_unwritten_memory(it: Any, results: list[Any]) -> list[Any]:
    scratch = results[0].new_empty(1 << 24)  # so large that it is new memory of the system, which is zero
    return [results[0] + torch.where(scratch[0].isnan(), 1.0, 0.0), *results[1:]]


def _reads_the_last_position(it: Any, results: list[Any]) -> list[Any]:
    positions = it.tensors[it.copied[0]]  # of four items of 4 x 4 patches, the last of them the dummy: the last rows are equal
    return [results[0] + (positions[-1] - positions[47]).abs().sum(), *results[1:]]


FAULTS = {
    "padded pixels": (_reads_padded_pixels, "fill_tail"),
    "unwritten memory": (_reads_unwritten_memory, "UnwrittenIsNan"),
    "padded metadata": (_reads_the_last_position, "turn_tails"),
}


def inject(patch: pytest.MonkeyPatch, fault: Any) -> None:
    original = capture.Capture.run
    patch.setattr(capture.Capture, "run", lambda self, args, *more: fault(self, original(self, args, *more)))


class Nothing:
    """In place of the part that is taken out."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


@pytest.mark.parametrize("name", FAULTS)
def test_each_part_catches_a_fault_that_no_other_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all parts on, the bucket is refused and the result is eager's; with that part taken out the fault goes unseen."""
    fault, part = FAULTS[name]
    layout = ((1, 4, 4), (1, 4, 4), (1, 4, 4))
    tower = tiny_tower("qwen2_vl", depth=1)
    compiled = compile_tower(tower, token_budgets=[16])
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"\[self_check\]"):
        inject(patch, fault)
        assert_same(compiled, tower, layout)
    assert stats(tower).fallbacks == {"self_check": 1}

    if part == "UnwrittenIsNan" and DEVICE != "cpu":
        return  # what is in a graph's pool is anything but right there
    vitcg_backend.reset()  # what was captured and refused; the graph serves the other tower, too
    other = tiny_tower("qwen2_vl", depth=1, seed=1)
    compiled = compile_tower(other, token_budgets=[16])
    with monkeypatch.context() as patch:
        inject(patch, fault)
        if part == "UnwrittenIsNan":
            patch.setattr(_torch, part, Nothing)
        else:
            patch.setattr(capture.Capture, part, lambda *_: None)
        assert_same(compiled, other, layout)
    assert (stats(other).graphs, stats(other).hits) == (1, 1)


def test_the_last_row_is_looked_at_by_itself() -> None:
    """A fault in the last row alone drowns in the norm of many rows, on whichever axis the rows are."""
    expected = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    wrong = expected.clone()
    wrong[-1] *= 1.01
    assert (wrong - expected).norm() < 1e-3 * expected.norm()
    assert disagreement(wrong, expected) == "relative error 1.00e-02 over the last row, allowed 1e-03"
    assert disagreement(wrong.t(), expected.t(), axis=1) == "relative error 1.00e-02 over the last row, allowed 1e-03"
    assert disagreement(expected, expected) is None


def test_non_finite_values_must_be_where_they_were() -> None:
    """NaN where the unpadded run has none is a disagreement; NaN of the input's own is not."""
    expected = torch.ones(4, 4)
    wrong = expected.clone()
    wrong[0, 0] = float("nan")
    assert disagreement(wrong, expected) == "1 values are not finite where the unpadded run's are"
    assert disagreement(wrong, wrong.clone()) is None


def test_what_is_spoilt_is_clean_for_the_next_call() -> None:
    """After the check the bucket serves the same layout again, and its cost is counted once."""
    tower = tiny_tower("qwen2_5_vl", depth=2)
    compiled = compile_tower(tower, token_budgets=[32])
    seconds: list[float] = []
    for _ in range(3):
        results: list[Tensor] = assert_same(compiled, tower, MIXED)
        assert all(r.isfinite().all() for r in results)
        seconds.append(stats(tower).buckets[32].self_check_s)
    assert 0 < seconds[0] == seconds[1] == seconds[2] <= stats(tower).buckets[32].capture_s
    assert stats(tower).hits == 3


def test_what_stays_is_made_before_the_unpadded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture's buffers: made after it they would lie in memory that the run has left, and keep all of that."""
    made: list[str] = []
    view, run = capture.Arena.view, runtime.run_body
    monkeypatch.setattr(capture.Arena, "view", lambda self, *args: (made.append("buffer"), view(self, *args))[1])
    monkeypatch.setattr(runtime, "run_body", lambda *args: (made.append("run"), run(*args))[1])
    tower = tiny_tower("qwen2_vl", depth=1)
    assert_same(compile_tower(tower, token_budgets=[16]), tower, ((1, 4, 4),))
    assert "run" in made
    assert made.index("run") > max(i for i, what in enumerate(made) if what == "buffer")
