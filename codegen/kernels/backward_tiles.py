"""What both backward kernels do with tiles: loads of the TMA warp, and how dK and dV leave."""

from types import SimpleNamespace

import tilelang.language as T

from .common import slot

INCLUDES = ("device/backward.cuh",)
DEV = "gqa_attn::device::"
CONSUMERS = 256  # threads of the two compute warpgroups


def divide(a, b):
    return T.call_extern("int32", f"{DEV}divide", a, b)


def tile_macros(spec):
    BM, BN, D, DV = spec.block_kv, spec.block_q, spec.head_dim, spec.head_dim_v

    @T.macro
    def load(source, b, first_row, h, tiles_s, full, count):
        stages, rows, columns = tiles_s.shape
        at = slot(count, stages)
        tile = source[b, first_row : first_row + rows, h, 0:columns]
        T.tma_copy(tile, tiles_s[at, :, :], barrier=full[at], leader_scope_threads=32)

    @T.macro
    def load_row_and_arrive(source, row, first, rows_s, full, count):
        at = slot(count, spec.stages_q)
        T.tma_copy(source[row, first : first + BN], rows_s[at, :], barrier=full[at], leader_scope_threads=32)
        if T.get_thread_binding() == CONSUMERS:
            T.barrier_arrive(full[at])

    @T.macro
    def write_parts(t, dk_parts, dv_parts, b, h, kv_tile):
        T.call_extern("handle", f"{DEV}store_accum<{BM}, {D}>", T.address_of(dk_parts[b, h, kv_tile, 0]), t.dk.data)
        T.call_extern("handle", f"{DEV}store_accum<{BM}, {DV}>", T.address_of(dv_parts[b, h, kv_tile, 0]), t.dv.data)

    @T.macro
    def write_gradients(t, dk, dv, b, h, kv_tile, scale):
        for i, j in T.Parallel(BM, D):
            t.dk[i, j] = t.dk[i, j] * scale
        T.sync_threads(1, CONSUMERS)
        T.copy(t.dk, t.k_s[0, :, :])
        T.copy(t.dv, t.v_s[0, :, :])
        T.fence_proxy_async()
        T.sync_threads(1, CONSUMERS)
        T.copy(t.k_s[0, :, :], dk[b, kv_tile * BM : (kv_tile + 1) * BM, h, 0:D])
        T.copy(t.v_s[0, :, :], dv[b, kv_tile * BM : (kv_tile + 1) * BM, h, 0:DV])

    return SimpleNamespace(
        load=load, load_row_and_arrive=load_row_and_arrive, write_parts=write_parts, write_gradients=write_gradients
    )
