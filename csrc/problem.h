// What a call asks for, in plain types: everything between the torch ops and the kernels speaks in these structs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gqa_attn {

enum class DType : int { float16, bfloat16 };

constexpr const char* name_of(DType dtype) { return dtype == DType::float16 ? "float16" : "bfloat16"; }

// Kernels take head dims in whole 16 bytes, TMA's unit; the op pads others by a copy.
constexpr int64_t kRowElements = 8;
constexpr int64_t padded_head_dim(int64_t head_dim) { return (head_dim + kRowElements - 1) / kRowElements * kRowElements; }

// Everything that selection looks at. Sizes in elements.
struct Problem {
  DType dtype = DType::float16;
  bool causal = false;
  int64_t batch = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;    // of q and k, padded
  int64_t head_dim_v = 0;  // of v and out
  int arch = 90;           // compute capability, major * 10 + minor
  int num_sms = 132;
};

// Kernels count tiles, rows of heads and sequence positions in 32 bits. The error text, or null where the problem fits.
inline const char* too_large(const Problem& p) {
  constexpr double limit = 2147483648.0;  // double: exact enough, and products of three sizes cannot overflow it
  const double longest = static_cast<double>(p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k);
  const double head_rows = static_cast<double>(p.batch) * static_cast<double>(p.heads);
  if (longest + 1024 < limit && head_rows * (longest / 64 + 1) < limit) return nullptr;
  return "on CUDA seqlen, and batch * heads * seqlen / 64, must be below 2**31";
}

// A tensor [batch, seqlen, heads, head_dim]: strides in elements, last stride 1, data and rows 16-byte aligned.
struct View {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

struct FwdArgs {
  View q, k, v, out;
  float* lse = nullptr;  // [batch, heads, seqlen_q], natural logarithm
  float scale = 1;       // >= 0: the op negates q for a negative one
};

struct BwdArgs {
  View q, k, v, out, dout;
  View dq, dk, dv;              // contiguous
  const float* lse = nullptr;   // [batch, heads, seqlen_q], natural logarithm
  const float* dlse = nullptr;  // the same shape, or null
  float scale = 1;              // >= 0, for scores and dk
  float scale_dq = 1;           // the scale as the user gave it, for dq
  void* workspace = nullptr;    // Selection::workspace_bytes, 128-byte aligned
};

}  // namespace gqa_attn
