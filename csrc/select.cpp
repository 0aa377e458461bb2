#include "select.h"

#include <algorithm>
#include <array>
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
       << dims(problem.head_dim, problem.head_dim_v) << ", " << name_of(mask_of(problem)) << " mask, "
       << (problem.softcap ? "softcap, " : "") << "sm_" << problem.arch << ". Supported:";
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
                   : "this dtype, mask or softcap");
  throw std::runtime_error(text.str());
}

// The kernel that serves the problem with the least padding of head dims; of two of the same, the one made for the mask. Null
// where this build has none.
const Kernel* find(Phase phase, const Problem& problem, Mask mask, bool softcap) {
  const Kernel* best = nullptr;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.phase != phase || kernel.arch != problem.arch || kernel.dtype != problem.dtype) continue;
    if (kernel.mask != mask && kernel.mask != Mask::general) continue;
    if (kernel.softcap != softcap) continue;
    if (kernel.head_dim && kernel.head_dim < problem.head_dim) continue;
    if (kernel.head_dim_v < problem.head_dim_v) continue;
    const auto cost = [&](const Kernel& k) { return 2 * (k.head_dim + k.head_dim_v) + (k.mask != mask); };
    if (!best || cost(kernel) < cost(*best)) best = &kernel;
  }
  return best;
}

const Kernel* require(Phase phase, const Problem& problem, Mask mask, bool softcap) {
  const Kernel* kernel = find(phase, problem, mask, softcap);
  if (!kernel) refuse(phase, problem);
  return kernel;
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

// Keys of a batch element, or sequence, whose K and V stay in L2 for all kv heads.
int64_t keys_in_l2(const Problem& p) { return kL2Bytes / std::max<int64_t>(1, p.kv_heads * (p.head_dim + p.head_dim_v) * 2); }

// Head tiles that the forward walks together. All of them balances tiles of unequal work best; where their K and V do not stay in
// L2, one group at a time reads K and V once.
int64_t forward_section(const Problem& p, int64_t head_tiles) {
  const bool together = mask_of(p) != Mask::full && p.batch * p.seqlen_k <= keys_in_l2(p);
  return std::max<int64_t>(1, together ? p.batch * head_tiles : head_tiles / p.kv_heads);
}

// How many sequences there are, and the rows and keys of each: of packed ones, all that the host knows is an average.
struct Lengths {
  explicit Lengths(const Problem& p)
      : sequences(std::max<int64_t>(1, p.packed ? p.sequences : p.batch)),
        rows(p.packed ? ceil_div(p.seqlen_q, sequences) : p.seqlen_q - hidden_rows(p)),
        keys(p.packed ? ceil_div(p.seqlen_k, sequences) : p.seqlen_k) {}

  int64_t sequences, rows, keys;
};

// Tiles of a sequence and kv head.
int64_t group_tiles(const Problem& p, const Kernel& kernel, int tile_heads) {
  const int64_t group = std::max<int64_t>(1, p.heads / p.kv_heads);
  return ceil_div(Lengths(p).rows, kernel.block_q / tile_heads) * ceil_div(group, tile_heads);
}

// Query heads in a tile: the fewest that make the fewest tiles.
int forward_tile_heads(const Problem& p, const Kernel& kernel) {
  int best = 1;
  for (int heads = 2; heads <= kernel.block_q && heads < 2 * p.heads / p.kv_heads; ++heads) {
    if (kernel.block_q % heads == 0 && group_tiles(p, kernel, heads) < group_tiles(p, kernel, best)) best = heads;
  }
  return best;
}

// Blocks that share the keys of a query tile, where the tiles alone do not fill the GPU: the number with the shortest schedule,
// in steps of a kv tile. A block takes two steps more to start and end, adding the parts about four.
int forward_splits(const Problem& p, const Kernel& kernel, int tile_heads) {
  const Lengths lengths(p);
  const int64_t tiles = lengths.sequences * p.kv_heads * group_tiles(p, kernel, tile_heads);
  int64_t keys = lengths.keys;
  if (p.window_left >= 0) keys = std::min(keys, p.window_left + kernel.block_q + std::max<int64_t>(p.window_right, 0));
  const int64_t steps = ceil_div(keys, kernel.block_kv);
  if (tiles == 0 || tiles >= p.num_sms) return 1;
  const auto time = [&](int64_t splits) {
    return ceil_div(tiles * splits, p.num_sms) * (ceil_div(steps, splits) + 2) + (splits > 1 ? 4 : 0);
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= std::min<int64_t>(steps / 4, kMostParts); ++splits) {
    if (time(splits) < time(best)) best = splits;
  }
  return static_cast<int>(best);
}

bool work_falls(const Problem& p) { return p.window_right >= 0 && p.window_left < 0; }

// Blocks that share a kv tile. The fewest that keep the GPU busy to 90 %, and that, when causal and dQ as a whole does not stay
// in L2, keep the float32 dQ tiles of the heads a block walks there (512: heads times head dim; docs/kernels.md).
int backward_splits(const Problem& p, const Kernel& kernel) {
  const int64_t group = std::max<int64_t>(1, p.heads / p.kv_heads);
  const Lengths lengths(p);
  const int64_t tiles = ceil_div(lengths.keys, kernel.block_kv), rows = lengths.sequences * p.kv_heads;
  const bool falling = work_falls(p);
  const bool spread = falling && p.batch * p.heads * p.seqlen_q * p.head_dim * 4 > kL2Bytes / 2;
  const auto keeps_busy = [&](int64_t splits) {
    if (!falling) {
      const int64_t items = tiles * rows * splits;
      return items * 10 >= ceil_div(items, p.num_sms) * p.num_sms * 9;
    }
    // A head's items take tiles, ..., 2, 1 steps. Given out longest first, they end within a short one of each other.
    const double share = 0.5 * static_cast<double>(tiles * (tiles + 1)) * static_cast<double>(rows * splits) / p.num_sms;
    return share >= 0.9 * std::max(share + 1, static_cast<double>(tiles));
  };
  for (int64_t splits = 1; splits < group; ++splits) {
    if (group % splits == 0 && keeps_busy(splits) && (!spread || group / splits * p.head_dim <= 512)) {
      return static_cast<int>(splits);
    }
  }
  return static_cast<int>(group);
}

// Long tiles first balances best; where blocks add in turn, they wait least for each other if long ones come last, which takes
// enough items behind them to even out, and blocks that walk one head each (docs/kernels.md).
ItemOrder item_order(const Problem& p, const Kernel& kernel, int splits) {
  if (!work_falls(p)) return kHeadByHead;
  if (!p.deterministic) return kLongFirst;
  const int64_t items = p.batch * p.kv_heads * splits * tile_count(p, p.seqlen_k, kernel.block_kv);
  return items >= 7 * p.num_sms && p.heads == p.kv_heads * splits ? kLongLast : kLongHalfDown;
}

}  // namespace

Problem with_padding(Problem problem, Phase phase) {
  if (!problem.packed) return problem;
  const Kernel& kernel = *require(phase, problem, mask_of(problem), problem.softcap);
  if (problem.head_dim <= kernel.head_dim - kernel.box_columns) problem.head_dim = kernel.head_dim;
  if (problem.head_dim_v <= kernel.head_dim_v - kernel.box_columns_v) problem.head_dim_v = kernel.head_dim_v;
  return problem;
}

Selection select_forward(const Problem& problem) {
  Selection selection;
  const Mask mask = mask_of(problem);
  selection.main = require(Phase::forward, problem, mask, problem.softcap);
  // The general kernel alone knows tiles of several heads and splits; it is up to a tenth slower than one made for the mask.
  if (const Kernel* general = find(Phase::forward, problem, Mask::general, problem.softcap)) {
    const int tile_heads = forward_tile_heads(problem, *general), splits = forward_splits(problem, *general, tile_heads);
    if (general == selection.main || splits > 1 ||
        group_tiles(problem, *general, tile_heads) * 5 <= group_tiles(problem, *selection.main, 1) * 4) {
      selection.main = general;
      selection.tile_heads = tile_heads;
      selection.splits = splits;
    }
  }
  selection.head_tiles = static_cast<int>(problem.kv_heads * ceil_div(problem.heads / problem.kv_heads, selection.tile_heads));
  selection.section = forward_section(problem, selection.head_tiles);
  selection.together_keys = keys_in_l2(problem);
  selection.workspace_bytes = forward_workspace(problem, selection, nullptr).bytes;
  return selection;
}

Selection select_backward(const Problem& problem) {
  Selection selection;
  selection.main = require(Phase::backward, problem, Mask::general, problem.softcap);
  selection.prepare = require(Phase::backward_prepare, problem, Mask::general, false);
  const Kernel& main = *selection.main;
  selection.finish_dq = find_finish(problem, main.block_q, main.head_dim);
  selection.splits = backward_splits(problem, main);
  selection.order = item_order(problem, main, selection.splits);
  if (selection.splits > 1) {
    selection.parts = problem.deterministic ? selection.splits : 1;
    selection.finish_dk = find_finish(problem, main.block_kv, main.head_dim);
    selection.finish_dv = find_finish(problem, main.block_kv, main.head_dim_v);
  }
  selection.workspace_bytes = backward_workspace(problem, selection, nullptr).bytes;
  return selection;
}

std::string reason(const Problem& problem, const Selection& selection) {
  std::ostringstream text;
  if (selection.main->phase == Phase::forward) {
    text << name_of(mask_of(problem)) << " mask, least padding of head dims " << dims(problem.head_dim, problem.head_dim_v);
    if (selection.tile_heads > 1) text << "; " << selection.tile_heads << " query heads share a tile: few rows each";
    if (selection.splits > 1) text << "; " << selection.splits << " blocks share the keys of a tile, to fill the GPU";
    if (problem.packed) {
      text << "; longest sequences first, their heads together up to " << selection.together_keys << " keys";
    } else {
      text << "; " << selection.section << " of " << problem.batch * selection.head_tiles << " head rows walked together";
    }
  } else {
    text << "least padding of head dims " << dims(problem.head_dim, problem.head_dim_v) << "; " << selection.splits
         << (selection.splits > 1 ? " blocks share a kv tile, to fill the GPU and keep dQ in L2"
                                  : " block owns a kv tile: they fill the GPU")
         << std::array{"", "; long kv tiles first", "; the long half of the kv tiles first",
                       "; long kv tiles last"}[selection.order];
    if (problem.deterministic) text << "; dQ added in the order of tickets";
  }
  return text.str();
}

}  // namespace gqa_attn
