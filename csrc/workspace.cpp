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
  w.kv_tiles = (p.seqlen_k + s.main->block_kv - 1) / s.main->block_kv;
  const int64_t rows = p.batch * p.heads * w.q_tiles * s.main->block_q;
  w.dq_accum_bytes = rows * s.main->head_dim * static_cast<int64_t>(sizeof(float));
  w.dq_accum = static_cast<float*>(cut(w.dq_accum_bytes));
  w.lse_log2 = static_cast<float*>(cut(rows * sizeof(float)));
  w.delta = static_cast<float*>(cut(rows * sizeof(float)));
  w.dq_state = static_cast<int*>(cut(rows / 64 * sizeof(int)));
  if (s.splits > 1) {
    const int64_t part_rows = p.batch * p.kv_heads * s.splits * w.kv_tiles * s.main->block_kv;
    w.dk_parts = static_cast<float*>(cut(part_rows * s.main->head_dim * sizeof(float)));
    w.dv_parts = static_cast<float*>(cut(part_rows * s.main->head_dim_v * sizeof(float)));
  }
  w.bytes = at;
  return w;
}

}  // namespace gqa_attn
