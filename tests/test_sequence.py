"""The sequence test: a seeded machine mixes grids, modes, weight edits, held outputs, failures and resets.

Every step is eager's. A failure prints the shortest sequence of steps that still fails, as found by leaving steps out.
``VITCG_STEPS=20000`` runs longer; a step on a GPU takes a tenth of a second or two, most of it for the float64 reference.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import DEVICE, assert_equal, compile_tower, tiny_tower
from torch import Tensor, nn

import vitcg_backend
from vitcg_backend import capture, testing

STEPS = int(os.environ.get("VITCG_STEPS", "1000" if DEVICE == "cpu" else "200"))
_SHORTEN_S = 120.0  # most seconds that are spent on finding a shorter sequence
Step = tuple[str, int]


class Machine:
    """Two towers of one class, one set of options, and what earlier calls returned."""

    def __init__(self, name: str, depth: int) -> None:
        torch._dynamo.reset()
        self.eager = [tiny_tower(name, depth=depth, seed=seed) for seed in (1, 2)]
        options = {"token_budgets": [8, 16, 24, 48, 96], "memory_limit_mib": 1}
        self.compiled = [compile_tower(tower, **options) for tower in self.eager]
        self.lanes = [vitcg_backend.fast_lane(tower) for tower in self.compiled]
        self.held: list[tuple[list[Tensor], list[Tensor]]] = []
        self.fail_captures = 0

    def step(self, kind: str, seed: int) -> None:
        """Do one step; raises AssertionError where a result is not eager's."""
        getattr(self, kind)(random.Random(seed))

    def call(self, rng: random.Random) -> None:
        """A call of one of the towers or of its lane, in one of the modes."""
        which = rng.randrange(2)
        mode = rng.choice([torch.no_grad, torch.no_grad, torch.inference_mode])
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=rng.random() < 0.2)
        pixels, grid = testing.make_inputs(self.eager[which], layout(rng), seed=rng.randrange(1000))
        if rng.random() < 0.05:
            pixels = torch.full_like(pixels, float("nan"))
        callee = rng.choice([self.compiled, self.lanes])[which]
        with mode(), autocast:
            output = callee(pixels, grid_thw=grid)
            self.compare(output, self.eager[which](pixels, grid_thw=grid), which, pixels, grid)
        if rng.random() < 0.1:
            tensors = testing.flatten(output)
            self.held.append((tensors, [t.clone() for t in tensors]))
            del self.held[:-20]

    def compare(self, output: Any, expected: Any, which: int, pixels: Tensor, grid: Tensor) -> None:
        """Equal to eager: a few ulps on a CPU, where padding may change how a row is multiplied; the budget on a GPU."""
        if DEVICE != "cpu":
            assert_equal(output, expected, self.eager[which], pixels, grid_thw=grid)
            return
        for a, b in zip(testing.flatten(output), testing.flatten(expected), strict=True):
            assert a.dtype == b.dtype
            limit = 2e-2 if a.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu") else 1e-4
            finite = b[b.isfinite()]
            largest = float(finite.abs().max()) if finite.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=limit, atol=limit * largest, equal_nan=True)

    def train(self, rng: random.Random) -> None:
        """A call with gradients, on the compiled tower and on eager."""
        which = rng.randrange(2)
        pixels, grid = testing.make_inputs(self.eager[which], layout(rng), seed=rng.randrange(1000))
        tower = self.eager[which]
        grads = [gradients(self.compiled[which], tower, pixels, grid), gradients(tower, tower, pixels, grid)]
        if DEVICE != "cpu":
            exact = copy.deepcopy(tower).double()
            testing.assert_within_budget(*grads, gradients(exact, exact, pixels.double(), grid))
            return
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

    @torch.no_grad()
    def edit(self, rng: random.Random) -> None:
        """Change weights or a buffer in one of the ways that people do."""
        which = rng.randrange(2)
        tower = self.eager[which]
        parameter = rng.choice(list(tower.parameters()))
        factor = rng.choice([0.9, 1.1])
        way = rng.randrange(5)
        if way == 0:
            parameter.mul_(factor)
        elif way == 1:
            parameter.data = parameter.data * factor
        elif way == 2:
            module = rng.choice([m for m in tower.modules() if isinstance(m, nn.Linear)])
            module.weight = nn.Parameter(module.weight * factor)
            self.lanes[which].forget()  # the one kind of edit that a lane has to be told of
        elif way == 3:
            assign = rng.random() < 0.5
            tower.load_state_dict({k: v * factor for k, v in tower.state_dict().items()}, assign=assign)
            if assign:
                self.lanes[which].forget()
        else:
            for buffer in tower.buffers():
                buffer.mul_(factor)

    def look_again(self, rng: random.Random) -> None:
        """What earlier calls returned has not changed."""
        for now, then in self.held:
            for a, b in zip(now, then, strict=True):
                assert torch.equal(a.nan_to_num(), b.nan_to_num()), "an earlier result changed"

    def scribble(self, rng: random.Random) -> None:
        """A caller writes into what it got; nothing later may show it."""
        if self.held:
            with torch.inference_mode():
                for tensor in self.held.pop(rng.randrange(len(self.held)))[0]:
                    tensor.fill_(float("nan"))

    def reset(self, rng: random.Random) -> None:
        """Give all captures back."""
        vitcg_backend.reset()

    def break_captures(self, rng: random.Random) -> None:
        """The next captures fail: what they were for is refused until everything is given back."""
        self.fail_captures = rng.randint(1, 2)


def gradients(called: Any, tower: nn.Module, pixels: Tensor, grid: Tensor) -> list[Tensor]:
    """Of the parameters of `tower`, by a call of it or of what it was compiled to."""
    tower.zero_grad()
    called(pixels, grid_thw=grid).pooler_output.square().mean().backward()
    return [p.grad.clone() for p in tower.parameters() if p.grad is not None]


def layout(rng: random.Random) -> tuple[tuple[int, int, int], ...]:
    """One to three images or videos, some of which fit no bucket."""
    return tuple((rng.choice([1, 1, 2, 3]), 2 * rng.randint(1, 5), 2 * rng.randint(1, 5)) for _ in range(rng.randint(1, 3)))


def sequence(seed: int, steps: int) -> list[Step]:
    """Step kinds and their own seeds."""
    rng = random.Random(seed)
    kinds = ["call"] * 60 + ["edit"] * 8 + ["look_again"] * 4 + ["scribble"] * 2 + ["train", "reset", "break_captures"]
    return [(rng.choice(kinds), rng.randrange(1 << 30)) for _ in range(steps)]


def first_failure(
    name: str, steps: list[Step], patch: Callable[[Machine], Any], depth: int = 2
) -> tuple[int, BaseException] | None:
    """Run the steps on a new machine: (number of the step that failed, its error), or None."""
    machine = Machine(name, depth)
    with patch(machine), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bucket that is refused warns once; that is tested elsewhere
        for number, step in enumerate(steps):
            try:
                machine.step(*step)
            except Exception as error:  # any error is a failure
                return number, error
    return None


def shortest(steps: list[Step], fails: Callable[[list[Step]], bool], tries: int = 24) -> list[Step]:
    """Leave out halves, quarters, … as long as the rest still fails."""
    size, until = len(steps) // 2, time.monotonic() + _SHORTEN_S
    while size and tries:
        start = 0
        while start < len(steps) and tries and time.monotonic() < until:
            shorter = steps[:start] + steps[start + size :]
            tries -= 1
            if shorter and fails(shorter):
                steps = shorter
            else:
                start += size
        size //= 2
    return steps


@contextlib.contextmanager
def failing_captures(machine: Machine) -> Any:
    """As many captures raise as the machine says."""
    original = capture.Capture.record

    def record(self: capture.Capture, args: Any, pool: Any, warm: bool = False) -> None:
        if machine.fail_captures:
            machine.fail_captures -= 1
            raise RuntimeError("CUDA out of memory")
        original(self, args, pool, warm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture.Capture, "record", record)
        yield


@pytest.mark.parametrize(("name", "depth"), [("qwen2_5_vl", 2), ("qwen3_vl", 1)])  # windows and full attention; deepstack
def test_every_step_of_a_long_sequence_is_eagers(name: str, depth: int) -> None:
    """Hundreds of mixed steps, none wrong."""
    steps = sequence(seed=0, steps=STEPS)
    failure = first_failure(name, steps, failing_captures, depth)
    if failure is not None:
        number, error = failure
        kept = shortest(steps[: number + 1], lambda s: first_failure(name, s, failing_captures, depth) is not None)
        raise AssertionError(f"step {number} {steps[number]}: {error}\nshortest sequence that fails: {kept}")


def test_the_machine_notices_a_wrong_step() -> None:
    """A machine whose captures return stale rows fails, and the sequence that shows it is short."""

    @contextlib.contextmanager
    def stale(machine: Machine) -> Any:
        def write(self: capture.Capture, args: Any, values: Any, rows: int) -> None:
            if not self.written:  # the fault: only the first call's pixels are ever copied in
                original(self, args, values, rows)
                self.written = True

        original = capture.Capture.write
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capture.Capture, "written", False, raising=False)
            patch.setattr(capture.Capture, "write", write)
            yield

    steps = [step for step in sequence(seed=1, steps=60) if step[0] == "call"]
    failure = first_failure("qwen2_vl", steps, stale, depth=1)
    assert failure is not None
    kept = shortest(steps[: failure[0] + 1], lambda s: first_failure("qwen2_vl", s, stale, depth=1) is not None, tries=2)
    assert len(kept) < len(steps)
