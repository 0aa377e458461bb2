"""The functions of the flash_attn package (2.x) on gqa_attn's kernels: same names, arguments, order, defaults and shapes.

    from gqa_attn.compat.flash_attn import flash_attn_func

What differs, all of it in what is accepted: dropout, ALiBi and paged keys and values raise NotImplementedError; float32 and
float64 work on the CPU; v may have another head dim than q and k; lse is differentiable. Where flash_attn takes max_seqlen,
any value will do: launches are sized from shapes, and nothing is read back from the GPU. `deterministic` follows
torch.use_deterministic_algorithms where it is not set.
"""

from torch import Tensor

from .. import _rules
from .._attention import attention, attention_varlen
from . import refuse

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, learnable_sink=None):
    """gqa_attn.attention on q [B, Sq, Hq, D], k and v [B, Sk, Hk, D]; learnable_sink [Hq], as FlashAttention-4 names its sinks.

    Returns out [B, Sq, Hq, D], with return_attn_probs (out, lse [B, Hq, Sq] float32, an empty tensor: probabilities exist
    with dropout only).
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    return _results(q, *attention(q, k, v, **options), return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None, *, learnable_sink=None):
    """gqa_attn.attention_varlen on q [Tq, Hq, D], k and v [Tk, Hk, D]; cu_seqlens int32 [n + 1]; max_seqlen is not needed.

    Returns out [Tq, Hq, D], with return_attn_probs (out, lse [Hq, Tq] float32, an empty tensor).
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    return _results(q, *attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options), return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_func on qkv [B, S, 3, H, D]."""
    return flash_attn_func(*_unpack("qkv", qkv, ["B", "S", 3, "H", "D"]), dropout_p, softmax_scale, causal, window_size,
                           softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_func on q [B, Sq, Hq, D] and kv [B, Sk, 2, Hk, D]."""
    return flash_attn_func(q, *_unpack("kv", kv, ["B", "Sk", 2, "Hk", "D"]), dropout_p, softmax_scale, causal, window_size,
                           softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """flash_attn_varlen_func on qkv [T, 3, H, D]."""
    return flash_attn_varlen_func(*_unpack("qkv", qkv, ["T", 3, "H", "D"]), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                  dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):
    """flash_attn_varlen_func on q [Tq, Hq, D] and kv [Tk, 2, Hk, D]."""
    return flash_attn_varlen_func(q, *_unpack("kv", kv, ["Tk", 2, "Hk", "D"]), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                  max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                                  deterministic, return_attn_probs)


def _options(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink) -> dict:
    # flash_attn takes softcap <= 0 for none
    return dict(scale=softmax_scale, causal=causal, window=window_size, softcap=max(softcap, 0.0), sinks=learnable_sink,
                deterministic=deterministic or None, return_lse=True)


def _results(q: Tensor, out: Tensor, lse: Tensor, return_attn_probs: bool):
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _unpack(name: str, packed: Tensor, shape: list) -> tuple[Tensor, ...]:
    """q, k, v or k, v: views along the dim of `shape` that is a number."""
    parts = shape.index(next(size for size in shape if isinstance(size, int)))
    if packed.dim() != len(shape) or packed.shape[parts] != shape[parts]:
        raise _rules.ArgumentError(f"{name} must have shape [{', '.join(map(str, shape))}], got {list(packed.shape)}")
    return packed.unbind(parts)
