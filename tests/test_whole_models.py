"""Whole models: with the tower compiled in place `generate` gives eager's tokens, and the model stays a model."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitcg_backend

pytestmark = pytest.mark.filterwarnings("ignore")  # of modelling files, not ours

START, END, IMAGE, VIDEO = 90, 91, 92, 93
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 99,
    "max_position_embeddings": 4096,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
MODELS = {
    "qwen2_vl": (
        "Qwen2VL",
        {"depth": 2, "embed_dim": 64, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
        {"rope_parameters": ROPE},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", {**VISION, "window_size": 16, "fullatt_block_indexes": [1]}, {"rope_parameters": ROPE}),
    "qwen3_vl": (
        "Qwen3VL",
        {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        {"rope_parameters": ROPE, "head_dim": 8},
    ),
    "glm4v": ("Glm4v", {**VISION, "image_size": 32}, {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}),
}


def make_model(name: str) -> nn.Module:
    """A tiny model with seeded random weights, in eval mode."""
    transformers = pytest.importorskip("transformers")
    prefix, vision, text = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(vision_config=vision, text_config={**TEXT, **text}, **TOKENS)
    if name == "glm4v":
        config.image_start_token_id, config.image_end_token_id = START, END
        config.video_start_token_id, config.video_end_token_id = START, END
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{prefix}ForConditionalGeneration")._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model.eval()


def prompt(
    images: list[tuple[int, int]], videos: list[tuple[int, int, int]], seed: int = 0, split: bool = False
) -> dict[str, Tensor]:
    """One prompt: words, images of (height, width) and videos of (frames, height, width) in patches, words.

    Args:
        images: sizes.
        videos: sizes.
        seed: of words and pixels.
        split: a video's frames stand apart in the prompt, each between its own marks.
    """
    words = random.Random(seed)
    ids, kinds = [1, words.randrange(2, 80)], [0, 0]

    def place(token: int, kind: int, count: int) -> None:
        ids.extend([START, *[token] * count, END, words.randrange(2, 80)])
        kinds.extend([0, *[kind] * count, 0, 0])

    for height, width in images:
        place(IMAGE, 1, height * width // 4)
    for frames, height, width in videos:
        for _ in range(frames if split else 1):
            place(VIDEO, 2, height * width // 4 * (1 if split else frames))
    noise = torch.Generator().manual_seed(seed)
    inputs = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([kinds]),
    }
    if images:
        inputs["image_grid_thw"] = torch.tensor([(1, h, w) for h, w in images])
        inputs["pixel_values"] = torch.randn(sum(h * w for h, w in images), 96, generator=noise)
    if videos:
        inputs["video_grid_thw"] = torch.tensor(videos)
        inputs["pixel_values_videos"] = torch.randn(sum(t * h * w for t, h, w in videos), 96, generator=noise)
    return inputs


def generate(model: nn.Module, inputs: dict[str, Tensor]) -> list[int]:
    """Greedy tokens."""
    with torch.no_grad():
        output: Any = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return output[0].tolist()


def compile_in_place(model: nn.Module, how: str) -> None:
    """Compile the tower, by its method or by assignment."""
    options = {"inner": "eager", "min_tokens": 1}
    if how == "method":
        model.model.visual.compile(backend="vitcg", options=options)
    else:
        model.model.visual = torch.compile(model.model.visual, backend="vitcg", options=options)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles by itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# How the tower is put in place is no matter of the model: by assignment once.
@pytest.mark.usefixtures("own_pieces")
@pytest.mark.towers
@pytest.mark.parametrize(("name", "how"), [*((name, "method") for name in MODELS), ("qwen3_vl", "assignment")])
def test_generate_gives_eagers_tokens(name: str, how: str) -> None:
    """Images, several, a video, both in one prompt, text alone: eager's token ids, and text never calls the backend."""
    model = make_model(name)
    split = name in ("qwen3_vl", "glm4v")  # these put each frame between marks of its own
    prompts = [
        prompt([(4, 4)], []),
        prompt([(8, 4), (4, 4)], [], 1),
        prompt([], [(2, 4, 8)], 2, split),
        prompt([(4, 8)], [(2, 4, 4)], 3, split) if name != "glm4v" else prompt([], [(3, 4, 4)], 3, split),
    ]
    if name == "glm4v":  # it has one token for both, so a prompt holds images or videos
        for inputs in prompts:
            inputs["input_ids"][inputs["input_ids"] == VIDEO] = IMAGE
    text = prompt([], [], 4)
    expected = [generate(model, p) for p in (*prompts, text)]
    compile_in_place(model, how)
    assert [generate(model, p) for p in prompts] == expected[:-1]
    assert [generate(model, p) for p in reversed(prompts)] == expected[-2::-1]
    before = vitcg_backend.stats(model.model.visual)
    assert before.calls == before.hits > 7
    assert before.graphs == (2 if name == "glm4v" else 1)  # it calls its tower with other arguments for images than for videos
    assert before.unique_pieces == before.pieces / before.graphs
    assert generate(model, text) == expected[-1]
    assert vitcg_backend.stats(model.model.visual).calls == before.calls


@pytest.mark.parametrize("name", MODELS)
def test_fifty_prompts_compile_once(name: str) -> None:
    """Continuous use: prompts of mixed sizes need no compile after the first, and keep a bounded number of buckets."""
    model = make_model(name)
    compile_in_place(model, "method")
    chance = random.Random(0)
    for step in range(50):
        images = [(chance.choice((4, 8, 12)), chance.choice((4, 8, 16))) for _ in range(chance.randint(1, 3))]
        inputs = prompt(images, [], step)
        with torch.no_grad():
            model(**inputs)
        if step == 0:
            first = vitcg_backend.stats(model.model.visual)
    last = vitcg_backend.stats(model.model.visual)
    assert first.graphs == last.graphs == 1
    assert last.hits == last.calls == 50
    assert last.captures <= 20


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_model_is_unharmed(name: str, tmp_path) -> None:
    """state_dict, save_pretrained, deepcopy and pickle of a model in use: as before, and the copies work."""
    model = make_model(name)
    inputs = prompt([(4, 4), (8, 4)], [])
    expected = generate(model, inputs)
    names = list(model.state_dict())
    compile_in_place(model, "method")
    assert generate(model, inputs) == expected
    assert list(model.state_dict()) == names
    clone = copy.deepcopy(model)
    assert generate(clone, inputs) == expected
    stream = io.BytesIO(pickle.dumps(model))
    assert generate(pickle.load(stream), inputs) == expected
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert generate(loaded, inputs) == expected
    loaded.model.visual.compile(backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    assert generate(loaded, inputs) == expected
    assert generate(model, inputs) == expected


@torch.no_grad()
def test_b31_features_of_glm_images_and_videos() -> None:
    """GLM-4V hands each frame to its tower as an item of its own: features of videos and images in turns are eager's."""
    model = make_model("glm4v")
    calls = [prompt([], [(3, 4, 4), (1, 4, 8)], 1), prompt([(4, 4), (16, 12)], [], 2), prompt([], [(2, 8, 8)], 3)]

    def features(inputs: dict[str, Tensor]) -> list[Tensor]:
        if "video_grid_thw" in inputs:
            output = model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        else:
            output = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return list(output.pooler_output)

    expected = [features(inputs) for inputs in calls]
    assert [len(tensors) for tensors in expected] == [2, 2, 1]
    compile_in_place(model, "method")
    held = []
    for number in (0, 1, 0, 2, 1):
        held.append((features(calls[number]), expected[number]))
    for tensors, of_eager in held:  # all of them at the end: none is written over by a later call
        for a, b in zip(tensors, of_eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert vitcg_backend.stats(model.model.visual).hits == 5


def test_b22_b51_text_alone_never_calls_the_tower() -> None:
    """A prompt without pictures makes no graph, no buffer and no capture of a compiled tower; the first picture does."""
    model = make_model("qwen2_vl")
    text, picture = prompt([], []), prompt([(4, 4)], [])
    expected = [generate(model, inputs) for inputs in (text, picture)]
    compile_in_place(model, "method")
    assert generate(model, text) == expected[0]
    seen = vitcg_backend.stats(model.model.visual)
    assert (seen.calls, seen.graphs, seen.captures) == (0, 0, 0)
    assert generate(model, picture) == expected[1]
    assert generate(model, text) == expected[0]
    assert (vitcg_backend.stats(model.model.visual).calls, vitcg_backend.stats(model.model.visual).captures) == (1, 1)


# --- Llama-4: tiles of one size, one a row ----------------------------------------------------------------------------

TILE_TOKENS = 16  # of a tile of 32 x 32 pixels: patches of 4 x 4, of which a shuffle makes one out of four


def make_llama4() -> nn.Module:
    """A tiny Llama-4 with seeded random weights, in eval mode."""
    transformers = pytest.importorskip("transformers")
    text = {**TEXT, "intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 2, "interleave_moe_layer_step": 2}
    vision = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 32,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    config = transformers.Llama4Config(
        vision_config=vision, text_config=text, boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE
    )
    torch.manual_seed(0)
    model: Any = transformers.Llama4ForConditionalGeneration._from_config(config)
    model.language_model.register_forward_hook(_with_image_outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model.eval()


def _with_image_outputs(module: nn.Module, args: Any, output: Any) -> None:
    """Llama4ForConditionalGeneration.forward of transformers 5.24 reads a field that its text model does not return."""
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None


def tiles_of(pixels: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """A prompt with these tiles ``[tiles, 3, 32, 32]``, each between its marks."""
    words = random.Random(seed)
    ids = [1, words.randrange(2, 80)]
    for _ in range(len(pixels)):
        ids.extend([START, *[IMAGE] * TILE_TOKENS, END, words.randrange(2, 80)])
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    return {**inputs, "pixel_values": pixels} if len(pixels) else inputs


def photographs(side: int) -> Tensor:
    """scikit-image's photographs as tiles ``[photographs, 3, side, side]``, values from -1 to 1."""
    numpy, photos = pytest.importorskip("numpy"), pytest.importorskip("vitcg_backend.cli.photos")
    pictures = photos.load_photographs(photos.bundled_photographs()).values()
    tiles = [torch.from_numpy(numpy.asarray(p.resize((side, side)), dtype="float32")).permute(2, 0, 1) for p in pictures]
    return torch.stack(tiles) / 127.5 - 1


@pytest.mark.towers
def test_llama4_generate_gives_eagers_tokens() -> None:
    """Photographs as tiles, one, several, and text alone: eager's token ids from one graph of the tower."""
    pytest.importorskip("skimage")
    model = make_llama4()
    pictures = photographs(32)
    prompts = [tiles_of(pictures[:1]), tiles_of(pictures[1:4], 1), tiles_of(pictures, 2)]
    text = tiles_of(pictures[:0], 3)
    expected = [generate(model, p) for p in (*prompts, text)]
    model.vision_model.compile(backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    for order in ((0, 1, 2), (2, 0, 1)):
        assert [generate(model, prompts[i]) for i in order] == [expected[i] for i in order]
    seen = vitcg_backend.stats(model.vision_model)
    assert (seen.graphs, seen.calls, seen.hits) == (1, 6, 6), (seen.fallbacks, seen.refusals)
    assert generate(model, text) == expected[-1]
    assert vitcg_backend.stats(model.vision_model).calls == 6


def test_llama4_fifty_prompts_compile_once() -> None:
    """Continuous use: any number of tiles needs no compile after the first."""
    model = make_llama4()
    model.vision_model.compile(backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    chance, noise = random.Random(0), torch.Generator().manual_seed(0)
    for step in range(50):
        with torch.no_grad():
            model(**tiles_of(torch.randn(chance.randint(1, 7), 3, 32, 32, generator=noise), step))
    seen = vitcg_backend.stats(model.vision_model)
    assert (seen.graphs, seen.hits, seen.calls) == (1, 50, 50)
    assert seen.captures <= 7


def make_llava() -> nn.Module:
    """A tiny Llava with a Pixtral tower, with seeded random weights, in eval mode."""
    transformers = pytest.importorskip("transformers")
    vision = transformers.PixtralVisionConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, patch_size=4, image_size=64
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.MistralConfig(**TEXT, head_dim=8),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlavaForConditionalGeneration._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model.eval()


def padded_images(sizes: list[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    """A prompt with images of (height, width) in pixels, padded to the largest of each."""
    words, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    ids = [1, words.randrange(2, 80)]
    pixels = torch.zeros(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for image, (height, width) in zip(pixels, sizes, strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, generator=noise)
        ids.extend([START, *[IMAGE] * (height // 4 * (width // 4)), END, words.randrange(2, 80)])
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "pixel_values": pixels,
        "image_sizes": torch.tensor(sizes),
    }


@pytest.mark.towers
def test_llava_with_pixtral_generates_eagers_tokens() -> None:
    """Prompts with one and several images of different sizes: eager's token ids from buckets of the tower."""
    model = make_llava()
    prompts = [
        padded_images(sizes, seed)
        for seed, sizes in enumerate([[(32, 24)], [(16, 40), (32, 32)], [(24, 24), (20, 36), (8, 64)], [(64, 48)]])
    ]
    expected = [generate(model, p) for p in prompts]
    assert len({tuple(e[-6:]) for e in expected}) > 1
    tower = model.model.vision_tower
    tower.compile(backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        assert [generate(model, prompts[i]) for i in order] == [expected[i] for i in order]
    seen = vitcg_backend.stats(tower)
    assert (seen.calls, seen.hits) == (8, 8), (seen.fallbacks, seen.refusals)
    assert seen.graphs <= 2  # transformers puts its hooks for hidden states in during the first call, behind a lock


def test_photographs_and_a_clip_give_eagers_tokens() -> None:
    """Real photographs and a clip of one, through transformers' own processor, in one prompt."""
    pytest.importorskip("skimage")
    photos = pytest.importorskip("vitcg_backend.cli.photos")
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    pictures = list(photos.load_photographs(photos.bundled_photographs()).values())[:3]
    processor = processing.Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    batch = processor(images=pictures, return_tensors="pt")
    grids = batch["image_grid_thw"].tolist()
    frames = processor(images=photos.make_clip(pictures[0], 4), return_tensors="pt")
    _, height, width = frames["image_grid_thw"][0].tolist()
    model = make_model("qwen2_vl")
    inputs = prompt([(h, w) for _, h, w in grids], [(4, height, width)])
    inputs["pixel_values"], inputs["pixel_values_videos"] = batch["pixel_values"], frames["pixel_values"]
    expected = generate(model, inputs)
    compile_in_place(model, "method")
    assert generate(model, inputs) == expected
    seen = vitcg_backend.stats(model.model.visual)
    assert (seen.graphs, seen.hits, seen.calls) == (1, 2, 2), (seen.fallbacks, seen.refusals)
