#include "driver.h"

#include <cudaTypedefs.h>

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

cudaError_t make_context_current() {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaSetDevice(device);
}

}  // namespace

cudaError_t encode(CUtensorMap& map, const TensorMap& tensor) {
  static const auto encode_tiled = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  if (!encode_tiled) return cudaErrorNotSupported;
  constexpr cuuint32_t unit[kMaxTensorRank] = {1, 1, 1, 1};
  const auto try_encode = [&] {
    return encode_tiled(&map, tensor.element, tensor.rank, const_cast<void*>(tensor.data), tensor.dims, tensor.strides,
                        tensor.box, unit, CU_TENSOR_MAP_INTERLEAVE_NONE, tensor.swizzle, tensor.l2_promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = try_encode();
  if (result != CUDA_SUCCESS) {  // a thread that has not called the runtime yet, as one of autograd's may be, has no context
    if (const cudaError_t error = make_context_current()) return error;
    result = try_encode();
  }
  return static_cast<cudaError_t>(result);  // the runtime has the driver's numbers
}

}  // namespace gqa_attn
