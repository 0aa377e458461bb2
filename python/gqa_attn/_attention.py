"""attention and attention_varlen: the ops with keyword arguments, autocast and typed errors."""

from typing import Literal, overload

import torch
from torch import Tensor

from . import _ops, _rules


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sinks: Tensor | None = None, deterministic: bool | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sinks: Tensor | None = None, deterministic: bool | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None, deterministic=None,
              return_lse=False):
    """Softmax attention with grouped query heads: out = softmax(scale * q k^T + mask) v, differentiable once.

    Query head h reads kv head h // (Hq // Hk). Masks are aligned bottom-right: with off = Sk - Sq, query i sees the keys j with
    i + off - left <= j <= i + off + right. A query that sees no key gets out = 0 and lse = -inf (the
    sink where there is one), and no gradient comes from it to q, k and v.

    Args:
        q: [B, Sq, Hq, D]; float16 or bfloat16, on the CPU also float32 and float64. Any strides; on CUDA no copy is made where
            the last one is 1, rows are 16-byte aligned and D is a multiple of 8. Under autocast q, k and v are cast to its
            dtype.
        k: [B, Sk, Hk, D]; Hq is a multiple of Hk.
        v: [B, Sk, Hk, Dv]; D and Dv from 1 to 256.
        scale: factor on the scores, D ** -0.5 by default.
        causal: right = 0, whatever `window` says.
        window: (left, right), keys seen before and behind the diagonal, -1 for no limit.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c).
        sinks: [Hq], float32 or the dtype of q: one more logit per head in the denominator of the softmax, with no value.
        deterministic: bitwise equal gradients from run to run; None follows torch.use_deterministic_algorithms.
        return_lse: also return lse, which is differentiable too.

    Returns:
        out [B, Sq, Hq, Dv] in the dtype of q; with return_lse (out, lse): lse [B, Hq, Sq], the natural logarithm of the
        softmax's denominator, float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument is not as above. NotImplementedError: no kernel on this device for this call; double
        backward; forward-mode derivatives.
        torch.OutOfMemoryError.
    """
    return _attention(q, k, v, scale, causal, window, softcap, sinks, None, None, deterministic, return_lse)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *, scale: float | None = None,
    causal: bool = False, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *, scale: float | None = None,
    causal: bool = False, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, scale=None, causal=False, window=(-1, -1), softcap=0.0,
                     sinks=None, deterministic=None, return_lse=False):
    """`attention` for sequences packed into one tensor: sequence n has the queries cu_seqlens_q[n] ... cu_seqlens_q[n + 1] - 1.

    Args:
        q: [Tq, Hq, D]. On CUDA, some head dims that are not tuned, such as 144, cost a copy.
        k: [Tk, Hk, D].
        v: [Tk, Hk, Dv].
        cu_seqlens_q: [n + 1], int32, on the device of q, from 0 upwards. On CUDA the host never reads it. Values out of order
            or range give meaningless results, but no access out of bounds; rows behind the last one are not read and come back
            as 0 (lse -inf).
        cu_seqlens_k: the same for k and v; cu_seqlens_q by default.

    The other arguments, and what is raised, are those of `attention`. Returns out [Tq, Hq, Dv], with return_lse also
    lse [Hq, Tq].
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    return _attention(q, k, v, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, deterministic, return_lse)


def _attention(q, k, v, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, deterministic, return_lse):
    q, k, v, sinks = autocast(q, k, v, sinks)
    left, right = window_sizes(window)
    args = q, k, v, scale, causal, left, right, softcap, sinks, cu_seqlens_q, cu_seqlens_k, deterministic
    results = _ops.call(_ops.forward, _check_forward, *args)
    return results if return_lse else results[0]


def _check_forward(*args):
    _rules.check_forward(*args[:-1])


def autocast(q, k, v, sinks):
    """As torch's own attention: under autocast, inputs are cast to its dtype; float64 is left alone."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):  # "meta" has no autocast and would raise
        return q, k, v, sinks
    dtype = torch.get_autocast_dtype(device)

    def cast(x):
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v), sinks if isinstance(sinks, Tensor) and sinks.dtype == torch.float32 else cast(sinks)


def window_sizes(window: tuple[int, int]) -> tuple[int, int]:
    if isinstance(window, (tuple, list)) and len(window) == 2:
        left, right = window
        if isinstance(left, int) and isinstance(right, int):
            return left, right
    raise _rules.ArgumentTypeError(f"window must be two ints (left, right), -1 for no limit, got {window!r}")
