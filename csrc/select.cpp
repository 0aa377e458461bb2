#include "select.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "workspace.h"

namespace gqa_attn {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string dims(int64_t head_dim, int64_t head_dim_v) { return std::to_string(head_dim) + "/" + std::to_string(head_dim_v); }

[[noreturn]] void refuse(Phase phase, const Problem& problem) {
  std::ostringstream text;
  text << "gqa_attn has no " << name_of(phase) << " kernel for this call. Required: " << name_of(problem.dtype) << ", head dims "
       << dims(problem.head_dim, problem.head_dim_v) << (problem.causal ? ", causal" : ", full") << ", sm_" << problem.arch
       << ". Supported:";
  bool arch = false, fits = false, any = false;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.phase != phase) continue;
    any = true;
    const bool same_arch = kernel.arch == problem.arch;
    arch |= same_arch;
    fits |= same_arch && kernel.head_dim >= problem.head_dim && kernel.head_dim_v >= problem.head_dim_v;
    text << " " << kernel.name;
  }
  if (!any) text << " none";
  text << ". Missing: "
       << (!any    ? "every kernel of this phase (built with GQA_ATTN_KERNELS?)"
           : !arch ? "kernels for this GPU's architecture"
           : !fits ? "these head dims"
                   : "this dtype or mask");
  throw std::runtime_error(text.str());
}

// The kernel that serves the problem with the least padding of head dims.
const Kernel* find(Phase phase, const Problem& problem) {
  const Kernel* best = nullptr;
  const bool any_mask = phase == Phase::backward_prepare;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.phase != phase || kernel.arch != problem.arch || kernel.dtype != problem.dtype) continue;
    if (!any_mask && kernel.causal != problem.causal) continue;
    if (kernel.head_dim && kernel.head_dim < problem.head_dim) continue;
    if (kernel.head_dim_v < problem.head_dim_v) continue;
    if (!best || kernel.head_dim + kernel.head_dim_v < best->head_dim + best->head_dim_v) best = &kernel;
  }
  if (!best) refuse(phase, problem);
  return best;
}

// The kernel that reads tiles as another one left them.
const Kernel* find_finish(const Problem& problem, int rows, int head_dim) {
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.phase == Phase::backward_finish && kernel.arch == problem.arch && kernel.dtype == problem.dtype &&
        kernel.block_q == rows && kernel.head_dim == head_dim) {
      return &kernel;
    }
  }
  refuse(Phase::backward_finish, problem);
}

constexpr int64_t kL2Bytes = 64 << 20;  // of K and V that still hit in an H100's or H200's 50 to 60 MB, with some luck

// Head rows that the forward walks together. All of them balances causal tiles best; where their K and V do not stay in L2,
// one group at a time reads K and V once.
int64_t forward_section(const Problem& p) {
  const int64_t kv_bytes = p.batch * p.kv_heads * p.seqlen_k * (p.head_dim + p.head_dim_v) * 2;
  const bool together = p.causal && kv_bytes <= kL2Bytes;
  return together ? p.batch * p.heads : p.heads / p.kv_heads;
}

// Blocks that share a kv tile. The fewest that fill the GPU's last round of blocks to 90 %, and that, when causal and dQ as a
// whole does not stay in L2, keep the float32 dQ tiles of the heads a block walks there (512: heads times head dim;
// docs/kernels.md).
int backward_splits(const Problem& p, const Kernel& kernel) {
  const int64_t group = p.heads / p.kv_heads;
  const int64_t tiles = ceil_div(p.seqlen_k, kernel.block_kv);
  const int64_t blocks = (p.causal ? ceil_div(tiles, 2) : tiles) * p.kv_heads * p.batch;
  const bool spread = p.causal && p.batch * p.heads * p.seqlen_q * p.head_dim * 4 > kL2Bytes / 2;
  for (int64_t splits = 1; splits < group; ++splits) {
    if (group % splits) continue;
    const int64_t grid = blocks * splits, rounds = ceil_div(grid, p.num_sms);
    if (grid * 10 >= rounds * p.num_sms * 9 && (!spread || group / splits * p.head_dim <= 512)) return static_cast<int>(splits);
  }
  return static_cast<int>(group);
}

}  // namespace

Selection select_forward(const Problem& problem) {
  Selection selection;
  selection.main = find(Phase::forward, problem);
  selection.section = static_cast<int>(std::max<int64_t>(1, forward_section(problem)));
  std::ostringstream reason;
  reason << "least padding of head dims " << dims(problem.head_dim, problem.head_dim_v) << "; " << selection.section << " of "
         << problem.batch * problem.heads << " head rows walked together";
  selection.reason = reason.str();
  return selection;
}

Selection select_backward(const Problem& problem) {
  Selection selection;
  selection.main = find(Phase::backward, problem);
  selection.prepare = find(Phase::backward_prepare, problem);
  const Kernel& main = *selection.main;
  selection.finish_dq = find_finish(problem, main.block_q, main.head_dim);
  selection.splits = backward_splits(problem, main);
  if (selection.splits > 1) {
    selection.finish_dk = find_finish(problem, main.block_kv, main.head_dim);
    selection.finish_dv = find_finish(problem, main.block_kv, main.head_dim_v);
  }
  selection.workspace_bytes = backward_workspace(problem, selection, nullptr).bytes;
  std::ostringstream reason;
  reason << "least padding of head dims " << dims(problem.head_dim, problem.head_dim_v) << "; " << selection.splits
         << (selection.splits > 1 ? " blocks share a kv tile, to fill the GPU and keep dQ in L2"
                                  : " block owns a kv tile: they fill the GPU");
  selection.reason = reason.str();
  return selection;
}

}  // namespace gqa_attn
