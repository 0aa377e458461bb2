// torch.ops.gqa_attn: schemas and CUDA kernels, on libtorch's stable ABI. The only file that knows torch.
//
// A call is checked (generated/rules.h), its tensors become Views that the kernels take, selection chooses kernels,
// launch enqueues them. Errors are std::runtime_error with our text alone: torch's own checks would add files and lines.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

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
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(dtype);
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
Tensor allocate(const std::vector<int64_t>& sizes, int32_t dtype, int64_t bytes_per_element, int32_t device) {
  std::vector<int64_t> strides(sizes.size());
  int64_t elements = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = elements;
    elements *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                               aoti_torch_device_type_cuda(), device, &handle) != TORCH_SUCCESS) {
    throw std::runtime_error("could not allocate " + std::to_string(elements * bytes_per_element) +
                             " bytes on cuda:" + std::to_string(device));
  }
  return Tensor(handle);
}

int64_t last_size(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }

Tensor head_dim_slice(Tensor tensor, int64_t begin, int64_t end) {
  return torch::stable::narrow(tensor, tensor.dim() - 1, begin, end - begin);
}

void copy(const Tensor& to, const Tensor& from) {
  check_torch(aoti_torch_copy_(to.get(), from.get(), /*non_blocking=*/1), "copy a tensor");
}

// The strides of batch, seqlen and heads as kernels see them: those of dims with one index mean nothing and become plausible.
// Packed tensors [T, H, D] are one batch.
std::array<int64_t, 3> view_strides(const Tensor& tensor) {
  auto sizes = tensor.sizes();
  auto strides = tensor.strides();
  std::array<int64_t, 3> result;
  int64_t inner = padded_head_dim(sizes[sizes.size() - 1]);
  for (int i = 2, dim = static_cast<int>(sizes.size()) - 2; i >= 0; --i, --dim) {
    const int64_t size = dim < 0 ? 1 : sizes[dim];
    result[i] = size > 1 ? strides[dim] : inner;
    inner = result[i] * std::max<int64_t>(size, 1);
  }
  return result;
}

bool needs_copy(const Tensor& tensor, int64_t head_dim) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) != head_dim || tensor.stride(last) != 1) return true;
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

  // `tensor` itself where kernels can read it as one of this head dim, else a copy, padded by zeros.
  Tensor readable(const Tensor& tensor, int64_t head_dim) const {
    if (!needs_copy(tensor, head_dim)) return tensor;
    const int64_t given = last_size(tensor);
    Tensor result = like(tensor, head_dim);
    copy(head_dim_slice(result, 0, given), tensor);
    if (head_dim > given) {
      Tensor tail = head_dim_slice(result, given, head_dim);
      torch::stable::zero_(tail);
    }
    return result;
  }

  // Contiguous, of the sizes of `tensor` with another head dim.
  Tensor like(const Tensor& tensor, int64_t head_dim) const {
    auto given = tensor.sizes();
    std::vector<int64_t> sizes(given.begin(), given.end());
    sizes.back() = head_dim;
    return allocate(sizes, dtype_, element_bytes, device_);
  }

  // A contiguous tensor without the padding of its head dim.
  Tensor unpadded(const Tensor& tensor, int64_t head_dim) const {
    if (last_size(tensor) == head_dim) return tensor;
    Tensor result = like(tensor, head_dim);
    copy(result, head_dim_slice(tensor, 0, head_dim));
    return result;
  }

 private:
  int32_t dtype_;
  int32_t device_;
};

// q as kernels take it, whose scale is > 0 (the greatest product is the greatest score): its sign moves into q, 0 makes q 0.
Tensor signed_like(const Tensor& q, double scale) {
  using torch::stable::detail::from;
  if (std::abs(scale) < std::numeric_limits<float>::min()) {
    StableIValue stack[] = {from(q),           from(std::nullopt), from(std::nullopt), from(std::nullopt), from(std::nullopt),
                            from(std::nullopt)};
    check_torch(torch_call_dispatcher("aten::zeros_like", "", stack, TORCH_ABI_VERSION), "make zeros");
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  if (scale > 0) return q;
  StableIValue stack[] = {from(q)};
  check_torch(torch_call_dispatcher("aten::neg", "", stack, TORCH_ABI_VERSION), "negate q");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// In float32, contiguous.
Tensor float_rows(const Tensor& tensor, int32_t device) {
  if (tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Float) return tensor;
  auto sizes = tensor.sizes();
  Tensor result = allocate({sizes.begin(), sizes.end()}, aoti_torch_dtype_float32(), 4, device);
  copy(result, tensor);
  return result;
}

const float* floats(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->data_ptr()) : nullptr;
}

// q, k, v and the options as kernels take them.
struct Inputs {
  Inputs(const Tensors& tensors, const Problem& problem, const Tensor& q, const Tensor& k, const Tensor& v,
         const Options& options, int32_t device)
      : signed_scale(options.scale.value_or(1.0 / std::sqrt(static_cast<double>(last_size(q))))),
        q(tensors.readable(signed_like(q, signed_scale), problem.head_dim)),
        k(tensors.readable(k, problem.head_dim)),
        v(tensors.readable(v, problem.head_dim_v)) {
    if (options.sinks) sinks = float_rows(*options.sinks, device);
    if (options.cu_seqlens_q) {
      cu_seqlens_q = contiguous_ints(*options.cu_seqlens_q, device);
      cu_seqlens_k = contiguous_ints(*options.cu_seqlens_k, device);
    }
  }

  static Tensor contiguous_ints(const Tensor& tensor, int32_t device) {
    if (tensor.is_contiguous()) return tensor;
    Tensor result = allocate({tensor.size(0)}, aoti_torch_dtype_int32(), 4, device);
    copy(result, tensor);
    return result;
  }

  void fill(CommonArgs& args, const Options& options) const {
    args.q = view_of(q);
    args.k = view_of(k);
    args.v = view_of(v);
    // Beyond these no score has a float32 value that differs from its neighbours', and no factor below may be infinite.
    args.scale = static_cast<float>(std::clamp<double>(std::abs(signed_scale), std::numeric_limits<float>::min(), 1e18));
    args.softcap = static_cast<float>(std::clamp(options.softcap, 1e-18, 1e18));
    args.sinks = floats(sinks);
    if (cu_seqlens_q) {
      args.cu_seqlens_q = static_cast<const int*>(cu_seqlens_q->data_ptr());
      args.cu_seqlens_k = static_cast<const int*>(cu_seqlens_k->data_ptr());
    }
  }

  double signed_scale;
  Tensor q, k, v;
  std::optional<Tensor> sinks, cu_seqlens_q, cu_seqlens_k;
};

Problem problem_of(Phase phase, const Tensor& q, const Tensor& k, const Tensor& v, const Options& options, int32_t device) {
  const DeviceLimits& limits = limits_of(device);
  const int64_t first = q.dim() - 3;  // of seqlen, heads, head dim
  Problem problem;
  problem.dtype = q.scalar_type() == ScalarType::Half ? DType::float16 : DType::bfloat16;
  problem.batch = first ? q.size(0) : 1;
  problem.seqlen_q = q.size(first);
  problem.seqlen_k = k.size(first);
  problem.heads = q.size(first + 1);
  problem.kv_heads = k.size(first + 1);
  problem.head_dim = padded_head_dim(last_size(q));
  problem.head_dim_v = padded_head_dim(last_size(v));
  set_window(problem, options.window_left, options.causal ? 0 : options.window_right);
  problem.softcap = options.softcap > 0;
  problem.packed = options.cu_seqlens_q.has_value();
  problem.sequences = problem.packed ? options.cu_seqlens_q->size(0) - 1 : 0;
  // No rule for all devices: it would bound the symbolic sizes of torch.export.
  if (const char* refusal = too_large(problem)) throw std::runtime_error(refusal);
  problem.arch = limits.arch;
  problem.num_sms = limits.num_sms;
  return with_padding(problem, phase);
}

// lse [B, Hq, Sq] or [Hq, Tq]
Tensor make_lse(const Problem& p, int32_t device) {
  if (p.packed) return allocate({p.heads, p.seqlen_q}, aoti_torch_dtype_float32(), 4, device);
  return allocate({p.batch, p.heads, p.seqlen_q}, aoti_torch_dtype_float32(), 4, device);
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
  Problem problem = problem_of(Phase::forward, q, k, v, options, device);
  Inputs inputs(tensors, problem, q, k, v, options, device);
  Selection selection = select_forward(problem);

  Tensor out = tensors.like(q, problem.head_dim_v);
  Tensor lse = make_lse(problem, device);
  std::optional<Tensor> workspace;
  if (selection.workspace_bytes) workspace = allocate({selection.workspace_bytes}, aoti_torch_dtype_uint8(), 1, device);
  FwdArgs args;
  inputs.fill(args, options);
  args.out = view_of(out);
  args.lse = static_cast<float*>(lse.data_ptr());
  args.workspace = workspace ? workspace->data_ptr() : nullptr;
  launch_forward(problem, selection, args, current_stream(device));
  return {tensors.unpadded(out, last_size(v)), lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                               const Tensor& out, const Tensor& lse, const std::optional<Tensor>& dlse,
                                               std::optional<double> scale, bool causal, int64_t window_left,
                                               int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                                               const std::optional<Tensor>& cu_seqlens_q,
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
  Problem problem = problem_of(Phase::backward, q, k, v, options, device);
  problem.deterministic = deterministic;
  Inputs inputs(tensors, problem, q, k, v, options, device);
  Tensor readable_out = tensors.readable(out, problem.head_dim_v);
  Tensor readable_dout = tensors.readable(dout, problem.head_dim_v);
  Tensor lse_rows = float_rows(lse, device);
  std::optional<Tensor> dlse_rows;
  if (dlse) dlse_rows = float_rows(*dlse, device);
  Selection selection = select_backward(problem);

  Tensor dq = tensors.like(q, problem.head_dim);
  Tensor dk = tensors.like(k, problem.head_dim);
  Tensor dv = tensors.like(v, problem.head_dim_v);
  Tensor dsinks = allocate({sinks ? problem.heads : 0}, aoti_torch_dtype_float32(), 4, device);
  Tensor workspace = allocate({selection.workspace_bytes}, aoti_torch_dtype_uint8(), 1, device);
  BwdArgs args;
  inputs.fill(args, options);
  args.out = view_of(readable_out);
  args.dout = view_of(readable_dout);
  args.dq = view_of(dq);
  args.dk = view_of(dk);
  args.dv = view_of(dv);
  args.lse = static_cast<const float*>(lse_rows.data_ptr());
  args.dlse = floats(dlse_rows);
  args.dsinks = sinks ? static_cast<float*>(dsinks.data_ptr()) : nullptr;
  args.scale_dq = static_cast<float>(std::clamp(inputs.signed_scale, -1e18, 1e18));
  args.workspace = workspace.data_ptr();
  launch_backward(problem, selection, args, current_stream(device));
  if (sinks && sinks->scalar_type() != ScalarType::Float) {
    Tensor rounded = tensors.like(*sinks, problem.heads);
    copy(rounded, dsinks);
    dsinks = rounded;
  }
  return {tensors.unpadded(dq, last_size(q)), tensors.unpadded(dk, last_size(k)), tensors.unpadded(dv, last_size(v)), dsinks};
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
