"""explain: which kernel a call would run and why, without running it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _library, _rules
from ._attention import autocast, window_sizes

# What is assumed where the tensors are not on a GPU that can be asked (an H100 or H200).
ASSUMED_ARCH, ASSUMED_SMS = 90, 132

ROW_ELEMENTS, ROW_BYTES = 8, 16  # the unit of TMA: rows are whole ones and start at one


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that one op call runs, as selection gives them."""

    name: str
    block_q: int  # query rows of a tile
    block_kv: int  # keys of a tile
    stages_q: int  # query tiles in flight
    stages_kv: int  # kv tiles in flight
    threads: int  # of a block
    registers: int  # of a compute thread
    smem_bytes: int  # dynamic shared memory of a block
    workspace_bytes: int  # allocated during the call
    tile_heads: int  # query heads whose rows share a tile
    splits: int  # blocks that share the keys of a query tile; backward: the queries of a kv tile
    helpers: tuple[str, ...]  # kernels before and after the main one
    copies: tuple[str, ...]  # tensors that the op copies: kernels cannot read or write them as they are
    copies_bytes: int  # allocated for these, besides the workspace
    reason: str

    def __str__(self) -> str:
        lines = [
            self.name,
            f"  tiles      {self.block_q} queries x {self.block_kv} keys, {self.stages_q} and {self.stages_kv} in flight",
            f"  block      {self.threads} threads, {self.registers} registers per compute thread, "
            f"{self.smem_bytes} bytes of shared memory",
            f"  workspace  {self.workspace_bytes} bytes",
        ]
        if self.copies:
            lines.append(f"  copies     {self.copies_bytes} bytes for {', '.join(self.copies)}")
        if self.tile_heads > 1:
            lines.append(f"  heads      {self.tile_heads} query heads per tile")
        if self.splits > 1:
            lines.append(f"  splits     {self.splits} blocks per tile")
        if self.helpers:
            lines.append(f"  with       {', '.join(self.helpers)}")
        return "\n".join([*lines, f"  because    {self.reason}"])


@dataclass(frozen=True)
class Explanation:
    """What `attention` would do with such tensors: for each direction the kernels, or one line on what happens instead."""

    device: str  # what the answer holds for
    forward: KernelChoice | str
    backward: KernelChoice | str

    def __str__(self) -> str:
        return f"on {self.device}\nforward: {self.forward}\nbackward: {self.backward}"


def explain(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, *,
    scale: float | None = None, causal: bool = False, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    sinks: Tensor | None = None, deterministic: bool | None = None,
) -> Explanation:
    """Which kernels `attention` (with cu_seqlens `attention_varlen`) would run for these arguments, and why.

    Only shapes, strides, dtypes and devices are looked at, so meta tensors do: for them, an sm_90 GPU with 132 SMs is assumed.
    The gradient of out is taken to be contiguous. Arguments that attention does not take raise as they do there; a call that
    has no kernel is explained.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    left, right = window_sizes(window)
    q, k, v, sinks = autocast(q, k, v, sinks)
    _rules.check_forward(q, k, v, scale, causal, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k)
    if q.device.type not in ("cuda", "meta"):
        on_cpu = q.device.type == "cpu"
        path = "the CPU path, tile by tile in plain torch" if on_cpu else "none: kernels are for CUDA and the CPU"
        return Explanation(str(q.device), path, path)

    device = q.device
    if device.type == "meta":  # stands for CUDA, which takes fewer dtypes
        device = torch.device("cuda")
        _rules.check_forward(
            *(_on(device, x) for x in (q, k, v)), scale, causal, left, right, softcap,
            *(_on(device, x) for x in (sinks, cu_seqlens_q, cu_seqlens_k)),
        )
    if q.numel() == 0 or k.numel() == 0:
        nothing = "none: without queries or without keys, results are only filled"
        return Explanation(_name_of(device), nothing, nothing)
    problem, copies = _problem(q, k, v, causal, left, right, softcap, cu_seqlens_q, _limits_of(device)), _copies(q, k, v, scale)
    return Explanation(
        _name_of(device), _select("forward", problem, copies["forward"]),
        _select("backward", problem | dict(deterministic=deterministic), copies["backward"]),
    )


def _problem(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, right: int, softcap: float, cu_seqlens_q: Tensor | None,
             limits: tuple[int, int]) -> dict:
    """What select() takes, as csrc/ops.cpp puts it together."""
    *batch, seqlen_q, heads, head_dim = q.shape
    arch, num_sms = limits
    return dict(
        dtype=str(q.dtype).removeprefix("torch."), batch=batch[0] if batch else 1, seqlen_q=seqlen_q, seqlen_k=k.shape[-3],
        heads=heads, kv_heads=k.shape[-2], head_dim=head_dim, head_dim_v=v.shape[-1], causal=causal, window_left=left,
        window_right=right, softcap=softcap > 0,
        sequences=None if cu_seqlens_q is None else len(cu_seqlens_q) - 1, arch=arch, num_sms=num_sms,
    )


@dataclass
class _Stub:
    """What rules look at in a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout = torch.strided
    is_nested: bool = False


def _on(device: torch.device, tensor: Tensor | None) -> _Stub | None:
    return None if tensor is None else _Stub(tuple(tensor.shape), tensor.dtype, device)


def _limits_of(device: torch.device) -> tuple[int, int]:
    if device.index is None:
        return ASSUMED_ARCH, ASSUMED_SMS
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def _name_of(device: torch.device) -> str:
    if device.index is None:
        return f"a GPU of sm_{ASSUMED_ARCH} with {ASSUMED_SMS} SMs (assumed)"
    return torch.cuda.get_device_name(device)


def _copies(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> dict[str, dict[str, int]]:
    """Phase -> tensor -> bytes of the copy that the op makes (csrc/ops.cpp; tests/gpu/test_gpu_explain.py holds them to it)."""
    negated = scale is not None and scale < torch.finfo(torch.float32).tiny  # the sign moves into q, 0 makes it 0
    inputs = {name: _padded_bytes(x) for name, x in (("q", q), ("k", k), ("v", v)) if _needs_copy(x) or (x is q and negated)}
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="meta")

    def padded(**outputs):
        return {name: _padded_bytes(like) for name, like in outputs.items() if like.shape[-1] % ROW_ELEMENTS}

    return {"forward": inputs | padded(out=out), "backward": inputs | padded(out=out, dout=out, dq=q, dk=k, dv=v)}


def _needs_copy(x: Tensor) -> bool:
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
    return bool(x.shape[-1] % ROW_ELEMENTS or x.stride(-1) != 1 or x.data_ptr() % ROW_BYTES
                or any(stride % ROW_ELEMENTS for stride in strides))


def _padded_bytes(x: Tensor) -> int:
    rows, head_dim = x.numel() // x.shape[-1], x.shape[-1]
    return rows * -(-head_dim // ROW_ELEMENTS) * ROW_BYTES


def _select(phase: str, problem: dict, copies: dict[str, int]) -> KernelChoice | str:
    if _library.compiled is None:
        return f"unknown: gqa_attn._C is missing ({_library.problems['_C']})"
    try:
        chosen = _library.compiled.select(phase, **problem)
    except NotImplementedError as refusal:
        return str(refusal)
    helpers = tuple(chosen[role] for role in ("prepare", "finish_dq", "finish_dk", "finish_dv") if chosen[role])
    fields = {name: chosen[name] for name in KernelChoice.__dataclass_fields__ if name in chosen}
    return KernelChoice(helpers=helpers, copies=tuple(copies), copies_bytes=sum(copies.values()), **fields)
