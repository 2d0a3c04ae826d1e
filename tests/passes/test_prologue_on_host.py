"""prologue_on_host: the same prologue with every device the host, or none where the host might give other numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import hoisted, metadata, positions, targets
from torch import Tensor

from vitcg_backend import ops
from vitcg_backend.passes.graph import Role
from vitcg_backend.passes.prologue_on_host import _INTEGER, _INTERPOLATION, prologue_on_host

UTILS = "tests.vision_utils."  # in the place of transformers' own, which other tests use
ops.register_function(f"{UTILS}get_vision_position_ids", positions)
ops.register_function(
    f"{UTILS}get_vision_interpolation_indices_and_weights", lambda grid, mode: positions(grid) * (0.5 if mode else 1.0)
)
ops.register_function(f"{UTILS}get_vision_nearest_position_ids", positions)


@pytest.fixture(autouse=True)
def functions_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions above count as those of transformers."""
    monkeypatch.setattr(sys.modules[prologue_on_host.__module__], "_MODULE", UTILS)


def of_transformers(name: str, grid: Tensor, constants: str = "{}") -> Tensor:
    """A call of a function of `transformers.vision_utils`, as the lowering emits it."""
    return torch.ops.vitcg.metadata(f"{UTILS}{name}", grid, [], constants)[0]


def angles(m: Any, x: Tensor, g: Tensor) -> Tensor:
    return (x @ m.weight) * (of_transformers("get_vision_position_ids", g)[:, None] * 0.5).cos()


def test_computes_the_same_numbers() -> None:
    """What the host computes is what the prologue computes."""
    result = hoisted(angles)
    on_host = prologue_on_host(result)
    assert on_host is not None
    inputs = [
        torch.tensor([[1, 2, 3], [2, 2, 2]]) if result.bound.placeholders[p].meta["role"] == Role.GRID else 14
        for p in result.prologue_inputs
    ]
    for found, expected in zip(on_host(*inputs), result.prologue(*inputs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("given", [torch.device("cuda:1"), "cuda", "cuda:0"])
def test_devices_become_the_host(given: Any) -> None:
    """Devices in positional and in keyword arguments; the prologue itself keeps its own."""
    result = hoisted(angles)
    graph = result.prologue.graph
    cos = next(n for n in graph.nodes if n.target == "cos")
    with graph.inserting_after(cos):
        moved = graph.call_method("to", (cos, given), {"device": given, "other": [given, 1]})
        moved.meta = dict(cos.meta)
    graph.output_node().replace_input_with(next(iter(graph.output_node().all_input_nodes)), moved)
    on_host = prologue_on_host(result)
    assert on_host is not None
    node = next(n for n in on_host.graph.nodes if n.target == "to")
    assert torch.device(node.args[1]) == torch.device(node.kwargs["device"]) == torch.device("cpu")
    assert torch.device(node.kwargs["other"][0]) == torch.device("cpu")
    assert moved.args[1] == given


def stays(function: Callable[..., Any]) -> bool:
    """Whether the prologue of `function` stays on the device."""
    return prologue_on_host(hoisted(function)) is None


def test_stays_where_numbers_could_differ() -> None:
    """Functions that nobody has read, the nearest table entry, other interpolations, and coordinates that are rounded."""
    name = "get_vision_interpolation_indices_and_weights"
    assert not stays(angles)
    assert not stays(lambda m, x, g: x * of_transformers(name, g, '{"mode": "bilinear"}')[:, None])
    assert stays(lambda m, x, g: x * of_transformers(name, g, '{"mode": "nearest"}')[:, None])
    assert stays(lambda m, x, g: x * of_transformers("get_vision_nearest_position_ids", g)[:, None])
    assert stays(lambda m, x, g: x * metadata("positions", g)[:, None])
    assert stays(lambda m, x, g: x * (of_transformers("get_vision_position_ids", g) * 0.3).long()[:, None])
    assert stays(lambda m, x, g: x * (of_transformers("get_vision_position_ids", g) * 0.3 > 0.5)[:, None])


def test_stays_with_what_lives_on_the_device() -> None:
    """A method call that names no device, or an argument of another role."""
    result = hoisted(angles)
    cos = next(n for n in result.prologue.graph.nodes if n.target == "cos")
    cos.target = "cuda"
    assert prologue_on_host(result) is None
    result = hoisted(angles)
    result.bound.placeholders[result.prologue_inputs[0]].meta["role"] = Role.EXTRA
    assert prologue_on_host(result) is None


def test_functions_by_name_exist() -> None:
    """Every name of the table is one that transformers has: a renamed function would quietly stay on the device."""
    utilities = pytest.importorskip("transformers.vision_utils")
    for name in (*_INTEGER, _INTERPOLATION):
        assert callable(getattr(utilities, name))


def test_targets_are_kept() -> None:
    """Nothing but devices changes."""
    result = hoisted(angles)
    on_host = prologue_on_host(result)
    assert on_host is not None
    assert targets(on_host) == targets(result.prologue)
