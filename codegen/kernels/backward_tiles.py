"""What both backward kernels are made of: the program of a block, its TMA warp and dQ threads, and how dK and dV leave.

Blocks are persistent. The TMA warp draws a ticket, writes down what to do (ITEM) and publishes it with the K tile, so that all
other threads of the block learn it there. An item is a kv tile of one kv head, over the query heads of one split of its group.
"""

from types import SimpleNamespace

import tilelang.language as T

from .common import phase, size, slot, tile_loader, tile_place, view

INCLUDES = ("device/backward.cuh",)
DEV = "gqa_attn::device::"
CONSUMERS = 256  # threads of the two compute warpgroups
ITEMS = 2  # that may be written down: the TMA warp draws the next ticket while the block is busy
DQ_THREADS = 2  # each the first of a warp behind the TMA warp; they take q tiles in turn

# What put_item of csrc/device/backward.cuh says about an item. No kv_tile (-1): there is nothing more to do. sends_dq: 0,
# or one more than the head's tiles that come in falling order, by which dq_rank tells the item's turn.
ITEM = (
    "kv_tile", "b", "h_split", "k_begin", "k_length", "kv_base", "q_begin", "q_length", "q_base", "first_q", "end_q", "start_q",
    "sends_dq", "start_bound", "first_bound", "last_bound", "keys",
)


def divide(a, b):
    return T.call_extern("int32", f"{DEV}divide", a, b)


def item(t, turn, field):
    return t.item_s[slot(turn, ITEMS), ITEM.index(field)]


def place(t, turn, side, row, packed):
    return tile_place(packed, item(t, turn, "b"), item(t, turn, f"{side}_begin"), item(t, turn, f"{side}_length"), row)


def tile_macros(spec):
    """Macros of the compute warpgroups."""
    BM, BN = spec.block_kv, spec.block_q

    @T.macro
    def hide(t, bound, keys, span):
        """P = 0 where the query does not see the key. bound is the last kv row of the tile that the first query row sees; row j
        sees j more; span is the number of rows that it sees before. keys: the last kv row of the tile that is a key at all."""
        if (bound < BM - 1) | (keys < BM - 1) | (bound - span > 1 - BN):
            for i, j in T.Parallel(BM, BN):
                t.p[i, j] = T.if_then_else((i <= T.min(j + bound, keys)) & (i >= j + bound - span), t.p[i, j], 0)

    @T.macro
    def cap(t, cap_scale):
        if cap_scale > 0:  # always: a branch keeps ptxas from mixing this with what stands around it, and from spilling
            T.call_extern("handle", f"{DEV}cap_scores<{BN // 2}>", t.s.data, cap_scale)

    def dq_rank(t, turn, q_tile, window_left, window_right, deterministic):
        """The item's turn at a dQ tile; -1 where the order does not matter."""
        return T.call_extern(
            "int32", f"{DEV}dq_rank<{BN}, {BM}>", T.address_of(t.item_s[slot(turn, ITEMS), 0]), q_tile, window_left,
            window_right, deterministic,
        )

    return SimpleNamespace(hide=hide, cap=cap, dq_rank=dq_rank)


def program(spec, allocate, clear, issue_scores, step, write_parts, write_gradients, add_tile):
    """The prim_func.

    allocate() makes a block's shared memory, fragments and barriers. Macros of the compute warpgroups: clear(t) of dK and dV,
    issue_scores(t, count, more) for the products that start a query tile, step(...) for the tile itself, and for what becomes
    of dK and dV write_parts(...) or write_gradients(...). add_tile(...) is what a dQ thread does for a query tile.
    """
    BM, BN, D, DV = spec.block_kv, spec.block_q, spec.head_dim, spec.head_dim_v
    SQ = spec.stages_q
    dtype, f32 = spec.dtype, T.float32
    q_outer, q_inner, kv_outer, kv_inner = (size(n) for n in ("q_outer", "q_inner", "kv_outer", "kv_inner"))
    heads, kv_heads, head_dim, head_dim_v = (size(n) for n in ("heads", "kv_heads", "head_dim", "head_dim_v"))
    part_rows, kv_tile_count = size("part_rows"), size("kv_tiles")
    head_rows, padded, sequences = size("head_rows"), size("seqlen_q_padded"), size("sequences")
    tiles = tile_macros(spec)
    load = tile_loader(CONSUMERS)

    @T.macro
    def load_row_and_arrive(source, row, first, rows_s, full, count):
        at = slot(count, SQ)
        T.tma_copy(source[row, first : first + BN], rows_s[at, :], barrier=full[at], leader_scope_threads=32)
        if T.get_thread_binding() == CONSUMERS:
            T.barrier_arrive(full[at])

    @T.prim_func
    def backward(
        q: view("q", q_outer, q_inner, heads, head_dim, dtype),
        k: view("k", kv_outer, kv_inner, kv_heads, head_dim, dtype),
        v: view("v", kv_outer, kv_inner, kv_heads, head_dim_v, dtype),
        dout: view("dout", q_outer, q_inner, heads, head_dim_v, dtype),
        dk: view("dk", kv_outer, kv_inner, kv_heads, head_dim, dtype),
        dv: view("dv", kv_outer, kv_inner, kv_heads, head_dim_v, dtype),
        dk_parts: T.Tensor([part_rows, kv_tile_count, BM * D], f32),
        dv_parts: T.Tensor([part_rows, kv_tile_count, BM * DV], f32),
        lse_log2: T.Tensor([head_rows, padded], f32),
        delta: T.Tensor([head_rows, padded], f32),
        dq_accum: T.Tensor([head_rows, padded // BN, BN * D], f32),
        dq_state: T.Tensor([head_rows * (padded // 64)], T.int32),
        tickets: T.Tensor([1], T.int32),
        begins_q: T.Tensor([sequences], T.int32),
        ends_q: T.Tensor([sequences], T.int32),
        begins_k: T.Tensor([sequences], T.int32),
        ends_k: T.Tensor([sequences], T.int32),
        plan: T.Tensor([sequences], T.int32),
        seqlen_q: T.int32,
        seqlen_k: T.int32,
        scale: T.float32,
        scale_log2: T.float32,
        cap_scale: T.float32,
        window_left: T.int32,
        window_right: T.int32,
        splits: T.int32,
        heads_per_split: T.int32,
        parts: T.int32,
        batch: T.int32,
        kv_heads_split: T.int32,
        order: T.int32,
        deterministic: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=CONSUMERS + 128) as (_,):
            t = allocate()
            tx = T.get_thread_binding()
            kv_tile = T.alloc_var("int32", init=0)
            turn = T.alloc_var("int32", init=0)      # items done by this block
            count = T.alloc_var("int32", init=0)     # q tiles so far: place in the rings
            first = T.alloc_var("int32", init=0)     # of the q tiles that see the kv tile
            end = T.alloc_var("int32", init=0)       # behind them; of compute threads, of the counts
            q_tile = T.alloc_var("int32", init=0)
            q_base = T.alloc_var("int32", init=0)    # of the sequence's tiles in the workspace
            row = T.alloc_var("int32", init=0)       # batch * heads + head
            head_count = T.alloc_var("int32", init=heads_per_split)
            if tx < CONSUMERS:
                T.set_max_nreg(spec.registers, 1)
                bound = T.alloc_var("int32", init=0)  # as in hide
                first_bound = T.alloc_var("int32", init=0)
                last_bound = T.alloc_var("int32", init=0)
                keys = T.alloc_var("int32", init=0)
                visit = T.alloc_var("int32", init=0)
                T.barrier_wait(t.k_full[0], 0)
                kv_tile = item(t, turn, "kv_tile")
                while kv_tile >= 0:
                    end = count + heads_per_split * (item(t, turn, "end_q") - item(t, turn, "first_q"))
                    bound = item(t, turn, "start_bound")
                    first_bound = item(t, turn, "first_bound")
                    last_bound = item(t, turn, "last_bound")
                    keys = item(t, turn, "keys")
                    row = item(t, turn, "b") * heads + item(t, turn, "h_split") * heads_per_split
                    q_tile = item(t, turn, "start_q")
                    visit = item(t, turn, "first_q")
                    clear(t)
                    T.barrier_wait(t.v_full[0], phase(turn, 1))
                    issue_scores(t, count, 1)
                    T.wait_wgmma(0)
                    T.call_extern("handle", f"{DEV}assume_positive", end - count)
                    for c in T.serial(count, end):
                        T.call_extern("handle", f"{DEV}keep_in_loop")
                        step(
                            t, c, end, bound, keys, window_left + window_right, scale_log2, cap_scale, dq_accum, row,
                            item(t, turn, "q_base") + q_tile, deterministic,
                        )
                        bound = bound + BN
                        q_tile = q_tile + 1
                        visit = visit + 1
                        if bound > last_bound:
                            bound = first_bound
                            q_tile = item(t, turn, "first_q")
                        if visit == item(t, turn, "end_q"):
                            visit = item(t, turn, "first_q")
                            row = row + 1
                    T.wait_wgmma(0)
                    count = end
                    if splits > 1:
                        write_parts(
                            t, divide((item(t, turn, "b") * kv_heads_split + item(t, turn, "h_split")) * parts, splits),
                            item(t, turn, "kv_base") + item(t, turn, "kv_tile"), dk_parts, dv_parts, parts < splits,
                        )
                    else:
                        write_gradients(t, turn, dk, dv, scale, sequences > 0)
                    T.barrier_arrive(t.kv_empty)
                    turn = turn + 1
                    T.barrier_wait(t.k_full[0], phase(turn, 1))
                    kv_tile = item(t, turn, "kv_tile")
            else:
                T.set_max_nreg(spec.producer_registers, 0)
                if tx < CONSUMERS + 32:
                    kv_head = T.alloc_var("int32", init=0)
                    while kv_tile >= 0:
                        T.call_extern(
                            "handle", f"{DEV}put_item<{BN}, {BM}, {D}>", T.address_of(t.item_s[slot(turn, ITEMS), 0]),
                            tickets.data, batch, kv_heads_split, order, deterministic, seqlen_q, seqlen_k, window_left,
                            window_right, sequences, begins_q.data, ends_q.data, begins_k.data, ends_k.data, plan.data,
                        )
                        kv_tile = item(t, turn, "kv_tile")
                        if kv_tile < 0:
                            T.barrier_wait(t.kv_empty, phase(turn, 1) ^ 1)
                            if tx == CONSUMERS:
                                T.barrier_arrive(t.k_full[0])
                        else:
                            kv_head = divide(item(t, turn, "h_split"), splits)
                            first = item(t, turn, "first_q")
                            end = item(t, turn, "end_q")
                            q_tile = item(t, turn, "start_q")
                            q_base = item(t, turn, "q_base")
                            row = item(t, turn, "b") * heads + item(t, turn, "h_split") * heads_per_split
                            for g in T.unroll(head_count, unroll_factor=1):
                                for visit in T.unroll(first, end, unroll_factor=1):
                                    T.barrier_wait(t.q_empty[slot(count, SQ)], phase(count, SQ) ^ 1)
                                    load(
                                        q, row - item(t, turn, "b") * heads, t.q_s, t.q_full, count,
                                        *place(t, turn, "q", q_tile * BN, sequences > 0), arrive=False,
                                    )
                                    load_row_and_arrive(lse_log2, row, (q_base + q_tile) * BN, t.lse_s, t.q_full, count)
                                    if g == 0 and visit == first:
                                        T.barrier_wait(t.kv_empty, phase(turn, 1) ^ 1)
                                        load(k, kv_head, t.k_s, t.k_full, 0, *place(t, turn, "k", kv_tile * BM, sequences > 0))
                                        load(v, kv_head, t.v_s, t.v_full, 0, *place(t, turn, "k", kv_tile * BM, sequences > 0))
                                    T.barrier_wait(t.dout_empty[slot(count, SQ)], phase(count, SQ) ^ 1)
                                    load(
                                        dout, row - item(t, turn, "b") * heads, t.dout_s, t.dout_full, count,
                                        *place(t, turn, "q", q_tile * BN, sequences > 0), arrive=False,
                                    )
                                    load_row_and_arrive(delta, row, (q_base + q_tile) * BN, t.delta_s, t.dout_full, count)
                                    count = count + 1
                                    q_tile = q_tile + 1
                                    if q_tile == end:
                                        q_tile = first
                                row = row + 1
                        turn = turn + 1
                elif (tx == CONSUMERS + 32) | (tx == CONSUMERS + 64):
                    parity = T.alloc_var("int32", init=0)  # of the counts of this thread
                    at = T.alloc_var("int64", init=0)
                    rank = T.alloc_var("int32", init=0)
                    parity = (tx - CONSUMERS) // 32 - 1
                    T.barrier_wait(t.k_full[0], 0)
                    kv_tile = item(t, turn, "kv_tile")
                    while kv_tile >= 0:
                        first = item(t, turn, "first_q")
                        end = item(t, turn, "end_q")
                        q_tile = item(t, turn, "start_q")
                        q_base = item(t, turn, "q_base")
                        row = item(t, turn, "b") * heads + item(t, turn, "h_split") * heads_per_split
                        for g in T.unroll(head_count, unroll_factor=1):
                            for visit in T.unroll(first, end, unroll_factor=1):
                                if count % DQ_THREADS == parity:
                                    at = (T.Cast("int64", row) * (padded // BN) + q_base + q_tile) * (BN // 64)
                                    rank = tiles.dq_rank(t, turn, q_tile, window_left, window_right, deterministic)
                                    add_tile(t, turn, count, dq_accum, row, q_base + q_tile, dq_state, at, rank, deterministic)
                                count = count + 1
                                q_tile = q_tile + 1
                                if q_tile == end:
                                    q_tile = first
                            row = row + 1
                        T.barrier_arrive(t.kv_empty)
                        turn = turn + 1
                        T.barrier_wait(t.k_full[0], phase(turn, 1))
                        kv_tile = item(t, turn, "kv_tile")
                    T.call_extern("handle", f"{DEV}wait_bulk_writes")

    return backward
