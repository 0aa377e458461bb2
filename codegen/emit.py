"""Lowered kernels -> files of csrc/generated: a CUDA file each, with its launch function, and the kernel table."""

NOTICE = "// Written by `python -m codegen`; edit codegen/ instead.\n"


def cuda_file(spec, lowered, includes):
    """The kernel and `launch_<name>`, which encodes its tensor maps and enqueues it."""
    maps = "\n".join(_tensor_map(m) for m in lowered.tensor_maps)
    arguments = ", ".join(lowered.arguments)
    smem = lowered.smem_bytes
    parts = [
        NOTICE,
        "".join(f'#include "{header}"\n' for header in (*includes, "kernel_launch.h")),
        lowered.source.strip() + "\n",
        f"""namespace gqa_attn {{

cudaError_t launch_{spec.name}(const KernelParams& p, cudaStream_t stream) {{
  static std::atomic<uint64_t> devices_done{{0}};
  const auto kernel = reinterpret_cast<const void*>({spec.name});
  if (cudaError_t error = allow_shared_memory(kernel, {smem}, devices_done)) return error;
{maps}
  return launch({spec.name}, static_cast<unsigned>({lowered.grid}), {lowered.threads}, {smem}, stream, {arguments});
}}

}}  // namespace gqa_attn
""",
    ]
    return "\n".join(parts)


def _tensor_map(m):
    def braces(items, kind):
        return "{" + ", ".join(f"static_cast<{kind}>({i})" for i in items) + "}"

    return (
        f"  CUtensorMap {m['name']};\n"
        f"  if (cudaError_t error = encode({m['name']}, {{static_cast<CUtensorMapDataType>({m['element']}), {len(m['dims'])}, "
        f"{m['pointer']},\n"
        f"          {braces(m['dims'], 'cuuint64_t')},\n"
        f"          {braces(m['strides'], 'cuuint64_t')},\n"
        f"          {braces(m['box'], 'cuuint32_t')}, static_cast<CUtensorMapSwizzle>({m['swizzle']}), "
        f"static_cast<CUtensorMapL2promotion>({m['l2_promotion']})}})) return error;"
    )


def table_file(kernels):
    """csrc/generated/table.cpp: kernel_table(), from [(spec, lowered)]."""
    declarations = "".join(f"cudaError_t launch_{spec.name}(const KernelParams&, cudaStream_t);\n" for spec, _ in kernels)
    rows = "".join(f"      {_row(spec, lowered)},\n" for spec, lowered in kernels)
    return f"""{NOTICE}
#include "kernels.h"

namespace gqa_attn {{

{declarations}
const std::vector<Kernel>& kernel_table() {{
  static const std::vector<Kernel> table = {{
{rows}  }};
  return table;
}}

}}  // namespace gqa_attn
"""


def _row(spec, lowered):
    cells = [
        f'"{spec.name}"',
        f"Phase::{spec.phase}",
        str(spec.arch),
        f"DType::{spec.dtype}",
        f"Mask::{spec.mask}",
        *(str(c) for c in (spec.head_dim, spec.head_dim_v, spec.block_q, spec.block_kv, spec.stages_q, spec.stages_kv)),
        str(lowered.threads),
        str(spec.registers),
        str(lowered.smem_bytes),
        "true" if spec.softcap else "false",
        *(str(_box_columns(lowered, head_dim)) for head_dim in ("p.head_dim", "p.head_dim_v")),
        "true" if spec.zeroed_dq else "false",
        f"launch_{spec.name}",
    ]
    return "{" + ", ".join(cells) + "}"


def _box_columns(lowered, head_dim):
    """Columns of the narrowest box of the tensors whose rows have `head_dim` elements."""
    return min((int(m["box"][0]) for m in lowered.tensor_maps if m["dims"][0] == head_dim), default=0)
