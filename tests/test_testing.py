"""The towers, inputs and comparisons that tests are made with."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from vitcg_backend import testing
from vitcg_backend.testing import architectures

TINY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PUBLISHED = (*TINY, "llama4")
LAYOUT = ((1, 8, 8), (2, 4, 6))


def run(tower, layout=LAYOUT, **options):
    """Eager's output for seeded pixels."""
    pixels, grid = testing.make_inputs(tower, layout, **options)
    with torch.no_grad():
        return tower(pixels, grid_thw=grid)


# --- towers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_tiny_towers_run(name):
    """A tower in eval mode returns all rows and, merged by four, the tokens; values are finite and of order 1."""
    tower = testing.tiny_tower(name)
    output = run(tower)
    assert not tower.training
    assert output.last_hidden_state.shape == (112, 64)
    assert output.pooler_output.shape == (28, 32)
    assert all(0.1 < float(tensor.std()) < 10 for tensor in testing.flatten(output))


def test_tiny_towers_keep_their_kinds_of_blocks():
    """qwen3_vl has two deepstack levels; qwen2_5_vl windows that matter and one block of full attention."""
    assert len(run(testing.tiny_tower("qwen3_vl")).deepstack_features) == 2
    tower = testing.tiny_tower("qwen2_5_vl")
    assert tower.config.fullatt_block_indexes == [2]
    assert len(tower.blocks) == 4
    # One frame of 16 windows, and 16 frames of one window each: the same rows, another attention.
    square, frames = (run(tower, layout).pooler_output for layout in [((1, 16, 16),), ((16, 4, 4),)])
    assert not torch.allclose(square, frames)


@pytest.mark.parametrize("name", TINY)
def test_weights_depend_on_the_seed_only(name):
    """The same seed gives the same weights, in any dtype rounded from the same numbers; another seed gives others."""
    weights = testing.tiny_tower(name, seed=1).state_dict()
    again = testing.tiny_tower(name, seed=1).state_dict()
    rounded = testing.tiny_tower(name, seed=1, dtype=torch.bfloat16).state_dict()
    other = testing.tiny_tower(name, seed=2).state_dict()
    for key, value in weights.items():
        assert torch.equal(value, again[key])
        assert torch.equal(value.bfloat16(), rounded[key])
        assert not torch.equal(value, other[key])


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_is_random(name):
    """No parameter is constant, those that transformers starts at zero or one included, and each one matters."""
    for key, parameter in testing.tiny_tower(name).named_parameters():
        assert parameter.detach().std() > 0, key
        if "norm" in key and key.endswith("weight"):
            assert 0.9 < float(parameter.detach().mean()) < 1.1, key


def test_global_random_state_is_left_alone():
    """Making towers and inputs takes nothing from torch's global generator that a test could miss."""
    torch.manual_seed(7)
    pixels, _ = testing.make_inputs(testing.tiny_tower("qwen2_vl"), LAYOUT)
    torch.manual_seed(8)
    again, _ = testing.make_inputs(testing.tiny_tower("qwen2_vl"), LAYOUT)
    assert torch.equal(pixels, again)


@pytest.mark.parametrize("name", TINY)
def test_buffers_keep_float32(name):
    """A tower in bfloat16 has rotary frequencies in float32, as `from_pretrained` would leave them."""
    tower = testing.tiny_tower(name, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in tower.buffers()} == {torch.float32}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_tiny_depth(name, depth):
    """Any depth of at least 1 runs; deepstack levels and the block of full attention stay inside it."""
    tower = testing.tiny_tower(name, depth=depth)
    assert len(tower.blocks) == depth
    assert len(testing.flatten(run(tower))) == 2 + (min(depth, 2) if name == "qwen3_vl" else 0)
    if name == "qwen2_5_vl":
        assert tower.config.fullatt_block_indexes == [min(2, depth - 1)]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heavy_tails(name, dtype):
    """A few channels of the residual stream are tens of times larger than the rest, and float16 still holds them."""
    tower = testing.tiny_tower(name, dtype=dtype, heavy_tailed=True)
    output = run(tower)
    assert all(bool(tensor.isfinite().all()) for tensor in testing.flatten(output))
    sizes = output.last_hidden_state.float().norm(dim=0).sort().values
    assert sizes[-1] > 10 * sizes.median()
    assert sizes[-4] < 5 * sizes.median()
    plain = run(testing.tiny_tower(name, dtype=dtype)).last_hidden_state.float().norm(dim=0).sort().values
    assert plain[-1] < 5 * plain.median()


def test_attention_implementation():
    """The implementation asked for reaches the tower, and changes only rounding."""
    eager = testing.tiny_tower("qwen3_vl", attn_implementation="eager")
    sdpa = testing.tiny_tower("qwen3_vl")
    assert eager.config._attn_implementation == "eager"
    assert sdpa.config._attn_implementation == "sdpa"
    torch.testing.assert_close(run(eager).pooler_output, run(sdpa).pooler_output)


@pytest.mark.parametrize("make", [testing.tiny_tower, testing.published_tower])
def test_unknown_names(make):
    """The message lists the names that exist; there is no tiny Llama-4."""
    with pytest.raises(ValueError, match=r"^unknown (tiny|published) tower 'vit'; known: qwen2_vl, qwen2_5_vl, qwen3_vl"):
        make("vit")
    with pytest.raises(ValueError, match=r"^unknown tiny tower 'llama4'"):
        testing.tiny_tower("llama4")


@pytest.mark.parametrize("depth", [0, -1])
def test_bad_depth(depth):
    """A tower has at least one block."""
    with pytest.raises(ValueError, match=rf"^depth={depth}: expected at least 1 block"):
        testing.tiny_tower("qwen2_vl", depth=depth)


def test_published_sizes_are_those_of_the_workloads():
    """The shipped data and the benchmarks' data describe the same towers."""
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "workloads.json"
    towers = json.loads(path.read_text(encoding="utf-8"))["towers"]
    assert {
        name: {"class": architecture.path, "config": dict(architecture.published)}
        for name, architecture in architectures.ARCHITECTURES.items()
    } == towers


@pytest.mark.parametrize(
    ("name", "depth", "key", "indexes"),
    [
        ("qwen3_vl", None, "deepstack_visual_indexes", [8, 16, 24]),
        ("qwen3_vl", 8, "deepstack_visual_indexes", [2, 4, 6]),
        ("qwen3_vl", 4, "deepstack_visual_indexes", [1, 2, 3]),
        ("qwen3_vl", 2, "deepstack_visual_indexes", [0, 1]),
        ("qwen3_vl", 1, "deepstack_visual_indexes", [0]),
        ("qwen2_5_vl", None, "fullatt_block_indexes", [7, 15, 23, 31]),
        ("qwen2_5_vl", 12, "fullatt_block_indexes", [7]),
        ("qwen2_5_vl", 4, "fullatt_block_indexes", [3]),
        ("qwen2_5_vl", 1, "fullatt_block_indexes", [0]),
    ],
)
def test_published_depth(name, depth, key, indexes):
    """With fewer blocks each kind of block still occurs, and the data itself is not changed."""
    published = architectures.ARCHITECTURES[name].published
    before = json.dumps(published)
    sizes = architectures.with_depth(published, depth)
    sizes[key].append(99)
    assert sizes[key][:-1] == indexes
    assert sizes["depth"] == (depth or published["depth"])
    assert json.dumps(published) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_towers_run(name):
    """One block of each released architecture runs in bfloat16 with finite values of order 1, and repeats by seed."""
    tower = testing.published_tower(name, depth=1, device="cpu")
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    if name == "llama4":
        assert [buffer.dtype for buffer in tower.buffers()] == [torch.complex64]
        with torch.no_grad():
            output = tower(torch.randn(1, 3, 336, 336, dtype=torch.bfloat16))
        assert output.last_hidden_state.shape == (1, 144, 4096)
    else:
        output = run(tower, ((1, 4, 4),))
        assert output.last_hidden_state.shape[0] == 16
    assert all(0.05 < float(tensor.float().std()) < 10 for tensor in testing.flatten(output))


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUT, [[1, 8, 8], [2, 4, 6]]])
def test_inputs(layout):
    """Rows of patches in the tower's dtype, standard normal and seeded, and the grid."""
    tower = testing.tiny_tower("qwen3_vl", dtype=torch.bfloat16)
    pixels, grid = testing.make_inputs(tower, layout)
    assert pixels.shape == (112, 3 * 2 * 4 * 4)
    assert (pixels.dtype, pixels.device) == (torch.bfloat16, torch.device("cpu"))
    assert (grid.dtype, grid.tolist()) == (torch.int64, [[1, 8, 8], [2, 4, 6]])
    assert 0.9 < float(pixels.float().std()) < 1.1
    assert torch.equal(pixels, testing.make_inputs(tower, layout)[0])
    assert not torch.equal(pixels, testing.make_inputs(tower, layout, seed=1)[0])
    exact, _ = testing.make_inputs(tower, layout, dtype=torch.float64)
    assert torch.equal(exact.bfloat16(), pixels)


def test_inputs_that_a_tower_refuses():
    """No item, no frame and odd sides are made as asked for."""
    tower = testing.tiny_tower("qwen3_vl")
    for layout, rows in [((), 0), (((0, 4, 4),), 0), (((1, 3, 5),), 15)]:
        pixels, grid = testing.make_inputs(tower, layout)
        assert pixels.shape == (rows, 96)
        assert grid.shape == (len(layout), 3)


def test_inputs_of_a_compiled_tower():
    """The compiled wrapper's tower is looked through."""
    tower = testing.tiny_tower("qwen2_vl")
    compiled = torch.compile(tower, backend="eager")
    assert torch.equal(testing.make_inputs(compiled, LAYOUT)[0], testing.make_inputs(tower, LAYOUT)[0])


def test_inputs_of_an_image_tower():
    """A tower without a grid is an error that says what to do."""
    with pytest.raises(ValueError, match=r"Identity takes no grid_thw.*torch\.randn\(tiles"):
        testing.make_inputs(nn.Identity(), LAYOUT)


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_flatten_order():
    """Tensors come in order out of any nesting; None and other values are left out."""
    a, b, c, d = (torch.full((1,), float(value)) for value in range(4))
    output = ModelOutput(first=a, missing=None, levels=[b, (c,)], extra={"d": d, "n": 3})
    assert [int(tensor) for tensor in testing.flatten(output)] == [0, 1, 2, 3]
    assert testing.flatten(a)[0] is a
    assert testing.flatten(None) == []


def test_flatten_deepstack():
    """Hidden state, pooled output, then each deepstack level."""
    output = run(testing.tiny_tower("qwen3_vl"))
    tensors = testing.flatten(output)
    assert [tuple(tensor.shape) for tensor in tensors] == [(112, 64), (28, 32), (28, 32), (28, 32)]
    assert tensors[3] is output.deepstack_features[1]


class Narrowing(nn.Module):
    """Casts to float32 inside, as towers do for rotary embedding and norms."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1 / 3]))

    def forward(self, x, *, more):
        """Products whose float32 rounding shows in float64."""
        return (x.float() * self.scale).type_as(x), {"more": more["x"].to(torch.float32) / 3, "n": more["n"]}


def test_reference_has_no_float32_step():
    """Casts to float32 inside the tower keep float64; integers and the tower itself stay as they are."""
    tower = Narrowing()
    x = torch.tensor([0.1])
    count = torch.tensor([5])
    out, rest = testing.reference_float64(tower, x, more={"x": x, "n": count})
    assert torch.equal(out, x.double() * tower.scale.detach().double())
    assert torch.equal(rest["more"], x.double() / 3)
    assert rest["n"] is count
    assert not out.requires_grad
    assert tower.scale.dtype == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_reference_of_a_tower(name):
    """All outputs are float64, and eager in float32 is a few ulps away; a compiled wrapper has the same reference."""
    tower = testing.tiny_tower(name)
    pixels, grid = testing.make_inputs(tower, LAYOUT)
    reference = testing.reference_float64(tower, pixels, grid_thw=grid)
    assert {tensor.dtype for tensor in testing.flatten(reference)} == {torch.float64}
    for out, ref in zip(testing.flatten(run(tower)), testing.flatten(reference), strict=True):
        assert 0 < float((out - ref).norm() / ref.norm()) < 1e-6
    compiled = torch.compile(tower, backend="eager")
    testing.assert_bitwise(testing.reference_float64(compiled, pixels, grid_thw=grid), reference)


# --- error budget -----------------------------------------------------------------------------------------------------


def outputs_with_error(relative, dtype=torch.float32):
    """A reference, and what is `relative` away from it in every value, with both signs."""
    ref = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signs = torch.where(torch.arange(8) % 2 == 0, 1.0, -1.0)
    return ref, (ref * (1 + relative * signs)).to(dtype)


@pytest.mark.parametrize(("times", "ok"), [(1.0, True), (1.9, True), (2.1, False), (10.0, False)])
def test_twice_eagers_error(times, ok):
    """An output may be twice as far from float64 as eager, and no further."""
    ref, eager = outputs_with_error(1e-3)
    _, out = outputs_with_error(times * 1e-3)
    report = testing.check({"a": out}, {"a": eager}, {"a": ref})
    assert report.ok is ok
    assert report.worst == pytest.approx(times / 2, rel=1e-3)
    tensor = report.worst_tensor
    assert tensor.rms_error == pytest.approx(times * 1e-3, rel=1e-3)
    assert tensor.eager_rms_error == pytest.approx(1e-3, rel=1e-3)
    normal = 1e-3 * float(ref.pow(2).mean().sqrt() / ref.abs().max()) * math.sqrt(2 * math.log(ref.numel()))
    assert tensor.max_budget == pytest.approx(2 * max(1e-3, normal), rel=1e-3)


def test_luck_of_few_values_is_no_budget():
    """Eager's worst of 32 errors may be small by luck: a result as good as eager's on average passes, a worse one does not."""
    ref = torch.ones(32, dtype=torch.float64)
    even = torch.where(torch.arange(32) % 2 == 0, 1e-3, -1e-3)  # as even as errors can be: the max is the rms
    out = torch.zeros(32)
    out[::4] = 2.5e-3
    assert testing.check((ref + out).float(), (ref + even).float(), ref).ok
    out[0] = 6e-3
    report = testing.check((ref + out).float(), (ref + even).float(), ref)
    assert not report.ok
    assert report.worst_tensor.rms_error < report.worst_tensor.rms_budget


def test_factor():
    """The factor is the caller's to choose."""
    ref, eager = outputs_with_error(1e-3)
    _, out = outputs_with_error(2.5e-3)
    testing.assert_within_budget(out, eager, ref, factor=3.0)
    with pytest.raises(AssertionError, match=r"^error against float64 above 1\.5 times eager's own"):
        testing.assert_within_budget(out, eager, ref, factor=1.5)


def test_one_wrong_value_shows():
    """A single value far off is lost in the rms error of a large tensor; the max error finds it."""
    ref, eager = outputs_with_error(1e-2)
    ref, eager = ref.repeat(100, 1), eager.repeat(100, 1)
    out = eager.clone()
    out[17, 3] += 0.5
    report = testing.check(out, eager, ref)
    assert report.tensors[0].rms_error <= report.tensors[0].rms_budget
    assert report.tensors[0].max_error > report.tensors[0].max_budget
    assert not report.ok


def test_text_names_the_tensor_and_the_errors():
    """The message names the worst tensor, both errors of both sides and the budgets, and lists every tensor."""
    ref, eager = outputs_with_error(1e-3)
    _, out = outputs_with_error(5e-3)
    with pytest.raises(AssertionError) as caught:
        testing.assert_within_budget(
            {"x": eager, "deep": [eager, out]}, {"x": eager, "deep": [eager] * 2}, {"x": ref, "deep": [ref] * 2}
        )
    first, _, *listed = str(caught.value).splitlines()
    assert first.startswith("error against float64 above 2 times eager's own; worst is deep[1]: ")
    assert "rms error 0.005 (eager 0.001, budget 0.002), max error 0.005 (eager 0.001, budget 0.00225)" in first
    assert [line.split(":")[0] for line in listed] == ["ok   x", "ok   deep[0]", "FAIL deep[1]"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floor_where_eager_is_exact(dtype):
    """Where eager is exact one correct rounding passes, and so does the neighbour of a few values; two ulps do not."""
    ulp = torch.finfo(dtype).eps
    eager = torch.linspace(1, 2, 257)[:-1].to(dtype)
    ref = eager.double()
    testing.assert_within_budget((ref * (1 + ulp / 4)).to(dtype), eager, ref)
    out = eager.clone()
    out[::16] += ulp
    testing.assert_within_budget(out, eager, ref)
    for wrong in (eager + 2 * ulp, torch.where(eager == 1, eager + 3 * ulp, eager)):
        assert not testing.check(wrong, eager, ref).ok


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite(bad):
    """NaN and infinities never pass, unless eager has the same ones; then the other values are still compared."""
    ref, eager = outputs_with_error(1e-3)
    out = eager.clone()
    out[3, 4] = bad
    report = testing.check(out, eager, ref)
    assert not report.ok
    assert report.worst == math.inf
    assert str(report) == "FAIL output: NaN or infinity unlike eager's at 1 of 512 positions"
    with pytest.raises(AssertionError, match="NaN or infinity unlike eager's"):
        testing.assert_within_budget(eager, out, ref)
    testing.assert_within_budget(out, out.clone(), ref)
    far = out.clone()
    far[0, 0] += 1
    assert not testing.check(far, out, ref).ok
    other = out.clone()
    other[3, 4] = math.inf if math.isnan(bad) or bad < 0 else math.nan
    assert not testing.check(other, out, ref).ok


def test_all_nan():
    """Where eager is NaN everywhere there is nothing to compare but the NaN."""
    nan = torch.full((4,), math.nan)
    assert testing.check(nan, nan, nan.double()).ok
    assert not testing.check(torch.zeros(4), nan, nan.double()).ok


def test_reference_not_finite():
    """A reference that overflows where eager did not cannot judge."""
    ref, eager = outputs_with_error(1e-3)
    ref[0, 0] = math.inf
    assert "the reference is not finite where eager is" in str(testing.check(eager, eager, ref))


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ({"a": torch.zeros(2, 3)}, "a: float32[2, 3] on cpu instead of float32[3, 2] on cpu"),
        ({"a": torch.zeros(3, 2, dtype=torch.float16)}, "a: float16[3, 2] on cpu instead of float32[3, 2] on cpu"),
        ({"a": 0.0}, "a: 0.0 instead of tensor("),
        ({"b": torch.zeros(3, 2)}, "output: the tensors differ: ['b'], eager ['a'], reference ['a']"),
        ({}, "output: the tensors differ: [], eager ['a'], reference ['a']"),
    ],
)
def test_other_structure(out, text):
    """Another shape, dtype, name or number of tensors is a failure with its own text."""
    eager = {"a": torch.zeros(3, 2)}
    report = testing.check(out, eager, eager)
    assert not report.ok
    assert text in str(report)


def test_reference_of_another_shape():
    """The reference has to be the same output."""
    eager = torch.zeros(3, 2)
    assert "the reference is float64[3] on cpu" in str(testing.check(eager, eager, torch.zeros(3, dtype=torch.float64)))


def test_exact_values():
    """Integers, booleans and plain values have no error: they are eager's or wrong."""
    eager = [torch.arange(4), torch.tensor([True, False]), 3]
    assert testing.check([torch.arange(4), torch.tensor([True, False]), 3], eager, eager).ok
    report = testing.check([torch.tensor([0, 1, 9, 9]), torch.tensor([True, False]), 4], eager, eager)
    assert str(report).splitlines() == [
        "FAIL [0]: 2 of 4 exact values differ from eager",
        "ok   [1]: rms error 0 (eager 0, budget 0), max error 0 (eager 0, budget 0)",
        "FAIL [2]: 4 instead of 3",
    ]


def test_empty_and_zero():
    """Empty tensors pass; against a reference of zeros errors are absolute; an output without tensors passes."""
    empty = torch.zeros(0, 4)
    assert testing.check(empty, empty, empty.double()).ok
    zero = torch.zeros(4)
    assert testing.check(zero, zero, zero.double()).ok
    assert not testing.check(zero + 1e-3, zero, zero.double()).ok
    nothing = testing.check([], [], [])
    assert (nothing.ok, nothing.worst, nothing.worst_tensor) == (True, 0.0, None)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heavy_tailed", [False, True])
def test_budget_of_a_tower(name, dtype, heavy_tailed):
    """Eager uses half of the budget or less, a float32 run rounded once is within it, wrong segments are not."""
    options = {"dtype": dtype, "heavy_tailed": heavy_tailed}
    tower = testing.tiny_tower(name, **options)
    pixels, grid = testing.make_inputs(tower, LAYOUT)
    reference = testing.reference_float64(tower, pixels, grid_thw=grid)
    eager = run(tower)
    assert testing.check(eager, eager, reference).worst <= 0.5
    precise = testing.flatten(copy.deepcopy(tower).float()(pixels.float(), grid_thw=grid))
    precise = [tensor.detach().to(dtype) for tensor in precise]
    testing.assert_within_budget(precise, testing.flatten(eager), testing.flatten(reference))
    with torch.no_grad():  # the two frames of the video as one segment
        wrong = tower(pixels, grid_thw=grid, cu_seqlens=torch.tensor([0, 64, 112], dtype=torch.int32))
    assert not testing.check(wrong, eager, reference).ok


# --- bit for bit ------------------------------------------------------------------------------------------------------


def test_bitwise_equal():
    """Equal outputs pass: nested, with NaN, with signed zeros, empty, of every width, complex."""
    output = ModelOutput(
        a=torch.tensor([math.nan, -0.0, math.inf]),
        b=[torch.zeros(0, 3), (torch.arange(3), torch.tensor(True)), None],
        c=torch.randn(3, dtype=torch.bfloat16),
        d=torch.tensor([1 + 2j]),
        e=torch.zeros((), dtype=torch.float64),
        f="text",
    )
    clone = ModelOutput(**{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in output.items()})
    testing.assert_bitwise(clone, output)


def test_bitwise_of_a_tower():
    """Two runs of the same tower are equal bit for bit."""
    tower = testing.tiny_tower("qwen3_vl")
    testing.assert_bitwise(run(tower), run(tower))


@pytest.mark.parametrize(
    ("out", "eager", "text"),
    [
        ([torch.zeros(2)], (torch.zeros(2),), "output is a list instead of a tuple"),
        ({"a": None}, {"a": torch.zeros(2)}, "output.a is a NoneType instead of a Tensor"),
        ({"b": 1}, {"a": 1}, "output: keys: ['b'] instead of ['a']"),
        ([1], [1, 2], "output: length: 1 instead of 2"),
        ([1], [2], "output[0]: 1 instead of 2"),
        (torch.zeros(2, 1), torch.zeros(2), "output: float32[2, 1] on cpu with strides [1] instead of float32[2]"),
        (torch.zeros(2).half(), torch.zeros(2), "output: float16[2] on cpu with strides [1] instead of float32[2]"),
        (
            torch.zeros(2, 3).t(),
            torch.zeros(3, 2),
            "with strides [1, 3] instead of float32[3, 2] on cpu with strides [2, 1]",
        ),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "output: 1 of 1 values differ, first at [0]: 0.0 instead of -0.0"),
        (
            torch.tensor([[1, 2], [3, 5]]),
            torch.tensor([[1, 2], [3, 4]]),
            "1 of 4 values differ, first at [1, 1]: 5 instead of 4",
        ),
        (torch.tensor(1.0), torch.tensor(2.0), "1 of 1 values differ, first at []: 1.0 instead of 2.0"),
        (torch.tensor([math.nan]), torch.tensor([1.0]), "first at [0]: nan instead of 1.0"),
    ],
)
def test_bitwise_different(out, eager, text):
    """Type, keys, length, shape, dtype, strides and bits each have a text that says where and what."""
    with pytest.raises(AssertionError) as caught:
        testing.assert_bitwise(out, eager)
    assert text in str(caught.value)


def test_bitwise_ignores_strides_that_say_nothing():
    """The stride of an axis of length 1 is nobody's business."""
    testing.assert_bitwise(torch.zeros(1, 4).as_strided((1, 4), (99, 1)), torch.zeros(1, 4))


def test_public_names():
    """`__all__` is sorted, complete and real."""
    assert sorted(testing.__all__) == testing.__all__
    assert all(hasattr(testing, name) for name in testing.__all__)
