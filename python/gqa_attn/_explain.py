"""explain: which kernel a call would run and why, without running it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _library, _rules
from ._attention import autocast, window_sizes
from ._ops import deterministic_by_default

# What is assumed where the tensors are not on a GPU that can be asked (an H100 or H200).
ASSUMED_ARCH, ASSUMED_SMS = 90, 132


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
    splits: int  # blocks that share a kv tile
    helpers: tuple[str, ...]  # kernels before and after the main one
    reason: str

    def __str__(self) -> str:
        lines = [
            self.name,
            f"  tiles      {self.block_q} queries x {self.block_kv} keys, {self.stages_q} and {self.stages_kv} in flight",
            f"  block      {self.threads} threads, {self.registers} registers per compute thread, "
            f"{self.smem_bytes} bytes of shared memory",
            f"  workspace  {self.workspace_bytes} bytes",
        ]
        if self.splits > 1:
            lines.append(f"  splits     {self.splits} blocks per kv tile")
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

    Only shapes, dtypes and devices are looked at, so meta tensors do: for them, an sm_90 GPU with 132 SMs is assumed.
    Arguments that attention does not take raise as they do there; a call that has no kernel is explained.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if deterministic is None:
        deterministic = deterministic_by_default()
    left, right = window_sizes(window)
    q, k, v, sinks = autocast(q, k, v, sinks)
    if isinstance(q, Tensor) and q.device.type == "cpu":
        _rules.check_forward(q, k, v, scale, causal, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k)
        path = "the CPU path, tile by tile in plain torch"
        return Explanation("cpu", path, path)

    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k = map(_as_on_gpu, (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k))
    options = (scale, causal, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k)
    refusals = {"forward": _refusal(_rules.check_forward, q, k, v, *options)}
    *tokens, heads, _ = q.shape
    out = _Stub((*tokens, heads, v.shape[-1]), q.dtype, q.device)
    lse = _Stub((*tokens[:-1], heads, tokens[-1]), torch.float32, q.device)
    refusals["backward"] = _refusal(_rules.check_backward, out, q, k, v, out, lse, None, *options, deterministic)
    if all(refusals.values()):
        return Explanation(_name_of(q.device), **refusals)

    arch, num_sms = _limits_of(q.device)
    problem = dict(
        dtype=str(q.dtype).removeprefix("torch."), causal=causal or right == 0, batch=q.shape[0], seqlen_q=q.shape[1],
        seqlen_k=k.shape[1], heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], head_dim_v=v.shape[3], arch=arch,
        num_sms=num_sms,
    )
    return Explanation(_name_of(q.device), **{phase: refusal or _select(phase, problem) for phase, refusal in refusals.items()})


@dataclass
class _Stub:
    """What rules look at in a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout = torch.strided
    is_nested: bool = False


def _as_on_gpu(tensor):
    """Stands for a tensor, on the assumed GPU where it is on none."""
    if not isinstance(tensor, Tensor) or tensor.is_nested:
        return tensor  # None, or for the rules to refuse
    device = torch.device("cuda") if tensor.device.type == "meta" else tensor.device
    return _Stub(tuple(tensor.shape), tensor.dtype, device, tensor.layout)


def _refusal(check, *args) -> str:
    try:
        check(*args)
    except _rules.UnsupportedError as refusal:
        return str(refusal)
    return ""


def _limits_of(device: torch.device) -> tuple[int, int]:
    if device.index is None:
        return ASSUMED_ARCH, ASSUMED_SMS
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def _name_of(device: torch.device) -> str:
    if device.index is None:
        return f"a GPU of sm_{ASSUMED_ARCH} with {ASSUMED_SMS} SMs (assumed)"
    return torch.cuda.get_device_name(device)


def _select(phase: str, problem: dict) -> KernelChoice | str:
    if _library.compiled is None:
        return f"unknown: gqa_attn._C is missing ({_library.problems['_C']})"
    try:
        chosen = _library.compiled.select(phase, **problem)
    except NotImplementedError as refusal:
        return str(refusal)
    helpers = tuple(chosen[role] for role in ("prepare", "finish_dq", "finish_dk", "finish_dv") if chosen[role])
    fields = {name: chosen[name] for name in KernelChoice.__dataclass_fields__ if name != "helpers"}
    return KernelChoice(helpers=helpers, **fields)
