// gqa_attn._C: build info, the kernel table and selection, without tensors. Importing it loads libgqa_attn.so, whose ops
// register themselves; torch must have been imported before.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "select.h"

namespace py = pybind11;
using namespace gqa_attn;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = GQA_ATTN_VERSION;
  info["commit"] = GQA_ATTN_COMMIT;
  info["torch"] = GQA_ATTN_TORCH;
  info["tilelang"] = GQA_ATTN_TILELANG;
  info["nvcc"] = GQA_ATTN_NVCC;
  py::set archs;
  for (const Kernel& kernel : kernel_table()) archs.add(kernel.arch);
  info["archs"] = py::module_::import("builtins").attr("sorted")(archs);
  return info;
}

py::dict describe(const Kernel& kernel) {
  py::dict row;
  row["name"] = kernel.name;
  row["phase"] = name_of(kernel.phase);
  row["arch"] = kernel.arch;
  row["dtype"] = name_of(kernel.dtype);
  row["mask"] = name_of(kernel.mask);
  row["head_dim"] = kernel.head_dim;
  row["head_dim_v"] = kernel.head_dim_v;
  row["block_q"] = kernel.block_q;
  row["block_kv"] = kernel.block_kv;
  row["stages_q"] = kernel.stages_q;
  row["stages_kv"] = kernel.stages_kv;
  row["threads"] = kernel.threads;
  row["registers"] = kernel.registers;
  row["smem_bytes"] = kernel.smem_bytes;
  row["softcap"] = kernel.softcap;
  row["zeroed_dq"] = kernel.zeroed_dq;
  return row;
}

py::list kernels() {
  py::list rows;
  for (const Kernel& kernel : kernel_table()) rows.append(describe(kernel));
  return rows;
}

DType dtype_of(const std::string& name) {
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw py::type_error("dtype must be \"float16\" or \"bfloat16\", got \"" + name + "\"");
}

py::object name_or_none(const Kernel* kernel) { return kernel ? py::object(py::str(kernel->name)) : py::object(py::none()); }

py::dict select_kernels(const std::string& phase, const std::string& dtype, int64_t batch, int64_t seqlen_q, int64_t seqlen_k,
                        int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t head_dim_v, bool causal, int64_t window_left,
                        int64_t window_right, bool softcap, std::optional<int64_t> sequences, bool deterministic, int arch,
                        int num_sms) {
  if (phase != "forward" && phase != "backward") {
    throw py::value_error("phase must be \"forward\" or \"backward\", got \"" + phase + "\"");
  }
  const bool sizes = std::min({batch, seqlen_q, seqlen_k, heads, head_dim, head_dim_v, sequences.value_or(0)}) >= 0;
  if (!sizes || kv_heads < 1 || num_sms < 1 || heads % kv_heads != 0 || std::min(window_left, window_right) < -1) {
    throw py::value_error("sizes must be >= 0, windows >= -1, num_sms >= 1 and heads a multiple of kv_heads");
  }
  Problem problem;
  problem.dtype = dtype_of(dtype);
  problem.batch = batch;
  problem.seqlen_q = seqlen_q;
  problem.seqlen_k = seqlen_k;
  problem.heads = heads;
  problem.kv_heads = kv_heads;
  problem.head_dim = padded_head_dim(head_dim);
  problem.head_dim_v = padded_head_dim(head_dim_v);
  set_window(problem, window_left, causal ? 0 : window_right);
  problem.softcap = softcap;
  problem.packed = sequences.has_value();
  problem.sequences = sequences.value_or(0);
  problem.deterministic = deterministic;
  problem.arch = arch;
  problem.num_sms = num_sms;
  if (const char* refusal = too_large(problem)) throw py::value_error(refusal);
  Selection selection;
  try {
    problem = with_padding(problem, phase == "forward" ? Phase::forward : Phase::backward);
    selection = phase == "forward" ? select_forward(problem) : select_backward(problem);
  } catch (const std::runtime_error& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
    throw py::error_already_set();
  }
  py::dict result = describe(*selection.main);
  result["prepare"] = name_or_none(selection.prepare);
  result["finish_dq"] = name_or_none(selection.finish_dq);
  result["finish_dk"] = name_or_none(selection.finish_dk);
  result["finish_dv"] = name_or_none(selection.finish_dv);
  result["tile_heads"] = selection.tile_heads;
  result["section"] = selection.section;
  result["splits"] = selection.splits;
  result["workspace_bytes"] = selection.workspace_bytes;
  result["reason"] = reason(problem, selection);
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "gqa_attn's compiled part: build info, kernel table and selection.";
  module.def("build_info", &build_info,
             "Versions of this library and of what it was built with, and the GPU archs that it has kernels for.");
  module.def("kernels", &kernels,
             "The compiled kernels, one dict each: what a kernel serves, its tiles, stages, threads, registers per compute "
             "thread and shared memory in bytes.");
  module.def("select", &select_kernels, py::arg("phase"), py::kw_only(), py::arg("dtype"), py::arg("batch"), py::arg("seqlen_q"),
             py::arg("seqlen_k"), py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("head_dim_v"),
             py::arg("causal") = false, py::arg("window_left") = -1, py::arg("window_right") = -1, py::arg("softcap") = false,
             py::arg("sequences") = py::none(), py::arg("deterministic") = false, py::arg("arch") = 90, py::arg("num_sms") = 132,
             "The kernels that a call runs, and why: the main kernel's row of kernels(), the helper kernels' names (None where "
             "there is none), section, splits, workspace_bytes and reason. sequences: of packed ones (batch 1). phase is "
             "\"forward\" or \"backward\"; raises "
             "NotImplementedError where no kernel serves the problem.");
}
