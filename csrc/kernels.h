// The kernel table: one row per compiled kernel, written by codegen from codegen/table.py.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "problem.h"

namespace gqa_attn {

enum class Phase : int { forward, backward_prepare, backward, backward_finish };

constexpr const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::backward_prepare:
      return "backward_prepare";
    case Phase::backward:
      return "backward";
    default:
      return "backward_finish";
  }
}

struct KernelParams;  // kernel_params.h

struct Kernel {
  const char* name;
  Phase phase;
  int arch;
  DType dtype;
  Mask mask;
  int head_dim;  // largest head dim it serves; 0 where it does not matter
  int head_dim_v;
  int block_q;    // rows of a query tile
  int block_kv;   // rows of a kv tile
  int stages_q;   // query (and dout) tiles in flight
  int stages_kv;  // kv tiles in flight
  int threads;
  int registers;      // per compute thread
  int smem_bytes;     // dynamic shared memory of a block
  bool softcap;       // serves problems with one, and no others
  int box_columns;    // of the narrowest TMA box of rows of head_dim
  int box_columns_v;  // and of head_dim_v
  bool zeroed_dq;     // backward: adds to a zeroed dQ workspace instead of storing the first tile
  cudaError_t (*launch)(const KernelParams&, cudaStream_t);
};

// Every kernel of this build, in the table's order.
const std::vector<Kernel>& kernel_table();

}  // namespace gqa_attn
