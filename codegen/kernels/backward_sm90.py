"""Backward for Hopper, head dims up to 192/128: a block owns a kv tile over query heads of its group.

A block walks the (query head, query tile) pairs that see its 128 kv rows, for the query heads of its split. dK and dV stay in the
registers of two compute warpgroups (64 kv rows each) and are written once. One warp loads by TMA, one thread adds the dQ tiles
to a float32 workspace, in the order of the accumulator's registers so that one bulk copy moves a whole tile; backward_finish
puts them in rows. When causal, a block takes kv tiles i and n-1-i one after the other, so that all blocks have the same work.
One iteration, with everything that is in flight (timeline and measurements: docs/kernels.md):
    S ready -> P = exp2(S - lse), issue dP = V dO^T and dV += P^T dO -> dS = P (dP - delta) to shared memory -> barrier
    -> issue dQ = dS^T K and the first steps of dK += dS Q -> dQ to shared memory -> issue next S and the rest of dK.
Formulas: Dao 2023 (FlashAttention-2), algorithm 2, transposed: S, P and dS are [kv, q].
"""

from types import SimpleNamespace

import tilelang.language as T

from .backward_tiles import CONSUMERS, DEV, INCLUDES, divide, tile_macros  # noqa: F401 (INCLUDES: for codegen)
from .common import accum_index, phase, size, slot, view


def build(spec):
    BM, BN, D, DV = spec.block_kv, spec.block_q, spec.head_dim, spec.head_dim_v
    SQ, SDS = spec.stages_q, spec.stages_ds
    causal = spec.causal
    dtype, f32 = spec.dtype, T.float32
    batch, seqlen_q, seqlen_k, heads, kv_heads = (size(n) for n in ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads"))
    head_dim, head_dim_v = size("head_dim"), size("head_dim_v")
    kv_heads_split, padded, kv_tile_count = size("kv_heads_split"), size("seqlen_q_padded"), size("kv_tiles")
    q_tiles, kv_tiles = T.ceildiv(seqlen_q, BN), T.ceildiv(seqlen_k, BM)
    offset = seqlen_k - seqlen_q
    columns = T.ceildiv(kv_tiles, 2) if causal else kv_tiles  # blocks of one (split head, batch)
    early = spec.dk_steps_with_dq * 16  # rows of dS and Q in the part of dK's product that is issued with dQ's
    by_rows = T.GemmWarpPolicy.FullRow
    dq_policy = by_rows if spec.dq_by_rows else T.GemmWarpPolicy.FullCol

    tiles = tile_macros(spec)

    def first_q_tile(kv_tile):
        """Of those that see the kv tile: row i sees keys up to i + offset."""
        return T.max(kv_tile * BM - offset, 0) // BN if causal else 0

    def start_q_tile(kv_tile):
        """Where the walk starts: full blocks of a head start apart, so that each is the first at other dQ tiles."""
        return first_q_tile(kv_tile) if causal else (kv_tile * (BM // BN)) % q_tiles

    @T.macro
    def issue_scores(t, count):
        T.wgmma_gemm(t.k_s[0, :, :], t.q_s[slot(count, SQ), :, :], t.s, transpose_B=True, policy=by_rows, clear_accum=True)

    @T.macro
    def probabilities(t, count, bound, scale_log2):
        for i, j in T.Parallel(BM, BN):
            t.p[i, j] = T.exp2(t.s[i, j] * scale_log2 - t.lse_s[slot(count, SQ), j])
        if bound < BM - 1:
            for i, j in T.Parallel(BM, BN):
                t.p[i, j] = T.if_then_else(i <= (j + bound if causal else bound), t.p[i, j], 0)
        T.copy(t.p, t.p16)

    @T.macro
    def score_gradients(t, count):
        at = slot(count, SQ)
        for i, j in T.Parallel(BM, BN):
            if spec.p_16bit:
                t.ds16[i, j] = T.cast(t.p16[i, j], f32) * (t.dp[i, j] - t.delta_s[at, j])
            else:
                t.ds16[i, j] = t.p[i, j] * (t.dp[i, j] - t.delta_s[at, j])

    @T.macro
    def step(t, count, end, bound, scale_log2):
        at = slot(count, SQ)
        ds = slot(count, SDS)
        probabilities(t, count, bound, scale_log2)
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
        T.fence_proxy_async()
        T.barrier_arrive(t.dq_full)
        if count + 1 < end:
            T.barrier_wait(t.q_full[slot(count + 1, SQ)], phase(count + 1, SQ))
        issue_scores(t, count + 1)
        if early < BN:
            T.wgmma_gemm(t.ds_s[ds, :, early:BN], t.q_s[at, early:BN, :], t.dk, policy=by_rows)
            T.wait_wgmma(1)
        else:
            T.wait_wgmma(0)

    @T.prim_func
    def backward(
        q: view("q", batch, seqlen_q, heads, head_dim, dtype),
        k: view("k", batch, seqlen_k, kv_heads, head_dim, dtype),
        v: view("v", batch, seqlen_k, kv_heads, head_dim_v, dtype),
        dout: view("dout", batch, seqlen_q, heads, head_dim_v, dtype),
        dk: view("dk", batch, seqlen_k, kv_heads, head_dim, dtype),
        dv: view("dv", batch, seqlen_k, kv_heads, head_dim_v, dtype),
        dk_parts: T.Tensor([batch, kv_heads_split, kv_tile_count, BM * D], f32),
        dv_parts: T.Tensor([batch, kv_heads_split, kv_tile_count, BM * DV], f32),
        lse_log2: T.Tensor([batch * heads, padded], f32),
        delta: T.Tensor([batch * heads, padded], f32),
        dq_accum: T.Tensor([batch * heads, padded // BN, BN * D], f32),
        dq_state: T.Tensor([batch * heads * (padded // 64)], T.int32),
        scale: T.float32,
        scale_log2: T.float32,
        splits: T.int32,
        heads_per_split: T.int32,
    ):
        with T.Kernel(columns * kv_heads_split * batch, threads=CONSUMERS + 128) as (block,):
            t = SimpleNamespace(
                k_s=T.alloc_shared([1, BM, D], dtype),
                v_s=T.alloc_shared([1, BM, DV], dtype),
                q_s=T.alloc_shared([SQ, BN, D], dtype),
                dout_s=T.alloc_shared([SQ, BN, DV], dtype),
                lse_s=T.alloc_shared([SQ, BN], f32),
                delta_s=T.alloc_shared([SQ, BN], f32),
                ds_s=T.alloc_shared([SDS, BM, BN], dtype),
                dq_s=T.alloc_shared([BN * D], f32),
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
                kv_empty=T.alloc_barrier(arrive_count=CONSUMERS),
                q_full=T.alloc_barrier(arrive_count=[1] * SQ),
                q_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SQ),
                dout_full=T.alloc_barrier(arrive_count=[1] * SQ),
                dout_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SQ),
                ds_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SDS),
                dq_full=T.alloc_barrier(arrive_count=CONSUMERS),
                dq_empty=T.alloc_barrier(arrive_count=1),
            )
            tx = T.get_thread_binding()
            rest = T.alloc_var("int32", init=0)
            column = T.alloc_var("int32", init=0)
            h_split = T.alloc_var("int32", init=0)   # kv head * splits + split
            b = T.alloc_var("int32", init=0)
            kv_tile = T.alloc_var("int32", init=0)
            passes = T.alloc_var("int32", init=1)    # kv tiles that this block owns
            count = T.alloc_var("int32", init=0)     # q tiles so far: place in the rings
            first = T.alloc_var("int32", init=0)     # of the q tiles that see the kv tile
            q_tile = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)       # batch * heads + head
            head_count = T.alloc_var("int32", init=heads_per_split)
            rest = divide(block, columns)
            column = block - rest * columns  # kv tiles of a head run together: their dQ meets in L2
            b = divide(rest, kv_heads_split)
            h_split = rest - b * kv_heads_split
            kv_tile = column
            if causal:
                if kv_tiles - 1 - column > column:
                    passes = 2
            if tx < CONSUMERS:
                T.set_max_nreg(spec.registers, 1)
                end = T.alloc_var("int32", init=0)
                # The last kv row of the tile that the q tile's first row sees; when causal, the j-th q row sees j more.
                bound = T.alloc_var("int32", init=0)
                first_bound = T.alloc_var("int32", init=0)
                last_bound = T.alloc_var("int32", init=0)
                for ph in T.unroll(passes, unroll_factor=1):
                    end = count + heads_per_split * (q_tiles - first_q_tile(kv_tile))
                    if causal:
                        first_bound = first_q_tile(kv_tile) * BN + offset - kv_tile * BM
                        last_bound = (q_tiles - 1) * BN + offset - kv_tile * BM
                        bound = first_bound
                    else:
                        bound = seqlen_k - 1 - kv_tile * BM
                    T.clear(t.dv)
                    T.clear(t.dk)
                    T.barrier_wait(t.k_full[0], ph)
                    T.barrier_wait(t.q_full[slot(count, SQ)], phase(count, SQ))
                    T.warpgroup_fence_operand(t.dv, num_regs=DV // 2)
                    T.warpgroup_fence_operand(t.dk, num_regs=D // 2)
                    issue_scores(t, count)
                    T.wait_wgmma(0)
                    T.barrier_wait(t.v_full[0], ph)
                    T.call_extern("handle", f"{DEV}assume_positive", end - count)
                    for c in T.serial(count, end):
                        step(t, c, end, bound, scale_log2)
                        if causal:
                            bound = T.if_then_else(bound == last_bound, first_bound, bound + BN)
                    T.wait_wgmma(0)
                    count = end
                    rest = divide(T.call_extern("int32", f"{DEV}block_index"), columns)
                    column = T.call_extern("int32", f"{DEV}block_index") - rest * columns
                    b = divide(rest, kv_heads_split)
                    kv_tile = T.if_then_else(ph == 0, column, kv_tiles - 1 - column)
                    if splits > 1:
                        tiles.write_parts(t, dk_parts, dv_parts, b, rest - b * kv_heads_split, kv_tile)
                    else:
                        tiles.write_gradients(t, dk, dv, b, rest - b * kv_heads_split, kv_tile, scale)
                    if causal:
                        T.barrier_arrive(t.kv_empty)
                        kv_tile = kv_tiles - 1 - column
            else:
                T.set_max_nreg(spec.producer_registers, 0)
                if tx < CONSUMERS + 32:
                    kv_head = T.alloc_var("int32", init=0)
                    kv_head = divide(h_split, splits)
                    for ph in T.unroll(passes, unroll_factor=1):
                        if causal:
                            if ph > 0:
                                T.barrier_wait(t.kv_empty, 0)
                        tiles.load(k, b, kv_tile * BM, kv_head, t.k_s, t.k_full, 0)
                        if tx == CONSUMERS:
                            T.barrier_arrive(t.k_full[0])
                        first = first_q_tile(kv_tile)
                        q_tile = start_q_tile(kv_tile)
                        # The second kv tile takes the heads backwards: the dQ of the last ones may still be in L2.
                        row = b * heads + h_split * heads_per_split + ph * (heads_per_split - 1)
                        for g in T.unroll(head_count, unroll_factor=1):
                            for visit in T.unroll(first, q_tiles, unroll_factor=1):
                                T.barrier_wait(t.q_empty[slot(count, SQ)], phase(count, SQ) ^ 1)
                                tiles.load(q, b, q_tile * BN, row - b * heads, t.q_s, t.q_full, count)
                                tiles.load_row_and_arrive(lse_log2, row, q_tile * BN, t.lse_s, t.q_full, count)
                                if g == 0 and visit == first:
                                    tiles.load(v, b, kv_tile * BM, kv_head, t.v_s, t.v_full, 0)
                                    if tx == CONSUMERS:
                                        T.barrier_arrive(t.v_full[0])
                                T.barrier_wait(t.dout_empty[slot(count, SQ)], phase(count, SQ) ^ 1)
                                tiles.load(dout, b, q_tile * BN, row - b * heads, t.dout_s, t.dout_full, count)
                                tiles.load_row_and_arrive(delta, row, q_tile * BN, t.delta_s, t.dout_full, count)
                                count = count + 1
                                q_tile = q_tile + 1
                                if q_tile == q_tiles:
                                    q_tile = first
                            row = row + 1 - 2 * ph
                        kv_tile = kv_tiles - 1 - column
                elif tx == CONSUMERS + 32:
                    at = T.alloc_var("int64", init=0)
                    ready = T.alloc_var("int32", init=0)
                    first_at = T.alloc_var("int64", init=-1)  # the tile that this thread stored and must publish
                    for ph in T.unroll(passes, unroll_factor=1):
                        first = first_q_tile(kv_tile)
                        q_tile = start_q_tile(kv_tile)
                        row = b * heads + h_split * heads_per_split + ph * (heads_per_split - 1)
                        for g in T.unroll(head_count, unroll_factor=1):
                            for visit in T.unroll(first, q_tiles, unroll_factor=1):
                                at = T.Cast("int64", row) * (padded // BN) + q_tile
                                ready = T.call_extern("int32", f"{DEV}dq_is_stored", dq_state.data, at * (BN // 64))
                                T.barrier_wait(t.dq_full, phase(count, 1))
                                first_at = T.call_extern(
                                    "int64", f"{DEV}claim_dq", dq_state.data, at * (BN // 64), ready, first_at
                                )
                                T.call_extern(
                                    "handle", f"{DEV}put_dq", T.address_of(t.dq_s[0]), T.address_of(dq_accum[row, q_tile, 0]),
                                    BN * D * 4, first_at,
                                )
                                T.barrier_arrive(t.dq_empty)
                                count = count + 1
                                q_tile = q_tile + 1
                                if q_tile == q_tiles:
                                    q_tile = first
                            row = row + 1 - 2 * ph
                        kv_tile = kv_tiles - 1 - column
                    T.call_extern("handle", f"{DEV}publish_dq", dq_state.data, first_at)
                    T.call_extern("handle", f"{DEV}wait_bulk_writes")

    return backward
