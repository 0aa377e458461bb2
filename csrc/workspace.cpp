#include "workspace.h"

namespace gqa_attn {

namespace {

class Cutter {
 public:
  explicit Cutter(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* cut(int64_t count) {
    T* part = reinterpret_cast<T*>(base_ + at_);
    at_ += (count * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;
    return part;
  }

  int64_t bytes() const { return at_; }

 private:
  char* base_;
  int64_t at_ = 0;
};

SequencePlan cut_plan(Cutter& cutter, const Problem& p, int64_t capacity) {
  SequencePlan plan;
  if (!p.packed) return plan;
  plan.bounds_q = cutter.cut<int>(p.sequences + 1);
  plan.bounds_k = cutter.cut<int>(p.sequences + 1);
  plan.begins_q = cutter.cut<int>(p.sequences);
  plan.begins_k = cutter.cut<int>(p.sequences);
  plan.plan = cutter.cut<int>(2 + 2 * capacity);
  return plan;
}

}  // namespace

int64_t tile_count(const Problem& p, int64_t seqlen, int rows) {
  return p.packed ? seqlen / rows + p.sequences : (seqlen + rows - 1) / rows;
}

ForwardWorkspace forward_workspace(const Problem& p, const Selection& s, void* base) {
  ForwardWorkspace w{};
  Cutter cutter(base);
  if (s.splits > 1) {
    const int64_t rows = s.splits * p.batch * p.heads * p.seqlen_q;
    w.out_parts = cutter.cut<float>(rows * p.head_dim_v);
    w.lse_parts = cutter.cut<float>(rows);
  }
  w.sequences = cut_plan(cutter, p, tile_count(p, p.seqlen_q, s.main->block_q / s.tile_heads));
  w.bytes = cutter.bytes();
  return w;
}

BackwardWorkspace backward_workspace(const Problem& p, const Selection& s, void* base) {
  BackwardWorkspace w{};
  Cutter cutter(base);
  w.q_tiles = tile_count(p, p.seqlen_q - hidden_rows(p), s.main->block_q);
  w.kv_tiles = tile_count(p, p.seqlen_k, s.main->block_kv);
  if (s.splits > 1) {
    const int64_t part_rows = p.batch * p.kv_heads * s.parts * w.kv_tiles * s.main->block_kv;
    w.dk_parts = cutter.cut<float>(part_rows * s.main->head_dim);
    w.dv_parts = cutter.cut<float>(part_rows * s.main->head_dim_v);
    if (s.parts < s.splits) w.zeroed_bytes = cutter.bytes();
  }
  const int64_t rows = p.batch * p.heads * w.q_tiles * s.main->block_q;
  w.dq_accum = cutter.cut<float>(rows * s.main->head_dim);
  if (s.main->zeroed_dq) w.zeroed_bytes = cutter.bytes();
  w.lse_log2 = cutter.cut<float>(rows);
  w.delta = cutter.cut<float>(rows);
  w.dq_state = cutter.cut<int>(rows / 64);
  w.tickets = cutter.cut<int>(1);
  w.sequences = cut_plan(cutter, p, w.kv_tiles);
  w.bytes = cutter.bytes();
  return w;
}

}  // namespace gqa_attn
