// Device functions of the backward kernels that TileLang has no tile operation for.
#pragma once

#include <cstdint>

namespace gqa_attn::device {

__device__ __forceinline__ int divide(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b)); }

// Volatile, so that what follows from it is computed where it is used and holds no register across the main loop.
__device__ __forceinline__ int block_index() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// The guard of a run-time loop against zero trips makes ptxas spill 250 bytes at 192/128.
__device__ __forceinline__ void assume_positive(int n) { __builtin_assume(n > 0); }

// How far a dQ tile in the workspace is. Whoever finds it untouched claims and stores it, which saves zeroing; later visitors add.
// A visitor waits only between another's claim and its store's end, where that block waits for nobody: it cannot hang.
// (const int*: TileLang sees no writes through it. All accesses are volatile assembly.)
constexpr int dq_untouched = 0, dq_claimed = 1, dq_stored = 2;

__device__ __forceinline__ int dq_state_at(const int* states, int64_t at) {
  int state;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(state) : "l"(states + at) : "memory");
  return state;
}

// True: this block is the first at the tile and must store it. False: the tile is there, add to it.
// `seen` is a state read before: mostly dq_stored by then, so that nothing is waited for.
__device__ __forceinline__ int claim_dq(const int* states, int64_t at, int seen) {
  if (seen == dq_untouched) {
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(seen) : "l"(states + at), "r"(dq_untouched), "r"(dq_claimed) : "memory");
    if (seen == dq_untouched) return 1;
  }
  while (seen != dq_stored) seen = dq_state_at(states, at);
  asm volatile("fence.proxy.async;" ::: "memory");
  return 0;
}

// One dQ tile from shared memory to the workspace; returns when the shared memory may be overwritten.
__device__ __forceinline__ void put_dq(const void* tile, float* dq, int bytes, int first) {
  unsigned source = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  if (first) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dq), "r"(source), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dq), "r"(source), "r"(bytes) : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void wait_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void publish_dq(const int* states, int64_t at, int first) {
  if (!first) return;
  wait_bulk_writes();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(states + at), "r"(dq_stored) : "memory");
}

// A warpgroup's half (N columns in all) of a 64-row dQ tile, added from registers to the workspace's accumulator order.
template <int N>
__device__ __forceinline__ void add_dq(float* dq, const float* accum) {
  float* at = dq + (threadIdx.x >> 7) * (32 * N) + (threadIdx.x & 127) * 4;
#pragma unroll
  for (int j = 0; j < N / 16; ++j) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at + j * 512), "f"(accum[4 * j]), "f"(accum[4 * j + 1]),
                 "f"(accum[4 * j + 2]), "f"(accum[4 * j + 3])
                 : "memory");
  }
}

}  // namespace gqa_attn::device
