"""complex_to_real: complex arithmetic becomes real with the same numbers, region by region; what it cannot do is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import DEVICE, compile_tower, stats
from graphs import aten_pieces, metadata
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from vitcg_backend import _torch, passes, testing
from vitcg_backend.passes.complex_to_real import complex_to_real
from vitcg_backend.testing.image_families import image_families

aten, prims = torch.ops.aten, torch.ops.prims


def numbers(x: Tensor) -> Tensor:
    """Rows of eight numbers as rows of four complex ones."""
    return torch.view_as_complex(x.view(-1, 4, 2))


def parts(z: Tensor) -> Tensor:
    """The other way."""
    return torch.view_as_real(z).flatten(1)


def rotary(m: Any, x: Tensor, g: Tensor) -> Tensor:
    """As Llama-4 rotates its queries: halves as pairs, turned in float32."""
    q = x.bfloat16()
    q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(q_ * m.turns.view(1, 4).to(q_.device)).flatten(1).type_as(q)


def aten_of(function: Callable[..., Any]) -> fx.GraphModule:
    """The one ATen piece of a function."""
    (piece,), _ = aten_pieces(function)
    return piece


def run(piece: fx.GraphModule, rows: int = 5, change: Callable[[Tensor], Tensor] = lambda t: t) -> tuple[Tensor, ...]:
    """The results of a piece on small whole numbers, whose products and sums are exact in any order.

    Args:
        piece: what runs; whole numbers that it takes are indices of four columns.
        rows: of its pixels.
        change: what is done to complex inputs.
    """
    torch.manual_seed(0)
    inputs: list[Any] = [rows]
    for node in piece.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], Tensor):
            shape = [rows if not isinstance(s, int) else s for s in node.meta["val"].shape]
            re, im = torch.randint(-8, 9, (2, *shape))
            if node.meta["val"].is_complex():
                inputs.append(change(torch.complex(re.float(), im.float())))
            else:
                inputs.append(re.to(node.meta["val"].dtype) if node.meta["val"].is_floating_point() else re % 4)
    return piece(*inputs)


def complex_calls(piece: fx.GraphModule) -> list[Any]:
    """What a piece calls with a complex result, but for what makes an input readable."""
    calls = [node for node in piece.graph.nodes if node.op == "call_function" and isinstance(node.meta["val"], Tensor)]
    return [c.target for c in calls if c.meta["val"].is_complex() and c.target is not aten.resolve_conj.default]


def rewritten(function: Callable[..., Any], rtol: float = 0) -> fx.GraphModule:
    """The piece of a function after the rewrite, with every result as before and no guard on its rows."""
    piece = aten_of(function)
    assert complex_calls(piece)
    shape_env = next(node.meta["val"].fake_mode.shape_env for node in reversed(piece.graph.nodes) if "val" in node.meta)
    expected, guards = run(piece), len(shape_env.guards)
    assert complex_to_real(piece, device_type="cpu") is piece
    assert len(shape_env.guards) == guards
    for result, before in zip(run(piece), expected, strict=True):
        torch.testing.assert_close(result, before, rtol=rtol, atol=0)
        assert result.stride() == before.stride()
    return piece


def test_rewrites() -> None:
    """A rotary embedding: one turned copy, two products, a sum; the buffer is read through a view."""
    piece = rewritten(rotary)
    assert not complex_calls(piece)
    targets = [node.target for node in piece.graph.nodes]
    assert [targets.count(t) for t in (prims.rev.default, aten.view_as_real.default, aten.add.Tensor)] == [1, 1, 1]


def test_rewrites_by_positions_of_the_grid() -> None:
    """Complex metadata, which a piece gets row by row: read through a view, too."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        angles = metadata("positions", g)[:, None] / torch.arange(1.0, 5.0)
        return parts(numbers(x) * torch.polar(torch.ones_like(angles), angles))

    piece = rewritten(function)
    assert not complex_calls(piece)
    (source,) = (node for node in piece.graph.nodes if node.op == "placeholder" and "complex" in str(node.meta["val"]))
    assert isinstance(source.meta["val"].shape[0], torch.SymInt)


def test_an_input_that_is_conjugated_when_it_is_read() -> None:
    """A buffer that is the conjugate of another one is read as that, not as what lies in its memory."""
    piece = aten_of(rotary)
    (expected,) = run(piece, change=torch.conj)
    complex_to_real(piece, device_type="cpu")
    assert torch.equal(run(piece, change=torch.conj)[0], expected)
    assert not torch.equal(run(piece)[0], expected)


def test_unrelated_graph_comes_back_as_it_was() -> None:
    """The same object, the same nodes; so does a rotary embedding on a device where torch's own kernels are faster."""
    for function in (lambda m, x, g: (x @ m.weight).relu(), rotary):
        piece = aten_of(function)
        before = list(piece.graph.nodes)
        assert complex_to_real(piece) is piece
        assert list(piece.graph.nodes) == before


MOVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "reshape": lambda z, m: z.reshape(-1, 2, 2).flatten(1),
    "expand": lambda z, m: z.unsqueeze(-1).expand(-1, -1, 2).flatten(1),
    "permute": lambda z, m: z.view(-1, 2, 2).permute(0, -1, 1).reshape(-1, 4),
    "select": lambda z, m: torch.stack([z[..., -1], z[:, 0]], 1),
    "slice": lambda z, m: z[..., 1:4:2],
    "squeeze": lambda z, m: z.unsqueeze(1).squeeze(-2),
    "cat": lambda z, m: torch.cat([z, m.turns.expand_as(z)], -1),
    "index": lambda z, m: z[:, torch.arange(4).flip(0)],
    "clone": lambda z, m: z.clone(),
    "product": lambda z, m: z * m.turns,
    "of itself": lambda z, m: z * z,
    "broadcast": lambda z, m: m.turns.unsqueeze(-1) * z[:1].unsqueeze(0),
    "real factor": lambda z, m: z * m.frequencies[:4],
    "size": lambda z, m: z * z.shape[0],
    "number": lambda z, m: 2 * z * -0.5,
    "sum": lambda z, m: torch.add(z, m.turns, alpha=3),
    "difference": lambda z, m: m.turns - z,
    "more digits": lambda z, m: z * m.frequencies[:4].double(),
    "negative": lambda z, m: -z,
    "conjugate": lambda z, m: (z.conj() * m.turns).conj().resolve_conj(),
    "complex": lambda z, m: z * torch.complex(m.weight[0, :4], m.second[0, :1]),
    "polar": lambda z, m: z * torch.polar(m.weight[0, :4], m.second[:, :4]).unsqueeze(1)[3],
    "double": lambda z, m: z.to(torch.complex128) * m.frequencies[:4].double(),
    "mixed": lambda z, m: z.to(torch.complex128) * m.turns,
    "without axes": lambda z, m: z * m.turns[0].squeeze(0),
}


@pytest.mark.parametrize("name", MOVES)
def test_numerics(name: str) -> None:
    """Each operation gives what it gave, bit for bit but where torch computes another cosine for it."""
    piece = rewritten(lambda m, x, g: parts(MOVES[name](numbers(x), m)), rtol=1e-5 if name == "polar" else 0)
    assert not complex_calls(piece)


def test_rounding() -> None:
    """A product of any numbers is as close to float64 as torch's own, whose kernel may round once less."""
    torch.manual_seed(0)
    z, w = torch.randn(2, 512, 4, dtype=torch.complex64)
    piece = aten_of(lambda m, x, g: parts(numbers(x) * m.turns))
    names = [node for node in piece.graph.nodes if node.op == "placeholder"]
    inputs = [512, *(w[0] if node.meta["val"].is_complex() else parts(z) for node in names[1:])]
    own, exact = piece(*inputs)[0].double(), parts(z.to(torch.complex128) * w[0].to(torch.complex128))
    real = complex_to_real(piece, device_type="cpu")(*inputs)[0].double()
    assert 0 < (real - exact).norm() <= 2 * (own - exact).norm()


def test_several_users() -> None:
    """A product that is read twice, by another one and as a result of the piece, is one real product."""

    def function(m: Any, x: Tensor, g: Tensor) -> Any:
        z = numbers(x) * m.turns
        return parts(z) + 1, parts(z * z), z, torch.view_as_real(z)

    piece = rewritten(function)
    assert complex_calls(piece) == [aten.view_as_complex.default]


def test_chain() -> None:
    """Product after product, through views and real tensors: no complex value between."""

    def function(m: Any, x: Tensor, g: Tensor) -> Tensor:
        z = numbers(x)
        for _ in range(3):
            z = (z * m.turns).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
            z = torch.view_as_complex(torch.view_as_real(torch.view_as_complex(torch.view_as_real(z))))
        return parts(z)

    assert not complex_calls(rewritten(function))


LEFT: dict[str, Callable[[Tensor, Any], Any]] = {
    "an unknown operation": lambda z, m: (z * m.turns).exp(),
    "what follows it": lambda z, m: torch.view_as_real(-(z * m.turns).exp()),
    "what it shares": lambda z, m: (parts(z * m.turns), (z * m.turns).exp(), parts(z)),
    "a real result": lambda z, m: (z * m.turns).abs(),
    "a complex number": lambda z, m: z * m.turns * 2j,
    "a complex multiple": lambda z, m: torch.add(z, m.turns, alpha=2j),
    "a real term": lambda z, m: z * m.turns + m.frequencies[:4],
    "one number of more digits": lambda z, m: z * m.frequencies[0].double(),
    "half precision": lambda z, m: z.to(torch.complex32) * m.turns,
    "several results": lambda z, m: (z * m.turns).split(2, 1)[0],
    "by strides": lambda z, m: parts(z * m.turns).as_strided((4,), (1,)),
    "a result in columns": lambda z, m: (z * m.turns).transpose(0, 1),
    "a real result that lies otherwise": lambda z, m: torch.view_as_real(channels_last(z, m)),
}


def channels_last(z: Tensor, m: Any) -> Tensor:
    """Joined along the second of four axes, which is last in memory: a layout that `cat` keeps, but not with a fifth axis."""
    image = (z.unsqueeze(-1) * m.turns).view(-1, 2, 2, 4).permute(0, 3, 1, 2)
    return torch.cat([image, -image], 1)


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_is_left_alone(name: str) -> None:
    """A region with one value that has no real form here, or with a result that would lie otherwise: the same nodes."""
    piece = aten_of(lambda m, x, g: LEFT[name](numbers(x), m))
    before = [(node, node.args) for node in piece.graph.nodes]
    assert complex_to_real(piece, device_type="cpu") is piece
    assert [(node, node.args) for node in piece.graph.nodes] == before


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [(aten.mul.Tensor, ("number",), {}), (aten.slice.Tensor, (), {"dim": 0, "start": 1})],
    ids=["a number of the host", "arguments by name"],
)
def test_calls_that_are_left_alone(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A factor on another device, of which a view would not do as well; arguments where the rewrite does not look for them."""
    graph = fx.Graph()
    z, number = graph.placeholder("z"), graph.placeholder("number")
    value = graph.call_function(target, (z, *(number for _ in args)), kwargs)
    result = graph.call_function(aten.view_as_real.default, (value,))
    graph.output((result,))
    with FakeTensorMode():
        z.meta["val"], number.meta["val"] = torch.empty(4, dtype=torch.complex64, device="meta"), torch.empty(())
        for node in (value, result):
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]), **node.kwargs)
    piece = fx.GraphModule(torch.nn.Module(), graph)
    before = list(graph.nodes)
    assert complex_to_real(piece, device_type="meta") is piece
    assert list(piece.graph.nodes) == before


def test_region_by_region() -> None:
    """Two products by the same buffer: the one that goes into an exponential stays complex, the other becomes real."""

    def function(m: Any, x: Tensor, g: Tensor) -> Any:
        return parts((numbers(x + 1) * m.turns / 64).exp()), parts(numbers(x) * m.turns)

    piece = rewritten(function, rtol=1e-5)
    assert [node.target for node in piece.graph.nodes].count(prims.rev.default) == 1
    assert complex_calls(piece).count(aten.mul.Tensor) == 1


@pytest.mark.usefixtures("own_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore")  # of Inductor, where a graph is complex
def test_llama4_through_inductor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces reach Inductor without a complex operation, and every call is within the error budget; so is one after the
    buffer became the conjugate of another tensor.
    """
    family = next(family for family in image_families() if family.name == "llama4")
    tower = family.tower(dtype=dtype).to(DEVICE)
    here = [functools.partial(r, device_type=DEVICE) if r is complex_to_real else r for r in passes.ATEN_REWRITES]
    monkeypatch.setattr(passes, "ATEN_REWRITES", tuple(here))
    given: list[fx.GraphModule] = []
    compile_piece = _torch.compile_piece
    monkeypatch.setattr(_torch, "compile_piece", lambda gm, mode: (given.append(gm), compile_piece(gm, mode))[1])
    compiled = compile_tower(tower, inner="inductor", token_budgets=[1, 4])

    def call(images: int) -> None:
        inputs = {name: t.to(DEVICE) for name, t in family.inputs(tower, images, seed=images).items()}
        with torch.no_grad():
            output, expected = compiled(**inputs), tower(**inputs)
        testing.assert_within_budget(output, expected, testing.reference_float64(tower, **inputs))

    for images in (1, 3, 4):
        call(images)
    reads = [node for gm in given for node in gm.graph.nodes if node.target is aten.view_as_real.default]
    assert len(reads) == 2  # one in each piece in front of an attention
    assert not [target for gm in given for target in complex_calls(gm)]
    rotary = tower.rotary_embedding
    rotary.freqs_ci = rotary.freqs_ci.conj().resolve_conj().conj()
    call(2)
    assert (stats(tower).hits, stats(tower).fallbacks) == (4, {})
