#include "launch.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "driver.h"
#include "kernel_params.h"
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

// Zeros in the leading `rows` rows of each batch element of a contiguous tensor.
void clear_rows(const View& view, int64_t batch, int64_t rows, cudaStream_t stream) {
  const int64_t pitch = view.batch_stride * kElementBytes, width = rows * view.seq_stride * kElementBytes;
  if (batch == 0 || width == 0) return;
  if (width == pitch) {
    check(cudaMemsetAsync(view.data, 0, batch * pitch, stream), "clearing rows");
  } else if (pitch <= std::numeric_limits<int>::max()) {  // the largest pitch of CUDA's two-dimensional copies
    check(cudaMemset2DAsync(view.data, pitch, 0, width, batch, stream), "clearing rows");
  } else {
    for (int64_t b = 0; b < batch; ++b)
      check(cudaMemsetAsync(static_cast<char*>(view.data) + b * pitch, 0, width, stream), "clearing rows");
  }
}

// Sizes and scales, for the query rows that see a key.
KernelParams common_params(const Problem& p, float scale) {
  KernelParams params;
  params.batch = static_cast<int>(p.batch);
  params.heads = static_cast<int>(p.heads);
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.seqlen_q = static_cast<int>(p.seqlen_q - hidden_rows(p));
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.scale = scale;
  // Never 0: -inf of a masked score times 0 would be NaN. 1e-30 leaves every finite score at 0.
  params.scale_log2 = std::fmax(scale, 1e-30f) * kLog2e;
  params.lse_row_stride = p.seqlen_q;
  return params;
}

}  // namespace

void launch_forward(const Problem& problem, const Selection& selection, const FwdArgs& args, cudaStream_t stream) {
  const int64_t hidden = hidden_rows(problem);
  clear_rows(args.out, problem.batch, hidden, stream);
  check(fill_rows(args.lse, problem.seqlen_q, problem.batch * problem.heads, hidden, -std::numeric_limits<float>::infinity(),
                  stream),
        "filling lse");
  KernelParams params = common_params(problem, args.scale);
  if (problem.batch * problem.heads * params.seqlen_q == 0) return;

  params.q = skip_rows(args.q, hidden);
  params.k = args.k;
  params.v = args.v;
  params.out = skip_rows(args.out, hidden);
  params.lse = args.lse + hidden;
  params.section = selection.section;
  const int64_t tiles = (params.seqlen_q + selection.main->block_q - 1) / selection.main->block_q;
  params.blocks = static_cast<int>(std::min<int64_t>(problem.num_sms, tiles * problem.batch * problem.heads));
  run(*selection.main, params, stream);
}

void launch_backward(const Problem& problem, const Selection& selection, const BwdArgs& args, cudaStream_t stream) {
  const int64_t hidden = hidden_rows(problem);
  clear_rows(args.dq, problem.batch, hidden, stream);
  KernelParams params = common_params(problem, args.scale);
  if (problem.batch * problem.heads * params.seqlen_q == 0) {
    clear_rows(args.dk, problem.batch, problem.seqlen_k, stream);
    clear_rows(args.dv, problem.batch, problem.seqlen_k, stream);
    return;
  }

  const BackwardWorkspace workspace = backward_workspace(problem, selection, args.workspace);
  params.q = skip_rows(args.q, hidden);
  params.k = args.k;
  params.v = args.v;
  params.out = skip_rows(args.out, hidden);
  params.dout = skip_rows(args.dout, hidden);
  params.dk = args.dk;
  params.dv = args.dv;
  params.lse = const_cast<float*>(args.lse) + hidden;
  params.dlse = args.dlse ? args.dlse + hidden : params.lse;
  params.has_dlse = args.dlse != nullptr;
  params.seqlen_q_padded = static_cast<int>(workspace.q_tiles * selection.main->block_q);
  params.kv_tiles = static_cast<int>(workspace.kv_tiles);
  params.lse_log2 = workspace.lse_log2;
  params.delta = workspace.delta;
  params.dq_accum = workspace.dq_accum;
  params.dq_state = workspace.dq_state;
  params.splits = selection.splits;
  params.heads_per_split = params.heads / params.kv_heads / selection.splits;
  params.kv_heads_split = params.kv_heads * selection.splits;
  params.dk_parts = workspace.dk_parts;
  params.dv_parts = workspace.dv_parts;

  if (selection.main->zeroed_dq) check(cudaMemsetAsync(workspace.dq_accum, 0, workspace.dq_accum_bytes, stream), "clearing dq");
  run(*selection.prepare, params, stream);
  run(*selection.main, params, stream);

  const auto finish = [&](const Kernel& kernel, const View& grad, const float* accum, float scale, int seqlen, int heads,
                          int head_dim, int64_t tiles, int parts) {
    params.grad = grad;
    params.grad_accum = accum;
    params.grad_scale = scale;
    params.grad_batch = params.batch;
    params.grad_seqlen = seqlen;
    params.grad_heads = heads;
    params.grad_head_dim = head_dim;
    params.grad_tiles = static_cast<int>(tiles);
    params.grad_parts = parts;
    run(kernel, params, stream);
  };
  finish(*selection.finish_dq, skip_rows(args.dq, hidden), workspace.dq_accum, args.scale_dq, params.seqlen_q, params.heads,
         params.head_dim, workspace.q_tiles, 1);
  if (selection.splits > 1) {
    finish(*selection.finish_dk, args.dk, workspace.dk_parts, args.scale, params.seqlen_k, params.kv_heads, params.head_dim,
           workspace.kv_tiles, selection.splits);
    finish(*selection.finish_dv, args.dv, workspace.dv_parts, 1, params.seqlen_k, params.kv_heads, params.head_dim_v,
           workspace.kv_tiles, selection.splits);
  }
}

}  // namespace gqa_attn
