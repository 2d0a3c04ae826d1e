"""The device code of the tile-scheduled attention for Hopper, in Gluon: warps that load beside warps that multiply.

One producer warp keeps a ring of key and value blocks filled by TMA; one to three consumer warpgroups take 64 or 128 query
rows each. A consumer starts the scores of the next block before it adds up the values of this one, so that the softmax of one
runs under the products of the other. Importing this module needs triton with Gluon; `tile_scheduled` does it lazily.

As in `triton_kernel`: a head size is split into two widths, tiles come from a table, and no block of values may reach past
its segment (its Note [Only rows of the segment]). Here the blocks of a segment are taken from the last to the first. The last
is shifted back to end with the segment, and the scores of keys that the next block has, too, are masked; in a segment of
less than a block the rows after its end are zeroed where they lie, in shared memory.
"""

# Gluon's own annotations are gl.constexpr or none, and constants are in capitals, as in its tutorials.
# ruff: noqa: ANN001, ANN202, ANN201, N803, SIM102
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["hopper_attention_kernel"]

_LOWEST: gl.constexpr = gl.constexpr(-3.0e38)  # as in `triton_kernel`


@gluon.jit
def _tile(table_ptr, work, HEADS: gl.constexpr):
    """Head and tile of a work item: first row of the segment, its rows, first row of the tile, end of the segment."""
    tile = table_ptr + (work // HEADS + 1) * 4
    return work % HEADS, gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)


@gluon.jit
def _produce(
    q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, q0, q1, k0, k1, v0, v1,
    q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    Q_BYTES: gl.constexpr = CONSUMERS * ROWS * (D0 + D1) * 2
    BYTES: gl.constexpr = BLOCK_N * (D0 + D1) * 2
    work_items = gl.load(table_ptr) * HEADS
    block = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    for work in range(gl.program_id(0), work_items, gl.num_programs(0)):
        head, start, length, first, _end = _tile(table_ptr, work, HEADS)
        if length > 0:
            kv_head = head // GROUPS
            mbarrier.wait(q_free, (tiles & 1) ^ 1)
            mbarrier.expect(q_full, Q_BYTES)
            for c in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(q_desc0, [head, first + c * ROWS, 0], q_full, q0.index(c))
                if D1 > 0:
                    tma.async_copy_global_to_shared(q_desc1, [head, first + c * ROWS, D0], q_full, q1.index(c))
            tiles += 1
            blocks = (length + BLOCK_N - 1) // BLOCK_N
            for i in range(blocks):
                row = start + (blocks - 1 - i) * BLOCK_N
                if (i == 0) & (length >= BLOCK_N):
                    row = start + length - BLOCK_N
                stage = block % STAGES
                phase = ((block // STAGES) & 1) ^ 1
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BYTES)
                tma.async_copy_global_to_shared(k_desc0, [kv_head, row, 0], k_full.index(stage), k0.index(stage))
                if D1 > 0:
                    tma.async_copy_global_to_shared(k_desc1, [kv_head, row, D0], k_full.index(stage), k1.index(stage))
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BYTES)
                tma.async_copy_global_to_shared(v_desc0, [kv_head, row, 0], v_full.index(stage), v0.index(stage))
                if D1 > 0:
                    tma.async_copy_global_to_shared(v_desc1, [kv_head, row, D0], v_full.index(stage), v1.index(stage))
                block += 1


@gluon.jit
def _start_scores(
    q0, q1, k0, k1, stage, LAYOUT: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Unscaled scores of a block of keys, not yet complete."""
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    keys0 = k0.index(stage).reshape([BLOCK_N, D0]).permute([1, 0])
    scores = warpgroup_mma(q0, keys0, scores, use_acc=False, is_async=True)
    if D1 > 0:
        keys1 = k1.index(stage).reshape([BLOCK_N, D1]).permute([1, 0])
        scores = warpgroup_mma(q1, keys1, scores, is_async=True)
    return scores


@gluon.jit
def _zero_rows_from(values, length, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the rows of a block of values from `length` on, in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0])
    block = values.reshape([BLOCK_N, WIDTH])
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    kept = block.load(LAYOUT)
    block.store(gl.where((rows < length)[:, None], kept, gl.zeros_like(kept)))


@gluon.jit
def _consume(
    NUMBER: gl.constexpr, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr,
    out_ptr, scale_log2,
    HEADS: gl.constexpr, DIM: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D0, 16])
    ACC1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1 if D1 > 0 else 16, 16])
    WEIGHTS0: gl.constexpr = gl.DotOperandLayout(0, ACC0, 2)
    WEIGHTS1: gl.constexpr = gl.DotOperandLayout(0, ACC1, 2)
    NEXT: gl.constexpr = (NUMBER + 1) % CONSUMERS
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    work_items = gl.load(table_ptr) * HEADS
    block = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    turns = gl.to_tensor(0)
    if TURNS:
        if NUMBER == CONSUMERS - 1:
            mbarrier.arrive(turn.index(0), count=1)
    own_q0 = q0.index(NUMBER).reshape([ROWS, D0])
    own_q1 = own_q0
    if D1 > 0:
        own_q1 = q1.index(NUMBER).reshape([ROWS, D1])
    for work in range(gl.program_id(0), work_items, gl.num_programs(0)):
        head, _start, length, first, end = _tile(table_ptr, work, HEADS)
        acc0 = gl.zeros([ROWS, D0], gl.float32, ACC0)
        acc1 = gl.zeros([ROWS, D1 if D1 > 0 else 16], gl.float32, ACC1)
        total = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
        if length > 0:
            blocks = (length + BLOCK_N - 1) // BLOCK_N
            mbarrier.wait(q_full, tiles & 1)
            tiles += 1
            if first + NUMBER * ROWS >= end:  # the tile ends before this consumer's rows: let every block pass
                mbarrier.arrive(q_free, count=1)
                for _ in range(blocks):
                    stage = block % STAGES
                    mbarrier.wait(k_full.index(stage), (block // STAGES) & 1)
                    if TURNS:
                        mbarrier.wait(turn.index(NUMBER), turns)
                        turns ^= 1
                        mbarrier.arrive(turn.index(NEXT), count=1)
                    mbarrier.arrive(k_free.index(stage), count=1)
                    mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
                    mbarrier.arrive(v_free.index(stage), count=1)
                    block += 1
            else:
                stage = block % STAGES
                mbarrier.wait(k_full.index(stage), (block // STAGES) & 1)
                if TURNS:
                    mbarrier.wait(turn.index(NUMBER), turns)
                    turns ^= 1
                scores = _start_scores(own_q0, own_q1, k0, k1, stage, SCORES, D0, D1, BLOCK_N, ROWS)
                if TURNS:
                    mbarrier.arrive(turn.index(NEXT), count=1)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(k_free.index(stage), count=1)
                if blocks == 1:
                    mbarrier.arrive(q_free, count=1)
                columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
                if length < BLOCK_N:
                    scores = gl.where((columns < length)[None, :], scores, _LOWEST)
                    mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
                    _zero_rows_from(v0.index(stage), length, BLOCK_N, D0)
                    if D1 > 0:
                        _zero_rows_from(v1.index(stage), length, BLOCK_N, D1)
                    fence_async_shared()
                else:
                    scores = gl.where((columns >= blocks * BLOCK_N - length)[None, :], scores, _LOWEST)
                top = gl.max(scores, 1) * scale_log2
                weights = gl.exp2(scores * scale_log2 - top[:, None])
                total = gl.sum(weights, 1)
                operand = gl.convert_layout(weights.to(dtype), WEIGHTS0)
                for _ in range(blocks - 1):
                    stage = block % STAGES
                    following = (block + 1) % STAGES
                    mbarrier.wait(k_full.index(following), ((block + 1) // STAGES) & 1)
                    if TURNS:
                        mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
                        mbarrier.wait(turn.index(NUMBER), turns)
                        turns ^= 1
                    scores = _start_scores(own_q0, own_q1, k0, k1, following, SCORES, D0, D1, BLOCK_N, ROWS)
                    if not TURNS:
                        mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
                    sum0 = warpgroup_mma(operand, v0.index(stage).reshape([BLOCK_N, D0]), acc0, is_async=True)
                    if D1 > 0:
                        values1 = v1.index(stage).reshape([BLOCK_N, D1])
                        sum1 = warpgroup_mma(gl.convert_layout(operand, WEIGHTS1), values1, acc1, is_async=True)
                        if TURNS:
                            mbarrier.arrive(turn.index(NEXT), count=1)
                        scores = warpgroup_mma_wait(2, deps=[scores])
                    else:
                        if TURNS:
                            mbarrier.arrive(turn.index(NEXT), count=1)
                        scores = warpgroup_mma_wait(1, deps=[scores])
                    mbarrier.arrive(k_free.index(following), count=1)
                    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
                    weights = gl.exp2(scores * scale_log2 - new_top[:, None])
                    decay = gl.exp2(top - new_top)
                    total = total * decay + gl.sum(weights, 1)
                    top = new_top
                    new_operand = gl.convert_layout(weights.to(dtype), WEIGHTS0)
                    # Complete already: a branch here keeps the assembler from moving the next wait above the softmax.
                    mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
                    if D1 > 0:
                        acc0, acc1, operand, new_operand = warpgroup_mma_wait(0, deps=[sum0, sum1, operand, new_operand])
                        acc1 = acc1 * gl.convert_layout(decay, gl.SliceLayout(1, ACC1))[:, None]
                    else:
                        acc0, operand, new_operand = warpgroup_mma_wait(0, deps=[sum0, operand, new_operand])
                    mbarrier.arrive(v_free.index(stage), count=1)
                    acc0 = acc0 * gl.convert_layout(decay, gl.SliceLayout(1, ACC0))[:, None]
                    operand = new_operand
                    block += 1
                if blocks > 1:
                    mbarrier.arrive(q_free, count=1)
                stage = block % STAGES
                mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
                sum0 = warpgroup_mma(operand, v0.index(stage).reshape([BLOCK_N, D0]), acc0, is_async=True)
                if D1 > 0:
                    values1 = v1.index(stage).reshape([BLOCK_N, D1])
                    sum1 = warpgroup_mma(gl.convert_layout(operand, WEIGHTS1), values1, acc1, is_async=True)
                    acc0, acc1 = warpgroup_mma_wait(0, deps=[sum0, sum1])
                else:
                    acc0 = warpgroup_mma_wait(0, deps=[sum0])
                mbarrier.arrive(v_free.index(stage), count=1)
                block += 1
        # A tile of the padded tail has accumulated nothing and gets zeros.
        factor = 1.0 / total
        rows0 = first + NUMBER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC0))
        columns0 = gl.arange(0, D0, gl.SliceLayout(0, ACC0))
        factor0 = gl.convert_layout(factor, gl.SliceLayout(1, ACC0))
        out = out_ptr + head * DIM
        place0 = out + rows0[:, None].to(gl.int64) * (HEADS * DIM) + columns0[None, :]
        gl.store(place0, (acc0 * factor0[:, None]).to(dtype), mask=(rows0 < end)[:, None])
        if D1 > 0:
            rows1 = first + NUMBER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC1))
            columns1 = D0 + gl.arange(0, D1, gl.SliceLayout(0, ACC1))
            factor1 = gl.convert_layout(factor, gl.SliceLayout(1, ACC1))
            place1 = out + rows1[:, None].to(gl.int64) * (HEADS * DIM) + columns1[None, :]
            gl.store(place1, (acc1 * factor1[:, None]).to(dtype), mask=(rows1 < end)[:, None] & (columns1 < DIM)[None, :])


@gluon.jit
def hopper_attention_kernel(
    q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, out_ptr, table_ptr, scale_log2,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr,
    REGISTERS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Packed attention over the tiles of a table section of ``CONSUMERS * ROWS`` rows, persistent.

    Descriptors are of ``[heads, rows, DIM]`` in blocks of ``[1, ROWS or BLOCK_N, D0 or D1]``; the rest is as for
    `triton_kernel.attention_kernel`, with a positive scale. REGISTERS are those of a thread of the second and third consumer,
    and with TURNS the consumers start their products one after the other.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    q0 = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, ROWS, D0], q_desc0.layout)
    k0 = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, D0], k_desc0.layout)
    v0 = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, D0], v_desc0.layout)
    q1 = q0
    k1 = k0
    v1 = v0
    if D1 > 0:
        q1 = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, ROWS, D1], q_desc1.layout)
        k1 = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, D1], k_desc1.layout)
        v1 = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, D1], v_desc1.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    fence_async_shared()
    N0: gl.constexpr = 0
    N1: gl.constexpr = 1
    N2: gl.constexpr = 2
    # Written out: Gluon wants the list of partitions as it stands.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (N0, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr, out_ptr,
                        scale_log2, HEADS, DIM, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS, TURNS)),
            (_produce, (q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full,
                        k_free, v_full, v_free, turn, table_ptr, HEADS, GROUPS, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (N0, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr, out_ptr,
                        scale_log2, HEADS, DIM, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS, TURNS)),
            (_consume, (N1, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr, out_ptr,
                        scale_log2, HEADS, DIM, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS, TURNS)),
            (_produce, (q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full,
                        k_free, v_full, v_free, turn, table_ptr, HEADS, GROUPS, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (N0, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr, out_ptr,
                        scale_log2, HEADS, DIM, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS, TURNS)),
            (_consume, (N1, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr, out_ptr,
                        scale_log2, HEADS, DIM, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS, TURNS)),
            (_consume, (N2, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full, k_free, v_full, v_free, turn, table_ptr, out_ptr,
                        scale_log2, HEADS, DIM, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS, TURNS)),
            (_produce, (q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, q0, q1, k0, k1, v0, v1, q_full, q_free, k_full,
                        k_free, v_full, v_free, turn, table_ptr, HEADS, GROUPS, D0, D1, BLOCK_N, STAGES, CONSUMERS, ROWS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
