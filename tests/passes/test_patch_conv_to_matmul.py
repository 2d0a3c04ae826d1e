"""patch_conv_to_matmul: kernel = input becomes a matrix product; every other convolution is left alone."""

from __future__ import annotations

import torch
from graphs import aten_pieces

from vitcg_backend.passes.patch_conv_to_matmul import patch_conv_to_matmul


def conv(m, x, g):
    patches = x.view(-1, 2, 1, 2, 2)
    weight = torch.cat([m.weight, m.second]).view(16, 2, 1, 2, 2)
    return torch.nn.functional.conv3d(patches, weight, m.weight[:, 0].repeat(2), stride=(1, 2, 2)).view(-1, 16)


def calls(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_rewrites() -> None:
    """A conv3d over exactly one patch becomes one addmm."""
    (piece,), _ = aten_pieces(conv)
    assert torch.ops.aten.convolution.default in calls(piece)
    patch_conv_to_matmul(piece)
    assert torch.ops.aten.convolution.default not in calls(piece)
    assert torch.ops.aten.addmm.default in calls(piece)


def test_unrelated_graph_comes_back_as_it_was() -> None:
    """The same object, the same nodes."""
    (piece,), _ = aten_pieces(lambda m, x, g: (x @ m.weight).relu())
    before = list(piece.graph.nodes)
    assert patch_conv_to_matmul(piece) is piece
    assert list(piece.graph.nodes) == before


def test_numerics() -> None:
    """The product agrees with the convolution to float32 rounding, with and without a bias."""
    for bias in (True, False):

        def function(m, x, g, bias=bias):
            patches = x.view(-1, 2, 2, 2)
            weight = m.weight.view(8, 2, 2, 2)
            return torch.nn.functional.conv2d(patches, weight, m.second[0] if bias else None, stride=2).view(-1, 8)

        (piece,), _ = aten_pieces(function)
        inputs = [5] + [
            torch.randn([5 if not isinstance(s, int) else s for s in n.meta["val"].shape])
            for n in piece.graph.nodes
            if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)
        ]
        expected = piece(*inputs)[0].clone()
        torch.testing.assert_close(patch_conv_to_matmul(piece)(*inputs)[0], expected, rtol=1e-5, atol=1e-5)


def test_several_users() -> None:
    """All users of the convolution read the product."""

    def function(m, x, g):
        y = torch.nn.functional.conv2d(x.view(-1, 2, 2, 2), m.weight.view(8, 2, 2, 2))
        return y.relu().view(-1, 8), y.view(-1, 8) + 1

    (piece,), _ = aten_pieces(function)
    patch_conv_to_matmul(piece)
    assert torch.ops.aten.convolution.default not in calls(piece)


def test_nested_chain_and_real_convolutions_stay() -> None:
    """A convolution that slides, in a chain after one that does not, is kept."""

    def function(m, x, g):
        y = torch.nn.functional.conv2d(x.view(-1, 2, 2, 2), m.weight.view(8, 2, 2, 2)).view(-1, 2, 2, 2)
        return torch.nn.functional.conv2d(y, m.second.view(16, 2, 2, 1)).flatten(1)

    (piece,), _ = aten_pieces(function)
    patch_conv_to_matmul(piece)
    assert calls(piece).count(torch.ops.aten.convolution.default) == 1
