// Device functions of the forward kernels that TileLang has no tile operation for.
//
// A warpgroup's wgmma accumulator of N columns is float[N / 2] per thread: element (j * 4 + r * 2 + c) stands in column
// j * 8 + (lane % 4) * 2 + c of row r * 8 + lane / 4 of the warp's 16 rows. Row vectors are float[2], indexed by r.
#pragma once

#include "sequences.cuh"

namespace gqa_attn::device {

// The persistent grid's work in order: sections of `section` head rows (batch * heads + head), within a section all head
// rows of one query tile before the next tile. With `snake` every other round of the grid runs backwards, so that a block
// that got a long causal tile gets a short one next.
template <bool snake>
__device__ __forceinline__ int work_index(int round, int blocks) {
  int block = blockIdx.x;
  return round * blocks + (snake && (round & 1) ? blocks - 1 - block : block);
}

__device__ __forceinline__ int section_width(int section, int head_rows, int s) { return min(section, head_rows - s * section); }

__device__ __forceinline__ int work_tile(int index, int tiles, int head_rows, int section) {
  int s = divide(index, tiles * section);
  return divide(index - s * tiles * section, section_width(section, head_rows, s));
}

__device__ __forceinline__ int work_head_row(int index, int tiles, int head_rows, int section, int tile) {
  int s = divide(index, tiles * section);
  return s * section + index - s * tiles * section - tile * section_width(section, head_rows, s);
}

// The general kernel's next item, in the order of ITEM in codegen/kernels/forward_sm90.py: a split of the keys of a tile. The
// same tile_rows rows of a kv head's group make head_tiles / kv_heads tiles. A batch's items come in the order above; packed
// ones, of which only the device knows the lengths, by ticket, longest sequences first: the plan (csrc/sequences.cu) is a count,
// the tickets drawn, and (sequence, its first place in the plan) for each tile of rows. For a whole warp, which may read `item`
// afterwards. (const int* plan: TileLang sees no writes through it.)
template <int block_q, int block_kv>
__device__ __forceinline__ void put_item(int* item, int round, int blocks, int batch, int kv_heads, int group, int head_tiles,
                                         int tile_rows, int splits, int section, int together_keys, int seqlen_q, int seqlen_k,
                                         int window_left, int window_right, int sequences, const int* begins_q, const int* ends_q,
                                         const int* begins_k, const int* ends_k, const int* plan) {
  int index = 0, q_begin = 0, q_length = seqlen_q, k_begin = 0, k_length = seqlen_k, head_rows = batch * head_tiles;
  const int group_tiles = divide(head_tiles, kv_heads);
  int split = 0;
  bool more;
  if (sequences) {
    if ((threadIdx.x & 31) == 0) index = atomicAdd(const_cast<int*>(plan) + 1, 1);
    index = __shfl_sync(0xffffffffu, index, 0);
    split = remainder(index, splits), index = divide(index, splits);
    more = index < plan[0] * head_tiles;
    if (more) {
      const int* place = plan + 2 + 2 * divide(index, head_tiles);
      const int s = place[0];
      index -= place[1] * head_tiles;
      head_rows = head_tiles;
      q_begin = begins_q[s], q_length = ends_q[s] - q_begin, k_begin = begins_k[s], k_length = ends_k[s] - k_begin;
      section = k_length <= together_keys ? head_tiles : group_tiles;
    }
  } else {
    index = work_index<true>(round, blocks);
    split = remainder(index, splits), index = divide(index, splits);
    more = index < ceil_divide(seqlen_q, tile_rows) * head_rows;
  }
  const int tiles = ceil_divide(q_length, tile_rows), tile_heads = divide(block_q, tile_rows);
  const int nth = work_tile(index, tiles, head_rows, section);
  const int head_row = work_head_row(index, tiles, head_rows, section, nth), b = divide(head_row, head_tiles);
  const int head_tile = head_row - b * head_tiles, kv_head = divide(head_tile, group_tiles);
  const int in_group = (head_tile - kv_head * group_tiles) * tile_heads;
  const int row = (tiles - 1 - nth) * tile_rows;  // long tiles first
  int diagonal = row + k_length - q_length;       // the key at the diagonal of the tile's first row
  const int first = divide(max(diagonal - window_left, 0), block_kv);
  const int of_tile = ceil_divide(min(diagonal + tile_rows + window_right, k_length), block_kv) - first;
  const int end = divide(of_tile * (split + 1), splits), begin = min(divide(of_tile * split, splits), of_tile - 1);
  if (begin >= end) diagonal = -(1 << 29);  // nothing is left for this split: a tile in which everything is hidden
  const int n = max(end - begin, 1), last = first + begin + n - 1;
  // Tiles up to this one hold only keys that all rows see on their right; and from this one on on their left.
  const int all_right = divide(max(diagonal + window_right + 1, 0), block_kv) - 1;
  const int all_left = ceil_divide(max(diagonal + tile_rows - 1 - window_left, 0), block_kv);
  const int edge = min(max(last - all_right, 1), n);
  if ((threadIdx.x & 31) == 0) {
    item[0] = row, item[1] = b, item[2] = kv_head * group + in_group, item[3] = min(tile_heads, group - in_group);
    item[4] = q_begin, item[5] = q_length, item[6] = k_begin, item[7] = k_length;
    item[8] = diagonal, item[9] = last, item[10] = more ? n : 0;
    item[11] = edge, item[12] = min(max(last - all_left + 1, edge), n), item[13] = split;
  }
  __syncwarp();
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Query head and row of the sequence, from the tile's first ones, of this thread's row r: a tile has tile_rows rows of each head.
struct TileRow {
  int head, row;

  __device__ __forceinline__ TileRow(int r, int tile_rows) {
    const int at = (threadIdx.x >> 5) * 16 + r * 8 + (threadIdx.x & 31) / 4;
    head = divide(at, tile_rows), row = remainder(at, tile_rows);
  }
};

// Ends the online softmax: row_sum becomes lse, rescale the factor for what was accumulated (0 for a row that saw no key). The
// row's head's sink is one more logit without a value.
__device__ __forceinline__ void finish_rows(const float* row_max, float* row_sum, float* rescale, float scale_log2,
                                            const float* sinks, int has_sinks, int first_head, int heads, int tile_rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + min(TileRow(r, tile_rows).head, heads - 1);
    const float sink_log2 = has_sinks ? sinks[head] * 1.4426950408889634f : -INFINITY;
    const float top = row_max[r] == -INFINITY ? -INFINITY : row_max[r] * scale_log2;
    const float new_top = fmaxf(top, sink_log2), shift = new_top == -INFINITY ? 0.f : new_top;
    const float grown = exp2f(top - shift);
    const float total = quad_sum(row_sum[r]) * grown + exp2f(sink_log2 - shift);
    rescale[r] = total == 0.f ? 0.f : __fdividef(grown, total);
    row_sum[r] = (log2f(total) + shift) * 0.6931471805599453f;
  }
}

// lse of the tile's rows below `rows` and heads below `heads`.
__device__ __forceinline__ void store_lse(float* lse, int64_t head_stride, const float* row_lse, int rows, int heads,
                                          int tile_rows) {
  if ((threadIdx.x & 3) != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const TileRow at(r, tile_rows);
    if (at.row < rows && at.head < heads) lse[at.head * head_stride + at.row] = row_lse[r];
  }
}

// One step of the online softmax (Milakov and Gimelshein 2018): scores become exp2(score * scale_log2 - max), row_max (of raw
// scores) and the lane's part of row_sum are updated, and rescale gets the factor for what was accumulated before.
// A maximum by which exp2 grew no more than 2 ** lazy times keeps the old one: results are the same, the rescaling is skipped.
template <int N, bool first, int lazy>
__device__ __forceinline__ void softmax_step(float* scores, float* row_max, float* rescale, float* row_sum, float scale_log2) {
  float block_max[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Four independent chains: the latency of fmaxf and the adds below would otherwise bind.
    float a[4] = {scores[2 * r], scores[2 * r + 1], scores[4 + 2 * r], scores[4 + 2 * r + 1]};
#pragma unroll
    for (int j = 2; j < N / 8; ++j) {
      a[(j & 1) * 2] = fmaxf(a[(j & 1) * 2], scores[j * 4 + 2 * r]);
      a[(j & 1) * 2 + 1] = fmaxf(a[(j & 1) * 2 + 1], scores[j * 4 + 2 * r + 1]);
    }
    block_max[r] = fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) block_max[r] = quad_max(block_max[r]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float next = first ? block_max[r] : fmaxf(row_max[r], block_max[r]);
    if (lazy && !first) next = (next - row_max[r]) * scale_log2 <= static_cast<float>(lazy) ? row_max[r] : next;
    // -inf: the row has seen no key yet; any finite stand-in keeps exp2(-inf) = 0 where -inf - -inf would be NaN.
    float shift = next == -INFINITY ? 0.f : next * scale_log2;
    if (!first) rescale[r] = exp2f(row_max[r] * scale_log2 - shift);
    row_max[r] = next;
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float x = exp2f(scores[j * 4 + 2 * r] * scale_log2 - shift), y = exp2f(scores[j * 4 + 2 * r + 1] * scale_log2 - shift);
      scores[j * 4 + 2 * r] = x;
      scores[j * 4 + 2 * r + 1] = y;
      sum[(j & 1) * 2] += x;
      sum[(j & 1) * 2 + 1] += y;
    }
    float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    row_sum[r] = first ? total : row_sum[r] * rescale[r] + total;
  }
}

// Scales accumulated rows; a warp whose factors are all 1 skips it.
template <int N>
__device__ __forceinline__ void rescale_rows(float* accum, float* rescale) {
  if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      accum[j * 2] *= rescale[j & 1];
      accum[j * 2 + 1] *= rescale[j & 1];
    }
  }
}

template <bool bf16>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
  unsigned packed;
  if constexpr (bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// A warpgroup's [64, N] output times `factor` to 16-bit rows at `out`, 16 bytes a lane after a 4 x 4 transpose in each quad.
// Rows from `rows` on and columns from `columns` (a multiple of 8) on are left alone.
template <int N, bool bf16>
__device__ __forceinline__ void store_rows(const float* accum, const float* factor, void* out, int64_t seq_stride, int rows,
                                           int columns) {
  int lane = threadIdx.x & 31, quad_lane = lane & 3, warp = (threadIdx.x >> 5) & 3;
  bool odd = quad_lane & 1, high = quad_lane & 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row = warp * 16 + r * 8 + (lane >> 2);
    char* line = static_cast<char*>(out) + row * seq_stride * 2;
#pragma unroll
    for (int g = 0; g < N / 32; ++g) {
      unsigned u[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = (g * 4 + j) * 4 + 2 * r;
        u[j] = pack_pair<bf16>(accum[at] * factor[r], accum[at + 1] * factor[r]);
      }
      unsigned s = __shfl_xor_sync(0xffffffffu, odd ? u[0] : u[1], 1), t = __shfl_xor_sync(0xffffffffu, odd ? u[2] : u[3], 1);
      if (odd) {
        u[0] = s;
        u[2] = t;
      } else {
        u[1] = s;
        u[3] = t;
      }
      s = __shfl_xor_sync(0xffffffffu, high ? u[0] : u[2], 2), t = __shfl_xor_sync(0xffffffffu, high ? u[1] : u[3], 2);
      if (high) {
        u[0] = s;
        u[1] = t;
      } else {
        u[2] = s;
        u[3] = t;
      }
      int column = g * 32 + quad_lane * 8;
      if (row < rows && column < columns) *reinterpret_cast<uint4*>(line + column * 2) = make_uint4(u[0], u[1], u[2], u[3]);
    }
  }
}

// A tile's output times `factor` to `out`, rows and heads as in store_lse: to float32 parts, or to 16 bit.
template <int N, bool bf16, typename Out>
__device__ __forceinline__ void store_heads(const float* accum, const float* factor, Out* out, int64_t seq_stride,
                                            int64_t head_stride, int rows, int heads, int tile_rows, int columns) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const TileRow at(r, tile_rows);
    if (at.row >= rows || at.head >= heads) continue;
    Out* line = out + at.row * seq_stride + at.head * head_stride;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const int column = j * 8 + (threadIdx.x & 3) * 2;
      const float x = accum[j * 4 + 2 * r] * factor[r], y = accum[j * 4 + 2 * r + 1] * factor[r];
      if (column >= columns) continue;
      if constexpr (sizeof(Out) == sizeof(float)) *reinterpret_cast<float2*>(line + column) = make_float2(x, y);
      else *reinterpret_cast<unsigned*>(line + column) = pack_pair<bf16>(x, y);
    }
  }
}

}  // namespace gqa_attn::device
