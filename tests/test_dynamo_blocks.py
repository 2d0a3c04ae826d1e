"""Blocks that are copied while Dynamo traces: the graph and the guards are those of a trace of each block."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import DEVICE, IMAGE, MIXED, assert_same, compile_tower, stats, tiny_tower
from torch import Tensor, nn
from torch._guards import Source, TracingContext
from transformers.utils import import_utils

from vitcg_backend import _dynamo_blocks, _dynamo_call, _torch, lowering, testing
from vitcg_backend.testing import make_inputs
from vitcg_backend.testing.image_families import image_families

IMAGES = {family.name: family for family in image_families()}


@pytest.fixture(autouse=True)
def _code_of_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of these tests are copied, too, so that each condition is tested."""
    monkeypatch.setattr(_dynamo_blocks, "_LIBRARIES", (*_dynamo_blocks._LIBRARIES, __name__))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose calls were copied, in all traces so far."""
    modules: list[nn.Module] = []
    original = _dynamo_blocks._Noted.copy

    def noting(self: Any, tx: Any, block: Any, given: Any) -> Any:
        modules.append(block.value)
        return original(self, tx, block, given)

    monkeypatch.setattr(_dynamo_blocks._Noted, "copy", noting)
    return modules


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], set[Any], set[Any]]]:
    """Of each trace that reached the backend: the nodes, the guards, and the dictionaries whose order is guarded."""
    found: list[tuple[list[Any], set[Any], set[Any]]] = []
    original = _dynamo_call.guard_on_hooks

    def noting() -> None:
        output = _torch.current_trace().output
        names = {node: f"n{i}" for i, node in enumerate(output.graph.nodes)}
        nodes = [_node(node, names) for node in output.graph.nodes]
        guards = {_guard(guard) for guard in TracingContext.get().guards_context.dynamo_guards}
        found.append((nodes, guards, set(map(repr, output.guard_on_key_order))))
        original()

    monkeypatch.setattr(_dynamo_call, "guard_on_hooks", noting)
    return found


def _node(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> Any:
    value, argument = node.meta.get("example_value"), node.meta.get("grapharg")
    sizes = (str(value.shape), str(value.stride()), value.dtype) if isinstance(value, Tensor) else ()
    given = torch.fx.node.map_aggregate((node.args, node.kwargs), lambda x: names.get(x, x) if type(x) is torch.fx.Node else x)
    return node.op, str(node.target), str(given), sizes, repr(getattr(argument, "source", None))


def _guard(guard: Any) -> Any:
    keywords = guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}
    more = {k: repr(v) if isinstance(v, (Source, str, bool)) else type(v) for k, v in keywords.items()}
    return re.sub(r"___\d+|_?\d{9,}(_c\d+)?", "", f"{guard.originating_source!r} {guard.create_fn_name()} {more}")


def _with_and_without(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> None:
    run()
    torch._dynamo.reset()
    monkeypatch.setattr(lowering, "copy_equal_blocks", lambda trace: None)
    run()


@pytest.mark.towers
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_graph_and_guards_are_those_of_a_trace(
    name: str, copied: list[nn.Module], traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node by node, with sizes, strides and where each parameter is found; guard by guard."""
    tower = tiny_tower(name, depth=5)
    _with_and_without(monkeypatch, lambda: assert_same(compile_tower(tower), tower, MIXED))
    own, plain = traced
    assert len({module for module in copied if module in [*tower.blocks]}) == (2 if name == "qwen2_5_vl" else 3)
    assert own == plain


@pytest.mark.filterwarnings("ignore")  # of modelling files, not ours
@pytest.mark.parametrize(("name", "copies"), [("clip", 2), ("dinov2", 2), ("llama4", 1)])
def test_towers_of_images(
    name: str, copies: int, copied: list[nn.Module], traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for towers that take an image a row; of Llama-4 this backend first hears inside its first block."""
    tower = IMAGES[name].tower(num_hidden_layers=4).to(DEVICE)
    inputs = {key: value.to(DEVICE) for key, value in IMAGES[name].inputs(tower, 3).items()}

    def call() -> None:
        with torch.no_grad():
            compile_tower(tower)(**inputs)

    _with_and_without(monkeypatch, call)
    own, plain = traced
    assert len(copied) == copies
    assert own == plain


def test_a_block_of_a_model_that_becomes_another(copied: list[nn.Module]) -> None:
    """A number in a block's attention changes after the block was copied: it is traced anew, the others are copied again."""
    tower = tiny_tower("qwen3_vl", depth=5)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    block = tower.blocks[3]
    assert block in copied
    copied.clear()
    block.attn.scaling = 0.01
    assert_same(compiled, tower, IMAGE)
    assert stats(tower).graphs == 2
    assert block not in copied
    assert tower.blocks[2] in copied
    assert_same(compiled, tower, MIXED)


def test_parameters_that_blocks_share(copied: list[nn.Module]) -> None:
    """A weight of two blocks, a module of two others and a block that comes twice: eager's results, also when they part."""
    tower = tiny_tower("qwen3_vl", depth=6)
    tower.blocks[3].mlp.linear_fc1.weight = tower.blocks[2].mlp.linear_fc1.weight
    tower.blocks[4].norm1 = tower.blocks[1].norm1
    tower.blocks[5] = tower.blocks[2]
    compiled = compile_tower(tower)
    for layout in (IMAGE, MIXED):
        assert_same(compiled, tower, layout)
    assert tower.blocks[2] in copied
    tower.blocks[3].mlp.linear_fc1.weight = nn.Parameter(tower.blocks[2].mlp.linear_fc1.weight.detach() * 2)
    tower.blocks[4].norm1 = copy.deepcopy(tower.blocks[1].norm1)
    nn.init.constant_(tower.blocks[4].norm1.weight, 0.3)
    tower.blocks[5] = copy.deepcopy(tower.blocks[2])
    nn.init.constant_(tower.blocks[5].norm2.weight, 0.3)
    for layout in (IMAGE, MIXED):
        assert_same(compiled, tower, layout)


def test_a_block_that_changes_what_the_next_one_reads(copied: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that goes up with each block: each is traced, and the number is eager's afterwards."""
    tower = tiny_tower("qwen3_vl", depth=5)
    cls, forward = type(tower.blocks[0]), type(tower.blocks[0]).forward

    def counting(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.attn.config.calls = self.attn.config.calls + 1
        return forward(self, hidden_states, **kwargs) * self.attn.config.calls

    monkeypatch.setattr(cls, "forward", counting)
    results = []
    for run in (tower, compile_tower(tower)):
        tower.config.calls = 0
        pixels, grid = make_inputs(tower, IMAGE)
        with torch.no_grad():
            results.append(run(pixels, grid_thw=grid).pooler_output)
        assert tower.config.calls == 5
    assert not set(copied) & {*tower.blocks}
    torch.testing.assert_close(*results)


def test_blocks_that_are_given_numbers_of_their_own(copied: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from the block or passed to it decides: here each block has its own index."""
    tower = tiny_tower("qwen3_vl", depth=5)
    for index, block in enumerate(tower.blocks):
        block.index = index
    cls, forward = type(tower.blocks[0]), type(tower.blocks[0]).forward
    monkeypatch.setattr(cls, "forward", lambda self, h, **kwargs: forward(self, h, **kwargs) * (self.index + 1))
    assert_same(compile_tower(tower), tower, IMAGE)
    assert not set(copied) & {*tower.blocks}


def test_blocks_that_look_themselves_up(copied: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table outside that holds something else for each block: each is traced."""
    tower = tiny_tower("qwen3_vl", depth=5)
    table = {block: index + 1.0 for index, block in enumerate(tower.blocks)}
    cls, forward = type(tower.blocks[0]), type(tower.blocks[0]).forward
    monkeypatch.setattr(cls, "forward", lambda self, h, **kwargs: forward(self, h, **kwargs) * table[self])
    pixels, grid = make_inputs(tower, IMAGE)
    with torch.no_grad():
        results = [testing.flatten(one(pixels, grid_thw=grid)) for one in (compile_tower(tower), tower)]
    for ours, eagers in zip(*results, strict=True):  # no copy of the tower for the error budget: it would not be in the table
        torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-3)
    assert not set(copied) & {*tower.blocks}


@pytest.mark.parametrize("where", ["_Given.of", "_Noted.of", "_Noted.fits", "_Noted.copy", "_results"])
def test_a_dynamo_that_is_not_known(where: str, traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails of a copy, each block is traced, and nothing of the copy stays in the graph."""
    owner, _, name = where.rpartition(".")
    pixels = torch.randn(3, 3, 8, 8, device=DEVICE)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError("this attribute has another name")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(_dynamo_blocks, owner) if owner else _dynamo_blocks, name, fail)
        tower = _Layers(lambda block, hidden: 1).to(DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(compile_tower(tower)(pixels), tower(pixels), rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
    monkeypatch.setattr(lowering, "copy_equal_blocks", lambda trace: None)
    with torch.no_grad():
        compile_tower(_Layers(lambda block, hidden: 1).to(DEVICE))(pixels)
    half = len(traced) // 2
    assert half
    assert traced[:half] == traced[half:]


class _Shared:
    """What all blocks hold."""

    marks, seen, special = False, (), ()


class _Block(nn.Module):
    """A layer that multiplies by what `factor` reads."""

    def __init__(self, shared: Any, first: bool, factor: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        nn.init.normal_(self.norm.weight)
        self.shared, self.first, self.scale, self._factor = shared, first, 0.5, factor

    def forward(self, hidden: Tensor) -> Tensor:
        number = self._factor(self, hidden)
        out = hidden + number * self.linear(self.norm(hidden))
        if self.shared.marks:
            out.number = number + 1
        return out


class _Layers(nn.Module):
    """Six of them behind a patch convolution; the call of transformers is how this backend hears of the trace."""

    def __init__(self, factor: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.shared = _Shared()
        self.blocks = nn.ModuleList(_Block(self.shared, i == 0, factor) for i in range(6))

    def forward(self, pixel_values: Tensor) -> Tensor:
        import_utils.is_torchdynamo_compiling()
        hidden = self.patch(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _check_layers(tower: nn.Module, compiled: nn.Module) -> None:
    for images in (3, 2):
        pixels = torch.randn(images, 3, 8, 8, device=DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(compiled(pixels), tower(pixels), rtol=1e-3, atol=1e-3)


def _count(block: Any, hidden: Tensor) -> int:
    if block.first:
        block.shared.seen = []
    block.shared.seen.append(1)
    return len(block.shared.seen)


def _mark(tower: Any) -> None:
    tower.shared.marks = True


def _tie(name: str, one: int, other: int) -> Callable[[Any], None]:
    return lambda tower: setattr(tower.blocks[other].norm, name, getattr(tower.blocks[one].norm, name))


@pytest.mark.parametrize(
    ("factor", "change"),
    [
        (_count, lambda tower: None),
        (lambda block, hidden: getattr(hidden, "number", 1), _mark),
        (lambda block, hidden: 3 if id(block) == block.shared.special[0] else 1, "id"),
        (lambda block, hidden: 3 if block.norm.weight is block.shared.special[0] else 1, "weight"),
        (lambda block, hidden: 1, _tie("weight", 0, 1)),
        (lambda block, hidden: 1, lambda tower: setattr(tower.blocks[1], "norm", tower.blocks[0].norm)),
    ],
    ids=["a new list", "attribute of a tensor", "id", "weight looked up", "weight of the first", "module of the first"],
)
def test_what_tells_blocks_apart(factor: Callable[[Any, Tensor], Any], change: Any) -> None:
    """Eager's results where a block is equal to another one, and what it shares or meets is not."""
    tower = _Layers(factor).to(DEVICE)
    if isinstance(change, str):
        block = tower.blocks[3]
        tower.shared.special = [id(block) if change == "id" else block.norm.weight]
    else:
        change(tower)
    _check_layers(tower, compile_tower(tower))


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.norm, "eps", 0.5),
        lambda block: block.linear.register_forward_hook(lambda module, args, output: output * 2),
        lambda block: setattr(block, "norm", nn.Identity()),
        lambda block: setattr(block, "forward", lambda hidden: hidden),
        lambda block: setattr(block.linear, "bias", None),
    ],
    ids=["number", "hook", "module", "forward", "no bias"],
)
def test_a_block_that_is_or_becomes_another(change: Callable[[nn.Module], None], copied: list[nn.Module]) -> None:
    """Changed after it was copied, it is traced anew, as it is when it was another from the beginning: eager's results."""
    tower = _Layers(lambda block, hidden: 1).to(DEVICE)
    compiled = compile_tower(tower)
    _check_layers(tower, compiled)
    block = tower.blocks[3]
    assert block in copied
    copied.clear()
    change(block)
    _check_layers(tower, compiled)
    assert block not in copied
    assert tower.blocks[2] in copied


def test_code_of_others_is_traced(copied: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are no modelling file's may tell one another apart in ways that nobody has thought of."""
    monkeypatch.setattr(_dynamo_blocks, "_LIBRARIES", ("transformers.",))
    tower = _Layers(lambda block, hidden: 1).to(DEVICE)
    _check_layers(tower, compile_tower(tower))
    assert not copied


def test_numbers_that_have_changed(copied: list[nn.Module]) -> None:
    """A number that is another in a later call is an input of Dynamo's from then on, and no constant of a block."""
    tower = _Layers(lambda block, hidden: block.scale).to(DEVICE)
    compiled = compile_tower(tower)
    for scale in (0.5, 0.7, 0.9):
        for block in tower.blocks:
            block.scale = scale
        _check_layers(tower, compiled)
    assert copied


class _Holder(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.__dict__.update(attributes)


_OBJECT = object()


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, True, False),
        (0.0, -0.0, False),
        ("a", "a", True),
        (_OBJECT, _OBJECT, True),
        (_OBJECT, object(), False),
        ([1, (2, None)], [1, (2, None)], True),
        ([1], [1, 2], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (functools.partial(max, key=len), functools.partial(max, key=len), True),
        (functools.partial(max, 1), functools.partial(max, 2), False),
        (torch.zeros(2), torch.ones(2), True),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2, 3), torch.zeros(3, 2).T, False),
        (torch.zeros(2), nn.Parameter(torch.zeros(2)), False),
        (nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False), False),
        (nn.LayerNorm(4), nn.LayerNorm(4), True),
        (nn.LayerNorm(4), nn.LayerNorm(4).eval(), False),
        (nn.LayerNorm(4), nn.RMSNorm(4), False),
    ],
)
def test_equal_to_a_trace(one: Any, other: Any, equal: bool) -> None:
    """Plain values by value, tensors by what they look like, anything else by identity; in lists, dicts and modules alike."""
    assert _dynamo_blocks._Equal()(one, other) is equal
    assert _dynamo_blocks._Equal()([one], [other]) is equal
    assert _dynamo_blocks._Equal()(_Holder(value=one), _Holder(value=other)) is equal


def test_objects_that_come_twice() -> None:
    """What is one object in one place is one object in the other."""
    a, b = torch.zeros(2), torch.zeros(2)
    assert _dynamo_blocks._Equal()([a, a], [b, b])
    assert not _dynamo_blocks._Equal()([a, b], [b, b])
    assert not _dynamo_blocks._Equal()([a, a], [a, b])
