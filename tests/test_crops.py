"""Pixtral: padded images of different sizes are cropped in front of the graph, which is that of a packed tower."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from common import DEVICE
from torch import Tensor, nn

import vitcg_backend
from vitcg_backend import _torch, testing
from vitcg_backend.testing.image_families import image_families

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of modelling files, not ours

FAMILY = next(family for family in image_families() if family.name == "pixtral")
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles by itself."""
    yield
    torch._dynamo.reset()


def make(*, attention: str = "sdpa", **sizes: Any) -> nn.Module:
    """A tower of one layer where nothing is said."""
    tower = FAMILY.tower(**{"num_hidden_layers": 1, **sizes}).to(DEVICE)
    tower.config._attn_implementation = attention
    return tower


def compile_tower(tower: nn.Module, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"inner": "eager", "min_tokens": 1, **options}
    return torch.compile(tower, backend="vitcg", fullgraph=fullgraph, dynamic=dynamic, options=options)


def images(count: int, size: tuple[int, int] = (32, 32), seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of so many images padded to a size, and the size of each, in pixels."""
    noise, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    sizes = [(dice.randrange(16, size[0] + 1), dice.randrange(16, size[1] + 1)) for _ in range(count)]
    return torch.randn(count, 3, *size, generator=noise).to(DEVICE), torch.tensor(sizes).to(DEVICE)


def assert_same(compiled: Any, tower: nn.Module, pixels: Tensor, sizes: Any, **kwargs: Any) -> list[Tensor]:
    """One call within the error budget, of eager's shapes; its output tensors."""
    with torch.no_grad():
        output, expected = (call(pixels, image_sizes=sizes, **kwargs) for call in (compiled, tower))
        testing.assert_within_budget(output, expected, testing.reference_float64(tower, pixels, image_sizes=sizes, **kwargs))
    return testing.flatten(output)


@pytest.mark.towers
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shuffled_batches_of_any_size_share_one_graph(attention: str) -> None:
    """1 to 5 images in batches padded to several sizes, shuffled: one graph, all hits, results stay as they were."""
    tower = make(attention=attention, num_hidden_layers=2)
    compiled = compile_tower(tower)
    order = [(count, size) for count in (1, 2, 3, 5) for size in ((32, 32), (24, 40), (64, 16))] * 2
    random.Random(0).shuffle(order)
    held = []
    for step, (count, size) in enumerate(order):
        outputs = assert_same(compiled, tower, *images(count, size, seed=step))
        held += [(t, t.clone()) for t in outputs]
    assert all(torch.equal(now, then) for now, then in held)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.calls, seen.hits) == (1, len(order), len(order)), (seen.fallbacks, seen.refusals)


@pytest.mark.parametrize("kind", ["left out", "pairs", "int32", "positional"])
def test_ways_of_giving_sizes(kind: str) -> None:
    """Sizes left out, as pairs of numbers, and in another dtype: hits, equal to eager."""
    tower = make()
    compiled = compile_tower(tower)
    for step, count in enumerate((2, 2, 1, 2)):
        pixels, sizes = images(count, seed=step)
        given = {"left out": None, "pairs": [tuple(s) for s in sizes.tolist()], "int32": sizes.int()}.get(kind, sizes)
        if kind == "positional":
            with torch.no_grad():
                testing.assert_within_budget(
                    compiled(pixels, given), tower(pixels, given), testing.reference_float64(tower, pixels, given)
                )
        else:
            assert_same(compiled, tower, pixels, given)
    seen = vitcg_backend.stats(tower)
    assert seen.hits == seen.calls == 4, (seen.fallbacks, seen.refusals)
    assert seen.graphs == 1 or kind == "pairs"


@pytest.mark.parametrize("how", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}, {"inner": "inductor"}], ids=str)
def test_ways_of_compiling(how: dict[str, Any]) -> None:
    """One graph and hits, whatever the way, and no mark stays on the caller's tensors."""
    tower = make()
    compiled = compile_tower(tower, **how)
    for step, count in enumerate((1, 3, 2)):
        pixels, sizes = images(count, (32, 24), seed=step)
        assert_same(compiled, tower, pixels, sizes)
        assert not [name for t in (pixels, sizes) for name in t.__dict__ if "dynamo" in name or "vitcg" in name]
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 3), (seen.fallbacks, seen.refusals)


def test_hidden_states() -> None:
    """`output_hidden_states` gives eager's, from a bucket."""
    tower = make(num_hidden_layers=2)
    compiled = compile_tower(tower)
    for step, count in enumerate((2, 1, 3)):
        assert len(assert_same(compiled, tower, *images(count, seed=step), output_hidden_states=True)) >= 3
    seen = vitcg_backend.stats(tower)
    assert (seen.calls, seen.hits) == (3, 3), (seen.fallbacks, seen.refusals)
    assert seen.graphs <= 2  # transformers puts its hooks in during the first call, behind a lock


def test_attention_weights_are_eagers() -> None:
    """Weights of attention are those of the whole masked sequence: such calls are traced as they are."""
    tower = make(attention="eager")
    compiled = compile_tower(tower)
    pixels, sizes = images(2)
    with torch.no_grad():
        output, expected = (call(pixels, image_sizes=sizes, output_attentions=True) for call in (compiled, tower))
    assert len(output.attentions) == 1
    testing.assert_bitwise(output.attentions, expected.attentions)
    assert_same(compiled, tower, pixels, sizes)


@pytest.mark.towers
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.skipif(OLD, reason="leaves autocast"))])
def test_half_precision(autocast: bool) -> None:
    """Images of another dtype than the tower's, and autocast: hits within the error budget."""
    tower = make() if autocast else make(dtype=torch.bfloat16)
    compiled = compile_tower(tower)
    for step, count in enumerate((2, 1, 3)):
        pixels, sizes = images(count, seed=step)
        with torch.no_grad():
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                output, expected = compiled(pixels, image_sizes=sizes), tower(pixels, image_sizes=sizes)
            testing.assert_within_budget(output, expected, testing.reference_float64(tower, pixels, image_sizes=sizes))
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 3), (seen.fallbacks, seen.refusals)


def test_attention_that_takes_no_segments_is_not_packed() -> None:
    """An attention that drops its segments on the way would see across images: nothing is lowered then, all is right."""
    tower = make(attention="eager")
    attention = tower.transformer.layers[0].attention

    class Dropping(type(attention)):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **kwargs: Any):
            return super().forward(hidden_states, attention_mask, position_embeddings)

    attention.__class__ = Dropping
    compiled = compile_tower(tower)
    for step in range(2):
        assert_same(compiled, tower, *images(3, seed=step))
    assert vitcg_backend.stats(tower).hits == 0


def test_attention_of_another_kind_is_not_packed() -> None:
    """An attention by hand has no use for segments: the proof finds that rows meet, and the call is right."""
    tower = make()
    attention = tower.transformer.layers[0].attention

    class Masked(type(attention)):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any):
            q, k, v = (p(hidden_states).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            scores = q @ k.transpose(-1, -2) * self.scaling
            scores = scores if attention_mask is None else scores + attention_mask
            return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None

    attention.__class__ = Masked
    compiled = compile_tower(tower)
    for step in range(2):
        assert_same(compiled, tower, *images(3, seed=step))
    seen = vitcg_backend.stats(tower)
    assert seen.hits == 0
    assert seen.refusals


SIZES = {
    "larger than the batch": [(100, 100), (20, 40)],
    "without a patch": [(3, 32), (32, 32), (32, 0)],
    "counted from the end": [(-1, 32), (32, -8)],
    "fewer than images": [(32, 16)],
    "more than images": [(16, 16)] * 4,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_as_a_slice_takes_them(name: str) -> None:
    """Sizes that no processor gives mean what they mean in eager, between others in one graph."""
    tower = make()
    compiled = compile_tower(tower)
    pixels, sizes = images(3)
    assert_same(compiled, tower, pixels, sizes)
    assert_same(compiled, tower, pixels, torch.tensor(SIZES[name], device=DEVICE))
    assert_same(compiled, tower, pixels, sizes)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 3), (seen.fallbacks, seen.refusals)


BAD = {
    "no image": lambda p, s: (p[:0], s[:0]),
    "no size": lambda p, s: (p, s[:0]),
    "smaller than a patch": lambda p, s: (p[..., :3], s),
    "other channels": lambda p, s: (p[:, :2], s),
    "no patch at all": lambda p, s: (p, s * 0),
    "one axis": lambda p, s: (p, s[0]),
    "one column": lambda p, s: (p, s[:, :1]),
    "not whole numbers": lambda p, s: (p, s.float()),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_bad_calls_raise_eagers_error(name: str, first: bool) -> None:
    """What eager rejects raises with eager's text, as the first call and where a bucket would serve it, and does no harm."""
    tower = make()
    compiled = compile_tower(tower)
    pixels, sizes = images(2)
    if not first:
        assert_same(compiled, tower, pixels, sizes)
    bad, bad_sizes = BAD[name](pixels, sizes)
    with torch.no_grad():
        with pytest.raises(Exception) as expected:
            tower(bad, image_sizes=bad_sizes)
        with pytest.raises(Exception) as found:
            compiled(bad, image_sizes=bad_sizes)
    assert str(expected.value).splitlines()[0][:40] in str(found.value)
    assert_same(compiled, tower, pixels, sizes)
    assert vitcg_backend.stats(tower).hits == (1 if first else 2)


def test_training_has_gradients() -> None:
    """With gradients wanted the graph takes the ordinary path and has eager's gradients, those of the pixels, too."""
    tower = make()
    compiled = compile_tower(tower)
    for count, with_pixels in ((2, False), (1, False), (2, True)):
        pixels, sizes = images(count)
        grads = []
        for call in (tower, compiled):
            tower.zero_grad()
            given = pixels.clone().requires_grad_(with_pixels)
            call(given, image_sizes=sizes).last_hidden_state.square().sum().backward()
            grads.append([p.grad.clone() for p in (*tower.parameters(), given) if p.grad is not None])
        assert len(grads[0]) == len(grads[1]) > 5
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert vitcg_backend.stats(tower).hits == 0


def test_forward_mode_keeps_tangents() -> None:
    """A tangent of the pixels goes through the crops."""
    tower = make(attention="eager").requires_grad_(False)
    compiled = compile_tower(tower)
    pixels, sizes = images(2)
    assert_same(compiled, tower, pixels, sizes)
    tangents = []
    for call in (tower, compiled):
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(pixels, torch.ones_like(pixels))
            output = call(dual, image_sizes=sizes).last_hidden_state
            tangents.append(torch.autograd.forward_ad.unpack_dual(output).tangent)
    torch.testing.assert_close(*tangents, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["forward", "_conv_forward", "class"])
def test_a_convolution_with_code_of_its_own_gets_whole_images(where: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What such code does with an image it may not do with a patch, and no proof of rows sees that."""
    tower = make()
    compiled = compile_tower(tower)
    pixels, sizes = images(3)
    if late:
        assert_same(compiled, tower, pixels, sizes)
    conv = tower.patch_conv
    name = "_conv_forward" if where == "_conv_forward" else "forward"
    original = getattr(nn.Conv2d, name)

    def along(self: nn.Conv2d, *args: Any) -> Tensor:
        output = original(self, *args)
        return output + torch.linspace(0, 1, output.shape[-1], device=output.device, dtype=output.dtype)

    owner, value = (nn.Conv2d, along) if where == "class" else (conv, types.MethodType(along, conv))
    monkeypatch.setattr(owner, name, value)
    for seed in range(2):
        assert_same(compiled, tower, *images(3, seed=seed))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_sizes_of_any_whole_numbers(dtype: torch.dtype) -> None:
    """One graph each, every call a hit."""
    tower = make()
    compiled = compile_tower(tower)
    for seed in range(3):
        pixels, sizes = images(3, seed=seed)
        assert_same(compiled, tower, pixels, sizes.to(dtype))
        assert vitcg_backend.stats(tower).last.hit


def test_sizes_out_of_an_iterator_are_used_once() -> None:
    """Nobody asks eager beside the call: it would use them up."""
    tower = make()
    compiled = compile_tower(tower)
    pixels, sizes = images(3)
    with torch.no_grad():
        output = compiled(pixels, image_sizes=iter(sizes.tolist()))
        expected = tower(pixels, image_sizes=iter(sizes.tolist()))
    assert all(torch.equal(a, b) for a, b in zip(testing.flatten(output), testing.flatten(expected), strict=True))


def test_weights_edited_in_place_and_a_hook_on_the_convolution() -> None:
    """Edited weights are in the next result; a hook that wants the convolution of whole images is called with that."""
    tower = make()
    compiled = compile_tower(tower)
    pixels, sizes = images(2)
    before = assert_same(compiled, tower, pixels, sizes)[0]
    with torch.no_grad():
        tower.patch_conv.weight.mul_(2)
    assert not torch.equal(before, assert_same(compiled, tower, pixels, sizes)[0])
    assert vitcg_backend.stats(tower).hits == 2
    shapes = []
    handle = tower.patch_conv.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    assert_same(compiled, tower, pixels, sizes)
    handle.remove()
    assert set(shapes) == {(2, 64, 8, 8)}
    assert_same(compiled, tower, pixels, sizes)


def test_strides_are_eagers() -> None:
    """Of the axis of size 1, too, whose stride tells how large the bucket was."""
    tower = make()
    compiled = compile_tower(tower)
    for count in (2, 1, 3):
        pixels, sizes = images(count)
        with torch.no_grad():
            rows, expected = (call(pixels, image_sizes=sizes).last_hidden_state for call in (compiled, tower))
        assert rows.stride() == expected.stride()
    assert vitcg_backend.stats(tower).hits == 3


@pytest.mark.parametrize("limit", [99, 0])
@pytest.mark.parametrize("odd", ["hook", "gradient", "three columns", "a list of tensors"])
def test_a_call_that_is_not_packed_costs_others_no_graph(odd: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it ordinary calls are hits as before, and so are those of another tower whose forward has the same decorator."""
    monkeypatch.setattr(_torch, "_GIVE_UPS", limit)
    tower, other = make(), testing.tiny_tower("qwen2_vl", depth=1, device=DEVICE)
    compiled, of_other = compile_tower(tower), compile_tower(other)
    pixels, sizes = images(2)
    inputs = testing.make_inputs(other, ((1, 4, 4),))

    def ordinary() -> None:
        assert_same(compiled, tower, pixels, sizes)
        with torch.no_grad():
            of_other(*inputs)

    ordinary()
    for _ in range(2):
        if odd == "hook":
            handle = tower.patch_conv.register_forward_hook(lambda *_: None)
            assert_same(compiled, tower, pixels, sizes)
            handle.remove()
        elif odd == "gradient":
            given = pixels.clone().requires_grad_()
            compiled(given, image_sizes=sizes).last_hidden_state.sum().backward()
            assert given.grad is not None
        else:
            assert_same(
                compiled, tower, pixels, list(sizes) if odd == "a list of tensors" else torch.cat([sizes, sizes], 1)[:, :3]
            )
        hits, graphs = vitcg_backend.stats(tower).hits, vitcg_backend.stats(tower).graphs
        ordinary()
        seen = vitcg_backend.stats(tower)
        assert (seen.hits, seen.graphs) == (hits + 1, graphs)
    seen = vitcg_backend.stats(other)
    assert (seen.graphs, seen.hits) == (1, 3)


def test_eager_and_other_backends_see_the_original() -> None:
    """While our compiled tower is in use the class has its forward, and another backend traces that."""
    forward = type(FAMILY.tower()).forward
    tower = make()
    assert_same(compile_tower(tower), tower, *images(2))
    assert type(tower).forward is forward
    targets = set()

    def look(gm: Any, inputs: Any) -> Any:
        targets.update(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    other = make(num_hidden_layers=2)
    pixels, sizes = images(2)
    with torch.no_grad():
        torch.compile(other, backend=look)(pixels, image_sizes=sizes)
    assert targets
    assert not [target for target in targets if "vitcg" in target]


def test_another_forward_is_traced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that the form was not written for stays as it is, with the reason."""
    import dataclasses
    import sys

    from vitcg_backend import packed_forwards

    tower = make()
    module = sys.modules[type(tower).__module__]
    form = dataclasses.replace(packed_forwards.FORMS[module.__name__], known=frozenset({"0" * 16}))
    original = packed_forwards.forward_of(module, form.tower)
    lowered = packed_forwards.make_packed(original, active=lambda: True, module=module, form=form)
    noted = {}
    monkeypatch.setattr(packed_forwards, "note_step", noted.__setitem__)
    pixels, sizes = images(2)
    with torch.no_grad():
        testing.assert_bitwise(lowered(tower, pixels, sizes), original(tower, pixels, sizes))
    assert "PixtralVisionModel.forward" in noted["other_forward"]


def test_a_lane_has_its_reason() -> None:
    """A lane gives no route round the crops; calls are right."""
    tower = make()
    compiled = compile_tower(tower)
    lane = vitcg_backend.fast_lane(compiled)
    pixels, sizes = images(2)
    for _ in range(3):
        assert_same(lane, tower, pixels, sizes)
    assert vitcg_backend.stats(tower).hits == 3
    assert list(lane.refusals) == ["other_inputs"]


def test_warmed_up_before_the_first_call() -> None:
    """`warmup` makes calls of padded images, by grids or by patches, and such calls find their captures."""
    tower = make()
    compiled = compile_tower(tower, capture="warmup", token_budgets=[64, 128])
    warmed = vitcg_backend.warmup(compiled, grids=[[(1, 8, 8)], [(1, 8, 8), (1, 4, 8)]])
    assert warmed.captured == (128, 64)
    assert not warmed.skipped
    pixels, _ = images(2)
    assert_same(compiled, tower, pixels, torch.tensor([[32, 32], [16, 32]], device=DEVICE))
    seen = vitcg_backend.stats(tower)
    assert seen.last.hit
    assert (seen.graphs, seen.captures) == (1, 2)
    with pytest.raises(vitcg_backend.OptionError, match="takes images: expected 1 frame"):
        vitcg_backend.warmup(compiled, grids=[[(2, 8, 8)]])
