// What generated launch functions call, besides the tensor maps of driver.h.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "driver.h"
#include "kernel_params.h"

namespace gqa_attn {

// Raises the kernel's limit of dynamic shared memory, once per device and kernel.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes, std::atomic<uint64_t>& devices_done) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (devices_done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
  devices_done.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), unsigned grid, unsigned threads, unsigned smem_bytes, cudaStream_t stream,
                   Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace gqa_attn
