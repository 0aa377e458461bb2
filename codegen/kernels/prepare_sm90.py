"""Before the backward: delta = rowsum(dout * out) - dlse, lse in base 2; states of the dQ tiles and tickets are cleared.

Rows are padded to whole query tiles of every sequence: lse = +inf there makes P = 0. TMA fills columns beyond head_dim_v with
zeros, so that a power of two, which the row sum needs, serves every smaller width.
"""

import tilelang.language as T

from .common import LOG2E, size, tile_place, view

INCLUDES = ("device/workspace_tiles.cuh",)
DEV = "gqa_attn::device::"


def build(spec):
    BN, DV, dtype, f32 = spec.block_q, spec.head_dim_v, spec.dtype, T.float32
    q_outer, q_inner, padded, heads, head_rows, head_dim_v, seqlen_q, sequences = (
        size(n) for n in (
            "q_outer", "q_inner", "seqlen_q_padded", "heads", "head_rows", "head_dim_v", "seqlen_q", "sequences",
        )
    )
    lse_row_stride = T.dynamic("lse_row_stride", "int64")
    columns = min(DV, 128)  # reduced at once

    @T.macro
    def load(source, tile_s, full, h, outer, inner):
        T.tma_copy(source[outer, inner : inner + BN, h, 0:DV], tile_s, barrier=full)

    @T.prim_func
    def prepare(
        out: view("out", q_outer, q_inner, heads, head_dim_v, dtype),
        dout: view("dout", q_outer, q_inner, heads, head_dim_v, dtype),
        lse: T.StridedTensor([head_rows, seqlen_q], [lse_row_stride, 1], f32),
        dlse: T.StridedTensor([head_rows, seqlen_q], [lse_row_stride, 1], f32),
        lse_log2: T.Tensor([head_rows, padded], f32),
        delta: T.Tensor([head_rows, padded], f32),
        dq_state: T.Tensor([head_rows, padded // BN], T.int32),
        tickets: T.Tensor([1], T.int32),
        begins_q: T.Tensor([sequences], T.int32),
        ends_q: T.Tensor([sequences], T.int32),
        q_tile_rows: T.int32,
        has_dlse: T.int32,
    ):
        with T.Kernel(padded // BN * head_rows, threads=spec.threads) as (block,):
            out_s = T.alloc_shared([BN, DV], dtype)
            dout_s = T.alloc_shared([BN, DV], dtype)
            o = T.alloc_fragment([BN, columns], dtype)
            do = T.alloc_fragment([BN, columns], dtype)
            product = T.alloc_fragment([BN, columns], f32)
            d = T.alloc_fragment([BN], f32)
            full = T.alloc_barrier(arrive_count=1)
            found = T.alloc_local([4], T.int32)  # batch, first row, length of the sequence; which of its tiles
            h = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)  # row of the sequence
            tile = T.call_extern("int32", f"{DEV}divide", block, head_rows)
            row = block - tile * head_rows  # heads of one place in the sequence lie together in memory
            b = T.call_extern("int32", f"{DEV}divide", row, heads)
            h = row - b * heads
            first = T.call_extern("int32", f"{DEV}divide", tile * BN, q_tile_rows)  # of the backward's query tiles
            T.call_extern(
                "handle", f"{DEV}find_tile", found.data, first, b, seqlen_q, begins_q.data, ends_q.data, sequences, q_tile_rows
            )
            first = found[3] * q_tile_rows + tile * BN - first * q_tile_rows
            if T.get_thread_binding() == 0:
                dq_state[row, tile] = 0
                if block == 0:
                    tickets[0] = 0
            T.clear(d)
            if first < found[2]:
                load(out, out_s, full, h, *tile_place(sequences > 0, found[0], found[1], found[2], first))
                load(dout, dout_s, full, h, *tile_place(sequences > 0, found[0], found[1], found[2], first))
                if T.get_thread_binding() == 0:
                    T.barrier_arrive(full)
                T.barrier_wait(full, 0)
                for c in T.serial(DV // columns):
                    T.copy(out_s[:, c * columns : (c + 1) * columns], o)
                    T.copy(dout_s[:, c * columns : (c + 1) * columns], do)
                    for i, j in T.Parallel(BN, columns):
                        product[i, j] = T.cast(o[i, j], f32) * T.cast(do[i, j], f32)
                    T.reduce_sum(product, d, dim=1, clear=False)
            if has_dlse > 0:
                for i in T.Parallel(BN):
                    if first + i < found[2]:
                        d[i] = d[i] - dlse[row, found[1] + first + i]
            T.copy(d, delta[row, tile * BN : (tile + 1) * BN])
            for i in T.Parallel(BN):
                lse_log2[row, tile * BN + i] = T.if_then_else(
                    first + i < found[2], lse[row, found[1] + first + i] * LOG2E, T.infinity(f32)
                )

    return prepare
