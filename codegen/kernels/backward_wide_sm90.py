"""Backward for Hopper, head dims 192 and 256: a 64-row kv tile, one compute warpgroup for S and dV, the other for dP and dK.

dK and dV of 128 kv rows would not fit in the registers. One iteration (timeline: docs/kernels.md):
    first:  S ready  -> P = exp2(S - lse) -> P to shared memory in float32 -> issue dV += P dO
    second: dP ready -> P there -> dS = P (dP - delta) -> dS to shared memory in 16 bit -> issue dK += dS Q
    both:   barrier -> issue dQ = dS^T K, half of the columns each, and the next S or dP -> add dQ from registers to the zeroed
            workspace. The second one starts when the first has its S, and fills the tensor cores while that makes P.
S and dP are one product to both, dV and dK another, each of a tile of its own: in branches they would not share registers.
Otherwise as backward_sm90.
"""

from types import SimpleNamespace

import tilelang.language as T

from .backward_tiles import INCLUDES  # noqa: F401 (for codegen)
from .backward_tiles import CONSUMERS, DEV, DQ_THREADS, ITEM, ITEMS, item, place, program, tile_macros
from .common import accum_index, phase, slot


class Tiles:
    """Tiles in a larger buffer, as `tile_loader` takes a ring: tile(n, columns) is the n-th one's."""

    def __init__(self, tile, shape, columns_at_once):
        self.tile, self.shape, self.columns_at_once = tile, shape, columns_at_once

    def __getitem__(self, at):
        n, _, columns = at
        return self.tile(n, columns)


def build(spec):
    BM, BN, D = spec.block_kv, spec.block_q, spec.head_dim
    SQ = spec.stages_q
    dtype, f32 = spec.dtype, T.float32
    by_rows, by_columns = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol
    WIDTH = 128 if D == 256 else D  # columns of dQ at a time: there are no registers for 256
    tiles = tile_macros(spec)

    def allocate():
        kv_s = T.alloc_shared([2, BM, D], dtype)
        qdo_s = T.alloc_shared([SQ, 2 * BN, D], dtype)
        s = T.alloc_fragment([BM, 2 * BN], f32)
        return SimpleNamespace(
            kv_s=kv_s,
            k_s=Tiles(lambda n, columns: kv_s[0, :, columns], (1, BM, D), D),
            v_s=Tiles(lambda n, columns: kv_s[1, :, columns], (1, BM, D), D),
            qdo_s=qdo_s,
            q_s=Tiles(lambda n, columns: qdo_s[n, 0:BN, columns], (SQ, BN, D), 64),
            dout_s=Tiles(lambda n, columns: qdo_s[n, BN : 2 * BN, columns], (SQ, BN, D), 64),
            lse_s=T.alloc_shared([SQ, BN], f32),
            delta_s=T.alloc_shared([SQ, BN], f32),
            p_s=T.alloc_shared([BM * BN], f32),
            ds_s=T.alloc_shared([BM, BN], dtype),
            item_s=T.alloc_shared([ITEMS, len(ITEM)], T.int32, scope="shared"),
            s=s,  # and dP: columns of the first and of the second warpgroup
            p=s,
            slope=T.alloc_fragment([BM, 2 * BN], f32),  # of the cap
            factor=T.alloc_fragment([2 * BM, BN], dtype),  # P and dS: rows
            sums=T.alloc_fragment([2 * BM, D], f32),  # dV and dK: rows
            dq=T.alloc_fragment([BN, WIDTH], f32),
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

    def second():
        """1 in the second warpgroup, 0 in the first."""
        return T.get_thread_binding() // 128

    @T.macro
    def clear(t):
        T.clear(t.sums)
        T.warpgroup_fence_operand(t.sums, num_regs=D // 2)

    @T.macro
    def issue_scores(t, count, more):
        at = slot(count, SQ)
        if more:
            T.barrier_wait(t.q_full[at], phase(count, SQ))
            T.barrier_wait(t.dout_full[at], phase(count, SQ))
        T.wgmma_gemm(t.kv_s[second(), :, :], t.qdo_s[at, :, :], t.s, transpose_B=True, policy=by_columns, clear_accum=True)

    @T.macro
    def probabilities(t, at, bound, keys, span, scale_log2, cap_scale):
        if spec.softcap:
            tiles.cap(t, cap_scale)
            for i, j in T.Parallel(BM, BN):  # S holds the tanh
                t.slope[i, j] = 1 - t.s[i, j] * t.s[i, j]
        for i, j in T.Parallel(BM, BN):
            t.p[i, j] = T.exp2(t.s[i, j] * scale_log2 - t.lse_s[at, j])
        tiles.hide(t, bound, keys, span)
        for i, j in T.Parallel(BM, BN):
            t.factor[i, j] = t.p[i, j]
        if spec.softcap:
            for i, j in T.Parallel(BM, BN):
                t.p[i, j] = t.p[i, j] * t.slope[i, j]
        for i, j in T.Parallel(BM, BN):
            t.p_s[accum_index(i, j, BM)] = t.p[i, j]
        T.named_barrier_arrive(3, CONSUMERS)

    @T.macro
    def score_gradients(t, at):
        # Loops over both warpgroups' elements, of which the second has its own: over only those TileLang makes an empty loop.
        for i, j in T.Parallel(BM, 2 * BN):
            t.s[i, j] = t.s[i, j] - t.delta_s[at, j % BN]
        T.sync_threads(3, CONSUMERS)
        for i, j in T.Parallel(2 * BM, BN):
            t.factor[i, j] = t.p_s[accum_index(i % BM, j, BM)] * t.s[i % BM, i // BM * BN + j]
        for i, j in T.Parallel(2 * BM, BN):
            t.ds_s[i % BM, j] = t.factor[i, j]

    @T.macro
    def issue_dq(t, first):
        T.wgmma_gemm(
            t.ds_s, t.kv_s[0, :, first : first + WIDTH], t.dq, transpose_A=True, policy=by_columns, clear_accum=True
        )

    @T.macro
    def add_dq(t, dq_accum, row, q_tile, first):
        T.call_extern("handle", f"{DEV}add_dq<{WIDTH}>", T.address_of(dq_accum[row, q_tile, first * BN]), t.dq.data)

    @T.macro
    def step(t, count, end, bound, keys, span, scale_log2, cap_scale, dq_accum, row, q_tile, deterministic):
        at = slot(count, SQ)
        if second() == 0:
            probabilities(t, at, bound, keys, span, scale_log2, cap_scale)
        else:
            score_gradients(t, at)
        T.fence_proxy_async()
        other = (1 - second()) * BN
        T.wgmma_gemm(t.factor, t.qdo_s[at, other : other + BN, :], t.sums, policy=by_rows)
        T.sync_threads(2, CONSUMERS)
        issue_dq(t, 0)
        T.wait_wgmma(1)
        T.barrier_arrive(t.q_empty[at])
        T.barrier_arrive(t.dout_empty[at])
        if second() == 1:  # dP only when S is done, so that it runs while the first warpgroup computes P
            T.sync_threads(4, CONSUMERS)
        issue_scores(t, count + 1, count + 1 < end)
        T.wait_wgmma(1)
        if deterministic > 0:
            T.barrier_wait(t.dq_turn[slot(count, DQ_THREADS)], phase(count, DQ_THREADS))
        add_dq(t, dq_accum, row, q_tile, 0)
        if WIDTH < D:
            issue_dq(t, WIDTH)
        T.wait_wgmma(0)
        if second() == 0:
            T.named_barrier_arrive(4, CONSUMERS)
        if WIDTH < D:
            add_dq(t, dq_accum, row, q_tile, WIDTH)
        if deterministic > 0:
            T.barrier_arrive(t.dq_added[slot(count, DQ_THREADS)])

    def write_part(t, parts, part_row, kv_tile, adds):
        at = T.address_of(parts[part_row, kv_tile, 0])
        return T.call_extern("handle", f"{DEV}write_part<{BM}, {D}>", at, t.sums.data, adds)

    @T.macro
    def write_parts(t, part_row, kv_tile, dk_parts, dv_parts, adds):
        if second() == 0:
            write_part(t, dv_parts, part_row, kv_tile, adds)
        else:
            write_part(t, dk_parts, part_row, kv_tile, adds)

    @T.macro
    def write_gradients(t, turn, dk, dv, scale, packed):
        outer, inner = place(t, turn, "k", item(t, turn, "kv_tile") * BM, packed)
        for i, j in T.Parallel(2 * BM, D):
            t.sums[i, j] = t.sums[i, j] * T.if_then_else(i < BM, 1, scale)
        T.sync_threads(1, CONSUMERS)
        for i, j in T.Parallel(2 * BM, D):
            t.kv_s[i // BM, i % BM, j] = t.sums[i, j]
        T.fence_proxy_async()
        T.sync_threads(1, CONSUMERS)
        T.copy(t.kv_s[0, :, :], dv[outer, inner : inner + BM, item(t, turn, "h_split"), 0:D])
        T.copy(t.kv_s[1, :, :], dk[outer, inner : inner + BM, item(t, turn, "h_split"), 0:D])

    @T.macro
    def add_tile(t, turn, count, dq_accum, row, q_tile, dq_state, state, rank, deterministic):
        if deterministic > 0:
            T.call_extern("handle", f"{DEV}await_dq", dq_state.data, state, rank)
            T.barrier_arrive(t.dq_turn[slot(count, DQ_THREADS)])
            T.barrier_wait(t.dq_added[slot(count, DQ_THREADS)], phase(count, DQ_THREADS))
            T.call_extern("handle", f"{DEV}pass_turn", dq_state.data, state, rank)

    return program(spec, allocate, clear, issue_scores, step, write_parts, write_gradients, add_tile)
