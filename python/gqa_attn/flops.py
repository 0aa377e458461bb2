"""FLOP formulas of the ops for torch.utils.flop_counter.FlopCounterMode: `import gqa_attn.flops` registers them.

`import gqa_attn` does so only where that module is imported already: it imports triton, which takes longer than all of
gqa_attn.

Counted are the products over pairs of a query and a key, two operations for each multiply-add. As torch counts SDPA, the
corner that a causal mask hides is not subtracted; a window limited on both sides counts min(Sk, left + right + 1) keys for each
query; packed sequences count each with its own length.
"""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula


def _flops(q, k, v, causal, left, right, cu_seqlens_q, cu_seqlens_k, products_qk: int, products_v: int) -> int:
    right = 0 if causal else right
    width = left + right + 1 if left >= 0 and right >= 0 else k.shape[-3]
    if cu_seqlens_q is None:
        pairs = q.shape[0] * q.shape[1] * torch.sym_min(k.shape[1], width)
    elif cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, FakeTensor):  # no lengths to read: all have the mean one
        pairs = torch.sym_min(q.shape[0] * k.shape[0] // torch.sym_max(cu_seqlens_q.shape[0] - 1, 1), q.shape[0] * width)
    else:
        lengths = zip(_lengths(cu_seqlens_q, q.shape[0]), _lengths(cu_seqlens_k, k.shape[0]))
        pairs = sum(seqlen_q * min(seqlen_k, width) for seqlen_q, seqlen_k in lengths)
    return 2 * q.shape[-2] * pairs * (products_qk * q.shape[-1] + products_v * v.shape[-1])


def _lengths(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Of packed sequences; values out of order or bounds are forced into them, as the CPU path does."""
    return cu_seqlens.clamp(0, tokens).cummax(0).values.diff().tolist()


@register_flop_formula(torch.ops.gqa_attn.fwd, get_raw=True)
def _(q, k, v, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None, cu_seqlens_q=None,
      cu_seqlens_k=None, **kwargs):
    return _flops(q, k, v, causal, window_left, window_right, cu_seqlens_q, cu_seqlens_k, 1, 1)


@register_flop_formula(torch.ops.gqa_attn.bwd, get_raw=True)
def _(dout, q, k, v, out, lse, dlse=None, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None,
      cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False, **kwargs):
    return _flops(q, k, v, causal, window_left, window_right, cu_seqlens_q, cu_seqlens_k, 3, 2)
