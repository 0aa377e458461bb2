// Device functions of the backward kernels that TileLang has no tile operation for.
#pragma once

#include "common.cuh"

namespace gqa_attn::device {

// Volatile, so that what follows from it is computed where it is used and holds no register across the main loop.
__device__ __forceinline__ int block_index() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// The guard of a run-time loop against zero trips makes ptxas spill 250 bytes at 192/128.
__device__ __forceinline__ void assume_positive(int n) { __builtin_assume(n > 0); }

// How far a dQ tile in the workspace is. Whoever finds it untouched claims and stores it, which saves zeroing; later visitors
// add. A visitor waits only while another's claimed tile is on its way to being stored, and that block waits for no other block
// before it publishes the tile: this cannot hang, in whatever order blocks run.
// (const int*: TileLang sees no writes through it. All accesses are volatile assembly.)
constexpr int dq_untouched = 0, dq_claimed = 1, dq_stored = 2;

// No acquire and no proxy fence, which would cost 4 to 8 % (docs/kernels.md): the bulk copy that stored the tile was complete in
// L2 before the state was written there, the bulk reduction that depends on what is read here happens in L2 too, and no L1 holds
// either.
__device__ __forceinline__ int dq_is_stored(const int* states, int64_t at) {
  int state;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(state) : "l"(states + at) : "memory");
  return state == dq_stored;
}

__device__ __forceinline__ void wait_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Tells the others that the tile that this thread stored is there; at < 0: it stored none.
__device__ __forceinline__ void publish_dq(const int* states, int64_t at) {
  if (at < 0) return;
  wait_bulk_writes();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(states + at), "r"(dq_stored) : "memory");
}

// `at` where this block is the first at the tile and must store it, -1 where it must add. Publishes the tile stored before,
// first.
__device__ __forceinline__ int64_t claim_dq(const int* states, int64_t at, int is_stored, int64_t stored_before) {
  publish_dq(states, stored_before);
  if (is_stored) return -1;
  int state;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(state)
               : "l"(states + at), "r"(dq_untouched), "r"(dq_claimed)
               : "memory");
  if (state == dq_untouched) return at;
  while (!dq_is_stored(states, at)) continue;
  asm volatile("fence.proxy.async;" ::: "memory");
  return -1;
}

// One dQ tile from shared memory to the workspace; returns when the shared memory may be overwritten.
__device__ __forceinline__ void put_dq(const void* tile, float* dq, int bytes, int64_t first_at) {
  unsigned source = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  if (first_at >= 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dq), "r"(source), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dq), "r"(source), "r"(bytes)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A warpgroup's half (N columns in all) of a 64-row dQ tile, added from registers to the workspace's accumulator order.
template <int N>
__device__ __forceinline__ void add_dq(float* dq, const float* accum) {
  float* at = dq + (threadIdx.x >> 7) * (32 * N) + (threadIdx.x & 127) * 4;
#pragma unroll
  for (int j = 0; j < N / 16; ++j) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at + j * 512), "f"(accum[4 * j]),
                 "f"(accum[4 * j + 1]), "f"(accum[4 * j + 2]), "f"(accum[4 * j + 3])
                 : "memory");
  }
}

// Two warpgroups' accumulators of a [rows, N] tile to the workspace, in the order that backward_finish reads: for each 8 columns
// 16 bytes of every thread. 128 rows are 64 of each warpgroup; of 64 rows each warpgroup has half of the columns.
template <int rows, int N>
__device__ __forceinline__ void store_accum(float* tile, const float* accum) {
  constexpr int columns = rows == 128 ? N : N / 2;
  float4* at =
      reinterpret_cast<float4*>(tile) + (rows == 128 ? threadIdx.x : (threadIdx.x >> 7) * (N / 16 * 128) + (threadIdx.x & 127));
#pragma unroll
  for (int j = 0; j < columns / 8; ++j)
    at[j * rows * 2] = make_float4(accum[4 * j], accum[4 * j + 1], accum[4 * j + 2], accum[4 * j + 3]);
}

}  // namespace gqa_attn::device
