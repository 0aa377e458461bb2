#include "workspace.h"

namespace gqa_attn {

BackwardWorkspace backward_workspace(const Problem& p, const Selection& s, void* base) {
  BackwardWorkspace w{};
  int64_t at = 0;
  const auto cut = [&](int64_t bytes) {
    void* part = static_cast<char*>(base) + at;
    at += (bytes + 127) / 128 * 128;
    return part;
  };
  w.q_tiles = (p.seqlen_q - hidden_rows(p) + s.main->block_q - 1) / s.main->block_q;
  const int64_t rows = p.batch * p.heads * w.q_tiles * s.main->block_q;
  w.dq_accum_bytes = rows * s.main->head_dim * static_cast<int64_t>(sizeof(float));
  w.dq_accum = static_cast<float*>(cut(w.dq_accum_bytes));
  w.lse_log2 = static_cast<float*>(cut(rows * sizeof(float)));
  w.delta = static_cast<float*>(cut(rows * sizeof(float)));
  w.dq_state = static_cast<int*>(cut(rows / 64 * sizeof(int)));
  if (s.splits > 1) {
    const int64_t parts = p.batch * p.seqlen_k * p.kv_heads * s.splits * 2;
    w.dk_parts = cut(parts * p.head_dim);
    w.dv_parts = cut(parts * p.head_dim_v);
  }
  w.bytes = at;
  return w;
}

}  // namespace gqa_attn
