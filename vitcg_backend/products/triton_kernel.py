"""The device code of a product. Importing this module needs triton; `triton_product` does it lazily.

One program computes one tile of the result: it takes blocks of both matrices through TMA and adds their products up in float32.
Programs go down the rows of a few tiles before they turn to the next columns, so that what runs at one time reads few weights.
What lies outside a matrix is read as zero and never stored.

Sizes are plain arguments that nothing is specialised on, and so are whether there is a bias and a GELU: one compile of a tile
shape serves every product of a dtype.
"""

# Triton's own annotations are tl.constexpr or none, and constants are in capitals, as in its tutorials. No postponed
# evaluation here: the interpreter (TRITON_INTERPRET=1) looks at the annotations themselves.
# ruff: noqa: ANN001, ANN202, ANN201, N803
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

__all__ = ["UNIT", "product_kernel"]

UNIT = 8  # elements of half precision in 16 bytes: each row of the result begins at a multiple
_UNIT: tl.constexpr = tl.constexpr(UNIT)


@triton.jit
def _tanh_gelu(x):
    """``x / 2 * (1 + tanh(u))``, written as a sigmoid of ``2 * u``."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit(do_not_specialize=["rows", "units", "inputs", "biased", "gelu"])
def product_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, rows, units, inputs, biased, gelu,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``x @ w.T + bias``, with a tanh-GELU where `gelu` is not 0.

    `x_desc` is of ``[rows, inputs]``, `w_desc` of ``[outputs, inputs]``, out is contiguous ``[rows, outputs]`` with outputs =
    units * UNIT; the first `biased` columns get a bias: all, or with 0 none, and then `bias_ptr` may point anywhere.
    """
    outputs = units * _UNIT
    down = tl.cdiv(rows, BLOCK_M)
    across = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    row = (first + tile % (GROUP * across) % height) * BLOCK_M
    column = tile % (GROUP * across) // height * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(x_desc.load([row, k]), w_desc.load([column, k]).T, acc)

    columns = column + tl.arange(0, BLOCK_N)
    acc += tl.load(bias_ptr + columns, mask=columns < biased, other=0.0).to(tl.float32)[None, :]
    if gelu != 0:
        acc = _tanh_gelu(acc)
    lines = row + tl.arange(0, BLOCK_M)
    out = out_ptr + lines[:, None].to(tl.int64) * outputs + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(lines < rows)[:, None] & (columns < outputs)[None, :])
