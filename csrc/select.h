// Problem -> kernels: a pure function over printable structs.
#pragma once

#include <string>

#include "kernels.h"

namespace gqa_attn {

struct Selection {
  const Kernel* main = nullptr;
  const Kernel* prepare = nullptr;  // backward only, as the three below
  const Kernel* finish_dq = nullptr;
  const Kernel* finish_dk = nullptr;  // where several blocks share a kv tile
  const Kernel* finish_dv = nullptr;
  int section = 1;  // forward: head rows walked together
  int splits = 1;   // backward: blocks that share a kv tile, each with its part of the query heads
  int64_t workspace_bytes = 0;
  std::string reason;  // one line, for explain
};

// Throws std::runtime_error with required, supported and missing where this build has no kernel.
Selection select_forward(const Problem& problem);
Selection select_backward(const Problem& problem);

}  // namespace gqa_attn
