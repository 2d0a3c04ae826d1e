"""The command line: what it says about a user's mistake, the inputs it makes, and one whole run."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import vitcg_backend
from vitcg_backend.cli import main
from vitcg_backend.cli.demo import make_calls
from vitcg_backend.cli.photos import bundled_photographs, load_photographs, make_clip
from vitcg_backend.cli.processing import PROCESSORS, Preprocessor

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

needs_photographs = pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="needs scikit-image")


def fails(capsys, *argv):
    """Run a command that must fail; return its one line on stderr."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("python -m vitcg_backend: error: ").rstrip("\n")


@pytest.fixture
def photo(tmp_path):
    """A small picture in a file."""
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((96, 64)).convert("RGB").save(path)
    return path


def test_missing_image_is_one_line_and_exit_code_2(capsys, tmp_path):
    """A path that does not exist is named."""
    path = tmp_path / "nowhere.png"
    assert fails(capsys, "demo", "--images", str(path)) == f"--images: no such file: {path}"


def test_folder_instead_of_an_image_is_one_line_and_exit_code_2(capsys, tmp_path):
    """A folder is refused with what to give instead."""
    expected = f"--images: not a file: {tmp_path} (give the image files themselves)"
    assert fails(capsys, "demo", "--images", str(tmp_path)) == expected


def test_file_that_is_no_image_is_one_line_and_exit_code_2(capsys, tmp_path):
    """A text file is not taken for a picture."""
    path = tmp_path / "notes.png"
    path.write_text("not a picture")
    assert fails(capsys, "demo", "--images", str(path)) == f"--images: not an image that Pillow can read: {path}"


def test_cut_off_image_is_one_line_and_exit_code_2(capsys, tmp_path, photo):
    """A file that ends in the middle of its picture is reported, good ones beside it or not."""
    path = tmp_path / "cut.png"
    path.write_bytes(photo.read_bytes()[:-200])
    assert fails(capsys, "demo", "--images", str(photo), str(path)).startswith(f"--images: cannot read {path}: ")


def test_unknown_model_is_one_line_and_exit_code_2(capsys):
    """The known models are listed."""
    expected = "--model: unknown model 'resnet50'; known: qwen2_vl, qwen2_5_vl, qwen3_vl"
    assert fails(capsys, "demo", "--model", "resnet50") == expected


def test_unknown_device_is_one_line_and_exit_code_2(capsys):
    """The devices are listed."""
    expected = "--device: unknown device 'tpu'; allowed: auto, cpu, cuda"
    assert fails(capsys, "demo", "--device", "tpu") == expected


def test_absent_cuda_is_one_line_and_exit_code_2(capsys, monkeypatch):
    """Asking for CUDA on a machine without it does not quietly run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = "--device: torch sees no CUDA device here; use --device cpu or auto"
    assert fails(capsys, "demo", "--device", "cuda") == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dtype", "int8"], "--dtype: unknown dtype 'int8'; allowed: float32, bfloat16, float16"),
        (["--inner", "magic"], "--inner: unknown choice 'magic'; allowed: inductor, eager"),
        (["--depth", "0"], "--depth: 0 layers; at least 1 is needed"),
        (["--depth", "two"], "argument --depth: invalid int value: 'two'"),
        (["--max-pixels", "10"], "--max-pixels: 10 is less than the 4096 that a picture needs"),
        (["--json", "/no/such/folder/rows.json"], "--json: no such folder: /no/such/folder"),
    ],
)
def test_wrong_argument_is_one_line_and_exit_code_2(capsys, arguments, expected):
    """Each argument is checked before any work is done, and the text says what is allowed."""
    assert fails(capsys, "demo", *arguments) == expected


def test_no_command_is_one_line_and_exit_code_2(capsys):
    """Without a command the line says that one is missing."""
    assert "COMMAND" in fails(capsys)


def test_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"vitcg-backend {vitcg_backend.__version__}\n"


def test_missing_scikit_image_is_one_line_and_exit_code_2(capsys, monkeypatch):
    """Without the default photographs the line says how to get them or do without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = "the default photographs need scikit-image: pip install scikit-image, or give --images PATH"
    assert fails(capsys, "demo") == expected


def test_module_is_the_program(tmp_path):
    """``python -m vitcg_backend`` is the same command line, with its exit code."""
    command = [sys.executable, "-m", "vitcg_backend", "demo", "--images", str(tmp_path / "nowhere.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr == f"python -m vitcg_backend: error: --images: no such file: {tmp_path / 'nowhere.png'}\n"


@needs_photographs
def test_default_photographs_are_in_the_package():
    """Colour photographs of several shapes are found and decoded, without a download."""
    pictures = load_photographs(bundled_photographs())
    assert len(pictures) >= 4
    assert len({picture.size for picture in pictures.values()}) >= 4
    assert all(picture.mode == "RGB" for picture in pictures.values())


def test_images_of_one_name_stay_apart(tmp_path, photo):
    """Two files of one name in different folders are two inputs."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / photo.name
    other.write_bytes(photo.read_bytes())
    assert list(load_photographs([photo, other])) == ["picture", "picture-2"]


@pytest.mark.parametrize("model", PROCESSORS)
def test_clip_is_packed_by_the_video_processors_rule(model, photo):
    """Frames packed from the image processor's output equal what the family's own video code makes of them."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    preprocessor = Preprocessor(model, max_pixels=64 * 96)
    frames = make_clip(load_photographs([photo])["picture"])
    clip = preprocessor.clip(frames)
    grid_t, height, width = clip.grid_thw[0].tolist()
    side = PROCESSORS[model]["patch_size"]
    assert grid_t == len(frames) // 2
    # The frames as pictures again, from the image processor's patches: [frame, channel, height, width].
    singles = torch.stack([preprocessor.image(frame).pixel_values for frame in frames])
    patches = singles.reshape(len(frames), height // 2, width // 2, 2, 2, 3, 2, side, side)[..., 0, :, :]
    video = patches.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(1, len(frames), 3, height * side, width * side)
    expected = Qwen3VLVideoProcessor.patchify(None, video, side, 2, 2)[0][0]
    assert torch.equal(clip.pixel_values, expected)


def test_demo_repeats_its_calls_in_another_order(photo):
    """The second half of the sequence is the first half shuffled, the same inputs."""
    pictures = dict.fromkeys(("a", "b", "c"), load_photographs([photo])["picture"])
    calls = make_calls(pictures, Preprocessor("qwen3_vl", max_pixels=64 * 64))
    half = len(calls) // 2
    names = [name for name, _ in calls[:half]]
    again = [name.removeprefix("again: ") for name, _ in calls[half:]]
    assert sorted(again) == sorted(names)
    assert again != names
    assert {id(packed) for _, packed in calls[:half]} == {id(packed) for _, packed in calls[half:]}


@pytest.mark.slow
def test_demo_on_one_picture_is_right_and_reports_every_call(capsys, tmp_path, photo):
    """A whole run, small: each call is served, within the error budget, and the JSON says what the table says."""
    report = tmp_path / "report.json"
    arguments = ["--images", str(photo), "--depth", "1", "--max-pixels", "4096", "--inner", "eager", "--device", "cpu"]
    assert main(["demo", *arguments, "--json", str(report)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(report.read_text())
    assert [row["input"] for row in found["rows"][:3]] == ["picture", "clip", "clip, 1 photo"]
    assert all(row["hit"] and row["budget_used"] <= 1 for row in found["rows"])
    assert found["totals"]["graphs"] == 1
    assert "all outputs are within the error budget" in out


def test_png_without_matplotlib_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch):
    """A missing package is named before any work, with what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = "--png: drawing needs matplotlib: pip install 'vitcg-backend[bench]'"
    assert fails(capsys, "demo", "--png", str(tmp_path / "traffic.png")) == expected


def test_traffic_is_drawn(tmp_path):
    """Calls above, buckets with their padding below, in a file that is a picture."""
    pytest.importorskip("matplotlib")
    from vitcg_backend.counters import CallRecord, Stats
    from vitcg_backend.plot import draw_traffic

    counted = Stats()
    for tokens, budget in ((49, 56), (64, 64), (98, 104), (392, 416), (49, 56)):
        counted.record(CallRecord(True, None, 1, 4 * tokens, tokens, budget, 1 - tokens / budget, ((budget, tokens),)))
    counted.record(CallRecord(False, "over_largest_budget", 1, 40000, 10000, None, 0.0))
    path = draw_traffic(counted, tmp_path / "traffic.png")
    with Image.open(path) as picture:
        assert picture.size[0] > 500
    assert draw_traffic(Stats(), tmp_path / "empty.png").is_file()
