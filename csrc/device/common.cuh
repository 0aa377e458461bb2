// Device functions that all kernels share.
#pragma once

#include <cstdint>

namespace gqa_attn::device {

// Of sizes and indices, which are not negative: the signed division of C++ costs a fix-up of the sign each time.
__device__ __forceinline__ int divide(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

__device__ __forceinline__ int remainder(int a, int b) { return a - divide(a, b) * b; }

// Absolute error 1e-7, and 1e-6 relative near 0, where 1 - 2 / (e + 1) would cancel.
__device__ __forceinline__ float accurate_tanh(float x) {
  const float square = x * x;
  const float small = x * (1.f + square * (-1.f / 3 + square * (2.f / 15)));
  const float large = 1.f - __fdividef(2.f, exp2f(x * 2.8853900817779268f) + 1.f);
  return square < 0.01f ? small : large;
}

// Scores become tanh(score * cap_scale), to the rounding of the capped score: tanh.approx would err by 5e-4 of the cap.
template <int count>
__device__ __forceinline__ void cap_scores(float* scores, float cap_scale) {
#pragma unroll
  for (int i = 0; i < count; ++i) scores[i] = accurate_tanh(scores[i] * cap_scale);
}

__device__ __forceinline__ int ceil_divide(int a, int b) { return divide(a + b - 1, b); }

}  // namespace gqa_attn::device
