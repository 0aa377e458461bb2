"""After the backward: a gradient from float32 tiles in accumulator order to rows in 16 bit, times a factor.

dQ has one part; dK and dV, where several blocks shared a kv tile, one part of each block, which are added in a fixed order.
"""

import tilelang.language as T

from .common import accum_index, size, tile_place, view

INCLUDES = ("device/workspace_tiles.cuh",)
DEV = "gqa_attn::device::"


def build(spec):
    ROWS, D, dtype, f32 = spec.block_q, spec.head_dim, spec.dtype, T.float32
    outer, inner, heads, head_dim = (size(f"grad_{n}") for n in ("outer", "inner", "heads", "head_dim"))
    head_rows, tiles, parts, sequences = size("grad_head_rows"), size("grad_tiles"), size("grad_parts"), size("sequences")
    halves = 2 if ROWS == 64 else 1  # how two warpgroups share the tile: by columns, or by rows
    width = D // halves

    @T.macro
    def store(rows_s, grad, h, at_outer, at_inner):
        T.copy(rows_s, grad[at_outer, at_inner : at_inner + ROWS, h, 0:D])

    @T.prim_func
    def finish(
        grad: view("grad", outer, inner, heads, head_dim, dtype),
        grad_accum: T.Tensor([head_rows, parts, tiles, ROWS * D], f32),
        grad_begins: T.Tensor([sequences], T.int32),
        grad_ends: T.Tensor([sequences], T.int32),
        grad_seqlen: T.int32,
        grad_scale: T.float32,
    ):
        with T.Kernel(tiles * head_rows, threads=spec.threads) as (block,):
            total = T.alloc_fragment([ROWS, D], f32)
            rows_s = T.alloc_shared([ROWS, D], dtype)
            found = T.alloc_local([4], T.int32)  # batch, first row, length of the sequence; which of its tiles
            h = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            tile = T.call_extern("int32", f"{DEV}divide", block, head_rows)
            row = block - tile * head_rows  # heads of one place in the sequence lie together in memory
            b = T.call_extern("int32", f"{DEV}divide", row, heads)
            h = row - b * heads
            T.call_extern(
                "handle", f"{DEV}find_tile", found.data, tile, b, grad_seqlen, grad_begins.data, grad_ends.data, sequences, ROWS
            )
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
            if found[3] * ROWS < found[2]:
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
                store(rows_s, grad, h, *tile_place(sequences > 0, found[0], found[1], found[2], found[3] * ROWS))

    return finish
