// Device functions of the backward kernels that TileLang has no tile operation for.
#pragma once

#include "sequences.cuh"

namespace gqa_attn::device {

// Draws a ticket and says what the item is, in the order of ITEM in codegen/kernels/backward_tiles.py. Where the work falls from
// kv tile to kv tile, as many heads run side by side as fill the GPU with their long halves, tile by tile. Else one head follows
// the other; in the order of tickets blocks of one head, which start together, would wait for each other, so that as many heads
// run side by side as their dQ stays in L2. The plan (csrc/sequences.cu) is a count and (sequence, its first place in the plan)
// for each kv tile. For a whole warp, which may read `item` afterwards. (const int* tickets: TileLang sees no writes through it.)
//
// `down` of a head's tiles come first, from the last of them on; the others follow, upwards. Long tiles first (kLongFirst)
// balances best. To add in the order of tickets they should come last (kLongLast): a block starts at its diagonal and meets
// there, one query tile later, what the blocks above have left, so that nobody waits; but for the last section, which nothing
// behind it would even out. It compromises (kLongHalfDown): the long half so, then the short half, long ones first; blocks start
// as those of the long half end and wait a little (model: docs/kernels.md).
template <int block_q, int block_kv, int head_dim>
__device__ __forceinline__ void put_item(int* item, const int* tickets, int batch, int kv_heads_split, int order,
                                         int deterministic, int seqlen_q, int seqlen_k, int window_left, int window_right,
                                         int sequences, const int* begins_q, const int* ends_q, const int* begins_k,
                                         const int* ends_k, const int* plan) {
  int index = 0;
  if ((threadIdx.x & 31) == 0) index = atomicAdd(const_cast<int*>(tickets), 1);
  index = __shfl_sync(0xffffffffu, index, 0);

  int q_begin = 0, q_length = seqlen_q, q_base = 0, k_begin = 0, k_length = seqlen_k, kv_base = 0, rows = batch * kv_heads_split;
  const int items = kv_heads_split * (sequences ? plan[0] : batch * ceil_divide(seqlen_k, block_kv));
  const bool more = index < items;
  int behind = items;  // from this sequence's first one on
  if (sequences) {
    if (more) {
      const int* place = plan + 2 + 2 * divide(index, kv_heads_split);
      const int s = place[0];
      index -= place[1] * kv_heads_split, behind -= place[1] * kv_heads_split;
      rows = kv_heads_split;
      q_begin = begins_q[s], q_length = ends_q[s] - q_begin, k_begin = begins_k[s], k_length = ends_k[s] - k_begin;
      q_base = first_tile(q_begin, s, block_q), kv_base = first_tile(k_begin, s, block_kv);
    }
  }
  const int tiles = max(ceil_divide(k_length, block_kv), 1);
  int enough = 1;
  if (order != kHeadByHead) enough = divide(gridDim.x, max(tiles / 2, 1));
  else if (deterministic) enough = divide((40 << 20) / (head_dim * 4), max(q_length, 1));
  const int side_by_side = ceil_divide(rows, max(divide(rows, max(enough, 1)), 1));
  const int section = divide(index, side_by_side * tiles);
  index -= section * side_by_side * tiles, behind -= (section + 1) * side_by_side * tiles;
  const int down = order != kHeadByHead && deterministic ? (order == kLongLast && behind > 0 ? tiles : tiles / 2) : 0;
  const int width = min(side_by_side, rows - section * side_by_side), nth = divide(index, max(width, 1));
  const int row = section * side_by_side + index - nth * width, kv_tile = nth < down ? down - 1 - nth : nth;
  const int b = divide(row, kv_heads_split);

  const int offset = k_length - q_length, q_tiles = ceil_divide(q_length, block_q), first_key = kv_tile * block_kv;
  int first = divide(max(first_key - offset - window_right, 0), block_q);
  const int last_row = min(q_length - 1, min(first_key + block_kv, k_length) - 1 - offset + window_left);
  int end = last_row < 0 ? 0 : divide(last_row, block_q) + 1;
  const bool seen = first < end;
  if (!seen) {  // nobody sees these keys, but their gradients must be written: one tile, in which all is hidden
    first = min(first, max(q_tiles - 1, 0));
    end = first + 1;
  }
  // Blocks of a head start at their own diagonal, so that each is the first at other dQ tiles, unless the order is given.
  const int diagonal = divide(max(first_key - offset, 0), block_q);
  const int start = deterministic ? first : max(first, min(diagonal, end - 1));
  if ((threadIdx.x & 31) == 0) {
    item[0] = more ? kv_tile : -1, item[1] = b, item[2] = row - b * kv_heads_split;
    item[3] = k_begin, item[4] = k_length, item[5] = kv_base;
    item[6] = q_begin, item[7] = q_length, item[8] = q_base;
    item[9] = first, item[10] = end, item[11] = start, item[12] = seen ? 1 + down : 0;
    const int bound = offset + window_right - first_key;  // of query tile 0
    item[13] = bound + start * block_q, item[14] = bound + first * block_q, item[15] = bound + (end - 1) * block_q;
    item[16] = k_length - 1 - first_key;
  }
  __syncwarp();
}

// The item's place among those that add to a dQ tile, in the order of tickets; -1 where the order does not matter, or where it
// adds nothing but zeros.
template <int block_q, int block_kv>
__device__ __forceinline__ int dq_rank(const void* item_s, int q_tile, int window_left, int window_right, int deterministic) {
  const int* item = static_cast<const int*>(item_s);
  if (!deterministic || !item[12]) return -1;
  const int kv_tile = item[0], k_length = item[4], q_length = item[7], offset = k_length - q_length, down = item[12] - 1;
  const int tiles = ceil_divide(k_length, block_kv);
  const int last_row = min((q_tile + 1) * block_q, q_length) - 1;
  const int first = divide(max(q_tile * block_q + offset - window_left, 0), block_kv);
  const int last = min(divide(last_row + offset + window_right, block_kv), tiles - 1);
  if (kv_tile < down) return min(last, down - 1) - kv_tile;
  return max(min(last, down - 1) - first + 1, 0) + kv_tile - max(first, down);
}

// The guard of a run-time loop against zero trips makes ptxas spill 250 bytes at 192/128.
__device__ __forceinline__ void assume_positive(int n) { __builtin_assume(n > 0); }

// How far a dQ tile in the workspace is. With ranks: how many items have added; each waits for its turn, so, ranks being in the
// order of tickets, only for blocks that drew a smaller one. Without: whoever finds it untouched claims and stores it, which
// saves zeroing; later visitors add. One waits only while another's claimed tile is on its way to being stored, and that block
// waits for no other block before it says that it is. Neither can hang, in whatever order blocks run. (const int*: TileLang sees
// no writes through it. All accesses are volatile assembly.)
constexpr int dq_untouched = 0, dq_claimed = 1, dq_stored = 2;

// No acquire and no proxy fence where it is only looked at on the way, which would cost 4 to 8 % (docs/kernels.md): the bulk copy
// that stored the tile was complete in L2 before the state was written there, the bulk reduction that depends on what is read
// here happens in L2 too, and no L1 holds either.
__device__ __forceinline__ int dq_state(const int* states, int64_t at) {
  int state;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(state) : "l"(states + at) : "memory");
  return state;
}

// Whether the tile is known to be there, to add to. With a rank, waits for its turn, after which ordinary reductions may follow,
// too.
__device__ __forceinline__ int await_dq(const int* states, int64_t at, int rank) {
  if (rank < 0) return dq_state(states, at) == dq_stored;
  while (dq_state(states, at) < rank) continue;
  asm volatile("fence.acq_rel.gpu; fence.proxy.async;" ::: "memory");
  return rank > 0;
}

__device__ __forceinline__ void wait_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Whether this block is the first at the tile and must store it; else it must add.
__device__ __forceinline__ int claim_dq(const int* states, int64_t at, int is_stored, int rank) {
  if (is_stored) return 0;
  if (rank >= 0) return 1;
  int state;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(state)
               : "l"(states + at), "r"(dq_untouched), "r"(dq_claimed)
               : "memory");
  if (state == dq_untouched) return 1;
  while (dq_state(states, at) != dq_stored) continue;
  asm volatile("fence.proxy.async;" ::: "memory");
  return 0;
}

// One dQ tile from shared memory to the workspace; returns when the shared memory may be overwritten.
__device__ __forceinline__ void put_dq(const void* tile, float* dq, int bytes, int stores) {
  unsigned source = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  if (stores) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dq), "r"(source), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dq), "r"(source), "r"(bytes)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Tells those who wait for it that the tile is there: all others where it was stored, with a rank the next one.
__device__ __forceinline__ void settle_dq(const int* states, int64_t at, int rank, int stores) {
  if (rank < 0 && !stores) return;
  wait_bulk_writes();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(states + at), "r"(rank < 0 ? dq_stored : rank + 1) : "memory");
}

// The same for a tile to which the compute threads have added, as they told this thread by a barrier.
__device__ __forceinline__ void pass_turn(const int* states, int64_t at, int rank) {
  if (rank < 0) return;
  __threadfence();
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(states + at), "r"(rank + 1) : "memory");
}

__device__ __forceinline__ void add4(float* at, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// A warpgroup's half of N columns of a 64-row dQ tile, added from registers to the workspace's accumulator order.
template <int N>
__device__ __forceinline__ void add_dq(float* dq, const float* accum) {
  float* at = dq + (threadIdx.x >> 7) * (32 * N) + (threadIdx.x & 127) * 4;
#pragma unroll
  for (int j = 0; j < N / 16; ++j) add4(at + j * 512, accum + 4 * j);
}

// Accumulators of a [rows, N] tile, of which a warpgroup has 64 rows, stored in or added to the workspace in the order that
// backward_finish reads: for each 8 columns 16 bytes of every thread.
template <int rows, int N>
__device__ __forceinline__ void write_part(float* tile, const float* accum, bool adds) {
  float* at = tile + (rows == 128 ? threadIdx.x : threadIdx.x % 128) * 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j, at += rows * 8) {
    const float* x = accum + 4 * j;
    if (adds) add4(at, x);
    else *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

}  // namespace gqa_attn::device
