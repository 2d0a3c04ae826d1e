"""Guards that are put together: Dynamo has less to look at in a call, and still sees each change."""

from __future__ import annotations

import copy
import types

import pytest
from common import IMAGE, MIXED, assert_same, compile_tower, stats, tiny_tower
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from vitcg_backend import _dynamo_call


def _guards(tower: nn.Module) -> str:
    """Dynamo's own text of the guards of a tower's graphs."""
    functions = [type(tower).forward]
    while hasattr(functions[-1], "__wrapped__"):
        functions.append(functions[-1].__wrapped__)
    return "\n".join(str(e.guard_manager) for f in functions for e in _debug_get_cache_entry_list(f.__code__))


def test_a_layer_with_another_config() -> None:
    """One layer's config, replaced by an equal one and changed there: eager's attention each time, in graphs of their own."""
    tower = tiny_tower("qwen3_vl", depth=3)
    compiled = compile_tower(tower)
    for layout in (IMAGE, MIXED, IMAGE):
        assert_same(compiled, tower, layout)
    text = _guards(tower)
    assert text.count("is L['self']._modules['blocks']") == 1  # the others are compared with this one
    tower.blocks[1].attn.config = copy.deepcopy(tower.config)
    for layout in (IMAGE, MIXED, IMAGE):
        assert_same(compiled, tower, layout)
    assert stats(tower).graphs == 2
    tower.blocks[1].attn.config._attn_implementation = "eager"
    assert_same(compiled, tower, IMAGE, exact=False)
    assert stats(tower).graphs == 3


def test_an_attribute_that_a_config_gets_and_loses() -> None:
    """What the config lacked when the tower was traced is seen once it is there, and once it is gone again."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    text = _guards(tower)
    assert "it has, or has not" in text or "object.__getattribute__(L['self'].config" not in text  # not traced that far
    for graphs, change in ((2, lambda c: setattr(c, "use_cache", False)), (2, lambda c: delattr(c, "use_cache"))):
        change(tower.config)
        for layout in (IMAGE, MIXED):
            assert_same(compiled, tower, layout)
        assert stats(tower).graphs == graphs


def test_a_config_whose_class_gets_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute of the class is one of the config."""
    tower = tiny_tower("qwen3_vl", depth=1)
    compiled = compile_tower(tower)
    assert_same(compiled, tower, IMAGE)
    monkeypatch.setattr(type(tower.config), "use_cache", False, raising=False)
    assert_same(compiled, tower, IMAGE)
    assert stats(tower).graphs == 2


def test_a_forward_that_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class without a `forward` of its own: replaced in the class that has it, then given one of its own."""
    tower = tiny_tower("qwen3_vl", depth=2)
    inherits = type("Inherits", (type(tower.blocks[0].mlp),), {})
    for block in tower.blocks:
        block.mlp.__class__ = inherits
    compiled = compile_tower(tower)
    base, original = inherits.__mro__[1], inherits.forward

    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return original(self, x) * 2

    for graphs, owner in ((1, None), (2, base), (3, inherits)):
        with pytest.MonkeyPatch.context() as patch:
            if owner is not None:
                patch.setattr(owner, "forward", doubled)
            for layout in (IMAGE, MIXED):
                assert_same(compiled, tower, layout)
            assert stats(tower).graphs == graphs


def test_paths_are_gathered_with_common_beginnings_once() -> None:
    """As each path by itself, quoted brackets and dots in names included; what is no path stays an expression."""

    class Counted(dict):
        looked_up = 0

        def __getitem__(self, key):
            Counted.looked_up += 1
            return super().__getitem__(key)

    root = types.SimpleNamespace(a=Counted({"x.y": Counted({"p": 1, "q": [2, 3]}), "[0]": 4, "z": Counted(p=5)}), b=6)
    paths = ["root.a['x.y']['p']", "root.a['x.y']['q'][1]", "root.a['[0]']", "root.b", "root.a['z']['p'] + 1", "root.a['x.y']"]
    expected = tuple(eval(path, {"root": root}) for path in paths)
    Counted.looked_up = 0
    found = _dynamo_call._gather(paths)(root)
    assert Counted.looked_up == 6  # 'x.y' once for three paths
    assert found == expected == (1, 3, 4, 6, 6, root.a["x.y"])
    root.a["x.y"]["p"] = 7
    assert _dynamo_call._gather(paths[:1])(root) == (7,)
