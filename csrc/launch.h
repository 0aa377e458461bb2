// Selection -> kernels on a stream: tensor maps, grids, the order of the backward's phases.
#pragma once

#include <cuda_runtime_api.h>

#include "select.h"

namespace gqa_attn {

// Both enqueue on `stream` only, write every element of their outputs and throw std::runtime_error where CUDA refuses.
void launch_forward(const Problem& problem, const Selection& selection, const FwdArgs& args, cudaStream_t stream);
void launch_backward(const Problem& problem, const Selection& selection, const BwdArgs& args, cudaStream_t stream);

}  // namespace gqa_attn
