"""What the kernels share: symbols of the launch, tensors with run-time strides, pass configuration."""

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# Every schedule here is written by hand: roles, barriers and the order of the tensor core's work.
PASSES = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_LOOP_UNSWITCHING: True,
}


def size(name):
    """A run-time size: the field of that name of KernelParams (csrc/kernel_params.h)."""
    return T.dynamic(name)


def view(name, outer, inner, heads, head_dim, dtype):
    """A View of KernelParams, [outer, inner, heads, head_dim] with run-time strides and unit last stride.

    outer and inner are batch and seqlen; of packed sequences what csrc/device/sequences.cuh says. Tiles may reach beyond inner
    and head_dim: TMA fills with zeros on load and clips on store.
    """
    strides = [T.dynamic(f"{name}_{axis}_stride", "int64") for axis in ("batch", "seq", "head")]
    return T.StridedTensor([outer, inner, heads, head_dim], [*strides, 1], dtype)


def accum_index(i, j, rows):
    """Place of [i, j] in a float32 tile of the workspace, in the order of a wgmma accumulator.

    For each 8 columns 16 bytes of every thread. `write_part` and `add_dq` of csrc/device/backward.cuh write it too.
    """
    return (j // 8) * (rows * 8) + (i // 16) * 128 + (i % 8) * 16 + ((j % 8) // 2) * 4 + ((i // 8) % 2) * 2 + j % 2


def slot(count, stages):
    """Buffer slot of the count-th tile in a ring of `stages`."""
    return count % stages


def phase(count, stages):
    """Parity that a consumer waits for at the count-th tile of a ring; a producer waits for its complement."""
    return (count // stages) & 1


def tile_place(packed, b, begin, length, row):
    """[outer, inner] of the tile that starts at `row` of a sequence, in a view (csrc/device/sequences.cuh)."""
    return (
        T.call_extern("int32", "gqa_attn::device::tile_outer", packed, b, begin, length, row),
        T.call_extern("int32", "gqa_attn::device::tile_inner", packed, length, row),
    )


def tile_loader(producer):
    """A macro that loads whole tiles into a ring, for the warp whose first thread is `producer`."""

    @T.macro
    def load(source, h, tiles_s, full, count, outer, inner, arrive=True):
        stages, rows, columns = tiles_s.shape
        at = slot(count, stages)
        width = getattr(tiles_s, "columns_at_once", columns)  # of a part of the rows of a swizzled buffer, TMA takes 64
        for c in T.unroll(columns // width):
            T.tma_copy(
                source[outer, inner : inner + rows, h, c * width : (c + 1) * width],
                tiles_s[at, :, c * width : (c + 1) * width], barrier=full[at], leader_scope_threads=32,
            )
        if arrive:
            if T.get_thread_binding() == producer:
                T.barrier_arrive(full[at])

    return load
