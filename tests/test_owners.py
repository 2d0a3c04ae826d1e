"""Whose graph it is: a tower's counters and reasons are found, whatever its weights are and Dynamo makes of its code."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from common import DEVICE, compile_tower, stats
from torch import Tensor, nn


class NoParameters(nn.Module):
    """Nothing but code."""

    def forward(self, x: Tensor) -> Tensor:
        """A sine."""
        return x.sin()


class PlainTensors(nn.Module):
    """A weight that is an attribute, neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(8, 8, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        return x @ self.weight


class Buffers(nn.Module):
    """A weight that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 8, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        return x @ self.weight


class Inner(PlainTensors):
    """Whatever is compiled by itself where the outer code cannot be."""


class GivenUp(nn.Module):
    """A graph break where Dynamo cannot go on after it: this code runs in eager mode, its submodule does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        """A product, and a break of the graph inside ``try``."""
        try:
            torch._dynamo.graph_break()
            return self.inner(x)
        finally:
            self.seen = True


class Broken(nn.Module):
    """Code that reads a value: two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        """A sine, and one more or less."""
        y = x.sin()
        return y + 1 if y.sum().tolist() > 0 else y - 1


class Disabled(nn.Module):
    """Code that Dynamo is told to leave alone."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """A sine."""
        return x.sin()


def call(tower: nn.Module) -> None:
    compiled = compile_tower(tower)
    x = torch.randn(4, 8, device=DEVICE)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(x), tower(x))


@pytest.mark.parametrize("make", [NoParameters, PlainTensors, Buffers, Inner])
def test_a_graph_without_parameters_is_found(make: Callable[[], nn.Module]) -> None:
    """Calls and the reason are the tower's, and no other tower's."""
    tower = make()
    call(tower)
    assert (stats(tower).graphs, stats(tower).fallbacks) == (1, {"pixels": 2})
    assert "symbolic number of rows" in stats(tower).refusals["pixels"]
    other = NoParameters()
    assert (stats(other).calls, set(stats(other).refusals)) == (0, {"no_graph"})


def test_towers_of_one_class_share_an_ordinary_graph_and_its_reason() -> None:
    """Dynamo traces the first of them alone; the second is found by its weights, and by nothing once it is gone."""
    first, second = nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE)
    call(first)
    call(second)
    assert stats(first).graphs == stats(second).graphs == 1
    assert stats(second).fallbacks == {"pixels": 4}
    third = nn.Linear(8, 8, device=DEVICE)
    assert stats(third).calls == 0
    del first
    gc.collect()
    assert stats(second).calls == 4


def test_code_that_dynamo_gives_up_is_named() -> None:
    """The tower's own code reaches no backend: its line and Dynamo's words are there beside its submodule's counters."""
    tower = GivenUp()
    call(tower)
    seen = stats(tower)
    assert (seen.graphs, seen.calls) == (1, 2)
    assert "Dynamo gives forward up at test_owners.py:" in seen.refusals["not_traced"]
    assert "graph_break" in seen.refusals["not_traced"]
    assert "not_traced" in str(seen)
    assert "not_traced" not in stats(tower.inner).refusals  # its own code was traced


def test_parts_of_a_tower_say_where_it_is_broken() -> None:
    """The graph before a break names its line, the graph after it the function that goes on."""
    tower = Broken()
    call(tower)
    refusals = stats(tower).refusals
    assert "y.sum().tolist()" in refusals["graph_break"]
    assert "torch_dynamo_resume_in_forward_at_" in refusals["after_graph_break"]  # which holds no module of the tower
    assert stats(tower).calls == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tower_that_gave_no_graph_says_so(compiled: bool) -> None:
    """Never called, or left to eager mode: no counters, and a text that says what may be the matter."""
    tower = Disabled()
    if compiled:
        call(tower)
    seen = stats(tower)
    assert (seen.calls, seen.graphs) == (0, 0)
    assert "no graph of this tower has reached the backend" in seen.refusals["no_graph"]


def test_an_error_of_the_caller_is_no_reason() -> None:
    """A call that eager rejects raises, and is not told as code that Dynamo gives up."""
    tower = nn.Sequential(Inner())
    call(tower)
    with torch.no_grad(), pytest.raises(RuntimeError):
        compile_tower(tower)(torch.randn(4, 7, device=DEVICE))
    assert "not_traced" not in stats(tower).refusals
