// Device functions that all kernels share.
#pragma once

#include <cstdint>

namespace gqa_attn::device {

// Of sizes and indices, which are not negative: the signed division of C++ costs a fix-up of the sign each time.
__device__ __forceinline__ int divide(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

}  // namespace gqa_attn::device
