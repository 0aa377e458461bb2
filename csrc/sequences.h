// The kernels around the main ones that know no tiles: the plan of packed sequences, rows that no kernel writes, parts of the
// forward's results, sinks.
#pragma once

#include <cuda_runtime_api.h>

#include "workspace.h"

namespace gqa_attn {

// Fills `plan` for tiles of `tile_rows` query rows, or keys, from cu_seqlens with any values: they are put in order and in
// bounds. Sequences come longest first, so that blocks that take tiles in this order end together.
cudaError_t plan_sequences(const SequencePlan& plan, const Problem& problem, const int* cu_seqlens_q, const int* cu_seqlens_k,
                           bool of_keys, int tile_rows, cudaStream_t stream);

// Contiguous 16-bit rows [batch, seqlen, row_bytes] of which some are no kernel's: the `hidden` first ones of each batch; packed,
// those before begins[s] and after bounds[s + 1] of each sequence s. They become 0, and their lse -inf, or the sink where they
// are in a sequence.
struct UnseenRows {
  void* data[2] = {nullptr, nullptr};
  int64_t row_bytes[2] = {0, 0};  // multiples of 16
  int64_t batch = 0, seqlen = 0, hidden = 0;
  int64_t sequences = 0;
  bool packed = false;
  const int* bounds = nullptr;
  const int* begins = nullptr;
  float* lse = nullptr;  // [batch, heads, seqlen], or null
  const float* sinks = nullptr;
  int64_t heads = 0;
};

cudaError_t clear_unseen(const UnseenRows& rows, cudaStream_t stream);

// Results over some of the keys each: out [splits, batch, heads, seqlen, head_dim], lse [splits, batch, heads, seqlen].
struct Parts {
  const float* out;
  const float* lse;
  int splits;
  int64_t head_dim;
  DType dtype;
};

// out and lse of the rows that are not unseen, with `rows.data[0]` and `rows.lse`: lse is the log of the sum of the parts'
// exp(lse) and exp(sink), out the sum of the parts times exp(their lse - lse).
cudaError_t combine_parts(const UnseenRows& rows, const Parts& parts, cudaStream_t stream);

// dsinks[h] = - sum over rows of exp(sink - lse) * delta; a row that sees no key has delta = -dlse.
struct SinkGradient {
  float* dsinks;
  const float* sinks;
  const float* lse_log2;  // [batch, heads, padded], +inf in the padding
  const float* delta;
  int64_t batch, heads, padded;
  const float* lse;   // [batch, heads, seqlen_q] of the call, for the rows that see no key
  const float* dlse;  // or null
  int64_t seqlen_q, hidden, sequences;
  const int* bounds_q;
  const int* begins_q;
};

cudaError_t sum_sinks(const SinkGradient& gradient, cudaStream_t stream);

}  // namespace gqa_attn
