"""Vision towers of transformers, those with metadata from `vision_utils` and those of images: right, and as the record says."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Iterator

import pytest
import torch
import transformers

import vitcg_backend
from vitcg_backend.cli import main
from vitcg_backend.family_record import document, dump, everything, families, recorded
from vitcg_backend.testing.families import Family, discover, measure
from vitcg_backend.testing.image_families import ImageFamily, image_families

FAMILIES = (*discover(), *image_families())
HERE = transformers.__version__
RECORD = {status.family: status for status in families(HERE)} if HERE in recorded() else {}
if recorded()[0] != HERE and any(s.torch.split("+")[0] != torch.__version__.split("+")[0] for s in RECORD.values()):
    RECORD = {}  # the oldest transformers is recorded with the newest torch; with the oldest, fewer masks can be traced
ROOT = pathlib.Path(__file__).parents[1]
GRAPHED = {"newest": 41, "oldest": 33}  # at least so many

pytestmark = pytest.mark.filterwarnings("ignore")  # of modelling files, not ours


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each family compiles by itself."""
    yield
    torch._dynamo.reset()


def _distinct() -> list[list[Family | ImageFamily]]:
    """The families, those with one and the same tower together: its code need not be traced once for each of their names."""
    groups: list[list[Family | ImageFamily]] = []
    for family in FAMILIES:
        alike = [g for g in groups if isinstance(family, Family) and getattr(g[0], "measured_by", None) == family.measured_by]
        if alike:
            alike[0].append(family)
        else:
            groups.append([family])
    return groups


@pytest.mark.towers
@pytest.mark.parametrize("group", _distinct(), ids=lambda group: "+".join(family.name for family in group))
def test_right_and_as_recorded(group: list[Family | ImageFamily]) -> None:
    """A shuffled sequence of layouts equals eager, and the status is that of the record (`docs/make_families.py` writes it)."""
    seen = measure(group[0])
    for family in group:
        if RECORD:
            row = RECORD[family.name]
            assert (seen.status, seen.graphs, seen.hits) == (row.status, row.graphs, row.hits), seen.reason
            assert seen.reason.partition(":")[0] == row.reason.partition(":")[0]
        else:
            assert seen.status == "graphed" or seen.reason


@pytest.mark.towers
@pytest.mark.skipif(not RECORD, reason="nothing is recorded of this transformers")
def test_record_is_complete() -> None:
    """The record of a release has every family that is discovered, no other, and most of them are graphed."""
    assert list(RECORD) == [family.name for family in FAMILIES]
    enough = GRAPHED["newest" if recorded()[0] == HERE else "oldest"]
    assert sum(status.status == "graphed" for status in RECORD.values()) >= enough
    assert all(status.reason for status in RECORD.values() if status.status != "graphed")


def test_record_has_the_oldest_release_and_a_newer_one() -> None:
    """The newest release is what is shown where none is named; the oldest is the one that the package promises."""
    newest, oldest = recorded()
    promised = re.search(
        r'^hf = \["transformers>=(.+)"\]$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert oldest.startswith(f"{promised.group(1)}.")
    assert f"OLDEST := {oldest}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert vitcg_backend.families() == families(newest) != families(oldest)
    with pytest.raises(ValueError, match=rf"no record of transformers 4.0; there is one of {newest}, {oldest}"):
        families("4.0")


def test_document_shows_the_record() -> None:
    """docs/families.md is the tables of the record."""
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8").endswith(document(everything()))


def test_command_prints_and_writes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m vitcg_backend families` shows the record, all or some; --json writes it; a wrong name is one line."""
    file = tmp_path / "families.json"
    assert main(["families", "--json", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == dump(families())
    assert "qwen3_vl" in capsys.readouterr().out
    assert main(["families", "qwen2_vl"]) == 0
    assert "1 of 1 graphed" in capsys.readouterr().out
    assert main(["families", "qwen9"]) == 2
    assert "no family named 'qwen9'" in capsys.readouterr().err
    assert main(["families", "--json", str(tmp_path / "none" / "x.json")]) == 2


# --- towers nobody taught us ----------------------------------------------------------------------------------------


@pytest.fixture
def own_loops() -> object:
    """The example as a module of its own, so that what is registered in one test is new in the next."""
    path = ROOT / "examples" / "own_loops.py"
    spec = importlib.util.spec_from_file_location("own_loops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unknown_tower_is_right_without_help(own_loops) -> None:
    """A tower with metadata loops of its own runs in parts, equal to eager and counted."""
    error, seen = own_loops.calls(own_loops.OwnLoops().eval())
    assert error == 0.0
    assert seen.calls == 5
    assert seen.hits + sum(seen.fallbacks.values()) == seen.calls


def test_unknown_tower_is_whole_after_register_lowering(own_loops) -> None:
    """Two registered functions make it one graph, every call a hit, equal to eager."""
    vitcg_backend.register_lowering(own_loops.patch_positions, grid="sizes")
    vitcg_backend.register_lowering(own_loops.frame_boundaries, grid="sizes")
    error, seen = own_loops.calls(own_loops.OwnLoops().eval())
    assert error == 0.0
    assert (seen.graphs, seen.calls, seen.hits) == (1, 5, 5)


def test_shapes_that_were_learnt_are_held_against_each_layout() -> None:
    """A metadata function whose size is another than its first grids showed costs the bucket, not the result."""

    def table(grid_thw):
        return torch.ones(4 + sum(width % 2 for width in grid_thw[:, 2].tolist()))

    class Tower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, pixels, grid_thw):
            return pixels * (self.scale * table(grid_thw)).sum()

    vitcg_backend.register_lowering(table)
    tower = Tower()
    compiled = torch.compile(tower, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    for layout in ([[1, 4, 4]], [[1, 4, 3]], [[1, 2, 4], [1, 2, 2]], [[1, 2, 3], [1, 2, 5]]):
        grid = torch.tensor(layout)
        pixels = torch.randn(int(grid.prod(1).sum()), 8)
        with torch.no_grad():
            assert torch.equal(compiled(pixels, grid), tower(pixels, grid))
    fallbacks = vitcg_backend.stats(tower).fallbacks
    assert fallbacks.get("metadata_shape") == 2, fallbacks


def test_register_lowering_leaves_eager_and_other_backends_alone(own_loops) -> None:
    """Registered functions are themselves in eager code and for another backend."""
    sizes = torch.tensor([[1, 4, 4]])
    before = own_loops.patch_positions(sizes)
    vitcg_backend.register_lowering(own_loops.patch_positions, grid="sizes")
    assert torch.equal(own_loops.patch_positions(sizes), before)
    names = []

    def backend(gm, inputs):
        names.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    torch.compile(own_loops.patch_positions, backend=backend)(sizes)
    assert not any("vitcg" in name for name in names)


def test_register_lowering_says_what_it_takes(own_loops) -> None:
    """Methods and functions without a grid are refused with what to do."""
    with pytest.raises(TypeError, match=r"plain Python function, not method .*Move the loop of a method into a function"):
        vitcg_backend.register_lowering(own_loops.OwnLoops().forward)
    with pytest.raises(ValueError, match=r"patch_positions\(sizes, merge\) has no parameter of a usual name for the grid"):
        vitcg_backend.register_lowering(own_loops.patch_positions)
    with pytest.raises(ValueError, match="has no parameter shape for the grid"):
        vitcg_backend.register_lowering(own_loops.patch_positions, grid="shape")


def test_cu_seqlens_beside_plain_sdpa_is_ignored_as_in_eager() -> None:
    """A tower that hands cu_seqlens to SDPA outside of a packed branch attends over everything, as in eager."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    class Plain(torch.nn.Module):
        is_causal = False

        def forward(self, x, cu):
            y = x[None, None]
            return sdpa_attention_forward(self, y, y, y, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)[0]

    module, x, cu = Plain(), torch.randn(8, 4), torch.tensor([0, 3, 8], dtype=torch.int32)
    compiled = torch.compile(module, backend="vitcg", options={"inner": "eager", "min_tokens": 1})
    with torch.no_grad():
        assert torch.equal(compiled(x, cu), module(x, cu))
