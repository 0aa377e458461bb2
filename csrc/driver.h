// The driver function that the runtime does not offer.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace gqa_attn {

constexpr int kMaxTensorRank = 4;

struct TensorMap {
  CUtensorMapDataType element;
  int rank;
  const void* data;
  cuuint64_t dims[kMaxTensorRank];         // innermost first, elements
  cuuint64_t strides[kMaxTensorRank - 1];  // of dims 1, 2, ..., bytes
  cuuint32_t box[kMaxTensorRank];
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
};

// Encodes on the host; reads beyond dims give zeros, writes there are dropped.
cudaError_t encode(CUtensorMap& map, const TensorMap& tensor);

}  // namespace gqa_attn
