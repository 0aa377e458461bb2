"""Backward for Hopper, head dims up to 192/128: a block owns 128 kv rows over query heads of their group.

A block walks the (query head, query tile) pairs that see its kv tile, for the query heads of its split. dK and dV stay in the
registers of two compute warpgroups (64 kv rows each) and are written once. One warp loads by TMA, two threads add the dQ tiles
to a float32 workspace, in the order of the accumulator's registers so that one bulk copy moves a whole tile; backward_finish
puts them in rows.
One iteration, with everything that is in flight (timeline and measurements: docs/kernels.md):
    S ready -> P = exp2(S - lse), issue dP = V dO^T and dV += P^T dO -> dS = P (dP - delta) to shared memory -> barrier
    -> issue dQ = dS^T K and the first steps of dK += dS Q -> dQ to shared memory -> issue next S and the rest of dK.
Formulas: Dao 2023 (FlashAttention-2), algorithm 2, transposed: S, P and dS are [kv, q].
"""

from types import SimpleNamespace

import tilelang.language as T

from .backward_tiles import INCLUDES  # noqa: F401 (for codegen)
from .backward_tiles import CONSUMERS, DEV, DQ_THREADS, ITEM, ITEMS, item, place, program, tile_macros
from .common import accum_index, phase, slot


def build(spec):
    BM, BN, D, DV = spec.block_kv, spec.block_q, spec.head_dim, spec.head_dim_v
    SQ, SDS = spec.stages_q, spec.stages_ds
    dtype, f32 = spec.dtype, T.float32
    early = spec.dk_steps_with_dq * 16  # rows of dS and Q in the part of dK's product that is issued with dQ's
    by_rows = T.GemmWarpPolicy.FullRow
    dq_policy = by_rows if spec.dq_by_rows else T.GemmWarpPolicy.FullCol
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
            dq_s=T.alloc_shared([BN * D], f32),
            item_s=T.alloc_shared([ITEMS, len(ITEM)], T.int32, scope="shared"),
            s=T.alloc_fragment([BM, BN], f32),
            p=T.alloc_fragment([BM, BN], f32),
            dp=T.alloc_fragment([BM, BN], f32),
            p16=T.alloc_fragment([BM, BN], dtype),
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
            ds_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SDS),
            dq_full=T.alloc_barrier(arrive_count=[CONSUMERS] * DQ_THREADS),
            dq_empty=T.alloc_barrier(arrive_count=1),
        )

    @T.macro
    def clear(t):
        T.clear(t.dv)
        T.clear(t.dk)
        T.warpgroup_fence_operand(t.dv, num_regs=DV // 2)
        T.warpgroup_fence_operand(t.dk, num_regs=D // 2)

    @T.macro
    def issue_scores(t, count, more):
        if more:
            T.barrier_wait(t.q_full[slot(count, SQ)], phase(count, SQ))
        T.wgmma_gemm(t.k_s[0, :, :], t.q_s[slot(count, SQ), :, :], t.s, transpose_B=True, policy=by_rows, clear_accum=True)

    @T.macro
    def times_cap_slope(t, cap_scale):
        """P, from now on for dS only, times the derivative of the cap: S holds its tanh."""
        if cap_scale > 0:
            for i, j in T.Parallel(BM, BN):
                t.p[i, j] = t.p[i, j] * (1 - t.s[i, j] * t.s[i, j])

    @T.macro
    def probabilities(t, count, bound, keys, span, scale_log2, cap_scale):
        if spec.softcap:
            tiles.cap(t, cap_scale)
        for i, j in T.Parallel(BM, BN):
            t.p[i, j] = T.exp2(t.s[i, j] * scale_log2 - t.lse_s[slot(count, SQ), j])
        tiles.hide(t, bound, keys, span)
        T.copy(t.p, t.p16)
        if spec.softcap:
            times_cap_slope(t, cap_scale)

    @T.macro
    def score_gradients(t, count):
        at = slot(count, SQ)
        for i, j in T.Parallel(BM, BN):
            if spec.p_16bit:
                t.ds16[i, j] = T.cast(t.p16[i, j], f32) * (t.dp[i, j] - t.delta_s[at, j])
            else:
                t.ds16[i, j] = t.p[i, j] * (t.dp[i, j] - t.delta_s[at, j])

    @T.macro
    def publish_dq(t, count):
        T.fence_proxy_async()  # waits for the stores: where no more of dK is to come, the next S is issued before
        T.barrier_arrive(t.dq_full[slot(count, DQ_THREADS)])

    @T.macro
    def step(t, count, end, bound, keys, span, scale_log2, cap_scale, dq_accum, row, q_tile, deterministic):
        at = slot(count, SQ)
        ds = slot(count, SDS)
        probabilities(t, count, bound, keys, span, scale_log2, cap_scale)
        T.barrier_wait(t.dout_full[at], phase(count, SQ))
        T.wgmma_gemm(t.v_s[0, :, :], t.dout_s[at, :, :], t.dp, transpose_B=True, policy=by_rows, clear_accum=True)
        T.wgmma_gemm(t.p16, t.dout_s[at, :, :], t.dv, policy=by_rows)
        T.wait_wgmma(1)
        if count > 0:
            T.barrier_arrive(t.q_empty[slot(count + SQ - 1, SQ)])
        score_gradients(t, count)
        T.barrier_wait(t.ds_empty[ds], phase(count, SDS) ^ 1)
        T.copy(t.ds16, t.ds_s[ds, :, :])
        T.fence_proxy_async()
        if spec.drain_dv:
            T.wait_wgmma(0)
            T.barrier_arrive(t.dout_empty[at])
        T.sync_threads(2, CONSUMERS)
        T.wgmma_gemm(t.ds_s[ds, :, :], t.k_s[0, :, :], t.dq, transpose_A=True, policy=dq_policy, clear_accum=True)
        T.wgmma_gemm(t.ds_s[ds, :, 0:early], t.q_s[at, 0:early, :], t.dk, policy=by_rows)
        T.wait_wgmma(1)
        if not spec.drain_dv:
            T.barrier_arrive(t.dout_empty[at])
        T.barrier_wait(t.dq_empty, phase(count, 1) ^ 1)
        for i, j in T.Parallel(BN, D):
            t.dq_s[accum_index(i, j, BN)] = t.dq[i, j]
        T.barrier_arrive(t.ds_empty[ds])
        if early < BN:
            publish_dq(t, count)
            issue_scores(t, count + 1, count + 1 < end)
            T.wgmma_gemm(t.ds_s[ds, :, early:BN], t.q_s[at, early:BN, :], t.dk, policy=by_rows)
            T.wait_wgmma(1)
        else:
            issue_scores(t, count + 1, count + 1 < end)
            publish_dq(t, count)
            T.wait_wgmma(0)

    @T.macro
    def write_parts(t, part_row, kv_tile, dk_parts, dv_parts, adds):
        T.call_extern("handle", f"{DEV}write_part<{BM}, {D}>", T.address_of(dk_parts[part_row, kv_tile, 0]), t.dk.data, adds)
        T.call_extern("handle", f"{DEV}write_part<{BM}, {DV}>", T.address_of(dv_parts[part_row, kv_tile, 0]), t.dv.data, adds)

    @T.macro
    def store(tile_s, grad, h, outer, inner):
        T.copy(tile_s[0, :, :], grad[outer, inner : inner + BM, h, 0 : tile_s.shape[2]])

    @T.macro
    def write_gradients(t, turn, dk, dv, scale, packed):
        for i, j in T.Parallel(BM, D):
            t.dk[i, j] = t.dk[i, j] * scale
        T.sync_threads(1, CONSUMERS)
        T.copy(t.dk, t.k_s[0, :, :])
        T.copy(t.dv, t.v_s[0, :, :])
        T.fence_proxy_async()
        T.sync_threads(1, CONSUMERS)
        store(t.k_s, dk, item(t, turn, "h_split"), *place(t, turn, "k", item(t, turn, "kv_tile") * BM, packed))
        store(t.v_s, dv, item(t, turn, "h_split"), *place(t, turn, "k", item(t, turn, "kv_tile") * BM, packed))

    @T.macro
    def add_tile(t, turn, count, dq_accum, row, q_tile, dq_state, state, rank, deterministic):
        is_stored = T.call_extern("int32", f"{DEV}await_dq", dq_state.data, state, rank)
        T.barrier_wait(t.dq_full[slot(count, DQ_THREADS)], phase(count, DQ_THREADS))
        if item(t, turn, "sends_dq") > 0:
            stores = T.call_extern("int32", f"{DEV}claim_dq", dq_state.data, state, is_stored, rank)
            T.call_extern(
                "handle", f"{DEV}put_dq", T.address_of(t.dq_s[0]), T.address_of(dq_accum[row, q_tile, 0]), BN * D * 4, stores
            )
            T.barrier_arrive(t.dq_empty)
            T.call_extern("handle", f"{DEV}settle_dq", dq_state.data, state, rank, stores)
        else:
            T.barrier_arrive(t.dq_empty)

    return program(spec, allocate, clear, issue_scores, step, write_parts, write_gradients, add_tile)
