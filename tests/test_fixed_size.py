"""Towers that take one image a row: one trace an image size, buckets of images, equal to eager."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from common import DEVICE
from torch import Tensor, nn

import vitcg_backend
from vitcg_backend import testing
from vitcg_backend.testing.image_families import ImageFamily, image_families

transformers = pytest.importorskip("transformers")
FAMILIES = {family.name: family for family in image_families()}

pytestmark = pytest.mark.filterwarnings("ignore")  # of modelling files, not ours


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles by itself."""
    yield
    torch._dynamo.reset()


def compile_tower(tower: nn.Module, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"inner": "eager", "min_tokens": 1, **options}
    return torch.compile(tower, backend="vitcg", fullgraph=fullgraph, dynamic=dynamic, options=options)


def assert_same(compiled: Any, tower: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """One call within the error budget, of eager's shapes; its output tensors."""
    inputs = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with torch.no_grad():
        output, expected = compiled(**inputs), tower(**inputs)
        testing.assert_within_budget(output, expected, testing.reference_float64(tower, **inputs))
    return testing.flatten(output)


def make(name: str, **kwargs: Any) -> tuple[ImageFamily, nn.Module]:
    """A family and a tower of it, of one layer where nothing is said."""
    return FAMILIES[name], FAMILIES[name].tower(**{"num_hidden_layers": 1, **kwargs}).to(DEVICE)


class Layers(nn.Module):
    """Something between images, given as a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(3, 8, 4, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        """``[batch, patches, 8]``, and then the function."""
        return self.function(self.conv(pixels).flatten(2).transpose(1, 2))


def attend(h: Tensor) -> Tensor:
    """Attention of two heads within each image."""
    heads = h.unflatten(-1, (2, 4)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2).sin()


def layers(function: Any = attend) -> tuple[nn.Module, Any]:
    """A tower of a patch embedding and one function, and what makes inputs of so many images."""
    torch.manual_seed(0)
    tower = Layers(function).eval().to(DEVICE)
    return tower, lambda batch, *size: {"pixels": torch.randn(batch, 3, *(size or (8, 8))).to(DEVICE)}


def assert_alike(output: Tensor, expected: Tensor) -> None:
    """Bit for bit with the same strides on a CPU; on a GPU a batch of another size may be another kernel's."""
    if DEVICE == "cpu":
        testing.assert_bitwise(output, expected)
    torch.testing.assert_close(output, expected, check_stride=True)


# Idefics3 of transformers 5.17 writes positions through a mask, which breaks the graph.
idefics3 = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24), reason="this Idefics3 is not one graph"
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama4", torch.float32), ("siglip", torch.bfloat16), pytest.param("idefics3", torch.float32, marks=idefics3)],
    ids=str,
)
def test_shuffled_batches(name: str, dtype: torch.dtype) -> None:
    """Batches shuffled and repeated, some above the largest budget: one trace, every call a hit, results stay as they were."""
    family, tower = make(name, dtype=dtype)
    compiled = compile_tower(tower, token_budgets=[1, 2, 4])
    order = [1, *(batch for batch in (1, 2, 3, 4, 5, 9) for _ in range(2))]
    random.Random(0).shuffle(order)
    held = []
    for step, batch in enumerate(order):
        outputs = assert_same(compiled, tower, family.inputs(tower, batch, seed=step))
        held += [(t, t.clone()) for t in outputs]
    assert all(torch.equal(now, then) for now, then in held)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.calls, seen.hits) == (1, len(order), len(order)), seen.fallbacks
    assert seen.captures == 3
    assert seen.last.num_patches == seen.last.num_items == order[-1]


@pytest.mark.usefixtures("own_pieces")
def test_equal_layers_share_a_piece() -> None:
    """A tower is cut before its dense attention, so that the stretches behind the second are one piece, used three times."""
    tower, images = layers(lambda h: attend(attend(attend(attend(attend(h))))))
    assert_same(compile_tower(tower), tower, images(2))
    seen = vitcg_backend.stats(tower)
    assert (seen.unique_pieces, seen.pieces) == (4, 6)


def test_results_with_gaps_between_rows() -> None:
    """A result that is a slice of something larger has eager's strides."""
    tower, images = layers(lambda h: h.sin()[:, 0])
    compiled = compile_tower(tower)
    for batch in (2, 3):
        inputs = images(batch)
        with torch.no_grad():
            assert_alike(compiled(**inputs), tower(**inputs))
    assert vitcg_backend.stats(tower).hits == 2


def test_weights_edited_in_place() -> None:
    """An edit in place is in the next result, without another capture; a replaced weight is, too."""
    tower, images = layers()
    compiled = compile_tower(tower)
    inputs = images(2)
    before = assert_same(compiled, tower, inputs)[0]
    with torch.no_grad():
        tower.conv.weight.mul_(2)
    after = assert_same(compiled, tower, inputs)[0]
    assert not torch.equal(before, after)
    assert vitcg_backend.stats(tower).captures == 1
    tower.conv.weight.data = tower.conv.weight.data.clone()
    assert_same(compiled, tower, inputs)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits, seen.captures) == (1, 3, 2)


def test_two_image_sizes_and_results_that_share_memory() -> None:
    """Each size is a graph with buckets of its own, and going back and forth traces nothing again. DINOv2's pooled result is a
    view of its hidden states: above the largest budget it still is, with the right rows.
    """
    family, tower = make("dinov2")
    compiled = compile_tower(tower, token_budgets=[2])
    for step, (batch, size) in enumerate([(1, (32, 32)), (5, (16, 24)), (3, (32, 32)), (1, (16, 24)), (2, (32, 32))]):
        inputs = {k: v.to(DEVICE) for k, v in family.inputs(tower, batch, seed=step, size=size).items()}
        assert_same(compiled, tower, inputs)
        with torch.no_grad():
            both = compiled(**inputs), tower(**inputs)
        shared = [o.last_hidden_state.untyped_storage()._cdata == o.pooler_output.untyped_storage()._cdata for o in both]
        assert shared[0] == shared[1]
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.calls, seen.hits) == (2, 10, 10), seen.fallbacks


@torch._dynamo.config.patch(recompile_limit=3)
def test_many_image_sizes_are_bounded() -> None:
    """The last graph that Dynamo makes takes every further size without buckets, with a reason; known sizes stay hits."""
    tower, images = layers(lambda h: h.softmax(-1))
    compiled = compile_tower(tower)
    for step, size in enumerate([(32, 32), (16, 32), (24, 32), (16, 16), (24, 16), (32, 32)]):
        assert_same(compiled, tower, images(2 + step % 3, *size))
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.calls, seen.hits) == (3, 6, 3)
    assert seen.fallbacks == {"image_sizes": 3}
    assert "the last of the 3 graphs" in seen.refusals["image_sizes"]


@torch._dynamo.config.patch(recompile_limit=3)
def test_a_size_that_has_buckets_in_the_last_graph() -> None:
    """Where the graphs are for towers of other attributes, the last one takes their size, too."""
    tower, images = layers()
    compiled = compile_tower(tower)
    for padding in (0, 1, 2, 1):
        tower.conv.padding = (padding, padding)
        assert_same(compiled, tower, images(3))
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.calls, seen.hits) == (3, 4, 3), seen.fallbacks
    assert seen.fallbacks == {"image_sizes": 1}


def test_no_image() -> None:
    """An empty batch gives what eager gives, also between others."""
    tower, images = layers()
    compiled = compile_tower(tower)
    for batch in (2, 0, 3):
        inputs = images(batch)
        with torch.no_grad():
            assert_alike(compiled(**inputs), tower(**inputs))
    seen = vitcg_backend.stats(tower)
    assert (seen.calls, seen.hits) == (3, 2)


@pytest.mark.parametrize("how", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}], ids=str)
def test_ways_of_compiling(how: dict[str, Any]) -> None:
    """One graph and hits whatever ``fullgraph`` and ``dynamic`` say, and no mark stays on the caller's tensors."""
    tower, images = layers()
    compiled = compile_tower(tower, **how)
    for batch in (1, 3, 2):
        inputs = images(batch)
        assert_same(compiled, tower, inputs)
        assert not [name for name in inputs["pixels"].__dict__ if "dynamo" in name or "vitcg" in name]
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 3), (seen.fallbacks, seen.refusals)


def test_inductor() -> None:
    """Compiled pieces: one graph for a single image and for several."""
    tower, images = layers()
    compiled = compile_tower(tower, inner="inductor")
    for batch in (1, 3):
        assert_same(compiled, tower, images(batch))
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 2), (seen.fallbacks, seen.refusals)


@idefics3
def test_masks_are_padded_with_rows_of_the_call() -> None:
    """Masks of different images, in another order each time, in one bucket: no image sees another's mask or an old one."""
    family, tower = make("idefics3")
    compiled = compile_tower(tower, token_budgets=[8])
    for step, batch in enumerate((5, 2, 7, 1)):
        inputs = family.inputs(tower, batch, seed=step)
        inputs["patch_attention_mask"] = inputs["patch_attention_mask"][torch.randperm(batch)]
        assert_same(compiled, tower, inputs)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits, seen.captures) == (1, 4, 1)


def test_a_mask_of_one_row_is_another_graph() -> None:
    """A mask that eager broadcasts over the images is not taken for one of as many rows, whichever call comes first."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
            return pixels * self.scale + mask.shape[0] * mask[:, :, None, None]

    tower = Masked().to(DEVICE)
    for first, second in (((1, 1), (3, 1)), ((3, 3), (3, 1)), ((3, 1), (3, 3))):
        torch._dynamo.reset()
        compiled = compile_tower(tower)
        for images, rows in (first, second, first, second):
            pixels, mask = torch.randn(images, 4, 8, 8, device=DEVICE), torch.ones(rows, 4, dtype=torch.int64, device=DEVICE)
            with torch.no_grad():
                assert_alike(compiled(pixels, mask), tower(pixels, mask))


def test_checks_of_values_raise_as_in_eager() -> None:
    """SigLIP2 checks the sizes that come with its patches: eager's error, where a replay would be, and no harm after."""
    family, tower = make("siglip2")
    compiled = compile_tower(tower)
    good = family.inputs(tower, 2)
    assert_same(compiled, tower, good)
    if vitcg_backend.stats(tower).hits == 0:
        pytest.skip("an older SigLIP2 loops over its sizes")
    bad = {**good, "spatial_shapes": torch.tensor([[8, 8], [0, 8]])}
    for call in (tower, compiled):
        with torch.no_grad(), pytest.raises(ValueError, match="must have a positive size"):
            call(**bad)
    assert_same(compiled, tower, good)
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 2)


# --- what cannot be padded along the batch ---------------------------------------------------------------------------


REFUSED = {
    "mean over the batch": (lambda h: h - h.mean(0), "unproved"),
    "batch norm": (lambda h: nn.functional.batch_norm(h.transpose(1, 2), None, None, training=True), "unproved|graph_break"),
    "attention across images": (
        lambda h: nn.functional.scaled_dot_product_attention(*[h.transpose(0, 1).contiguous()] * 3).transpose(0, 1),
        "unproved",
    ),
    "branch on the batch": (lambda h: h.sum(1) if h.shape[0] > 2 else h.mean(1), "graph_break"),
    "squeezed batch": (lambda h: h.mean((1, 2), keepdim=True).squeeze(), "batch_of_one"),
    "squeezed axis 0": (lambda h: h.squeeze(0) * 2, "batch_of_one"),
    "scaled by the batch": (lambda h: h / h.shape[0], "unproved"),
    "first image": (lambda h: h - h[:1], "unproved"),
    "images rolled": (lambda h: h.roll(1, 0), "unproved|graph_break"),
    "images side by side": (lambda h: h.transpose(0, 1).reshape(h.shape), "unproved"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What mixes images, or is another graph for a batch of one, is right and has its reason."""
    function, reason = REFUSED[name]
    tower, images = layers(function)
    compiled = compile_tower(tower)
    for batch in (1, 3, 2, 4, 1):
        pixels = images(batch)["pixels"].to(DEVICE)
        with torch.no_grad():
            assert_alike(compiled(pixels), tower(pixels))
    seen = vitcg_backend.stats(tower)
    assert seen.hits == 0
    assert set(seen.fallbacks) <= set(reason.split("|")), (seen.fallbacks, seen.refusals)  # which of them, torch decides
    assert all(seen.refusals[name] for name in seen.fallbacks)


TIMM = {  # name -> image size and sizes of a smaller tower
    "vit_tiny_patch16_224": (32, {"depth": 2}),  # a class token
    "vit_small_patch14_reg4_dinov2": (28, {"depth": 2}),  # registers, layer scale
    "vit_base_patch16_siglip_224": (32, {"depth": 2}),  # pooled by attention
    "vit_base_patch16_clip_224": (32, {"depth": 2}),  # a norm before the blocks
    "swin_tiny_patch4_window7_224": (56, {"depths": (1, 1, 1, 1)}),  # windows
    "eva02_tiny_patch14_224": (28, {"depth": 2}),  # rotary positions, SwiGLU
    "beit_base_patch16_224": (32, {"depth": 2}),  # a bias for relative positions
    "deit3_small_patch16_224": (32, {"depth": 2}),
}


@pytest.mark.parametrize("name", TIMM)
def test_vits_of_timm(name: str) -> None:
    """ViTs of timm that people use: one trace, every batch a hit, equal to eager."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # the latter from a torchvision that was built for another torch
        pytest.skip(f"timm does not import: it needs a torchvision built for this torch, CPU or CUDA alike ({error})")
    size, few = TIMM[name]
    torch.manual_seed(0)
    tower = timm.create_model(name, num_classes=0, img_size=size, **few).eval().to(DEVICE)
    compiled = compile_tower(tower)
    for batch in (1, 3, 2, 5, 1):
        x = torch.randn(batch, 3, size, size).to(DEVICE)
        with torch.no_grad():
            testing.assert_within_budget(compiled(x), tower(x), testing.reference_float64(tower, x))
    seen = vitcg_backend.stats(tower)
    assert (seen.graphs, seen.hits) == (1, 5), (seen.fallbacks, seen.refusals)


HOST_CODE = {
    "branch on the batch": lambda h: h.sum(1) if h.shape[0] > 2 else h.mean(1),
    "first branch of all": lambda h: h * 2,
    "loop over the images": lambda h: torch.stack([image.sum(0) for image in h]),
    "one image a time": lambda h: torch.cat([image.sin() for image in h.split(1)]),
}


@pytest.mark.parametrize("name", HOST_CODE)
def test_code_that_counts_images_under_fullgraph(name: str) -> None:
    """Where the graph may not break, a tower that asks for the number of its images is one graph a number, with the line."""

    class First(Layers):
        def forward(self, pixels: Tensor) -> Tensor:
            return super().forward(pixels if pixels.shape[0] > 2 else pixels + 1)

    tower, images = layers(HOST_CODE[name])
    tower.__class__ = First if name.startswith("first") else Layers
    compiled = compile_tower(tower, fullgraph=True)
    for batch in (1, 3, 2, 4, 1):
        inputs = images(batch)
        with torch.no_grad():
            assert_alike(compiled(**inputs), tower(**inputs))
    seen = vitcg_backend.stats(tower)
    assert set(seen.fallbacks) == {"host_code"}, (seen.fallbacks, seen.refusals)
    assert "test_fixed_size.py:" in seen.refusals["host_code"]


def test_training_has_gradients() -> None:
    """With gradients wanted the batch is left alone: the ordinary path, eager's gradients."""
    tower, images = layers()
    compiled = compile_tower(tower)
    for batch in (2, 1):
        inputs = {k: v.to(DEVICE) for k, v in images(batch).items()}
        grads = []
        for call in (tower, compiled):
            tower.zero_grad()
            call(**inputs).sum().backward()
            grads.append([p.grad.clone() for p in tower.parameters() if p.grad is not None])
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*grads, strict=True))
    assert set(vitcg_backend.stats(tower).fallbacks) == {"gradients"}
