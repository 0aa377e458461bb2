#include "driver.h"

#include <cudaTypedefs.h>

#include <bit>

namespace gqa_attn {

namespace {

// Through the runtime, so that the library needs no link to libcuda, which a machine without a driver lacks.
template <typename Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(entry) : nullptr;
}

}  // namespace

cudaError_t encode(CUtensorMap& map, const TensorMap& tensor) {
  static const auto encode_tiled = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  if (!encode_tiled) return cudaErrorNotSupported;
  constexpr cuuint32_t unit[kMaxTensorRank] = {1, 1, 1, 1};
  const CUresult result =
      encode_tiled(&map, tensor.element, tensor.rank, const_cast<void*>(tensor.data), tensor.dims, tensor.strides, tensor.box,
                   unit, CU_TENSOR_MAP_INTERLEAVE_NONE, tensor.swizzle, tensor.l2_promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t fill_rows(float* data, int64_t pitch, int64_t rows, int64_t width, float value, cudaStream_t stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  static const auto fill = driver_function<PFN_cuMemsetD2D32Async_v3020>("cuMemsetD2D32Async");
  if (!fill) return cudaErrorNotSupported;
  const CUresult result =
      fill(reinterpret_cast<CUdeviceptr>(data), pitch * sizeof(float), std::bit_cast<unsigned>(value), width, rows, stream);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace gqa_attn
