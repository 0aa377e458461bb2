// What a call's one workspace allocation holds: cut here and nowhere else.
#pragma once

#include "select.h"

namespace gqa_attn {

// Of packed sequences, written by plan_sequences (sequences.h).
struct SequencePlan {
  int* bounds_q = nullptr;  // [sequences + 1]: cu_seqlens_q, in order and in bounds
  int* bounds_k = nullptr;  // the same of cu_seqlens_k
  int* begins_q = nullptr;  // [sequences]: the first query row of each that sees a key
  int* begins_k = nullptr;  // [sequences]: of the keys; behind them all where no query sees any
  int* plan = nullptr;      // a count, 0, then (sequence, its first place in the plan) for each tile
};

constexpr int kMostParts = 32;  // that combine_parts adds (sequences.h): a lane for each

struct ForwardWorkspace {
  float* out_parts;  // [splits, batch, heads, seqlen_q, head_dim_v] where splits > 1
  float* lse_parts;  // [splits, batch, heads, seqlen_q]
  SequencePlan sequences;
  int64_t bytes;
};

ForwardWorkspace forward_workspace(const Problem& problem, const Selection& selection, void* base);

// Tiles are in accumulator order (csrc/device/backward.cuh), their head dims the kernel's. Tile counts are per head row, the room
// for all sequences of a packed batch.
struct BackwardWorkspace {
  int64_t zeroed_bytes;  // of the start, which must be zeroed
  float* dk_parts;       // [batch, kv_heads, parts, kv tiles, tile] where splits > 1
  float* dv_parts;
  float* dq_accum;  // [batch, heads, q tiles, tile]
  float* lse_log2;  // [batch, heads, seqlen_q padded]
  float* delta;     // the same
  int* dq_state;    // [batch, heads, seqlen_q padded / 64]
  int* tickets;     // [1]
  SequencePlan sequences;
  int64_t q_tiles;
  int64_t kv_tiles;
  int64_t bytes;
};

BackwardWorkspace backward_workspace(const Problem& problem, const Selection& selection, void* base);

// Tiles of `rows` rows that a workspace has for `seqlen` rows: of packed sequences, one more for each (sequences.cuh).
int64_t tile_count(const Problem& problem, int64_t seqlen, int rows);

}  // namespace gqa_attn
