#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernel_launch.h"
#include "sequences.h"

namespace gqa_attn {

namespace {

constexpr int kPlanThreads = 1024;
constexpr int kThreads = 256;
constexpr int kBuckets = 128;  // of lengths, four to a power of two
constexpr float kLog2e = 1.4426950408889634f;

struct Maximum {
  __device__ int operator()(int a, int b) const { return max(a, b); }
};
using Scan = cub::BlockScan<int, kPlanThreads>;

// cu_seqlens as the CPU path reads them: clamped, and never falling.
__device__ void put_in_order(const int* cu_seqlens, int count, int total, int* bounds, Scan::TempStorage& storage) {
  int reached = 0;
  for (int base = 0; base < count; base += kPlanThreads) {
    const int i = base + threadIdx.x;
    int bound = i < count ? min(max(cu_seqlens[i], 0), total) : 0, highest;
    Scan(storage).InclusiveScan(bound, bound, Maximum(), highest);
    if (i < count) bounds[i] = max(bound, reached);
    reached = max(reached, highest);
    __syncthreads();
  }
}

// Longer lengths come first.
__device__ int bucket_of(unsigned length) {
  if (length < 4) return kBuckets - 1 - length;
  const int log = 31 - __clz(length);
  return kBuckets - 1 - (log * 4 + ((length >> (log - 2)) & 3));
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(SequencePlan plan, const int* cu_seqlens_q, const int* cu_seqlens_k, int sequences, int total_q, int total_k,
                int64_t window_right, bool of_keys, int tile_rows) {
  __shared__ Scan::TempStorage storage;
  __shared__ int tiles_before[kBuckets];
  put_in_order(cu_seqlens_q, sequences + 1, total_q, plan.bounds_q, storage);
  put_in_order(cu_seqlens_k, sequences + 1, total_k, plan.bounds_k, storage);
  if (threadIdx.x < kBuckets) tiles_before[threadIdx.x] = 0;
  __syncthreads();

  const auto tiles_of = [&](int s, int& bucket) {
    const int q_length = plan.bounds_q[s + 1] - plan.begins_q[s], k_length = plan.bounds_k[s + 1] - plan.begins_k[s];
    bucket = bucket_of(static_cast<unsigned>(q_length) + k_length);
    return ((of_keys ? k_length : q_length) + tile_rows - 1) / tile_rows;
  };
  for (int s = threadIdx.x; s < sequences; s += kPlanThreads) {
    const int64_t q_length = plan.bounds_q[s + 1] - plan.bounds_q[s], k_length = plan.bounds_k[s + 1] - plan.bounds_k[s];
    int64_t hidden = window_right < 0 ? 0 : q_length - k_length - window_right;
    if (k_length == 0) hidden = q_length;
    plan.begins_q[s] = plan.bounds_q[s] + static_cast<int>(max(hidden, int64_t{0}));
    plan.begins_k[s] = plan.bounds_k[s + (q_length == 0)];
    int bucket;
    const int tiles = tiles_of(s, bucket);
    atomicAdd(&tiles_before[bucket], tiles);
  }
  __syncthreads();
  int before = threadIdx.x < kBuckets ? tiles_before[threadIdx.x] : 0, all;
  Scan(storage).ExclusiveSum(before, before, all);
  if (threadIdx.x < kBuckets) tiles_before[threadIdx.x] = before;
  if (threadIdx.x == 0) plan.plan[0] = all, plan.plan[1] = 0;
  __syncthreads();

  int2* places = reinterpret_cast<int2*>(plan.plan) + 1;
  const int lane = threadIdx.x % 32;
  for (int base = threadIdx.x - lane; base < sequences; base += kPlanThreads) {
    const int s = base + lane;
    int tiles = 0, first = 0, bucket;
    if (s < sequences) {
      tiles = tiles_of(s, bucket);
      first = atomicAdd(&tiles_before[bucket], tiles);
    }
    for (int other = 0; other < 32; ++other) {  // a warp writes one sequence after the other
      const int count = __shfl_sync(0xffffffffu, tiles, other), at = __shfl_sync(0xffffffffu, first, other);
      for (int t = lane; t < count; t += 32) places[at + t] = make_int2(base + other, at);
    }
  }
}

// Whether a row is nobody's, and whether it belongs to a sequence all the same.
__device__ bool is_unseen(const UnseenRows& rows, int64_t row, bool& in_sequence) {
  in_sequence = true;
  if (!rows.packed) return row % rows.seqlen < rows.hidden;
  const int n = static_cast<int>(rows.sequences);
  int low = 0, high = n;  // the last bound that is not behind the row, or 0
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (rows.bounds[middle] <= row) low = middle;
    else high = middle - 1;
  }
  in_sequence = low < n && rows.bounds[low] <= row;
  return !in_sequence || row < rows.begins[low];
}

__global__ void __launch_bounds__(kThreads) clear_kernel(UnseenRows rows) {
  const int lane = threadIdx.x % 32;
  const int64_t count = rows.batch * rows.seqlen;
  for (int64_t base = (int64_t{blockIdx.x} * kThreads + threadIdx.x) - lane; base < count;
       base += int64_t{gridDim.x} * kThreads) {
    bool in_sequence = false;
    const bool unseen = base + lane < count && is_unseen(rows, base + lane, in_sequence);
    for (unsigned left = __ballot_sync(0xffffffffu, unseen); left; left &= left - 1) {  // a warp clears one row after the other
      const int other = __ffs(left) - 1;
      const int64_t row = base + other;
      const bool sink = __shfl_sync(0xffffffffu, in_sequence, other) && rows.sinks;
      for (int t = 0; t < 2; ++t) {
        for (int64_t at = lane * 16; at < rows.row_bytes[t]; at += 32 * 16)
          *reinterpret_cast<uint4*>(static_cast<char*>(rows.data[t]) + row * rows.row_bytes[t] + at) = make_uint4(0, 0, 0, 0);
      }
      if (rows.lse == nullptr) continue;
      const int64_t batch = row / rows.seqlen, at = row % rows.seqlen;
      for (int64_t h = lane; h < rows.heads; h += 32)
        rows.lse[(batch * rows.heads + h) * rows.seqlen + at] = sink ? rows.sinks[h] : -INFINITY;
    }
  }
}

__device__ void convert(float4 x, __half* out) {
  reinterpret_cast<__half2*>(out)[0] = __floats2half2_rn(x.x, x.y),
  reinterpret_cast<__half2*>(out)[1] = __floats2half2_rn(x.z, x.w);
}
__device__ void convert(float4 x, __nv_bfloat16* out) {
  reinterpret_cast<__nv_bfloat162*>(out)[0] = __floats2bfloat162_rn(x.x, x.y);
  reinterpret_cast<__nv_bfloat162*>(out)[1] = __floats2bfloat162_rn(x.z, x.w);
}

// A warp for each row and head; a lane for each part's lse, then for each four columns.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(UnseenRows rows, Parts parts) {
  const int lane = threadIdx.x % 32;
  const int64_t count = rows.batch * rows.seqlen * rows.heads;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; i < count; i += int64_t{gridDim.x} * (kThreads / 32)) {
    const int64_t row = i / rows.heads, head = i % rows.heads;
    bool in_sequence;
    if (is_unseen(rows, row, in_sequence)) continue;
    const int64_t at = (row / rows.seqlen * rows.heads + head) * rows.seqlen + row % rows.seqlen;
    const float sink = rows.sinks ? rows.sinks[head] : -INFINITY;
    const float part_lse = lane < parts.splits ? parts.lse[lane * count + at] : -INFINITY;
    float top = fmaxf(part_lse, sink);
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    if (top == -INFINITY) top = 0;
    float weight = expf(part_lse - top), total = weight;
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    total += expf(sink - top);
    if (lane == 0) rows.lse[at] = top + logf(total);
    weight = total == 0 ? 0 : weight / total;
    T* out = reinterpret_cast<T*>(static_cast<char*>(rows.data[0]) + row * rows.row_bytes[0]) + head * parts.head_dim;
    for (int64_t column = lane * 4; column < (parts.head_dim + 127) / 128 * 128; column += 128) {
      const bool inside = column < parts.head_dim;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int s = 0; s < parts.splits; ++s) {
        const float w = __shfl_sync(0xffffffffu, weight, s);
        if (!inside) continue;
        const float4 part = *reinterpret_cast<const float4*>(parts.out + (s * count + at) * parts.head_dim + column);
        sum.x += w * part.x, sum.y += w * part.y, sum.z += w * part.z, sum.w += w * part.w;
      }
      if (inside) convert(sum, out + column);
    }
  }
}

__global__ void __launch_bounds__(kPlanThreads) sinks_kernel(SinkGradient g) {
  using Reduce = cub::BlockReduce<float, kPlanThreads>;
  __shared__ Reduce::TempStorage storage;
  const int head = blockIdx.x;
  const float sink = g.sinks[head] * kLog2e;
  float sum = 0;
  for (int64_t b = 0; b < g.batch; ++b) {
    const int64_t row = b * g.heads + head;
    for (int64_t i = threadIdx.x; i < g.padded; i += kPlanThreads)
      sum -= exp2f(sink - g.lse_log2[row * g.padded + i]) * g.delta[row * g.padded + i];
  }
  if (g.dlse && sink != -INFINITY) {
    const auto add = [&](int64_t at) { sum += exp2f(sink - g.lse[at] * kLog2e) * g.dlse[at]; };
    for (int64_t i = threadIdx.x; i < g.batch * g.hidden; i += kPlanThreads)
      add((i / g.hidden * g.heads + head) * g.seqlen_q + i % g.hidden);
    for (int64_t s = threadIdx.x; s < g.sequences; s += kPlanThreads) {
      for (int at = g.bounds_q[s]; at < g.begins_q[s]; ++at) add(head * g.seqlen_q + at);
    }
  }
  const float total = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) g.dsinks[head] = total;
}

}  // namespace

cudaError_t plan_sequences(const SequencePlan& plan, const Problem& p, const int* cu_seqlens_q, const int* cu_seqlens_k,
                           bool of_keys, int tile_rows, cudaStream_t stream) {
  return launch(plan_kernel, 1, kPlanThreads, 0, stream, plan, cu_seqlens_q, cu_seqlens_k, p.sequences, p.seqlen_q, p.seqlen_k,
                p.window_right, of_keys, tile_rows);
}

cudaError_t clear_unseen(const UnseenRows& rows, cudaStream_t stream) {
  const int64_t count = rows.batch * rows.seqlen;
  if (count == 0 || (!rows.packed && rows.hidden == 0)) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, 4096);
  return launch(clear_kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, rows);
}

cudaError_t combine_parts(const UnseenRows& rows, const Parts& parts, cudaStream_t stream) {
  const int64_t warps = rows.batch * rows.seqlen * rows.heads, per_block = kThreads / 32;
  const auto kernel = parts.dtype == DType::float16 ? combine_kernel<__half> : combine_kernel<__nv_bfloat16>;
  return launch(kernel, static_cast<unsigned>(std::min<int64_t>((warps + per_block - 1) / per_block, 65536)), kThreads, 0, stream,
                rows, parts);
}

cudaError_t sum_sinks(const SinkGradient& gradient, cudaStream_t stream) {
  if (gradient.heads == 0) return cudaSuccess;
  return launch(sinks_kernel, static_cast<unsigned>(gradient.heads), kPlanThreads, 0, stream, gradient);
}

}  // namespace gqa_attn
