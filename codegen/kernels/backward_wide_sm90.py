"""Backward for Hopper, head dims 192 and 256: a 64-row kv tile whose dK and dV columns are shared out to two warpgroups.

dK and dV of 128 kv rows would not fit in the registers, so a block owns 64 rows, each warpgroup has half of the columns of
every product, and P and dS pass through shared memory. dQ is added to the zeroed workspace straight from registers. Otherwise
as backward_sm90.
"""

from types import SimpleNamespace

import tilelang.language as T

from .backward_tiles import INCLUDES  # noqa: F401 (for codegen)
from .backward_tiles import CONSUMERS, DEV, DQ_THREADS, ITEM, ITEMS, program, tile_macros
from .common import phase, slot


def build(spec):
    BM, BN, D, DV = spec.block_kv, spec.block_q, spec.head_dim, spec.head_dim_v
    SQ, SDS = spec.stages_q, spec.stages_ds
    dtype, f32 = spec.dtype, T.float32
    by_columns = T.GemmWarpPolicy.FullCol
    tiles = tile_macros(spec)

    def allocate():
        return SimpleNamespace(
            k_s=T.alloc_shared([1, BM, D], dtype),
            v_s=T.alloc_shared([1, BM, DV], dtype),
            q_s=T.alloc_shared([SQ, BN, D], dtype),
            dout_s=T.alloc_shared([SQ, BN, DV], dtype),
            lse_s=T.alloc_shared([SQ, BN], f32),
            delta_s=T.alloc_shared([SQ, BN], f32),
            ds_s=T.alloc_shared([SDS, BM, BN], dtype),
            p_s=T.alloc_shared([SDS, BM, BN], dtype),
            item_s=T.alloc_shared([ITEMS, len(ITEM)], T.int32, scope="shared"),
            s=T.alloc_fragment([BM, BN], f32),
            p=T.alloc_fragment([BM, BN], f32),
            dp=T.alloc_fragment([BM, BN], f32),
            ds16=T.alloc_fragment([BM, BN], dtype),
            dv=T.alloc_fragment([BM, DV], f32),
            dk=T.alloc_fragment([BM, D], f32),
            dq=T.alloc_fragment([BN, D], f32),
            k_full=T.alloc_barrier(arrive_count=[1]),
            v_full=T.alloc_barrier(arrive_count=[1]),
            kv_empty=T.alloc_barrier(arrive_count=CONSUMERS + DQ_THREADS),
            q_full=T.alloc_barrier(arrive_count=[1] * SQ),
            q_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SQ),
            dout_full=T.alloc_barrier(arrive_count=[1] * SQ),
            dout_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SQ),
            dq_turn=T.alloc_barrier(arrive_count=[1] * DQ_THREADS),
            dq_added=T.alloc_barrier(arrive_count=[CONSUMERS] * DQ_THREADS),
        )

    @T.macro
    def issue_scores(t, count, more):
        at = slot(count, SQ)
        if more:
            T.barrier_wait(t.q_full[at], phase(count, SQ))
            T.barrier_wait(t.dout_full[at], phase(count, SQ))
        T.wgmma_gemm(t.k_s[0, :, :], t.q_s[at, :, :], t.s, transpose_B=True, policy=by_columns, clear_accum=True)
        T.wgmma_gemm(t.v_s[0, :, :], t.dout_s[at, :, :], t.dp, transpose_B=True, policy=by_columns, clear_accum=True)

    @T.macro
    def step(t, count, end, bound, keys, span, scale_log2, cap_scale, dq_accum, row, q_tile, deterministic):
        at = slot(count, SQ)
        ds = slot(count, SDS)
        if spec.softcap:
            tiles.cap(t, cap_scale)
        for i, j in T.Parallel(BM, BN):
            t.p[i, j] = T.exp2(t.s[i, j] * scale_log2 - t.lse_s[at, j])
        tiles.hide(t, bound, keys, span)
        T.copy(t.p, t.p_s[ds, :, :])
        if spec.softcap:
            tiles.times_cap_slope(t, cap_scale)
        for i, j in T.Parallel(BM, BN):
            t.ds16[i, j] = t.p[i, j] * (t.dp[i, j] - t.delta_s[at, j])
        T.copy(t.ds16, t.ds_s[ds, :, :])
        T.fence_proxy_async()
        T.sync_threads(2, CONSUMERS)
        T.wgmma_gemm(t.ds_s[ds, :, :], t.k_s[0, :, :], t.dq, transpose_A=True, policy=by_columns, clear_accum=True)
        T.wgmma_gemm(t.p_s[ds, :, :], t.dout_s[at, :, :], t.dv, policy=by_columns)
        T.wgmma_gemm(t.ds_s[ds, :, :], t.q_s[at, :, :], t.dk, policy=by_columns)
        T.wait_wgmma(2)
        if deterministic > 0:
            T.barrier_wait(t.dq_turn[slot(count, DQ_THREADS)], phase(count, DQ_THREADS))
        T.call_extern("handle", f"{DEV}add_dq<{D}>", T.address_of(dq_accum[row, q_tile, 0]), t.dq.data)
        if deterministic > 0:
            T.barrier_arrive(t.dq_added[slot(count, DQ_THREADS)])
        issue_scores(t, count + 1, count + 1 < end)
        T.wait_wgmma(0)
        T.barrier_arrive(t.dout_empty[at])
        T.barrier_arrive(t.q_empty[at])

    @T.macro
    def add_tile(t, turn, count, dq_accum, row, q_tile, dq_state, state, rank, deterministic):
        if deterministic > 0:
            T.call_extern("handle", f"{DEV}await_dq", dq_state.data, state, rank)
            T.barrier_arrive(t.dq_turn[slot(count, DQ_THREADS)])
            T.barrier_wait(t.dq_added[slot(count, DQ_THREADS)], phase(count, DQ_THREADS))
            T.call_extern("handle", f"{DEV}pass_turn", dq_state.data, state, rank)

    return program(spec, allocate, issue_scores, step, add_tile)
