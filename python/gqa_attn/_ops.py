"""What `import gqa_attn` adds to torch.ops.gqa_attn::fwd and ::bwd: fakes, the CPU path, autograd, vmap.

Schemas and CUDA kernels come from libgqa_attn.so. A call that breaks a rule raises here, in the fakes, on the CPU path and
in the CUDA op alike (_rules.py).

Autograd is a kernel of the ops like any other, so that a raw op call is differentiable; the Python front takes the same way
without the round through the dispatcher.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import Function, forward_ad

from . import _cpu, _rules, _vmap
from . import _library as _library  # defines the ops

fwd = torch.ops.gqa_attn.fwd
bwd = torch.ops.gqa_attn.bwd


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


class GqaAttention(Function):
    """fwd with its derivative. Takes all arguments of the schema and, last, `deterministic`, which that has no place for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        return _below_autograd(fwd.default, args[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, deterministic = inputs
        ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens_q, cu_seqlens_k)
        ctx.options = scale, causal, window_left, window_right, softcap
        ctx.deterministic = deterministic
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        """One entry for each input; None for those that need no gradient."""
        if dout is None and dlse is None:
            return (None,) * 12
        q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        args = dout, q, k, v, out, lse, dlse, *ctx.options, sinks, cu_seqlens_q, cu_seqlens_k, ctx.deterministic
        dq, dk, dv, dsinks = call(backward, _rules.check_backward, *args)
        of_q, of_k, of_v, *_, of_sinks, _, _, _ = ctx.needs_input_grad
        return (dq if of_q else None, dk if of_k else None, dv if of_v else None, None, None, None, None, None,
                dsinks if of_sinks else None, None, None, None)


class GqaAttentionGradient(Function):
    """bwd, which refuses to be differentiated."""

    @staticmethod
    def forward(*args):
        return _below_autograd(bwd.default, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("gqa_attn::bwd cannot be differentiated: double backward is not supported by gqa_attn::fwd")


def forward(*args):
    """fwd(*args[:-1]); the last argument is `deterministic` for its derivative, or None."""
    *of_op, deterministic = args
    compiling = torch.compiler.is_compiling()
    if compiling or torch._C._are_functorch_transforms_active():
        if deterministic is None or compiling and not _records(of_op):
            return fwd(*of_op)
        return GqaAttention.apply(*_distinct(args))
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return _apply(GqaAttention, *of_op, deterministic)


def _records(args: list) -> bool:
    """What _apply asks, in words that Dynamo traces; a Function that records nothing it does not."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _distinct(args: tuple) -> list:
    """args with a view for a tensor that stands there twice, as cu_seqlens may: Dynamo takes each only once."""
    return [arg.view_as(arg) if isinstance(arg, Tensor) and any(arg is other for other in args[:i]) else arg
            for i, arg in enumerate(args)]


def backward(*args):
    """bwd(*args)"""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return bwd(*args)
    return _apply(GqaAttentionGradient, *args)


def _apply(function: type[Function], *args):
    """function.apply(*args), or its forward alone where nobody asks for a derivative.

    Without what Function.apply does for torch.func first: that takes longer than all the rest of a call.
    """
    if forward_ad._current_level >= 0:  # private, but the only cheap way to ask
        _refuse_tangents(args)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return super(Function, function).apply(*args)
    return function.forward(*args)


def _refuse_tangents(args: tuple) -> None:
    """torch would drop the tangents of an op that has no forward-mode rule, and give zeros without a word."""
    if any(isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args):
        raise NotImplementedError("gqa_attn has no forward-mode derivatives")


def _below_autograd(op: OpOverload, args: tuple) -> tuple[Tensor, ...]:
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the guard, and autograd is not in its graph
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._are_functorch_transforms_active():
            # Function.apply has turned derivatives off, but the next transform may want its own.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return op(*args)
        return op(*args)


def _autograd_of_fwd(q, k, v, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None,
                     cu_seqlens_q=None, cu_seqlens_k=None):
    return _apply_in_dispatcher(GqaAttention, q, k, v, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q,
                                cu_seqlens_k, torch.are_deterministic_algorithms_enabled())


def _autograd_of_bwd(*args):
    return _apply_in_dispatcher(GqaAttentionGradient, *args)


def _apply_in_dispatcher(function: type[Function], *args):
    if torch._C._are_functorch_transforms_active():  # the dispatcher calls once for each transform, as it does with torch's ops
        with enable_single_level_autograd_function():
            return _apply(function, *args)
    return _apply(function, *args)


_kernels = torch.library.Library("gqa_attn", "IMPL")
for _key, _of_fwd, _of_bwd in (("CPU", _cpu.forward, _cpu.backward), ("Autograd", _autograd_of_fwd, _autograd_of_bwd)):
    _kernels.impl("fwd", _of_fwd, _key)
    _kernels.impl("bwd", _of_bwd, _key)

torch.library.register_vmap("gqa_attn::fwd", _vmap.forward)
torch.library.register_vmap("gqa_attn::bwd", _vmap.backward)
