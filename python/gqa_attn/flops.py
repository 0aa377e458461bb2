"""FLOP formulas of the ops for torch.utils.flop_counter.FlopCounterMode: `import gqa_attn.flops` registers them.

`import gqa_attn` does so only where that module is imported already: it imports triton, which takes longer than all of gqa_attn.
"""

import torch
from torch.utils.flop_counter import register_flop_formula


def _flops(q, k, v, cu_seqlens_q, cu_seqlens_k, products_qk: int, products_v: int) -> int:
    """Products over all pairs of a query and a key, masks not subtracted, as torch counts SDPA.

    Packed sequences count as if all had the mean length: their real lengths would have to be read from the device.
    """
    batch, (seqlen_q, heads, head_dim), seqlen_k = q[:-3], q[-3:], k[-3]
    pairs = heads * seqlen_q * seqlen_k * (batch[0] if batch else 1)
    if cu_seqlens_q is not None:
        pairs //= max(1, cu_seqlens_q[0] - 1)
    return 2 * pairs * (products_qk * head_dim + products_v * v[-1])


@register_flop_formula(torch.ops.gqa_attn.fwd)
def _(q, k, v, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None, cu_seqlens_q=None,
      cu_seqlens_k=None, **kwargs):
    return _flops(q, k, v, cu_seqlens_q, cu_seqlens_k, 1, 1)


@register_flop_formula(torch.ops.gqa_attn.bwd)
def _(dout, q, k, v, out, lse, dlse=None, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0, sinks=None,
      cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False, **kwargs):
    return _flops(q, k, v, cu_seqlens_q, cu_seqlens_k, 3, 2)
