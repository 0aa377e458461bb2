"""After the backward: a gradient from float32 tiles in accumulator order to rows in 16 bit, times a factor.

dQ has one part; dK and dV, where several blocks shared a kv tile, one part of each block, which are added here in a fixed order.
"""

import tilelang.language as T

from .common import accum_index, size, view

INCLUDES = ("device/common.cuh",)


def build(spec):
    ROWS, D, dtype, f32 = spec.block_q, spec.head_dim, spec.dtype, T.float32
    batch, seqlen, heads, head_dim = (size(f"grad_{n}") for n in ("batch", "seqlen", "heads", "head_dim"))
    tiles, parts = size("grad_tiles"), size("grad_parts")
    halves = 2 if ROWS == 64 else 1  # how two warpgroups shared the tile: by columns, or by rows
    width = D // halves

    @T.prim_func
    def finish(
        grad: view("grad", batch, seqlen, heads, head_dim, dtype),
        grad_accum: T.Tensor([batch * heads, parts, tiles, ROWS * D], f32),
        grad_scale: T.float32,
    ):
        with T.Kernel(tiles * heads * batch, threads=spec.threads) as (block,):
            total = T.alloc_fragment([ROWS, D], f32)
            rows_s = T.alloc_shared([ROWS, D], dtype)
            h = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            tile = T.call_extern("int32", "gqa_attn::device::divide", block, batch * heads)
            row = block - tile * batch * heads  # heads of one place in the sequence lie together in memory
            b = T.call_extern("int32", "gqa_attn::device::divide", row, heads)
            h = row - b * heads
            # The layout of a wgmma accumulator: each thread reads back what a thread of the backward wrote, 16 bytes at a time.
            T.annotate_layout({
                total: T.Fragment(
                    [ROWS, D],
                    forward_thread_fn=lambda i, j: (
                        (j // width) * 128 * (halves - 1) + (i // 16) * 32 + (i % 8) * 4 + (j % 8) // 2
                    ),
                    forward_index_fn=lambda i, j: ((j % width) // 8) * 4 + ((i // 8) % 2) * 2 + j % 2,
                )
            })
            for i, j in T.Parallel(ROWS, D):
                total[i, j] = grad_accum[row, 0, tile, accum_index(i, j, ROWS)]
            for part in T.serial(1, parts):
                for i, j in T.Parallel(ROWS, D):
                    total[i, j] = total[i, j] + grad_accum[row, part, tile, accum_index(i, j, ROWS)]
            for i, j in T.Parallel(ROWS, D):
                total[i, j] = total[i, j] * grad_scale
            T.copy(total, rows_s)
            T.fence_proxy_async()
            T.sync_threads()
            T.copy(rows_s, grad[b, tile * ROWS : (tile + 1) * ROWS, h, 0:D])

    return finish
