"""The budget guide: the worked cases, the processors' own rules, budgets by dynamic programming, and its error texts."""

from __future__ import annotations

import importlib
import itertools
import json
import pathlib
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitcg_backend import UnknownInput, recommend_budgets
from vitcg_backend.bucketing import Ladder
from vitcg_backend.budgets import FREQUENT, fit_budgets, mean_padding, round_budget, tightened
from vitcg_backend.cli import main
from vitcg_backend.grids import FOLLOWS, PROCESSORS, processor_of
from vitcg_backend.testing.families import discover

pytest.importorskip("transformers")
untimed = settings(deadline=None)

WORKED = {  # input: grid, output tokens, budget set by hand, its padding, padding of the power of two
    "4x224x224": ((2, 16, 16), 128, 128, 0.0, 0.0),
    "16x224x224": ((8, 16, 16), 512, 512, 0.0, 0.0),
    "16x256x256": ((8, 18, 18), 648, 768, 0.15625, 0.3671875),
    "16x448x448": ((8, 32, 32), 2048, 2048, 0.0, 0.0),
}


def test_the_worked_cases() -> None:
    """Patch 14: grids, tokens, and the paddings of budgets set by hand; the recommended ones pad nothing."""
    plan = recommend_budgets("qwen2_vl", WORKED)
    for case, expected in zip(plan.inputs, WORKED.items(), strict=True):
        seen = (case.grid, case.tokens, case.round_budget, case.round_padding, case.power_padding)
        assert (case.input, seen) == expected
        assert (case.budget, case.padding) == (case.tokens, 0.0)


@pytest.mark.parametrize("tokens", [128, 512, 2048])
def test_budgets_hold_one_two_and_four(tokens: int) -> None:
    """One kind of video: its tokens and their multiples, so that two and four of them have no padding either."""
    (text,) = [text for text, case in WORKED.items() if case[1] == tokens]
    plan = recommend_budgets("qwen2_5_vl", [text])
    assert plan.budgets == (tokens, 2 * tokens, 4 * tokens)
    assert plan.packs == {tokens: (1,), 2 * tokens: (2,), 4 * tokens: (4,)}
    assert plan.max_items == 4
    assert plan.max_frames == 4 * WORKED[text][0][0]


def test_one_picture_has_room_for_four_frames() -> None:
    """The frame limit is the tokens over the smallest frame's, at least 4."""
    assert recommend_budgets("qwen3_vl", ["1x2048x2048"], max_tokens=4096).max_frames == 4


@pytest.mark.parametrize("inputs", [["1x448x448", "1x224x224"], ["1x224x224", "1x112x224"], ["4x224x224", "1x364x84"]])
def test_windows_count_for_the_option(inputs) -> None:
    """What the option `max_frames` counts in a tower with windows holds each input as often as the largest budget does."""
    plan = recommend_budgets("qwen2_5_vl", inputs)
    assert f"max_frames={plan.max_segments}" in str(plan)
    for index, each in enumerate(plan.inputs):
        frames, height, width = each.grid
        windows = frames * -(-height // 8) * -(-width // 8)  # 112 pixels, patches of 14
        assert plan.packs[plan.budgets[-1]][index] * windows <= plan.max_segments
    assert recommend_budgets("qwen3_vl", inputs).max_segments == recommend_budgets("qwen3_vl", inputs).max_frames


SIZES = [
    (1, 224, 224),
    (1, 1080, 1920),
    (1, 333, 77),
    (1, 30, 40),
    (1, 5000, 4000),
    (7, 240, 320),
    (16, 100, 900),
    (32, 720, 1280),
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("family", PROCESSORS)
def test_grids_are_the_processors(family: str, size: tuple[int, int, int]) -> None:
    """Pictures: what the family's image processor itself returns for the same pixels."""
    image = pytest.importorskip("PIL.Image")
    frames, height, width = size
    processor = PROCESSORS[family]
    grid = processor.grid(*size)
    assert grid[0] == -(-frames // 2)
    assert grid[1] % 2 == grid[2] % 2 == 0
    if frames > 1 or height * width > 3_000_000:
        return
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    bounds = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    theirs = Qwen2VLImageProcessorPil(patch_size=processor.patch_size, size=bounds)
    batch = theirs(images=[image.new("RGB", (width, height))], return_tensors="pt")
    assert tuple(batch["image_grid_thw"][0].tolist()) == grid


def test_a_folder_gives_patches_and_bounds(tmp_path) -> None:
    """config.json decides the family and the patch, the processors' files the bounds of pictures and videos."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": {"patch_size": 16}}))
    bare = processor_of(str(tmp_path))
    assert (bare.name, bare.patch_size, bare.max_pixels) == ("qwen2_vl", 16, 12845056)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1024, "max_pixels": 65536}))
    given = processor_of(tmp_path)
    assert (given.min_pixels, given.max_pixels, given.video_max_pixels) == (1024, 65536, 65536)
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"size": {"longest_edge": 16384, "shortest_edge": 256}})
    )
    assert processor_of(tmp_path).video_max_pixels == 16384
    assert processor_of(tmp_path).max_pixels == 65536
    assert processor_of(tmp_path).grid(1, 256, 256) == (1, 16, 16)
    assert processor_of(tmp_path).grid(8, 256, 256) == (4, 8, 8)


def test_configurations_of_transformers() -> None:
    """A configuration object of the model or of the tower is as good as a name."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

    config = Qwen3VLConfig()
    for form in (config, config.vision_config, config.to_dict()):
        assert processor_of(form) == PROCESSORS["qwen3_vl"]
    plan = recommend_budgets(config.vision_config, ["1x512x512"])
    assert plan.inputs[0].tokens == 256
    assert plan.memory_bytes is not None


def test_whole_numbers_of_any_kind() -> None:
    """Those of numpy, too, in tuples and in an array."""
    np = pytest.importorskip("numpy")
    forms = [(np.int64(1), np.int32(224), 224), np.array([1, 224, 224]), "1x224x224"]
    plan = recommend_budgets("qwen2_vl", forms)
    assert {(each.input, each.grid) for each in plan.inputs} == {("1x224x224", (1, 16, 16))}


@pytest.mark.parametrize(("arguments", "text"), [({"most": "3"}, "most='3'"), ({"max_tokens": None}, "max_tokens=None")])
def test_mistakes_in_the_bounds(arguments: dict, text: str) -> None:
    """The message names what was given and what is expected."""
    with pytest.raises(UnknownInput, match=f"^{text}: expected "):
        recommend_budgets("qwen2_vl", ["1x224x224"], **arguments)


def _processors(name: str) -> tuple[str, str]:
    """The classes of a family's processors of pictures and of videos, as transformers maps them."""
    folder = pathlib.Path(
        importlib.import_module("transformers.models.auto").__file__
    ).parent  # the maps leave out what cannot run
    text = "".join(
        (folder / f"{file}.py").read_text() for file in ("auto_mappings", "image_processing_auto", "video_processing_auto")
    )
    found = [re.findall(rf'\(\s*"{name}",[^)]*?"(\w+{kind})"', text) for kind in ("ImageProcessorPil", "VideoProcessor")]
    return tuple(names[0] if names else "" for names in found)


def test_every_family_with_these_processors_is_known() -> None:
    """Whoever has Qwen2-VL's processor of pictures and its or Qwen3-VL's of videos, with the sizes of its configuration."""
    known = {*PROCESSORS, *FOLLOWS}
    seen = set()
    for family in discover():
        pictures, videos = _processors(family.name)
        if pictures != "Qwen2VLImageProcessorPil" or videos not in ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"):
            continue
        assert family.name in known, family.name
        seen.add(family.name)
        processor, config = processor_of(family.name), family.config_class()
        assert processor.by_clip == (videos == "Qwen3VLVideoProcessor"), family.name
        assert (processor.patch_size, processor.merge_size) == (config.patch_size, config.spatial_merge_size)
        assert processor_of(config) == replace(processor, name=processor_of(config).name)
        assert recommend_budgets(family.name, ["1x448x448"]).memory_bytes
    assert seen >= known & {family.name for family in discover()} - {"qwen3_vl_moe"}  # it has no line for pictures of its own


# --- fitting ----------------------------------------------------------------------------------------------------------


@untimed
@given(st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_fitted_budgets_pad_least(sizes: dict[int, int], most: int) -> None:
    """No other choice of as many budgets pads less."""
    budgets = fit_budgets(sizes, most)
    assert len(budgets) <= most
    assert budgets[-1] == max(sizes)
    least = min(
        mean_padding(sizes, (*chosen, max(sizes)))
        for count in range(min(most, len(sizes)))
        for chosen in itertools.combinations(sorted(sizes)[:-1], count)
    )
    assert mean_padding(sizes, budgets) == pytest.approx(least, abs=1e-12)


def test_many_sizes_are_fitted_too() -> None:
    """A thousand sizes onto twelve budgets: all fit, and padding is far below that of powers of two."""
    sizes = dict.fromkeys(range(20, 4020, 4), 1.0)
    budgets = fit_budgets(sizes, 12)
    assert mean_padding(sizes, budgets) < 0.5 * mean_padding(sizes, [2**k for k in range(5, 13)])


@untimed
@given(st.dictionaries(st.integers(1, 2000), st.integers(1, 500), min_size=1, max_size=60))
def test_observed_sizes_are_added_to_the_ladder(sizes: dict[int, int]) -> None:
    """Frequent sizes have no padding; no size, seen or not, has more than before; few budgets are added."""
    before = Ladder.automatic(1024, 4)
    after = tightened(before, sizes)
    assert set(before.budgets) <= set(after.budgets)
    assert len(after.budgets) <= len(before.budgets) + 1 / FREQUENT
    total = sum(sizes.values())
    for size, count in sizes.items():
        if count > 1 and count >= FREQUENT * total and size <= 1024:
            assert after.fit(size * 4).tokens == size


@pytest.mark.parametrize(("tokens", "budget"), [(1, 1), (2, 2), (3, 3), (5, 6), (7, 8), (648, 768), (768, 768), (769, 1024)])
def test_round_budgets(tokens: int, budget: int) -> None:
    """A power of two, or three quarters of one."""
    assert round_budget(tokens) == budget


# --- error texts and the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "inputs", "text"),
    [
        ("resnet50", ["1x224x224"], "unknown model 'resnet50'; known: qwen2_vl, qwen2_5_vl, qwen3_vl"),
        ({"model_type": "clip"}, ["1x224x224"], "unknown model 'clip'; known"),
        ("qwen2_vl", [], "no input: give at least one, such as 16x448x448"),
        ("qwen2_vl", ["224x224"], "input '224x224': expected FRAMESxHEIGHTxWIDTH in pixels"),
        ("qwen2_vl", [(16, 224)], "input '16x224': expected FRAMESxHEIGHTxWIDTH"),
        ("qwen2_vl", "1x224x224", "inputs='1x224x224': expected a list of inputs, such as"),
        ("qwen2_vl", 224, "inputs=224: expected a list of inputs, such as"),
        ("qwen2_vl", None, "inputs=None: expected a list of inputs, such as"),
        ("qwen2_vl", (1, 224, 224), "input 1: expected FRAMESxHEIGHTxWIDTH in pixels, .*, or three whole numbers"),
        ("qwen2_vl", [None], "input None: expected FRAMESxHEIGHTxWIDTH in pixels, .*, or three whole numbers"),
        ("qwen2_vl", [(1, 224.0, 224)], r"input (1, 224.0, 224\): expected FRAMESxHEIGHTxWIDTH in pixels"),
        ("qwen2_vl", [(1, -224, 224)], "input '1x-224x224': expected FRAMESxHEIGHTxWIDTH in pixels"),
        (None, ["1x224x224"], "config None: expected the name of a family (qwen2_vl, .*, a configuration of transformers"),
        (14, ["1x224x224"], "config 14: expected the name of a family (qwen2_vl, .*, a configuration of transformers"),
        ("qwen2_vl", ["0x224x224"], "input 0x224x224: frames, height and width are at least 1"),
        ("qwen2_vl", ["1x10x4000"], "input 1x10x4000: absolute aspect ratio must be smaller than 200"),
        ("no/such/folder", ["1x224x224"], "no such file: no/such/folder/config.json"),
    ],
)
def test_mistakes(config: object, inputs: list, text: str) -> None:
    """The message names what was given and what is expected."""
    with pytest.raises(UnknownInput, match="^" + text.replace("(", r"\(")):
        recommend_budgets(config, inputs)


def test_the_command(capsys, tmp_path) -> None:
    """``plan`` prints a line an input and the budgets, and writes the same as JSON."""
    out = tmp_path / "plan.json"
    arguments = [part for text in WORKED for part in ("--input", text)]
    assert main(["plan", "--model", "qwen2_vl", *arguments, "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["16x256x256", "8x18x18", "648", "648", "0.0%", "768", "15.6%", "1024", "36.7%"]
    assert "token_budgets=[" in lines[5]
    assert json.loads(out.read_text())["inputs"][2]["tokens"] == 648


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give either --model NAME or --config DIR"),
        (["--model", "qwen2_vl", "--config", "."], "give either --model NAME or --config DIR"),
        (["--model", "vgg", "--input", "1x2x2"], "--model: unknown model 'vgg'; known: qwen2_vl, qwen2_5_vl, qwen3_vl"),
        (["--config", "/nowhere", "--input", "1x2x2"], "--config: no such folder: /nowhere"),
        (["--model", "qwen2_vl"], "no input: give at least one, such as 16x448x448 (frames x height x width in pixels)"),
        (
            ["--model", "qwen2_vl", "--input", "big"],
            "input 'big': expected FRAMESxHEIGHTxWIDTH in pixels, such as 16x448x448 or",
        ),
        (["--model", "qwen3_vl", "--input", "1x64x64", "--budgets", "0"], "--budgets 0: expected at least one budget"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments: list[str], text: str) -> None:
    """As every command: one line on stderr, nothing on stdout."""
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"python -m vitcg_backend: error: {text}")
