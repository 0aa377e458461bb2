"""What `import gqa_attn` adds to torch.ops.gqa_attn::fwd and ::bwd: fakes, the CPU path, autograd, vmap.

Schemas and CUDA kernels come from libgqa_attn.so. A call that breaks a rule raises here, in the fakes, on the CPU path and
in the CUDA op alike (_rules.py).
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _cpu, _rules, _vmap
from . import _library as _library  # defines the ops

fwd = torch.ops.gqa_attn.fwd
bwd = torch.ops.gqa_attn.bwd

_kernels = torch.library.Library("gqa_attn", "IMPL")
_kernels.impl("fwd", _cpu.forward, "CPU")
_kernels.impl("bwd", _cpu.backward, "CPU")


# How the compiled op names what only Python has a type for.
_TYPED = {r"could not allocate \d+ bytes": torch.OutOfMemoryError, r"gqa_attn has no \w+ kernel": _rules.UnsupportedError,
          r"must be below 2\*\*31": _rules.ArgumentError}


def call(op: Callable, check: Callable, *args):
    """op(*args), its errors in the types that Python users expect.

    C++ can throw RuntimeError only: the rules, run again, raise the one with the right type.
    """
    try:
        return op(*args)
    except RuntimeError as error:
        if torch.compiler.is_compiling():
            raise
        for text, kind in _TYPED.items():
            if re.search(text, str(error)):
                raise kind(str(error)) from None
        if not isinstance(error, tuple(_rules.ERRORS.values())):
            check(*args)
        raise


def deterministic_by_default() -> bool:
    """torch.use_deterministic_algorithms(True), unless it only warns: then no call may fail for want of a kernel."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@torch.library.register_fake("gqa_attn::fwd")
def _(q, k, v, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None, cu_seqlens_q=None,
      cu_seqlens_k=None):
    _rules.check_forward(q, k, v, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k)
    *tokens, heads, _ = q.shape
    lse_shape = (*tokens[:-1], heads, tokens[-1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*tokens, heads, v.shape[-1]), q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.register_fake("gqa_attn::bwd")
def _(dout, q, k, v, out, lse, dlse=None, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None,
      cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False):
    _rules.check_backward(dout, q, k, v, out, lse, dlse, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q,
                          cu_seqlens_k, deterministic)
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dsinks)


def save_for_backward(ctx, inputs: Sequence, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens_q, cu_seqlens_k)
    ctx.options = scale, causal, window_left, window_right, softcap
    ctx.deterministic = deterministic_by_default()
    ctx.set_materialize_grads(False)


def gradients(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """One entry for each input of fwd; None for those that need no gradient."""
    q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 11
    if dout is None:
        dout = torch.zeros_like(out)
    args = dout, q, k, v, out, lse, dlse, *ctx.options, sinks, cu_seqlens_q, cu_seqlens_k, ctx.deterministic
    dq, dk, dv, dsinks = call(bwd, _rules.check_backward, *args)
    grads = (dq, dk, dv, *[None] * 5, dsinks, None, None)
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError("gqa_attn::bwd cannot be differentiated: double backward is not supported by gqa_attn::fwd")


torch.library.register_autograd("gqa_attn::fwd", gradients, setup_context=save_for_backward)
torch.library.register_autograd("gqa_attn::bwd", _refuse_double_backward)


class WithDeterministic(torch.autograd.Function):
    """fwd for callers who choose `deterministic` themselves: the schema of fwd has no place to carry it to bwd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        return fwd(*args[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        save_for_backward(ctx, inputs[:-1], output)
        ctx.deterministic = inputs[-1]

    @staticmethod
    def backward(ctx, dout, dlse):
        return *gradients(ctx, dout, dlse), None


torch.library.register_vmap("gqa_attn::fwd", _vmap.forward)
torch.library.register_vmap("gqa_attn::bwd", _vmap.backward)
