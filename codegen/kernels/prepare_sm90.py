"""Before the backward: delta = rowsum(dout * out) - dlse, lse in base 2, and the states of the dQ tiles cleared.

Rows are padded to whole query tiles: lse = +inf there makes P = 0. TMA fills columns beyond head_dim_v with zeros, so that a
power of two, which the row sum needs, serves every smaller width.
"""

import tilelang.language as T

from .common import LOG2E, size, view

INCLUDES = ("device/common.cuh",)


def build(spec):
    BN, DV, dtype, f32 = spec.block_q, spec.head_dim_v, spec.dtype, T.float32
    batch, seqlen_q, padded, heads, head_dim_v = (
        size(n) for n in ("batch", "seqlen_q", "seqlen_q_padded", "heads", "head_dim_v")
    )
    lse_row_stride = T.dynamic("lse_row_stride", "int64")
    columns = min(DV, 128)  # reduced at once

    @T.prim_func
    def prepare(
        out: view("out", batch, seqlen_q, heads, head_dim_v, dtype),
        dout: view("dout", batch, seqlen_q, heads, head_dim_v, dtype),
        lse: T.StridedTensor([batch * heads, seqlen_q], [lse_row_stride, 1], f32),
        dlse: T.StridedTensor([batch * heads, seqlen_q], [lse_row_stride, 1], f32),
        lse_log2: T.Tensor([batch * heads, padded], f32),
        delta: T.Tensor([batch * heads, padded], f32),
        dq_state: T.Tensor([batch * heads, padded // BN], T.int32),
        has_dlse: T.int32,
    ):
        with T.Kernel(padded // BN * heads * batch, threads=spec.threads) as (block,):
            out_s = T.alloc_shared([BN, DV], dtype)
            dout_s = T.alloc_shared([BN, DV], dtype)
            o = T.alloc_fragment([BN, columns], dtype)
            do = T.alloc_fragment([BN, columns], dtype)
            product = T.alloc_fragment([BN, columns], f32)
            d = T.alloc_fragment([BN], f32)
            full = T.alloc_barrier(arrive_count=1)
            h = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            tile = T.call_extern("int32", "gqa_attn::device::divide", block, batch * heads)
            row = block - tile * batch * heads  # heads of one place in the sequence lie together in memory
            b = T.call_extern("int32", "gqa_attn::device::divide", row, heads)
            h = row - b * heads
            T.tma_copy(out[b, tile * BN : (tile + 1) * BN, h, 0:DV], out_s, barrier=full)
            T.tma_copy(dout[b, tile * BN : (tile + 1) * BN, h, 0:DV], dout_s, barrier=full)
            if T.get_thread_binding() == 0:
                T.barrier_arrive(full)
                dq_state[row, tile] = 0
            T.barrier_wait(full, 0)
            T.clear(d)
            for c in T.serial(DV // columns):
                T.copy(out_s[:, c * columns : (c + 1) * columns], o)
                T.copy(dout_s[:, c * columns : (c + 1) * columns], do)
                for i, j in T.Parallel(BN, columns):
                    product[i, j] = T.cast(o[i, j], f32) * T.cast(do[i, j], f32)
                T.reduce_sum(product, d, dim=1, clear=False)
            if has_dlse > 0:
                for i in T.Parallel(BN):
                    if tile * BN + i < seqlen_q:
                        d[i] = d[i] - dlse[row, tile * BN + i]
            T.copy(d, delta[row, tile * BN : (tile + 1) * BN])
            for i in T.Parallel(BN):
                lse_log2[row, tile * BN + i] = T.if_then_else(
                    tile * BN + i < seqlen_q, lse[row, tile * BN + i] * LOG2E, T.infinity(f32)
                )

    return prepare
