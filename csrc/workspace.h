// The backward's workspace: one allocation, cut here and nowhere else.
#pragma once

#include "select.h"

namespace gqa_attn {

// Leading query rows that see no key: with bottom-right masks there are no others. Kernels never get them.
inline int64_t hidden_rows(const Problem& p) {
  if (p.seqlen_k == 0) return p.seqlen_q;
  return p.causal && p.seqlen_q > p.seqlen_k ? p.seqlen_q - p.seqlen_k : 0;
}

// Tiles are in accumulator order (csrc/device/backward.cuh), their head dims the kernel's.
struct BackwardWorkspace {
  float* dq_accum;  // [batch, heads, q tiles, tile]
  float* lse_log2;  // [batch, heads, seqlen_q padded]
  float* delta;     // the same
  int* dq_state;    // [batch, heads, seqlen_q padded / 64]
  float* dk_parts;  // [batch, kv_heads, splits, kv tiles, tile] where splits > 1
  float* dv_parts;
  int64_t dq_accum_bytes;
  int64_t q_tiles;
  int64_t kv_tiles;
  int64_t bytes;
};

BackwardWorkspace backward_workspace(const Problem& problem, const Selection& selection, void* base);

}  // namespace gqa_attn
