// What generated launch functions read: one flat struct for all kernels, filled by launch.cpp.
#pragma once

#include "problem.h"

namespace gqa_attn {

// Field names are the symbols of the TileLang kernels (codegen/kernels). Sizes in elements.
struct KernelParams {
  View q, k, v, out, dout, dk, dv;
  int q_outer = 0, q_inner = 0, kv_outer = 0, kv_inner = 0;  // of the views: batch and seqlen, packed as sequences.cuh says
  int batch = 0, heads = 0, kv_heads = 0;                    // packed: batch 1
  int head_rows = 0;                                         // batch * heads
  int seqlen_q = 0, seqlen_k = 0;                            // packed: all tokens
  int head_dim = 0, head_dim_v = 0;                          // padded to 8; the kernel's own may be larger
  float scale = 0;                                           // of the scores
  float scale_log2 = 0;  // of exp2's argument: scale * log2(e), with a softcap softcap * log2(e)
  float cap_scale = 0;   // scale / softcap
  int window_left = 0, window_right = 0;
  int blocks = 0;  // of a persistent grid

  float* lse = nullptr;         // [batch * heads, seqlen_q], rows lse_row_stride apart
  const float* dlse = nullptr;  // the same layout
  int64_t lse_row_stride = 0;
  int has_dlse = 0;

  int section = 0;               // forward: head rows, of the general kernel head tiles, that are walked together
  int together_keys = 0;         // packed: all heads of a sequence of that many keys
  int tile_rows = 0;             // forward, general: rows of each query head in a tile
  int head_tiles = 0;            // and tiles for the same rows of all heads
  float* out_parts = nullptr;    // [splits, batch, heads, seqlen_q, head_dim_v], rows as lse's, where splits > 1
  float* lse_parts = nullptr;    // [splits, batch, heads, seqlen_q]
  const float* sinks = nullptr;  // [heads]
  int has_sinks = 0;

  // Packed sequences, written on the device by sequences.cu.
  int sequences = 0;  // 0: a batch of equal lengths
  const int *begins_q = nullptr, *ends_q = nullptr, *begins_k = nullptr, *ends_k = nullptr;
  const int* plan = nullptr;

  // Backward workspace, per head row; q rows padded to whole query tiles.
  int seqlen_q_padded = 0;
  int q_tile_rows = 0;
  int kv_tiles = 0;
  float* lse_log2 = nullptr;  // [batch * heads, seqlen_q_padded]: lse * log2(e), +inf in the padding
  float* delta = nullptr;     // [batch * heads, seqlen_q_padded]: rowsum(dout * out) - dlse
  float* dq_accum = nullptr;  // [batch * heads, q tiles, tile], tiles in accumulator order
  int* dq_state = nullptr;    // [batch * heads, seqlen_q_padded / 64]
  int* tickets = nullptr;     // [1]: drawn so far
  int order = kHeadByHead;    // of items
  int deterministic = 0;      // dQ tiles are added in the order of tickets
  int splits = 1;             // blocks that share a kv tile; forward: the keys of a query tile
  int heads_per_split = 0;    // query heads that one of them walks
  int kv_heads_split = 0;     // kv_heads * splits
  int parts = 1;              // of dK and dV, where splits > 1: 1 or splits
  int part_rows = 0;          // batch * kv_heads * parts
  float* dk_parts = nullptr;  // [part_rows, kv_tiles, tile]
  float* dv_parts = nullptr;

  // backward_finish: one of dq, dk and dv.
  View grad;
  const float* grad_accum = nullptr;  // [grad_head_rows, grad_parts, grad_tiles, tile]
  float grad_scale = 1;
  int grad_outer = 0, grad_inner = 0, grad_heads = 0, grad_head_dim = 0;
  int grad_seqlen = 0, grad_head_rows = 0;
  const int *grad_begins = nullptr, *grad_ends = nullptr;
  int grad_tiles = 0, grad_parts = 1;
};

}  // namespace gqa_attn
