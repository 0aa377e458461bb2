"""After the backward: dQ from the accumulator order of the workspace to rows in 16 bit, times the softmax scale."""

import tilelang.language as T

from .common import size, view

INCLUDES = ("device/backward.cuh",)


def build(spec):
    BN, D, dtype, f32 = spec.block_q, spec.head_dim, spec.dtype, T.float32
    batch, seqlen_q, heads, head_dim, q_tiles = (size(n) for n in ("batch", "seqlen_q", "heads", "head_dim", "q_tiles"))
    halves = 2 if BN == 64 else 1  # how the two warpgroups of the backward shared the tile: by columns, or by rows
    width = D // halves

    @T.prim_func
    def finish(
        dq: view("dq", batch, seqlen_q, heads, head_dim, dtype),
        dq_accum: T.Tensor([batch * heads, q_tiles, BN * D], f32),
        scale: T.float32,
    ):
        with T.Kernel(q_tiles * heads * batch, threads=spec.threads) as (block,):
            accum = T.alloc_fragment([BN, D], f32)
            rows_s = T.alloc_shared([BN, D], dtype)
            h = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            tile = T.call_extern("int32", "gqa_attn::device::divide", block, batch * heads)
            row = block - tile * batch * heads
            b = T.call_extern("int32", "gqa_attn::device::divide", row, heads)
            h = row - b * heads
            # The layout of a wgmma accumulator: each thread reads back what a thread of the backward wrote, 16 bytes at a time.
            T.annotate_layout({
                accum: T.Fragment(
                    [BN, D],
                    forward_thread_fn=lambda i, j: (j // width) * 128 * (halves - 1) + (i // 16) * 32 + (i % 8) * 4 + (j % 8) // 2,
                    forward_index_fn=lambda i, j: ((j % width) // 8) * 4 + ((i // 8) % 2) * 2 + j % 2,
                )
            })
            for i, j in T.Parallel(BN, D):
                accum[i, j] = dq_accum[
                    row, tile, (j // 8) * (BN * 8) + (i // 16) * 128 + (i % 8) * 16 + ((j % 8) // 2) * 4 + ((i // 8) % 2) * 2 + j % 2
                ]
            for i, j in T.Parallel(BN, D):
                accum[i, j] = accum[i, j] * scale
            T.copy(accum, rows_s)
            T.fence_proxy_async()
            T.sync_threads()
            T.copy(rows_s, dq[b, tile * BN : (tile + 1) * BN, h, 0:D])

    return finish
