"""TileLang prim_func -> CUDA source and the facts of its launch. Needs no GPU and no nvcc."""

import re
from dataclasses import dataclass

import tilelang
from tilelang import tvm


@dataclass(frozen=True)
class Lowered:
    """A lowered kernel. Expressions are C++ over the fields of a `KernelParams p`."""

    source: str
    tensor_maps: tuple[dict, ...]  # name, pointer, element, dims, strides, box, swizzle
    arguments: tuple[str, ...]     # of the kernel, in order: names of tensor maps, or expressions
    grid: str
    threads: int
    smem_bytes: int


def lower(prim_func, name, arch, passes, boxes):
    """Lowers `prim_func` for `arch` ("sm_90a"); the kernel is called `name`.

    boxes: {tensor map: {dim: C++ expression}} where the launch decides on the box, of as many elements as the kernel's.
    """
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with target, tvm.transform.PassContext(opt_level=3, config={getattr(k, "value", k): v for k, v in passes.items()}):
        lowered = tilelang.lower(prim_func, target=target, enable_host_codegen=False, enable_device_compile=False)
    (host,) = lowered.host_mod.functions.values()
    maps = {m["name"]: m for m in (_tensor_map(args, boxes) for args in host.attrs.get("tma_descriptor_args", {}).values())}
    kernel, launch = _launch_call(host)
    (device,) = lowered.device_mod.functions.values()
    arguments, (grid, threads, *rest) = launch[: len(device.params)], launch[len(device.params) :]
    assert [int(r) for r in rest[:2]] == [1, 1], f"{name}: a grid of one dimension is expected, got {launch}"
    smem = rest[2] if len(rest) > 2 else 0
    source, smem_bytes = _settled_shared_memory(_uniform_warpgroup(lowered.kernel_source), int(smem))
    source = re.sub(rf"\b{kernel}\b", name, source)
    # Its functions are not inline: two kernels that include it cannot be linked together. Nobody prints here.
    source = source.replace("#include <tl_templates/cuda/debug.h>\n", "")
    arguments = tuple(str(a.name) if str(getattr(a, "name", "")) in maps else _expression(a) for a in arguments)
    return Lowered(
        source=source,
        tensor_maps=tuple(sorted(maps.values(), key=lambda m: m["name"])),
        arguments=arguments,
        grid=_expression(grid),
        threads=int(threads),
        smem_bytes=smem_bytes,
    )


def _launch_call(host):
    """The kernel's name and its launch arguments: what the host function's last packed call names and passes."""
    calls = []

    def visit(node):
        if isinstance(node, tvm.tirx.Call) and str(node.op.name).startswith("tirx.tvm_call_packed"):
            calls.append(node.args)

    tvm.tirx.stmt_functor.post_order_visit(host.body, visit)
    name, *arguments = calls[-1]
    return str(name.value), arguments


def _tensor_map(args, boxes):
    """The parts of a __tvm_tensormap_create_tiled call (TileLang, src/op/copy.cc: TMADesc)."""
    _, name, element, rank, pointer, *rest = args
    rank = int(rank)
    dims, strides, box, element_strides, modes = (
        rest[:rank], rest[rank : 2 * rank], rest[2 * rank : 3 * rank], rest[3 * rank : 4 * rank], rest[4 * rank :],
    )
    interleave, swizzle, l2_promotion, out_of_bounds = (int(m) for m in modes)
    plain = all(int(s) == 1 for s in element_strides) and interleave == 0 and out_of_bounds == 0
    assert plain, f"{name}: a tensor map that csrc/driver.h does not encode: {args}"
    return {
        "name": str(name.name),
        "pointer": _expression(pointer),
        "element": int(element),
        "dims": tuple(_expression(d) for d in dims),
        "strides": tuple(_expression(s) for s in strides[1:]),  # bytes; the innermost is the element
        "box": tuple(boxes.get(str(name.name), {}).get(dim, str(int(b))) for dim, b in enumerate(box)),
        "swizzle": swizzle,
        "l2_promotion": l2_promotion,
    }


VIEWS = ("q", "k", "v", "out", "dout", "dk", "dv", "grad")
_STRIDE = re.compile(rf"({'|'.join(VIEWS)})_(batch|seq|head)_stride")
_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "/", "Div": "/", "FloorMod": "%"}


def _expression(e):
    """C++ for a size, stride or pointer. Sizes are never negative, so floor division is C++'s."""
    if isinstance(e, int):
        return str(e)
    kind = type(e).__name__
    if kind == "IntImm":
        return str(int(e))
    if kind == "Cast":
        return f"static_cast<{e.dtype}_t>({_expression(e.value)})"
    if kind == "Var":
        stride = _STRIDE.fullmatch(e.name)
        if stride:
            return f"p.{stride[1]}.{stride[2]}_stride"
        return f"p.{e.name}.data" if e.name in VIEWS else f"p.{e.name}"
    if kind in _OPERATORS:
        return f"({_expression(e.a)} {_OPERATORS[kind]} {_expression(e.b)})"
    if kind == "Call" and e.op.name == "tirx.shift_right":
        return f"({_expression(e.args[0])} >> {_expression(e.args[1])})"
    raise NotImplementedError(f"launch expression {e} of kind {kind}")


def _uniform_warpgroup(source):
    """threadIdx.x >> 7 in wgmma descriptors and their offsets is not warp-uniform to ptxas; one shuffle makes it so.

    In the prototype's backward this took spills from 68 bytes to 0 and gave 3 %; in the forward it made no difference. Where a
    kernel calls `keep_in_loop`, what depends on it is computed there again instead of being kept in registers from outside.
    """
    if "wgmma_ss" not in source:
        return source
    lines = []
    for line in source.split("\n"):
        if "tl::wgmma_" in line or "tl::increase_descriptor_offset" in line:
            line = line.replace("(((int)threadIdx.x) >> 7)", "warpgroup")
        lines.append(line)
        if "tl::warpgroup_reg_alloc" in line:
            lines.append("    int warpgroup = __shfl_sync(0xffffffffu, ((int)threadIdx.x) >> 7, 0);")
    return "\n".join(lines).replace("gqa_attn::device::keep_in_loop();", 'asm volatile("" : "+r"(warpgroup));')


def _settled_shared_memory(source, smem_bytes):
    """TileLang places shared buffers of one size in an order that changes from run to run (by address): here by first use.

    Returns the source and its shared memory in bytes. The last buffer gets whole 1,024 bytes, which it may swap with another's.
    """
    declared = re.compile(r"  void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);\n")
    buffers = [(match[1], int(match[2])) for match in declared.finditer(source)]
    if not buffers:
        return source, smem_bytes
    smem_bytes = -(-smem_bytes // 1024) * 1024
    offsets = sorted(offset for _, offset in buffers)
    size_at = {offset: following - offset for offset, following in zip(offsets, [*offsets[1:], smem_bytes])}
    by_size = {}
    for name, offset in sorted(buffers, key=lambda buffer: buffer[1]):
        by_size.setdefault(size_at[offset], []).append(name)
    *_, head_end = (match.end() for match in declared.finditer(source))
    head, body = source[:head_end], source[head_end:]
    renamed = {}
    for names in by_size.values():
        renamed.update(zip(sorted(names, key=lambda name: re.search(rf"\b{name}\b", body).start()), names))
    return head + re.sub(r"\b\w+\b", lambda word: renamed.get(word[0], word[0]), body), smem_bytes
