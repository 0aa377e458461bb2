"""Forward for Hopper: persistent blocks, 2 or 3 compute warpgroups in ping-pong, one TMA warp.

A block walks work items (head row, query tile) in the order of csrc/device/forward.cuh. Each warpgroup owns 64 query rows
and goes over the kv tiles from right to left, so that only the first tiles need a mask; S of the next tile is issued
together with P V of the last one, and softmax runs while another warpgroup has the tensor cores.
Query row i sees keys up to i + seqlen_k - seqlen_q when causal; the launch passes no row that sees no key.
"""

from types import SimpleNamespace

import tilelang.language as T

from .common import LN2, phase, size, slot, view

INCLUDES = ("device/forward.cuh",)
DEV = "gqa_attn::device::"


def build(spec):
    BM, BN, D, DV = spec.block_q, spec.block_kv, spec.head_dim, spec.head_dim_v
    SQ, SKV = spec.stages_q, spec.stages_kv
    causal, output = spec.causal, spec.output
    warpgroups = BM // 64
    consumers = warpgroups * 128
    dtype, f32 = spec.dtype, T.float32
    batch, seqlen_q, seqlen_k, heads, kv_heads = (size(n) for n in ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads"))
    head_dim, head_dim_v = size("head_dim"), size("head_dim_v")
    lse_row_stride = T.dynamic("lse_row_stride", "int64")
    q_tiles = T.ceildiv(seqlen_q, BM)
    offset = seqlen_k - seqlen_q
    out_chunk = 64 if DV % 64 == 0 else 32  # columns of one TMA store: the width of the tile's swizzle
    by_rows = T.GemmWarpPolicy.FullRow

    def cpp_bool(condition):
        return "true" if condition else "false"

    def work(what, *args):
        return T.call_extern("int32", f"{DEV}{what}", *args)

    def kv_tiles(tile):
        return T.ceildiv(T.min((tile + 1) * BM + offset, seqlen_k) if causal else seqlen_k, BN)

    @T.macro
    def take_turn(wg):
        T.sync_threads(2 + wg, 256)

    @T.macro
    def pass_turn(wg):
        if warpgroups == 2:
            T.named_barrier_arrive(3 - wg, 256)
        else:
            T.named_barrier_arrive(2 + (wg + 1) % warpgroups, 256)

    @T.macro
    def arrive_per_warp(barriers, count):
        if T.get_thread_binding() % 32 == 0:
            T.barrier_arrive(barriers[slot(count, SKV)])

    @T.macro
    def score(t, wg, turn, count):
        T.barrier_wait(t.k_full[slot(count, SKV)], phase(count, SKV))
        take_turn(wg)
        T.wgmma_gemm(
            t.q_s[slot(turn, SQ), :, :], t.k_s[slot(count, SKV), :, :], t.s, transpose_B=True, policy=by_rows, clear_accum=True
        )

    @T.macro
    def mask(t, tile, first_key):
        for i, j in T.Parallel(BM, BN):
            if causal:
                t.s[i, j] = T.if_then_else(tile * BM + i + offset >= first_key + j, t.s[i, j], -T.infinity(f32))
            else:
                t.s[i, j] = T.if_then_else(first_key + j < seqlen_k, t.s[i, j], -T.infinity(f32))

    @T.macro
    def softmax(t, first, scale_log2):
        step = f"{DEV}softmax_step<{BN}, {cpp_bool(first)}, {spec.lazy_rescale}>"
        T.call_extern("handle", step, t.s.data, t.row_max.data, t.rescale.data, t.row_sum.data, scale_log2)

    @T.macro
    def first_tile(t, wg, turn, count, tile, n, scale_log2):
        score(t, wg, turn, count)
        pass_turn(wg)
        T.wait_wgmma(0)
        arrive_per_warp(t.k_empty, count)
        mask(t, tile, (n - 1) * BN)
        softmax(t, True, scale_log2)
        T.copy(t.s, t.p)

    @T.macro
    def next_tile(t, wg, turn, count, tile, first_key, masked, scale_log2):
        score(t, wg, turn, count)
        T.barrier_wait(t.v_full[slot(count - 1, SKV)], phase(count - 1, SKV))
        T.wgmma_gemm(t.p, t.v_s[slot(count - 1, SKV), :, :], t.o, policy=by_rows)
        pass_turn(wg)
        T.wait_wgmma(1)
        arrive_per_warp(t.k_empty, count)
        if masked:
            mask(t, tile, first_key)
        softmax(t, False, scale_log2)
        T.wait_wgmma(0)
        arrive_per_warp(t.v_empty, count - 1)
        T.copy(t.s, t.p)
        T.call_extern("handle", f"{DEV}rescale_rows<{DV}>", t.o.data, t.rescale.data)

    @T.macro
    def last_values(t, count):
        T.barrier_wait(t.v_full[slot(count, SKV)], phase(count, SKV))
        T.wgmma_gemm(t.p, t.v_s[slot(count, SKV), :, :], t.o, policy=by_rows)
        T.wait_wgmma(0)
        arrive_per_warp(t.v_empty, count)

    @T.macro
    def store(t, wg, tile_s, out, b, first_row, h):
        T.sync_threads(6 + wg, 128)
        T.copy(t.o, tile_s[0, :, 0:DV])
        T.fence_proxy_async()
        T.sync_threads(6 + wg, 128)
        for c in T.unroll(DV // out_chunk):
            T.tma_copy(
                tile_s[0, wg * 64 : wg * 64 + 64, c * out_chunk : (c + 1) * out_chunk],
                out[b, first_row : first_row + 64, h, c * out_chunk : (c + 1) * out_chunk],
                leader_scope_threads=128,
            )

    @T.macro
    def load(source, b, first_row, h, tiles_s, full, count):
        stages, rows, columns = tiles_s.shape
        at = slot(count, stages)
        tile = source[b, first_row : first_row + rows, h, 0:columns]
        T.tma_copy(tile, tiles_s[at, :, :], barrier=full[at], leader_scope_threads=32)
        if T.get_thread_binding() == consumers:
            T.barrier_arrive(full[at])

    @T.prim_func
    def forward(
        q: view("q", batch, seqlen_q, heads, head_dim, dtype),
        k: view("k", batch, seqlen_k, kv_heads, head_dim, dtype),
        v: view("v", batch, seqlen_k, kv_heads, head_dim_v, dtype),
        out: view("out", batch, seqlen_q, heads, head_dim_v, dtype),
        lse: T.StridedTensor([batch * heads, seqlen_q], [lse_row_stride, 1], f32),
        scale_log2: T.float32,
        section: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=consumers + 128) as (_,):
            t = SimpleNamespace(
                q_s=T.alloc_shared([SQ, BM, D], dtype),
                k_s=T.alloc_shared([SKV, BN, D], dtype),
                v_s=T.alloc_shared([SKV, BN, DV], dtype),
                s=T.alloc_fragment([BM, BN], f32),
                p=T.alloc_fragment([BM, BN], dtype),
                o=T.alloc_fragment([BM, DV], f32),
                row_max=T.alloc_fragment([BM], f32),
                row_sum=T.alloc_fragment([BM], f32),
                rescale=T.alloc_fragment([BM], f32),
                q_full=T.alloc_barrier(arrive_count=[1] * SQ),
                q_empty=T.alloc_barrier(arrive_count=[consumers] * SQ),
                k_full=T.alloc_barrier(arrive_count=[1] * SKV),
                k_empty=T.alloc_barrier(arrive_count=[warpgroups * 4] * SKV),
                v_full=T.alloc_barrier(arrive_count=[1] * SKV),
                v_empty=T.alloc_barrier(arrive_count=[warpgroups * 4] * SKV),
            )
            out_s = T.alloc_shared([1, BM, DV] if output == "own_tile" else [1, 1, 8], dtype)
            tx = T.get_thread_binding()
            rows = T.alloc_var("int32", init=batch * heads)
            items = T.alloc_var("int32", init=q_tiles * batch * heads)
            turn = T.alloc_var("int32", init=0)  # items done by this block
            index = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)   # batch * heads + head
            b = T.alloc_var("int32", init=0)
            h = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            n = T.alloc_var("int32", init=0)     # kv tiles of this item
            count = T.alloc_var("int32", init=0)  # kv tiles before it: place in the rings
            masked = T.alloc_var("int32", init=0)
            index = work(f"work_index<{cpp_bool(causal)}>", turn, blocks)
            if tx < consumers:
                T.set_max_nreg(spec.registers, 1)
                wg = tx // 128
                if wg == warpgroups - 1:
                    T.named_barrier_arrive(2, 256)  # the first turn is warpgroup 0's
                while index < items:
                    tile = work("work_tile", index, q_tiles, rows, section)
                    row = work("work_head_row", index, q_tiles, rows, section, tile)
                    b = work("divide", row, heads)
                    h = row - b * heads
                    if causal:
                        tile = q_tiles - 1 - tile  # long tiles first
                    n = kv_tiles(tile)
                    T.clear(t.o)
                    if output == "registers":  # only external functions use o then: this lets TileLang infer its layout
                        T.fill(t.rescale, 1)
                        for i, j in T.Parallel(BM, DV):
                            t.o[i, j] = t.o[i, j] * t.rescale[i]
                    T.warpgroup_fence_operand(t.o, num_regs=DV // 2)
                    T.barrier_wait(t.q_full[slot(turn, SQ)], phase(turn, SQ))
                    first_tile(t, wg, turn, count, tile, n, scale_log2)
                    if causal:
                        masked = T.max(n - (tile * BM + offset + 1) // BN, 1)
                        for it in T.serial(1, masked):
                            next_tile(t, wg, turn, count + it, tile, (n - 1 - it) * BN, True, scale_log2)
                        for it in T.serial(masked, n):
                            next_tile(t, wg, turn, count + it, tile, 0, False, scale_log2)
                    else:
                        for it in T.serial(1, n):
                            next_tile(t, wg, turn, count + it, tile, 0, False, scale_log2)
                    count = count + n
                    if output != "q_tile":
                        T.barrier_arrive(t.q_empty[slot(turn, SQ)])
                    last_values(t, count - 1)
                    T.call_extern("handle", f"{DEV}finish_row_sum", t.row_sum.data)
                    for i in T.Parallel(BM):
                        t.rescale[i] = 1.0 / t.row_sum[i]
                    for i in T.Parallel(BM):
                        t.row_sum[i] = (T.log2(t.row_sum[i]) + t.row_max[i] * scale_log2) * LN2
                    if output == "registers":
                        T.call_extern(
                            "handle", f"{DEV}store_rows<{DV}, {cpp_bool(dtype == 'bfloat16')}>", t.o.data, t.rescale.data,
                            T.address_of(out[b, tile * BM + wg * 64, h, 0]), out.strides[1],
                            seqlen_q - tile * BM - wg * 64, head_dim_v,
                        )
                    else:
                        for i, j in T.Parallel(BM, DV):
                            t.o[i, j] = t.o[i, j] * t.rescale[i]
                        if output == "own_tile":
                            T.tma_store_wait(0)
                            store(t, wg, out_s, out, b, tile * BM + wg * 64, h)
                        else:
                            store(t, wg, t.q_s, out, b, tile * BM + wg * 64, h)
                            T.tma_store_wait(0)
                            T.barrier_arrive(t.q_empty[0])
                    T.copy(t.row_sum, lse[row, tile * BM : (tile + 1) * BM])
                    turn = turn + 1
                    index = work(f"work_index<{cpp_bool(causal)}>", turn, blocks)
                if wg == 0:
                    take_turn(wg)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(spec.producer_registers, 0)
                if tx < consumers + 32:
                    kv_head = T.alloc_var("int32", init=0)
                    group = T.alloc_var("int32", init=0)
                    group = work("divide", heads, kv_heads)
                    while index < items:
                        tile = work("work_tile", index, q_tiles, rows, section)
                        row = work("work_head_row", index, q_tiles, rows, section, tile)
                        b = work("divide", row, heads)
                        h = row - b * heads
                        kv_head = work("divide", h, group)
                        if causal:
                            tile = q_tiles - 1 - tile
                        n = kv_tiles(tile)
                        T.barrier_wait(t.q_empty[slot(turn, SQ)], phase(turn, SQ) ^ 1)
                        load(q, b, tile * BM, h, t.q_s, t.q_full, turn)
                        for it in T.serial(n):
                            first_key = (n - 1 - it) * BN
                            T.barrier_wait(t.k_empty[slot(count, SKV)], phase(count, SKV) ^ 1)
                            load(k, b, first_key, kv_head, t.k_s, t.k_full, count)
                            T.barrier_wait(t.v_empty[slot(count, SKV)], phase(count, SKV) ^ 1)
                            load(v, b, first_key, kv_head, t.v_s, t.v_full, count)
                            count = count + 1
                        turn = turn + 1
                        index = work(f"work_index<{cpp_bool(causal)}>", turn, blocks)

    return forward
