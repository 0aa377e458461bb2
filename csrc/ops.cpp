// torch.ops.gqa_attn: schemas and CUDA kernels, on libtorch's stable ABI. The only file that knows torch.
//
// A call is checked (generated/rules.h), its tensors become Views that the kernels take, selection chooses kernels,
// launch enqueues them. Errors are std::runtime_error with our text alone: torch's own checks would add files and lines.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "generated/rules.h"
#include "launch.h"

// Lives in libtorch_cuda only: weak, so that the library also loads where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace gqa_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t row_alignment = 16;  // bytes: TMA's, of addresses and strides
constexpr int64_t element_bytes = 2;
constexpr int64_t row_elements = kRowElements;
static_assert(row_elements * element_bytes == row_alignment);

// ---- facts for the rules ----

std::string_view name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return torch::headeronly::toString(dtype);
  }
}

std::string_view type_of(const torch::stable::Device& device) {
  return device.is_cuda() ? "cuda" : device.is_cpu() ? "cpu" : "another device";
}

rules::TensorFacts facts_of(const Tensor& tensor) {
  rules::TensorFacts facts;
  if (!tensor.defined()) return facts;  // None: schemas let it pass
  auto sizes = tensor.sizes();
  auto device = tensor.device();
  facts.given = true;
  facts.layout = "strided";  // the dispatcher sends no other to a CUDA kernel
  facts.rank = static_cast<int64_t>(sizes.size());
  facts.shape = {sizes.data(), facts.rank};
  facts.dtype = name_of(tensor.scalar_type());
  facts.device = {type_of(device), device.index()};
  int64_t* named[] = {&facts.head_dim, &facts.heads, &facts.seqlen, &facts.batch};
  for (int64_t i = 0; i < std::min<int64_t>(4, facts.rank); ++i) *named[i] = sizes[facts.rank - 1 - i];
  return facts;
}

rules::TensorFacts facts_of(const std::optional<Tensor>& tensor) { return tensor ? facts_of(*tensor) : rules::TensorFacts{}; }

// What fwd and bwd have in common.
struct Options {
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap;
  const std::optional<Tensor>&sinks, &cu_seqlens_q, &cu_seqlens_k;
};

rules::Facts facts_of(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  rules::Facts facts;
  facts.q = facts_of(q);
  facts.k = facts_of(k);
  facts.v = facts_of(v);
  facts.sinks = facts_of(options.sinks);
  facts.cu_seqlens_q = facts_of(options.cu_seqlens_q);
  facts.cu_seqlens_k = facts_of(options.cu_seqlens_k);
  facts.scale = options.scale.value_or(1.0);
  facts.causal = options.causal;
  facts.window_left = options.window_left;
  facts.window_right = options.window_right;
  facts.softcap = options.softcap;
  facts.varlen = options.cu_seqlens_q.has_value();
  facts.device_type = facts.q.device.type;
  return facts;
}

// ---- the device ----

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

struct DeviceLimits {
  int arch = 0;
  int num_sms = 0;
};

// Asked once per device; the device must be current.
const DeviceLimits& limits_of(int32_t device) {
  constexpr size_t max_devices = 64;
  static std::array<std::once_flag, max_devices> asked;
  static std::array<DeviceLimits, max_devices> limits;
  std::call_once(asked.at(device), [device] {
    int major = 0, minor = 0, num_sms = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    limits[device] = {major * 10 + minor, num_sms};
  });
  return limits[device];
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(device, &stream) != TORCH_SUCCESS) {
    throw std::runtime_error("torch has no current CUDA stream for device cuda:" + std::to_string(device));
  }
  return static_cast<cudaStream_t>(stream);
}

// ---- tensors ----

void check_torch(AOTITorchError error, const char* what) {
  if (error != TORCH_SUCCESS) throw std::runtime_error(std::string("torch failed to ") + what);
}

// Contiguous, uninitialised, on `device`.
template <size_t rank>
Tensor allocate(const std::array<int64_t, rank>& sizes, int32_t dtype, int64_t bytes_per_element, int32_t device) {
  std::array<int64_t, rank> strides;
  int64_t elements = 1;
  for (size_t i = rank; i-- > 0;) {
    strides[i] = elements;
    elements *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, sizes.data(), strides.data(), dtype, aoti_torch_device_type_cuda(), device, &handle) !=
      TORCH_SUCCESS) {
    throw std::runtime_error("could not allocate " + std::to_string(elements * bytes_per_element) + " bytes on cuda:" +
                             std::to_string(device));
  }
  return Tensor(handle);
}


Tensor head_dim_slice(Tensor tensor, int64_t begin, int64_t end) {
  return torch::stable::narrow(tensor, tensor.dim() - 1, begin, end - begin);
}

void copy(const Tensor& to, const Tensor& from) {
  check_torch(aoti_torch_copy_(to.get(), from.get(), /*non_blocking=*/1), "copy a tensor");
}

// The strides of a [B, S, H, D] tensor as kernels see them: those of dims with one index mean nothing and become plausible.
std::array<int64_t, 3> view_strides(const Tensor& tensor) {
  auto sizes = tensor.sizes();
  auto strides = tensor.strides();
  std::array<int64_t, 3> result;
  int64_t inner = padded_head_dim(sizes[3]);
  for (int i = 2; i >= 0; --i) {
    result[i] = sizes[i] > 1 ? strides[i] : inner;
    inner = result[i] * std::max<int64_t>(sizes[i], 1);
  }
  return result;
}

bool needs_copy(const Tensor& tensor) {
  if (tensor.size(3) % row_elements != 0 || tensor.stride(3) != 1) return true;
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % row_alignment != 0) return true;
  for (int64_t stride : view_strides(tensor)) {
    if (stride % row_elements != 0) return true;
  }
  return false;
}

View view_of(const Tensor& tensor) {
  auto strides = view_strides(tensor);
  return {tensor.data_ptr(), strides[0], strides[1], strides[2]};
}

// The 16-bit tensors of one call: inputs that TMA can read, outputs that it can write.
class Tensors {
 public:
  Tensors(ScalarType dtype, int32_t device)
      : dtype_(dtype == ScalarType::Half ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16()), device_(device) {}

  // `tensor` itself where kernels can read it, else a copy with its head dim padded by zeros.
  Tensor readable(const Tensor& tensor) const {
    if (!needs_copy(tensor)) return tensor;
    int64_t head_dim = tensor.size(3);
    Tensor result = make(tensor.size(0), tensor.size(1), tensor.size(2), padded_head_dim(head_dim));
    copy(head_dim_slice(result, 0, head_dim), tensor);
    if (result.size(3) > head_dim) {
      Tensor tail = head_dim_slice(result, head_dim, result.size(3));
      torch::stable::zero_(tail);
    }
    return result;
  }

  Tensor make(int64_t batch, int64_t seqlen, int64_t heads, int64_t head_dim) const {
    return allocate<4>({batch, seqlen, heads, head_dim}, dtype_, element_bytes, device_);
  }

  Tensor make_padded(const Tensor& like, int64_t head_dim) const {
    return make(like.size(0), like.size(1), like.size(2), padded_head_dim(head_dim));
  }

  // A tensor of make_padded without its padding.
  Tensor unpadded(const Tensor& tensor, int64_t head_dim) const {
    if (tensor.size(3) == head_dim) return tensor;
    Tensor result = make(tensor.size(0), tensor.size(1), tensor.size(2), head_dim);
    copy(result, head_dim_slice(tensor, 0, head_dim));
    return result;
  }

 private:
  int32_t dtype_;
  int32_t device_;
};

Tensor negated(const Tensor& tensor) {
  StableIValue stack[] = {torch::stable::detail::from(tensor)};
  check_torch(torch_call_dispatcher("aten::neg", "", stack, TORCH_ABI_VERSION), "negate q");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// float32 [B, Hq, Sq]
Tensor contiguous_rows(const Tensor& rows, int32_t device) {
  if (rows.is_contiguous()) return rows;
  Tensor result = allocate<3>({rows.size(0), rows.size(1), rows.size(2)}, aoti_torch_dtype_float32(), 4, device);
  copy(result, rows);
  return result;
}

// q, k and v as kernels take them. Kernels want scale >= 0 (the greatest score is the greatest product): a negative one
// moves its sign into q.
struct Inputs {
  Inputs(const Tensors& tensors, const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> given_scale)
      : signed_scale(given_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))))),
        q(tensors.readable(signed_scale < 0 ? negated(q) : q)),
        k(tensors.readable(k)),
        v(tensors.readable(v)) {}

  double signed_scale;
  Tensor q, k, v;
};

Problem problem_of(const Inputs& inputs, const Options& options, int32_t device) {
  const DeviceLimits& limits = limits_of(device);
  Problem problem;
  problem.dtype = inputs.q.scalar_type() == ScalarType::Half ? DType::float16 : DType::bfloat16;
  problem.causal = options.causal || options.window_right == 0;
  problem.batch = inputs.q.size(0);
  problem.seqlen_q = inputs.q.size(1);
  problem.seqlen_k = inputs.k.size(1);
  problem.heads = inputs.q.size(2);
  problem.kv_heads = inputs.k.size(2);
  problem.head_dim = inputs.q.size(3);
  problem.head_dim_v = inputs.v.size(3);
  // No rule for all devices: it would bound the symbolic sizes of torch.export.
  if (const char* refusal = too_large(problem)) throw std::runtime_error(refusal);
  problem.arch = limits.arch;
  problem.num_sms = limits.num_sms;
  return problem;
}

// ---- the ops ----

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale, bool causal,
                               int64_t window_left, int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                               const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k) {
  Options options{scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k};
  rules::check_forward(facts_of(q, k, v, options));

  int32_t device = q.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  Tensors tensors(q.scalar_type(), device);
  Inputs inputs(tensors, q, k, v, scale);
  Problem problem = problem_of(inputs, options, device);
  Selection selection = select_forward(problem);

  Tensor out = tensors.make_padded(q, v.size(3));
  Tensor lse = allocate<3>({q.size(0), q.size(2), q.size(1)}, aoti_torch_dtype_float32(), 4, device);
  FwdArgs args;
  args.q = view_of(inputs.q);
  args.k = view_of(inputs.k);
  args.v = view_of(inputs.v);
  args.out = view_of(out);
  args.lse = static_cast<float*>(lse.data_ptr());
  args.scale = static_cast<float>(std::abs(inputs.signed_scale));
  launch_forward(problem, selection, args, current_stream(device));
  return {tensors.unpadded(out, v.size(3)), lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const std::optional<Tensor>& dlse, std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, bool deterministic) {
  Options options{scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k};
  rules::Facts facts = facts_of(q, k, v, options);
  facts.dout = facts_of(dout);
  facts.out = facts_of(out);
  facts.lse = facts_of(lse);
  facts.dlse = facts_of(dlse);
  facts.deterministic = deterministic;
  rules::check_backward(facts);

  int32_t device = q.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  Tensors tensors(q.scalar_type(), device);
  Inputs inputs(tensors, q, k, v, scale);
  Tensor readable_out = tensors.readable(out);
  Tensor readable_dout = tensors.readable(dout);
  Tensor lse_rows = contiguous_rows(lse, device);
  std::optional<Tensor> dlse_rows;
  if (dlse) dlse_rows = contiguous_rows(*dlse, device);
  Problem problem = problem_of(inputs, options, device);
  Selection selection = select_backward(problem);

  Tensor dq = tensors.make_padded(q, q.size(3));
  Tensor dk = tensors.make_padded(k, k.size(3));
  Tensor dv = tensors.make_padded(v, v.size(3));
  Tensor workspace = allocate<1>({selection.workspace_bytes}, aoti_torch_dtype_uint8(), 1, device);
  Tensor dsinks = allocate<1>({0}, aoti_torch_dtype_float32(), 4, device);
  BwdArgs args;
  args.q = view_of(inputs.q);
  args.k = view_of(inputs.k);
  args.v = view_of(inputs.v);
  args.out = view_of(readable_out);
  args.dout = view_of(readable_dout);
  args.dq = view_of(dq);
  args.dk = view_of(dk);
  args.dv = view_of(dv);
  args.lse = static_cast<const float*>(lse_rows.data_ptr());
  args.dlse = dlse_rows ? static_cast<const float*>(dlse_rows->data_ptr()) : nullptr;
  args.scale = static_cast<float>(std::abs(inputs.signed_scale));
  args.scale_dq = static_cast<float>(inputs.signed_scale);
  args.workspace = workspace.data_ptr();
  launch_backward(problem, selection, args, current_stream(device));
  return {tensors.unpadded(dq, q.size(3)), tensors.unpadded(dk, k.size(3)), tensors.unpadded(dv, v.size(3)), dsinks};
}

}  // namespace
}  // namespace gqa_attn

STABLE_TORCH_LIBRARY(gqa_attn, library) {
  library.def(
      "fwd(Tensor q, Tensor k, Tensor v, float? scale=None, bool causal=False, int window_left=-1, int window_right=-1, "
      "float softcap=0.0, Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None) "
      "-> (Tensor out, Tensor lse)");
  library.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, float? scale=None, "
      "bool causal=False, int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? sinks=None, "
      "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, bool deterministic=False) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
}

STABLE_TORCH_LIBRARY_IMPL(gqa_attn, CUDA, library) {
  library.impl("fwd", TORCH_BOX(&gqa_attn::fwd));
  library.impl("bwd", TORCH_BOX(&gqa_attn::bwd));
}
