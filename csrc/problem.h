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

// Rows that a tensor map of packed sequences has behind each token: at least a tile's (csrc/device/sequences.cuh).
constexpr int kRaggedRows = 256;

// The order of the backward's items, which are kv tiles of heads (put_item of device/backward.cuh): where all are alike, one head
// after the other; else tile by tile of many heads, long ones first, or, deterministic, as blocks wait least.
enum ItemOrder : int { kHeadByHead, kLongFirst, kLongHalfDown, kLongLast };

// What a forward kernel was compiled for; "general" serves windows, softcap and packed sequences, and the others' masks too.
enum class Mask : int { full, causal, general };

constexpr const char* name_of(Mask mask) { return mask == Mask::full ? "full" : mask == Mask::causal ? "causal" : "general"; }

// Everything that selection looks at. Sizes in elements.
struct Problem {
  DType dtype = DType::float16;
  int64_t batch = 0;     // packed: 1
  int64_t seqlen_q = 0;  // packed: all tokens
  int64_t seqlen_k = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;       // of q and k, padded
  int64_t head_dim_v = 0;     // of v and out
  int64_t window_left = -1;   // keys seen before the diagonal, -1: all
  int64_t window_right = -1;  // and behind it; causal: 0
  bool softcap = false;
  bool packed = false;
  int64_t sequences = 0;  // of packed ones
  bool deterministic = false;
  int arch = 90;  // compute capability, major * 10 + minor
  int num_sms = 132;
};

// A window that reaches beyond all keys is none; causal stays causal, also where there is one query.
inline void set_window(Problem& p, int64_t left, int64_t right) {
  p.window_left = left >= 0 && left < p.seqlen_k - 1 ? left : -1;
  p.window_right = right >= 0 && right < p.seqlen_q - 1 ? right : -1;
  if (right == 0) p.window_right = 0;
}

// Leading query rows of a batch that see no key: with bottom-right masks there are no others. Kernels never get them. (Of packed
// sequences only the device knows.)
inline int64_t hidden_rows(const Problem& p) {
  if (p.packed) return 0;
  if (p.seqlen_k == 0) return p.seqlen_q;
  const int64_t hidden = p.seqlen_q - p.seqlen_k - p.window_right;
  return p.window_right >= 0 && hidden > 0 ? hidden : 0;
}

inline Mask mask_of(const Problem& p) {
  if (p.packed || p.softcap || p.window_left >= 0 || p.window_right > 0) return Mask::general;
  return p.window_right == 0 ? Mask::causal : Mask::full;
}

// Kernels count tiles, rows of heads and sequence positions in 32 bits; a mask's bounds add up to four lengths. The error text,
// or null where the problem fits.
inline const char* too_large(const Problem& p) {
  constexpr double limit = 2147483648.0;  // double: exact enough, and products of three sizes cannot overflow it
  const double longest = static_cast<double>(p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k);
  const double head_rows = static_cast<double>(p.batch) * static_cast<double>(p.heads);
  const double tiles = longest / 64 + 1 + static_cast<double>(p.sequences);
  if (4 * longest + 1024 < limit && head_rows * tiles < limit) return nullptr;
  return "on CUDA 4 * seqlen, and batch * heads * (seqlen / 64 + sequences), must be below 2**31";
}

// A tensor [batch, seqlen, heads, head_dim]: strides in elements, last stride 1, data and rows 16-byte aligned.
struct View {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// What forward and backward are given alike. float32 [batch, heads, seqlen_q] for lse, a natural logarithm.
struct CommonArgs {
  View q, k, v, out;
  float scale = 1;                    // > 0: the op changes q for others
  float softcap = 0;                  // 0: none
  const float* sinks = nullptr;       // [heads], or null
  const int* cu_seqlens_q = nullptr;  // [sequences + 1], where packed
  const int* cu_seqlens_k = nullptr;
  void* workspace = nullptr;  // Selection::workspace_bytes, 128-byte aligned; null where there are none
};

struct FwdArgs : CommonArgs {
  float* lse = nullptr;
};

struct BwdArgs : CommonArgs {
  View dout;
  View dq, dk, dv;  // contiguous
  const float* lse = nullptr;
  const float* dlse = nullptr;  // of the shape of lse, or null
  float* dsinks = nullptr;      // [heads], where there are sinks
  float scale_dq = 1;           // the scale as the user gave it, for dq
};

}  // namespace gqa_attn
