"""Forward for Hopper: persistent blocks, 2 or 3 compute warpgroups in ping-pong, one TMA warp.

A block walks work items (head row, query tile) in the order of csrc/device/forward.cuh. Each warpgroup owns 64 query rows
and goes over the kv tiles from right to left, so that only the first tiles need a mask; S of the next tile is issued
together with P V of the last one, and softmax runs while another warpgroup has the tensor cores.
With d = i + seqlen_k - seqlen_q, query row i sees the keys up to d when causal; the general kernel's rows those from
d - window_left to d + window_right, in a batch or in packed sequences. No kernel gets a row that sees no key.

The general kernel also serves short queries: a tile may hold tile_rows rows of several query heads of a group, one head after
the other, which share K and V then; and `splits` blocks may share the keys of a tile, each of which leaves its part of the
result in float32 for combine_parts (csrc/sequences.cu).
"""

from types import SimpleNamespace

import tilelang.language as T

from .common import phase, size, slot, tile_loader, tile_place, view

INCLUDES = ("device/forward.cuh",)
DEV = "gqa_attn::device::"
ANY_SIZE = 1 << 62  # TileLang guards each access by the sizes that it is told

# What put_item of csrc/device/forward.cuh says about a work item of the general kernel.
# row: the tile's first of the sequence. n kv tiles, from last_kv down; 0: there is nothing more to do. Those before `edge` and
# from `inner_end` on hold keys that some row does not see.
ITEM = (
    "row", "b", "h", "heads", "q_begin", "q_length", "k_begin", "k_length", "diagonal", "last_kv", "n", "edge", "inner_end",
    "split",
)


def boxes(spec):
    """What only the launch knows of tensor maps' boxes, {map: {dim: C++ expression}}: rows and heads of a tile of Q."""
    if spec.mask != "general":
        return {}
    return {"q_desc": {1: "p.tile_rows", 2: f"{spec.block_q} / p.tile_rows"}}


def build(spec):
    BM, BN, D, DV = spec.block_q, spec.block_kv, spec.head_dim, spec.head_dim_v
    SQ, SKV = spec.stages_q, spec.stages_kv
    causal, general, output = spec.mask == "causal", spec.mask == "general", spec.output
    warpgroups = BM // 64
    consumers = warpgroups * 128
    dtype, f32 = spec.dtype, T.float32
    q_outer, q_inner, kv_outer, kv_inner = (size(n) for n in ("q_outer", "q_inner", "kv_outer", "kv_inner"))
    heads, kv_heads, head_dim, head_dim_v = (size(n) for n in ("heads", "kv_heads", "head_dim", "head_dim_v"))
    seqlen_q, head_rows, sequences = size("seqlen_q"), size("head_rows"), size("sequences")
    lse_row_stride = T.dynamic("lse_row_stride", "int64")
    q_tiles = T.ceildiv(seqlen_q, BM)
    # Of the general kernel: one more than Q's ring, since an item is written before the wait for its place, and one since it is
    # read until O is stored.
    ITEMS = SQ + 2
    out_chunk = 64 if DV % 64 == 0 else 32  # columns of one TMA store: the width of the tile's swizzle
    by_rows = T.GemmWarpPolicy.FullRow
    work_index = "work_index<false>" if spec.mask == "full" else "work_index<true>"

    def cpp_bool(condition):
        return "true" if condition else "false"

    def work(what, *args):
        return T.call_extern("int32", f"{DEV}{what}", *args)

    def item(item_s, turn, field):
        return item_s[slot(turn, ITEMS), ITEM.index(field)]

    def place(b, begin, length, row):
        return tile_place(sequences > 0, b, begin, length, row) if general else (b, row)

    def kv_tiles(tile, seqlen_k):
        return T.ceildiv(T.min((tile + 1) * BM + seqlen_k - seqlen_q, seqlen_k) if causal else seqlen_k, BN)

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
    def mask(t, first_key, diagonal, keys, window_left, window_right, tile_rows):
        for i, j in T.Parallel(BM, BN):
            if causal:
                t.s[i, j] = T.if_then_else(diagonal + i >= first_key + j, t.s[i, j], -T.infinity(f32))
            elif general:
                t.s[i, j] = T.if_then_else(
                    (first_key + j <= T.min(diagonal + work("remainder", i, tile_rows) + window_right, keys - 1))
                    & (first_key + j >= diagonal + work("remainder", i, tile_rows) - window_left),
                    t.s[i, j], -T.infinity(f32),
                )
            else:
                t.s[i, j] = T.if_then_else(first_key + j < keys, t.s[i, j], -T.infinity(f32))

    @T.macro
    def cap(t, cap_scale):
        if spec.softcap:
            if cap_scale > 0:  # always: a branch keeps ptxas from mixing this with what stands around it, and from spilling
                T.call_extern("handle", f"{DEV}cap_scores<{BN // 2}>", t.s.data, cap_scale)

    @T.macro
    def softmax(t, first, scale_log2):
        step = f"{DEV}softmax_step<{BN}, {cpp_bool(first)}, {spec.lazy_rescale}>"
        T.call_extern("handle", step, t.s.data, t.row_max.data, t.rescale.data, t.row_sum.data, scale_log2)

    @T.macro
    def first_tile(t, wg, turn, count, first_key, diagonal, keys, window_left, window_right, tile_rows, scale_log2, cap_scale):
        score(t, wg, turn, count)
        pass_turn(wg)
        T.wait_wgmma(0)
        arrive_per_warp(t.k_empty, count)
        cap(t, cap_scale)
        mask(t, first_key, diagonal, keys, window_left, window_right, tile_rows)
        softmax(t, True, scale_log2)
        T.copy(t.s, t.p)

    @T.macro
    def next_tile(
        t, wg, turn, count, first_key, masked, diagonal, keys, window_left, window_right, tile_rows, scale_log2, cap_scale
    ):
        score(t, wg, turn, count)
        T.barrier_wait(t.v_full[slot(count - 1, SKV)], phase(count - 1, SKV))
        T.wgmma_gemm(t.p, t.v_s[slot(count - 1, SKV), :, :], t.o, policy=by_rows)
        pass_turn(wg)
        T.wait_wgmma(1)
        arrive_per_warp(t.k_empty, count)
        cap(t, cap_scale)
        if masked:
            mask(t, first_key, diagonal, keys, window_left, window_right, tile_rows)
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
    def store_chunk(tile_s, place_s, out, at, column, h, outer, inner):
        T.tma_copy(
            tile_s[place_s, at : at + 64, column : column + out_chunk],
            out[outer, inner : inner + 64, h, column : column + out_chunk],
            leader_scope_threads=128,
        )

    @T.macro
    def store_tile(t, wg, turn, tile_s, out, b, h, begin, length, row):
        place_s = slot(turn, SQ) if output == "q_tile" else 0
        for i, j in T.Parallel(BM, DV):
            t.o[i, j] = t.o[i, j] * t.rescale[i]
        if output == "own_tile":
            T.tma_store_wait(0)
        T.sync_threads(6 + wg, 128)
        T.copy(t.o, tile_s[place_s, :, 0:DV])
        T.fence_proxy_async()
        T.sync_threads(6 + wg, 128)
        if (row + wg * 64 < length) if general else True:  # a batch's TMA clips rows behind the end (csrc/device/sequences.cuh)
            for c in T.unroll(DV // out_chunk):
                store_chunk(tile_s, place_s, out, wg * 64, c * out_chunk, h, *place(b, begin, length, row + wg * 64))
        if output == "q_tile":
            T.tma_store_wait(0)

    def store_heads(t, *args):
        return T.call_extern(
            "handle", f"{DEV}store_heads<{DV}, {cpp_bool(dtype == 'bfloat16')}>", t.o.data, t.rescale.data, *args
        )

    @T.macro
    def store_lse(t, lse, head_row, first, count, item_heads, tile_rows):
        T.call_extern(
            "handle", f"{DEV}store_lse", T.address_of(lse[head_row, first]), lse.strides[0], t.row_sum.data, count, item_heads,
            tile_rows,
        )

    load = tile_loader(consumers)

    @T.prim_func
    def forward(
        q: view("q", q_outer, q_inner, heads, head_dim, dtype),
        k: view("k", kv_outer, kv_inner, kv_heads, head_dim, dtype),
        v: view("v", kv_outer, kv_inner, kv_heads, head_dim_v, dtype),
        out: view("out", q_outer, q_inner, heads, head_dim_v, dtype),
        lse: T.StridedTensor([head_rows, seqlen_q], [lse_row_stride, 1], f32),
        out_parts: T.Tensor([ANY_SIZE], f32),
        lse_parts: T.Tensor([ANY_SIZE], f32),
        sinks: T.Tensor([heads], f32),
        begins_q: T.Tensor([sequences], T.int32),
        ends_q: T.Tensor([sequences], T.int32),
        begins_k: T.Tensor([sequences], T.int32),
        ends_k: T.Tensor([sequences], T.int32),
        plan: T.Tensor([sequences], T.int32),
        batch: T.int32,
        seqlen_k: T.int32,
        scale_log2: T.float32,
        cap_scale: T.float32,
        has_sinks: T.int32,
        window_left: T.int32,
        window_right: T.int32,
        tile_rows: T.int32,
        head_tiles: T.int32,
        splits: T.int32,
        section: T.int32,
        together_keys: T.int32,
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
                row_max=T.alloc_local([2], f32),  # of this thread's two rows, as row_sum
                row_sum=T.alloc_local([2], f32),
                rescale=T.alloc_fragment([BM], f32),
                q_full=T.alloc_barrier(arrive_count=[1] * SQ),
                q_empty=T.alloc_barrier(arrive_count=[consumers] * SQ),
                k_full=T.alloc_barrier(arrive_count=[1] * SKV),
                k_empty=T.alloc_barrier(arrive_count=[warpgroups * 4] * SKV),
                v_full=T.alloc_barrier(arrive_count=[1] * SKV),
                v_empty=T.alloc_barrier(arrive_count=[warpgroups * 4] * SKV),
            )
            out_s = T.alloc_shared([1, BM, DV] if output == "own_tile" else [1, 1, 8], dtype)
            tile_s = out_s if output == "own_tile" else t.q_s
            item_s = T.alloc_shared([ITEMS, len(ITEM)] if general else [1, 1], T.int32, scope="shared")
            tx = T.get_thread_binding()
            turn = T.alloc_var("int32", init=0)  # items done by this block
            index = T.alloc_var("int32", init=0)
            b = T.alloc_var("int32", init=0)
            h = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)   # the tile's first, of the sequence
            n = T.alloc_var("int32", init=0)     # kv tiles of this item
            count = T.alloc_var("int32", init=0)  # kv tiles before it: place in the rings
            keys = T.alloc_var("int32", init=seqlen_k)
            length = T.alloc_var("int32", init=seqlen_q)
            item_heads = T.alloc_var("int32", init=1)
            items = T.alloc_var("int32", init=q_tiles * head_rows)
            if tx < consumers:
                T.set_max_nreg(spec.registers, 1)
                first = T.alloc_var("int32", init=0)
                end_masked = T.alloc_var("int32", init=0)
                end_free = T.alloc_var("int32", init=0)
                first_key = T.alloc_var("int32", init=0)
                diagonal = T.alloc_var("int32", init=0)
                begin = T.alloc_var("int32", init=0)
                wg = tx // 128
                if wg == warpgroups - 1:
                    T.named_barrier_arrive(2, 256)  # the first turn is warpgroup 0's
                if general:
                    T.barrier_wait(t.q_full[slot(turn, SQ)], phase(turn, SQ))
                    n = item(item_s, turn, "n")
                else:
                    index = work(work_index, turn, blocks)
                while n > 0 if general else index < items:
                    if general:
                        diagonal = item(item_s, turn, "diagonal")
                        keys = item(item_s, turn, "k_length")
                        first_key = item(item_s, turn, "last_kv") * BN
                    else:
                        tile = work("work_tile", index, q_tiles, head_rows, section)
                        h = work("work_head_row", index, q_tiles, head_rows, section, tile)
                        b = work("divide", h, heads)
                        h = h - b * heads
                        if causal:
                            tile = q_tiles - 1 - tile  # long tiles first
                            diagonal = tile * BM + seqlen_k - seqlen_q
                        row = tile * BM
                        n = kv_tiles(tile, seqlen_k)
                        first_key = (n - 1) * BN
                    T.clear(t.o)
                    if output == "registers":  # only external functions use o then: this lets TileLang infer its layout
                        T.fill(t.rescale, 1)
                        for i, j in T.Parallel(BM, DV):
                            t.o[i, j] = t.o[i, j] * t.rescale[i]
                    T.warpgroup_fence_operand(t.o, num_regs=DV // 2)
                    if spec.mask != "general":
                        T.barrier_wait(t.q_full[slot(turn, SQ)], phase(turn, SQ))
                    first_tile(
                        t, wg, turn, count, first_key, diagonal, keys, window_left, window_right, tile_rows, scale_log2,
                        cap_scale,
                    )
                    if causal:
                        end_masked = T.max(n - (diagonal + 1) // BN, 1)
                        for it in T.serial(1, end_masked):
                            next_tile(
                                t, wg, turn, count + it, (n - 1 - it) * BN, True, diagonal, keys, window_left, window_right,
                                tile_rows, scale_log2, cap_scale,
                            )
                        for it in T.serial(end_masked, n):
                            next_tile(
                                t, wg, turn, count + it, 0, False, diagonal, keys, window_left, window_right,
                                tile_rows, scale_log2, cap_scale,
                            )
                    elif general:
                        first = 1
                        end_masked = item(item_s, turn, "edge")
                        end_free = item(item_s, turn, "inner_end")
                        for _ in T.serial(2):  # the window's right edge and what lies inside, then its left edge
                            for it in T.serial(first, end_masked):
                                next_tile(
                                    t, wg, turn, count + it, first_key - it * BN, True, diagonal, keys, window_left,
                                    window_right, tile_rows, scale_log2, cap_scale,
                                )
                            for it in T.serial(end_masked, end_free):
                                next_tile(
                                    t, wg, turn, count + it, 0, False, diagonal, keys, window_left, window_right, tile_rows,
                                    scale_log2, cap_scale,
                                )
                            first = end_free
                            end_masked = n
                            end_free = n
                    else:
                        for it in T.serial(1, n):
                            next_tile(
                                t, wg, turn, count + it, 0, False, diagonal, keys, window_left, window_right,
                                tile_rows, scale_log2, cap_scale,
                            )
                    count = count + n
                    if output != "q_tile":
                        T.barrier_arrive(t.q_empty[slot(turn, SQ)])
                    last_values(t, count - 1)
                    if general:
                        row = item(item_s, turn, "row")
                        b = item(item_s, turn, "b")
                        h = item(item_s, turn, "h")
                        item_heads = item(item_s, turn, "heads")
                        begin = item(item_s, turn, "q_begin")
                        length = item(item_s, turn, "q_length")
                    T.call_extern(
                        "handle", f"{DEV}finish_rows", t.row_max.data, t.row_sum.data, t.rescale.data, scale_log2, sinks.data,
                        has_sinks, h, item_heads, tile_rows,
                    )
                    if general:
                        if splits > 1:
                            part = T.Cast("int64", (item(item_s, turn, "split") * batch + b) * heads + h) * lse_row_stride
                            part = part + begin + row
                            store_heads(
                                t, T.address_of(out_parts[part * head_dim_v]), head_dim_v, lse_row_stride * head_dim_v,
                                length - row, item_heads, tile_rows, head_dim_v,
                            )
                            T.call_extern(
                                "handle", f"{DEV}store_lse", T.address_of(lse_parts[part]), lse_row_stride, t.row_sum.data,
                                length - row, item_heads, tile_rows,
                            )
                        else:
                            if tile_rows < BM:
                                store_heads(
                                    t, T.address_of(out[(*place(b, begin, length, row), h, 0)]), out.strides[1],
                                    out.strides[2], length - row, item_heads, tile_rows, head_dim_v,
                                )
                            else:
                                store_tile(t, wg, turn, tile_s, out, b, h, begin, length, row)
                            store_lse(t, lse, b * heads + h, begin + row, length - row, item_heads, tile_rows)
                    else:
                        if output == "registers":
                            T.call_extern(
                                "handle", f"{DEV}store_rows<{DV}, {cpp_bool(dtype == 'bfloat16')}>", t.o.data, t.rescale.data,
                                T.address_of(out[b, row + wg * 64, h, 0]), out.strides[1], seqlen_q - row - wg * 64, head_dim_v,
                            )
                        else:
                            store_tile(t, wg, turn, tile_s, out, b, h, begin, length, row)
                        store_lse(t, lse, b * heads + h, row, length - row, item_heads, tile_rows)
                    if output == "q_tile":
                        T.barrier_arrive(t.q_empty[slot(turn, SQ)])
                    turn = turn + 1
                    if general:
                        T.barrier_wait(t.q_full[slot(turn, SQ)], phase(turn, SQ))
                        n = item(item_s, turn, "n")
                    else:
                        index = work(work_index, turn, blocks)
                if wg == 0:
                    take_turn(wg)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(spec.producer_registers, 0)
                if tx < consumers + 32:
                    kv_head = T.alloc_var("int32", init=0)
                    group = T.alloc_var("int32", init=0)
                    kv_tile = T.alloc_var("int32", init=0)
                    q_length = T.alloc_var("int32", init=0)
                    q_begin = T.alloc_var("int32", init=0)
                    k_length = T.alloc_var("int32", init=0)
                    k_begin = T.alloc_var("int32", init=0)
                    group = work("divide", heads, kv_heads)
                    if general:
                        n = 1
                    else:
                        index = work(work_index, turn, blocks)
                    while n > 0 if general else index < items:
                        if general:
                            T.call_extern(
                                "handle", f"{DEV}put_item<{BM}, {BN}>", T.address_of(item_s[slot(turn, ITEMS), 0]), turn,
                                blocks, batch, kv_heads, group, head_tiles, tile_rows, splits, section, together_keys, seqlen_q,
                                seqlen_k, window_left, window_right, sequences, begins_q.data, ends_q.data, begins_k.data,
                                ends_k.data, plan.data,
                            )
                            row = item(item_s, turn, "row")
                            b = item(item_s, turn, "b")
                            h = item(item_s, turn, "h")
                            n = item(item_s, turn, "n")
                            q_begin = item(item_s, turn, "q_begin")
                            q_length = item(item_s, turn, "q_length")
                            k_begin = item(item_s, turn, "k_begin")
                            k_length = item(item_s, turn, "k_length")
                            kv_tile = item(item_s, turn, "last_kv")
                        else:
                            tile = work("work_tile", index, q_tiles, head_rows, section)
                            h = work("work_head_row", index, q_tiles, head_rows, section, tile)
                            b = work("divide", h, heads)
                            h = h - b * heads
                            if causal:
                                tile = q_tiles - 1 - tile
                            row = tile * BM
                            n = kv_tiles(tile, seqlen_k)
                            kv_tile = n - 1
                        kv_head = work("divide", h, group)
                        T.barrier_wait(t.q_empty[slot(turn, SQ)], phase(turn, SQ) ^ 1)
                        if n > 0 if general else True:
                            load(q, h, t.q_s, t.q_full, turn, *place(b, q_begin, q_length, row))
                        else:
                            if tx == consumers:
                                T.barrier_arrive(t.q_full[slot(turn, SQ)])  # with n = 0
                        for it in T.serial(n):
                            T.barrier_wait(t.k_empty[slot(count, SKV)], phase(count, SKV) ^ 1)
                            load(k, kv_head, t.k_s, t.k_full, count, *place(b, k_begin, k_length, kv_tile * BN))
                            T.barrier_wait(t.v_empty[slot(count, SKV)], phase(count, SKV) ^ 1)
                            load(v, kv_head, t.v_s, t.v_full, count, *place(b, k_begin, k_length, kv_tile * BN))
                            count = count + 1
                            kv_tile = kv_tile - 1
                        turn = turn + 1
                        if spec.mask != "general":
                            index = work(work_index, turn, blocks)

    return forward
