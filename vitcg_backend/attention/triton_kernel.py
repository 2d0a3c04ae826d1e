"""The device code of the tile-scheduled attention. Importing this module needs triton; `tile_scheduled` does it lazily.

One program computes one tile of up to BLOCK_M query rows for one head. A head size that is no power of two is split in
two dots, 64 + 16 for 72 and 80, so that no product is padded to 128.

Note [Only rows of the segment]
    A softmax weight of zero does not keep a row out: 0 * NaN is NaN, and the rows after a segment belong to another
    image or to a stale buffer. So no block of values may reach past the segment. In a segment of at least one block,
    the last block is shifted back to end where the segment ends, and the scores of the keys seen before are masked: all
    loads are whole blocks, which suits bulk (TMA) loads, and only scores are masked. A shorter segment is one block,
    loaded with a mask. Rows of q beyond the tile are harmless: they reach no other row and are not stored.
"""

# Triton's own annotations are tl.constexpr or none, and constants are in capitals, as in its tutorials. No postponed
# evaluation here: the interpreter (TRITON_INTERPRET=1) looks at the annotations themselves.
# ruff: noqa: ANN001, ANN202, ANN201, N803
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

__all__ = ["attention_kernel"]

# Below every score, and finite: the difference of two of them is 0, not NaN. Times any scale that the launch passes on
# it is still low enough for a weight of 0.
_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit
def _load_rows(base, rows, end, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Columns FIRST to FIRST + WIDTH of the rows before `end`, ``[rows, WIDTH]``; zero elsewhere and from DIM on."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    mask = rows[:, None] < end
    if FIRST + WIDTH > DIM:
        mask = mask & (columns[None, :] < DIM)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _scores(q0, q1, k0, k1, D1: tl.constexpr, NEGATIVE: tl.constexpr):
    """Unscaled scores of a block of keys, ``[BLOCK_M, BLOCK_N]`` in float32."""
    scores = tl.dot(q0, k0.T)
    if D1 > 0:
        scores = tl.dot(q1, k1.T, scores)
    if NEGATIVE:
        scores = -scores
    return scores


@triton.jit
def _accumulate(scores, v0, v1, top, total, acc0, acc1, scale_log2, D1: tl.constexpr):
    """One step of the online softmax.

    `top` is the highest scaled score of each row so far (an exponent of two), `total` the sum of its weights, `acc0`
    and `acc1` its weighted values.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_top[:, None])
    decay = tl.math.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(v0.dtype)
    acc0 = tl.dot(weights, v0, acc0 * decay[:, None])
    if D1 > 0:
        acc1 = tl.dot(weights, v1, acc1 * decay[:, None])
    return new_top, total, acc0, acc1


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr,
    q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1,
    q_row, q_head, k_row, k_head, v_row, v_head, scale_log2,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Packed attention over the tiles of a table (`tiles.tile_table`, one section).

    q is ``[rows, HEADS, DIM]``, k and v are ``[rows, HEADS / GROUPS, DIM]``, out is contiguous like q; `table_ptr`
    points to the number of used tiles (int32), then the tiles. `q_row` and `q_head` are the strides of a row and of a
    head in units of UNIT elements, so that the compiler knows how wide it may load; the same for k and v. `scale_log2`
    is the magnitude of the scale of the scores times log2(e), not zero, and NEGATIVE its sign.

    D0 is the power of two up to DIM, D1 a power of two that covers the rest, or 0. With TMA, whole blocks are loaded
    through descriptors of ``[heads, rows, DIM]``: `q_desc0` for the D0 columns, `q_desc1` for the D1 columns, etc.
    """
    work_items = tl.load(table_ptr) * HEADS
    # There is room in the table for many more tiles than a call needs, so the grid has fewer programs than that.
    for work in range(tl.program_id(0), work_items, tl.num_programs(0)):
        head = work % HEADS
        tile = table_ptr + (work // HEADS + 1) * 4
        start = tl.load(tile)
        length = tl.load(tile + 1)
        first = tl.load(tile + 2)
        end = tl.load(tile + 3)

        kv_head = head // GROUPS
        q_base = q_ptr + head.to(tl.int64) * (q_head * UNIT)
        k_base = k_ptr + kv_head.to(tl.int64) * (k_head * UNIT)
        v_base = v_ptr + kv_head.to(tl.int64) * (v_head * UNIT)
        rows = first + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_N)
        if TMA:
            q0 = q_desc0.load([head, first, 0]).reshape(BLOCK_M, D0)
        else:
            q0 = _load_rows(q_base, rows, end, q_row * UNIT, 0, D0, DIM)
        q1 = q0
        if D1 > 0:
            if TMA:
                q1 = q_desc1.load([head, first, D0]).reshape(BLOCK_M, D1)
            else:
                q1 = _load_rows(q_base, rows, end, q_row * UNIT, D0, D1, DIM)

        top = tl.full([BLOCK_M], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
        acc1 = total
        if D1 > 0:
            acc1 = tl.zeros([BLOCK_M, D1], tl.float32)

        # See Note [Only rows of the segment].
        if length < BLOCK_N:
            keys = start + columns
            k0 = _load_rows(k_base, keys, start + length, k_row * UNIT, 0, D0, DIM)
            v0 = _load_rows(v_base, keys, start + length, v_row * UNIT, 0, D0, DIM)
            k1 = k0
            v1 = v0
            if D1 > 0:
                k1 = _load_rows(k_base, keys, start + length, k_row * UNIT, D0, D1, DIM)
                v1 = _load_rows(v_base, keys, start + length, v_row * UNIT, D0, D1, DIM)
            scores = tl.where((columns < length)[None, :], _scores(q0, q1, k0, k1, D1, NEGATIVE), _LOWEST)
            top, total, acc0, acc1 = _accumulate(scores, v0, v1, top, total, acc0, acc1, scale_log2, D1)
        else:
            for offset in tl.range(0, length, BLOCK_N, num_stages=STAGES):
                seen = tl.maximum(offset + BLOCK_N - length, 0)
                key = start + offset - seen
                if TMA:
                    k0 = k_desc0.load([kv_head, key, 0]).reshape(BLOCK_N, D0)
                    v0 = v_desc0.load([kv_head, key, 0]).reshape(BLOCK_N, D0)
                else:
                    k0 = _load_rows(k_base, key + columns, start + length, k_row * UNIT, 0, D0, DIM)
                    v0 = _load_rows(v_base, key + columns, start + length, v_row * UNIT, 0, D0, DIM)
                k1 = k0
                v1 = v0
                if D1 > 0:
                    if TMA:
                        k1 = k_desc1.load([kv_head, key, D0]).reshape(BLOCK_N, D1)
                        v1 = v_desc1.load([kv_head, key, D0]).reshape(BLOCK_N, D1)
                    else:
                        k1 = _load_rows(k_base, key + columns, start + length, k_row * UNIT, D0, D1, DIM)
                        v1 = _load_rows(v_base, key + columns, start + length, v_row * UNIT, D0, D1, DIM)
                scores = _scores(q0, q1, k0, k1, D1, NEGATIVE)
                if seen > 0:
                    scores = tl.where((columns >= seen)[None, :], scores, _LOWEST)
                top, total, acc0, acc1 = _accumulate(scores, v0, v1, top, total, acc0, acc1, scale_log2, D1)

        # A tile of the padded tail has attended to nothing, and what it accumulated is arbitrary: the lowest score times the
        # scale, less its own rounding, is no zero where the compiler fuses the two.
        factor = 1.0 / total
        out = out_ptr + rows[:, None].to(tl.int64) * (HEADS * DIM) + head * DIM
        stored = rows[:, None] < end
        columns0 = tl.arange(0, D0)[None, :]
        values0 = tl.where(length > 0, acc0 * factor[:, None], 0.0)
        tl.store(out + columns0, values0.to(out_ptr.dtype.element_ty), mask=stored)
        if D1 > 0:
            columns1 = D0 + tl.arange(0, D1)[None, :]
            values1 = tl.where(length > 0, acc1 * factor[:, None], 0.0)
            tl.store(out + columns1, values1.to(out_ptr.dtype.element_ty), mask=stored & (columns1 < DIM))
