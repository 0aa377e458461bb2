"""Sum over the splits of a kv tile: parts [rows, splits, 8 * vectors] in 16 bit -> sum [rows, 8 * vectors], added in float32."""

import tilelang.language as T

from .common import size

INCLUDES = ("device/backward.cuh",)


def build(spec):
    dtype, f32, threads = spec.dtype, T.float32, spec.threads
    rows, vectors, splits = (size(n) for n in ("rows", "vectors", "splits"))

    @T.prim_func
    def reduce(
        parts: T.Tensor([rows, splits, vectors, 8], dtype),
        sum: T.Tensor([rows, vectors, 8], dtype),
    ):
        with T.Kernel(T.ceildiv(rows * vectors, threads), threads=threads) as (block,):
            part = T.alloc_local([8], dtype)
            total = T.alloc_local([8], f32)
            index = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            vector = T.alloc_var("int32", init=0)
            index = block * threads + T.get_thread_binding()
            row = T.call_extern("int32", "gqa_attn::device::divide", index, vectors)
            vector = index - row * vectors
            if row < rows:
                for i in T.vectorized(8):
                    total[i] = 0
                for s in T.serial(splits):
                    for i in T.vectorized(8):
                        part[i] = parts[row, s, vector, i]
                    for i in T.vectorized(8):
                        total[i] = total[i] + T.cast(part[i], f32)
                for i in T.vectorized(8):
                    part[i] = T.cast(total[i], dtype)
                for i in T.vectorized(8):
                    sum[row, vector, i] = part[i]

    return reduce
