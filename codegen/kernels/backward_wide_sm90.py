"""Backward for Hopper, head dims 192 and 256: a 64-row kv tile whose dK and dV columns are shared out to two warpgroups.

dK and dV of 128 kv rows would not fit in the registers, so a block owns 64 rows, each warpgroup has half of the columns of every
product, and P and dS pass through shared memory. dQ is added to the zeroed workspace straight from registers. Otherwise as
backward_sm90.
"""

from types import SimpleNamespace

import tilelang.language as T

from .backward_tiles import CONSUMERS, DEV, INCLUDES, divide, tile_macros  # noqa: F401 (INCLUDES: for codegen)
from .common import phase, size, slot, view


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
    columns = T.ceildiv(kv_tiles, 2) if causal else kv_tiles
    by_columns = T.GemmWarpPolicy.FullCol

    tiles = tile_macros(spec)

    def first_q_tile(kv_tile):
        return T.max(kv_tile * BM - offset, 0) // BN if causal else 0

    @T.macro
    def issue_scores(t, count, more):
        at = slot(count, SQ)
        if more:
            T.barrier_wait(t.q_full[at], phase(count, SQ))
            T.barrier_wait(t.dout_full[at], phase(count, SQ))
        T.wgmma_gemm(t.k_s[0, :, :], t.q_s[at, :, :], t.s, transpose_B=True, policy=by_columns, clear_accum=True)
        T.wgmma_gemm(t.v_s[0, :, :], t.dout_s[at, :, :], t.dp, transpose_B=True, policy=by_columns, clear_accum=True)

    @T.macro
    def step(t, dq_accum, row, q_tile, count, end, bound, scale_log2):
        at = slot(count, SQ)
        ds = slot(count, SDS)
        for i, j in T.Parallel(BM, BN):
            t.p[i, j] = T.exp2(t.s[i, j] * scale_log2 - t.lse_s[at, j])
        if bound < BM - 1:
            for i, j in T.Parallel(BM, BN):
                t.p[i, j] = T.if_then_else(i <= (j + bound if causal else bound), t.p[i, j], 0)
        T.copy(t.p, t.p_s[ds, :, :])
        for i, j in T.Parallel(BM, BN):
            t.ds16[i, j] = t.p[i, j] * (t.dp[i, j] - t.delta_s[at, j])
        T.copy(t.ds16, t.ds_s[ds, :, :])
        T.fence_proxy_async()
        T.sync_threads(2, CONSUMERS)
        T.wgmma_gemm(t.ds_s[ds, :, :], t.k_s[0, :, :], t.dq, transpose_A=True, policy=by_columns, clear_accum=True)
        T.wgmma_gemm(t.p_s[ds, :, :], t.dout_s[at, :, :], t.dv, policy=by_columns)
        T.wgmma_gemm(t.ds_s[ds, :, :], t.q_s[at, :, :], t.dk, policy=by_columns)
        T.wait_wgmma(2)
        T.call_extern("handle", f"{DEV}add_dq<{D}>", T.address_of(dq_accum[row, q_tile, 0]), t.dq.data)
        issue_scores(t, count + 1, count + 1 < end)
        T.wait_wgmma(0)
        T.barrier_arrive(t.dout_empty[at])
        T.barrier_arrive(t.q_empty[at])

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
                p_s=T.alloc_shared([SDS, BM, BN], dtype),
                s=T.alloc_fragment([BM, BN], f32),
                p=T.alloc_fragment([BM, BN], f32),
                dp=T.alloc_fragment([BM, BN], f32),
                ds16=T.alloc_fragment([BM, BN], dtype),
                dv=T.alloc_fragment([BM, DV], f32),
                dk=T.alloc_fragment([BM, D], f32),
                dq=T.alloc_fragment([BN, D], f32),
                kv_full=T.alloc_barrier(arrive_count=[1]),
                kv_empty=T.alloc_barrier(arrive_count=CONSUMERS),
                q_full=T.alloc_barrier(arrive_count=[1] * SQ),
                q_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SQ),
                dout_full=T.alloc_barrier(arrive_count=[1] * SQ),
                dout_empty=T.alloc_barrier(arrive_count=[CONSUMERS] * SQ),
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
            row = T.alloc_var("int32", init=0)       # batch * heads + head
            rest = divide(block, columns)
            column = block - rest * columns
            b = divide(rest, kv_heads_split)
            h_split = rest - b * kv_heads_split
            kv_tile = column
            if causal:
                if kv_tiles - 1 - column > column:
                    passes = 2
            if tx < CONSUMERS:
                T.set_max_nreg(spec.registers, 1)
                end = T.alloc_var("int32", init=0)
                q_tile = T.alloc_var("int32", init=0)
                bound = T.alloc_var("int32", init=0)  # as in backward_sm90
                for ph in T.unroll(passes, unroll_factor=1):
                    first = first_q_tile(kv_tile)
                    q_tile = first
                    row = b * heads + h_split * heads_per_split + ph * (heads_per_split - 1)
                    end = count + heads_per_split * (q_tiles - first)
                    T.clear(t.dv)
                    T.clear(t.dk)
                    T.barrier_wait(t.kv_full[0], ph)
                    T.warpgroup_fence_operand(t.dv, num_regs=DV // 4)
                    T.warpgroup_fence_operand(t.dk, num_regs=D // 4)
                    issue_scores(t, count, True)
                    T.wait_wgmma(0)
                    T.call_extern("handle", f"{DEV}assume_positive", end - count)
                    for c in T.serial(count, end):
                        bound = q_tile * BN + offset - kv_tile * BM if causal else seqlen_k - 1 - kv_tile * BM
                        step(t, dq_accum, row, q_tile, c, end, bound, scale_log2)
                        q_tile = q_tile + 1
                        if q_tile == q_tiles:
                            q_tile = first
                            row = row + 1 - 2 * ph
                    count = end
                    if splits > 1:
                        tiles.write_parts(t, dk_parts, dv_parts, b, rest - b * kv_heads_split, kv_tile)
                    else:
                        tiles.write_gradients(t, dk, dv, b, h_split, kv_tile, scale)
                    if causal:
                        T.barrier_arrive(t.kv_empty)
                        kv_tile = kv_tiles - 1 - column
            else:
                T.set_max_nreg(spec.producer_registers, 0)
                if tx < CONSUMERS + 32:
                    head_count = T.alloc_var("int32", init=heads_per_split)
                    kv_head = T.alloc_var("int32", init=0)
                    kv_head = divide(h_split, splits)
                    for ph in T.unroll(passes, unroll_factor=1):
                        if causal:
                            if ph > 0:
                                T.barrier_wait(t.kv_empty, 0)
                        tiles.load(k, b, kv_tile * BM, kv_head, t.k_s, t.kv_full, 0)
                        tiles.load(v, b, kv_tile * BM, kv_head, t.v_s, t.kv_full, 0)
                        if tx == CONSUMERS:
                            T.barrier_arrive(t.kv_full[0])
                        first = first_q_tile(kv_tile)
                        row = b * heads + h_split * heads_per_split + ph * (heads_per_split - 1)
                        for g in T.unroll(head_count, unroll_factor=1):
                            for q_tile in T.unroll(first, q_tiles, unroll_factor=1):
                                T.barrier_wait(t.q_empty[slot(count, SQ)], phase(count, SQ) ^ 1)
                                tiles.load(q, b, q_tile * BN, row - b * heads, t.q_s, t.q_full, count)
                                tiles.load_row_and_arrive(lse_log2, row, q_tile * BN, t.lse_s, t.q_full, count)
                                T.barrier_wait(t.dout_empty[slot(count, SQ)], phase(count, SQ) ^ 1)
                                tiles.load(dout, b, q_tile * BN, row - b * heads, t.dout_s, t.dout_full, count)
                                tiles.load_row_and_arrive(delta, row, q_tile * BN, t.delta_s, t.dout_full, count)
                                count = count + 1
                            row = row + 1 - 2 * ph
                        kv_tile = kv_tiles - 1 - column

    return backward
