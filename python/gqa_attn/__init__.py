"""Grouped-query attention, forward and backward, for PyTorch: compiled kernels for Hopper GPUs and a path for the CPU.

    out = gqa_attn.attention(q, k, v, causal=True)     # q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]

torch.ops.gqa_attn.fwd and .bwd are the ops behind it. `python -m gqa_attn info` says what was built and what this machine has.
"""

import sys

from . import _ops as _ops  # registers the ops
from ._attention import attention, attention_varlen
from ._explain import Explanation, KernelChoice, explain
from ._version import __version__

__all__ = ["Explanation", "KernelChoice", "__version__", "attention", "attention_varlen", "explain"]

if "torch.utils.flop_counter" in sys.modules:
    from . import flops as flops
