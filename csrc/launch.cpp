#include "launch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "driver.h"
#include "kernel_params.h"
#include "sequences.h"
#include "workspace.h"

namespace gqa_attn {

namespace {

constexpr int64_t kElementBytes = 2;
constexpr float kLog2e = 1.4426950408889634f;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("gqa_attn: ") + what + " failed: " + cudaGetErrorString(error));
  }
}

void run(const Kernel& kernel, const KernelParams& params, cudaStream_t stream) {
  check(kernel.launch(params, stream), kernel.name);
}

View skip_rows(View view, int64_t rows) {
  if (view.data) view.data = static_cast<char*>(view.data) + rows * view.seq_stride * kElementBytes;
  return view;
}

// A view of packed tokens as their tensor maps have it (device/sequences.cuh).
View ragged(View view) {
  view = skip_rows(view, -kRaggedRows);
  view.batch_stride = view.seq_stride;
  return view;
}

// Where kernels find the rows of the tensors, and the options: what forward and backward have in common.
KernelParams common_params(const Problem& p, const CommonArgs& args, const SequencePlan& sequences) {
  KernelParams params;
  const int64_t hidden = hidden_rows(p);
  const auto place = [&](const View& view, int64_t skipped) { return p.packed ? ragged(view) : skip_rows(view, skipped); };
  params.q = place(args.q, hidden);
  params.k = place(args.k, 0);
  params.v = place(args.v, 0);
  params.out = place(args.out, hidden);
  params.batch = static_cast<int>(p.batch);
  params.heads = static_cast<int>(p.heads);
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.head_rows = params.batch * params.heads;
  params.seqlen_q = static_cast<int>(p.seqlen_q - hidden);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.q_outer = p.packed ? params.seqlen_q + 1 : params.batch;
  params.q_inner = p.packed ? kRaggedRows : params.seqlen_q;
  params.kv_outer = p.packed ? params.seqlen_k + 1 : params.batch;
  params.kv_inner = p.packed ? kRaggedRows : params.seqlen_k;
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.window_left = static_cast<int>(p.window_left < 0 ? p.seqlen_k : p.window_left);
  params.window_right = static_cast<int>(p.window_right < 0 ? p.seqlen_q : p.window_right);
  params.scale = args.scale;
  params.scale_log2 = (p.softcap ? args.softcap : args.scale) * kLog2e;
  if (p.softcap) params.cap_scale = args.scale / args.softcap;
  params.lse_row_stride = p.seqlen_q;
  params.sinks = args.sinks;
  params.has_sinks = args.sinks != nullptr;
  if (p.packed) {
    params.sequences = static_cast<int>(p.sequences);
    params.begins_q = sequences.begins_q;
    params.ends_q = sequences.bounds_q + 1;
    params.begins_k = sequences.begins_k;
    params.ends_k = sequences.bounds_k + 1;
    params.plan = sequences.plan;
  }
  return params;
}

// Whether any query may see a key.
bool has_work(const Problem& p) {
  return p.batch * p.heads > 0 && p.seqlen_q > hidden_rows(p) && p.seqlen_k > 0 && (!p.packed || p.sequences > 0);
}

UnseenRows unseen_queries(const Problem& p, const View& rows, int64_t head_dim, const SequencePlan& plan) {
  UnseenRows unseen;
  unseen.data[0] = rows.data;
  unseen.row_bytes[0] = p.heads * head_dim * kElementBytes;
  unseen.batch = p.batch;
  unseen.seqlen = p.seqlen_q;
  unseen.hidden = hidden_rows(p);
  unseen.packed = p.packed;
  unseen.sequences = p.sequences;
  unseen.bounds = plan.bounds_q;
  unseen.begins = plan.begins_q;
  unseen.heads = p.heads;
  return unseen;
}

// Keys that no kernel goes over: those that no query sees because there is none, and packed ones behind the last sequence.
UnseenRows unseen_keys(const Problem& p, const BwdArgs& args, const SequencePlan& plan, bool all) {
  UnseenRows unseen;
  unseen.data[0] = args.dk.data;
  unseen.data[1] = args.dv.data;
  unseen.row_bytes[0] = p.kv_heads * p.head_dim * kElementBytes;
  unseen.row_bytes[1] = p.kv_heads * p.head_dim_v * kElementBytes;
  unseen.batch = p.batch;
  unseen.seqlen = p.seqlen_k;
  unseen.hidden = all ? p.seqlen_k : 0;
  unseen.packed = p.packed && !all;
  unseen.sequences = p.sequences;
  unseen.bounds = plan.bounds_k;
  unseen.begins = plan.begins_k;
  return unseen;
}

void add_sinks(const Problem& p, const BwdArgs& args, const KernelParams& params, const SequencePlan& plan, cudaStream_t stream) {
  SinkGradient gradient{};
  gradient.dsinks = args.dsinks;
  gradient.sinks = args.sinks;
  gradient.lse_log2 = params.lse_log2;
  gradient.delta = params.delta;
  gradient.batch = p.batch;
  gradient.heads = p.heads;
  gradient.padded = params.seqlen_q_padded;
  gradient.lse = args.lse;
  gradient.dlse = args.dlse;
  gradient.seqlen_q = p.seqlen_q;
  gradient.hidden = hidden_rows(p);
  gradient.sequences = p.sequences;
  gradient.bounds_q = plan.bounds_q;
  gradient.begins_q = plan.begins_q;
  check(sum_sinks(gradient, stream), "summing dsinks");
}

void plan_tiles(const Problem& p, const CommonArgs& args, const SequencePlan& plan, bool of_keys, int tile_rows,
                cudaStream_t stream) {
  if (p.packed)
    check(plan_sequences(plan, p, args.cu_seqlens_q, args.cu_seqlens_k, of_keys, tile_rows, stream), "planning sequences");
}

}  // namespace

void launch_forward(const Problem& problem, const Selection& selection, const FwdArgs& args, cudaStream_t stream) {
  const Kernel& kernel = *selection.main;
  const ForwardWorkspace workspace = forward_workspace(problem, selection, args.workspace);
  const SequencePlan& plan = workspace.sequences;
  KernelParams params = common_params(problem, args, plan);
  params.tile_rows = kernel.block_q / selection.tile_heads;
  plan_tiles(problem, args, plan, false, params.tile_rows, stream);
  UnseenRows unseen = unseen_queries(problem, args.out, problem.head_dim_v, plan);
  unseen.lse = args.lse;
  unseen.sinks = args.sinks;
  check(clear_unseen(unseen, stream), "clearing rows");

  if (!has_work(problem)) return;
  const int64_t hidden = hidden_rows(problem);
  params.lse = args.lse + hidden;
  params.head_tiles = selection.head_tiles;
  params.splits = selection.splits;
  if (selection.splits > 1) {
    params.out_parts = workspace.out_parts + hidden * problem.head_dim_v;
    params.lse_parts = workspace.lse_parts + hidden;
    params.has_sinks = false;  // combine_parts adds them
  }
  params.section = static_cast<int>(selection.section);
  params.together_keys = static_cast<int>(std::min<int64_t>(selection.together_keys, std::numeric_limits<int>::max()));
  const int64_t tiles = tile_count(problem, params.seqlen_q, params.tile_rows) * problem.batch * selection.head_tiles;
  params.blocks = static_cast<int>(std::min<int64_t>(problem.num_sms, tiles * selection.splits));
  run(kernel, params, stream);
  if (selection.splits > 1) {
    const Parts parts{workspace.out_parts, workspace.lse_parts, selection.splits, problem.head_dim_v, problem.dtype};
    check(combine_parts(unseen, parts, stream), "adding the parts of out");
  }
}

void launch_backward(const Problem& problem, const Selection& selection, const BwdArgs& args, cudaStream_t stream) {
  const Kernel& main = *selection.main;
  const BackwardWorkspace workspace = backward_workspace(problem, selection, args.workspace);
  const SequencePlan& plan = workspace.sequences;
  KernelParams params = common_params(problem, args, plan);
  plan_tiles(problem, args, plan, true, main.block_kv, stream);
  check(clear_unseen(unseen_queries(problem, args.dq, problem.head_dim, plan), stream), "clearing dq");
  const bool any = has_work(problem);
  check(clear_unseen(unseen_keys(problem, args, plan, !any), stream), "clearing dk and dv");

  const int64_t hidden = hidden_rows(problem);
  const auto place = [&](const View& view, int64_t skipped) { return problem.packed ? ragged(view) : skip_rows(view, skipped); };
  params.dout = place(args.dout, hidden);
  params.dk = place(args.dk, 0);
  params.dv = place(args.dv, 0);
  params.lse = const_cast<float*>(args.lse) + hidden;
  params.dlse = args.dlse ? args.dlse + hidden : params.lse;
  params.has_dlse = args.dlse != nullptr;
  params.q_tile_rows = main.block_q;
  params.seqlen_q_padded = static_cast<int>(workspace.q_tiles * main.block_q);
  params.kv_tiles = static_cast<int>(workspace.kv_tiles);
  params.lse_log2 = workspace.lse_log2;
  params.delta = workspace.delta;
  params.dq_accum = workspace.dq_accum;
  params.dq_state = workspace.dq_state;
  params.tickets = workspace.tickets;
  params.splits = selection.splits;
  params.order = selection.order;
  params.deterministic = problem.deterministic;
  params.heads_per_split = params.heads / params.kv_heads / selection.splits;
  params.kv_heads_split = params.kv_heads * selection.splits;
  params.parts = selection.parts;
  params.part_rows = params.batch * params.kv_heads * selection.parts;
  params.dk_parts = workspace.dk_parts;
  params.dv_parts = workspace.dv_parts;

  if (any) {
    if (workspace.zeroed_bytes > 0) {
      check(cudaMemsetAsync(args.workspace, 0, workspace.zeroed_bytes, stream), "clearing what blocks add to");
    }
    run(*selection.prepare, params, stream);
    const int64_t items = workspace.kv_tiles * params.kv_heads_split * params.batch;
    params.blocks = static_cast<int>(std::min<int64_t>(problem.num_sms, items));
    run(main, params, stream);
  } else {
    params.seqlen_q_padded = 0;  // for dsinks: no row sees a key
  }
  if (args.dsinks) add_sinks(problem, args, params, plan, stream);
  if (!any) return;

  const auto finish = [&](const Kernel& kernel, const View& grad, bool of_keys, const float* accum, float scale, int heads,
                          int head_dim, int64_t tiles, int parts) {
    params.grad = grad;
    params.grad_accum = accum;
    params.grad_scale = scale;
    params.grad_outer = of_keys ? params.kv_outer : params.q_outer;
    params.grad_inner = of_keys ? params.kv_inner : params.q_inner;
    params.grad_seqlen = of_keys ? params.seqlen_k : params.seqlen_q;
    params.grad_begins = of_keys ? params.begins_k : params.begins_q;
    params.grad_ends = of_keys ? params.ends_k : params.ends_q;
    params.grad_heads = heads;
    params.grad_head_rows = params.batch * heads;
    params.grad_head_dim = head_dim;
    params.grad_tiles = static_cast<int>(tiles);
    params.grad_parts = parts;
    run(kernel, params, stream);
  };
  finish(*selection.finish_dq, place(args.dq, hidden), false, workspace.dq_accum, args.scale_dq, params.heads, params.head_dim,
         workspace.q_tiles, 1);
  if (selection.splits > 1) {
    finish(*selection.finish_dk, params.dk, true, workspace.dk_parts, args.scale, params.kv_heads, params.head_dim,
           workspace.kv_tiles, selection.parts);
    finish(*selection.finish_dv, params.dv, true, workspace.dv_parts, 1, params.kv_heads, params.head_dim_v, workspace.kv_tiles,
           selection.parts);
  }
}

}  // namespace gqa_attn
