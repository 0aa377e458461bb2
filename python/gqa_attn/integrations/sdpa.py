"""torch's own attention through gqa_attn: F.scaled_dot_product_attention, varlen_attn, nested tensors, context parallelism.

    gqa_attn.integrations.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("gqa_attn")    # restore_flash_attention_impl() takes it back

From then on, torch's flash attention on CUDA is gqa_attn, for the whole process. Which backend torch chooses is another matter:
on Hopper that may be cuDNN, so ask for flash attention, with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) or
torch.backends.cuda.enable_cudnn_sdp(False). A call that gqa_attn has no kernel for (dropout, say) runs torch's own kernel, and
warns about it once. torch's varlen_attn drops the gradient that arrives at its lse; gqa_attn.attention_varlen does not.

A causal mask of these aten ops is aligned bottom-right, as here. That of F.scaled_dot_product_attention is aligned top-left,
but torch calls them for it only where both are the same: as many queries as keys.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from .. import _ops, _rules
from ..compat import refuse

NAME = "gqa_attn"


def register() -> None:
    """Offers gqa_attn to torch.nn.attention.activate_flash_attention_impl, under the name "gqa_attn"; activates nothing."""
    register_flash_attention_impl(NAME, register_fn=lambda: Override("CUDA"))


class Override:
    """gqa_attn's kernels in the place of torch's, from its creation to remove()."""

    def __init__(self, dispatch_key: str):
        self._library = torch.library.Library("aten", "IMPL", dispatch_key)
        for name, kernel in _KERNELS.items():
            if hasattr(torch.ops.aten, name):  # not all of them in torch 2.11 and earlier
                with_fallback = _or_torchs(kernel, getattr(torch.ops.aten, name).default, dispatch_key)
                self._library.impl(name, with_fallback, with_keyset=True)

    def remove(self) -> None:
        self._library = None  # torch takes the kernels of a Library back when that is gone


def _or_torchs(kernel: Callable, op: torch._ops.OpOverload, dispatch_key: str) -> Callable:
    torchs = torch.library.get_kernel(op, dispatch_key)

    def with_fallback(keyset, *args, **kwargs):
        try:
            return kernel(*args, **kwargs)
        except NotImplementedError as refusal:
            warnings.warn(f"torch's own kernel runs {op.name()}, since gqa_attn cannot: {refusal}")
        return torchs.call_boxed(keyset, *args, **kwargs)

    return with_fallback


def _forward(query, *args, **options):
    """aten::_flash_attention_forward"""
    out, lse = _out_and_lse(query, *args, **options)
    return _laid_out_as(query, out), lse, *_state_of_dropout(query)


def _forward_into(out, *args, **options):
    """aten::_flash_attention_forward_no_dropout_inplace"""
    result, lse = _out_and_lse(*args, **options)
    out.copy_(result)
    return lse


def _sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention, which has heads first."""
    seqlens = query.shape[2], key.shape[2]
    tensors = _swap(query, key, value)
    out, lse = _out_and_lse(*tensors, None, None, *seqlens, dropout_p, is_causal, return_debug_mask, scale=scale)
    return _laid_out_as(query, out.transpose(1, 2)), lse, None, None, *seqlens, *_state_of_dropout(query)


def _backward(grad_out, query, key, value, *args, **options):
    """aten::_flash_attention_backward"""
    return tuple(map(_laid_out_as, (query, key, value), _gradients(grad_out, query, key, value, *args, **options)))


def _sdpa_backward(grad_out, query, key, value, out, *args, **options):
    """aten::_scaled_dot_product_flash_attention_backward, which has heads first."""
    gradients = _gradients(*_swap(grad_out, query, key, value, out), *args, **options)
    return tuple(map(_laid_out_as, (query, key, value), _swap(*gradients)))


def _out_and_lse(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
                 window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
                 num_splits=None):
    """query [B, Sq, Hq, D] or packed [Tq, Hq, D], as all of aten's arguments; max_q and max_k are not needed."""
    refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
           block_table=block_table, more_than_one_split=(num_splits or 1) > 1,
           other_head_dim_of_value=value.shape[-1] != query.shape[-1])
    window = _window(window_size_left, window_size_right)
    args = query, key, value, scale, is_causal, *window, 0.0, None, cum_seq_q, cum_seq_k
    return _ops.call(_ops.fwd, _rules.check_forward, *args)


def _gradients(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
               unused, *, scale=None, window_size_left=None, window_size_right=None):
    refuse(dropout_p=dropout_p)
    window = _window(window_size_left, window_size_right)
    args = grad_out, query, key, value, out, logsumexp, None, scale, is_causal, *window, 0.0, None, cum_seq_q, cum_seq_k
    return _ops.call(_ops.bwd, _rules.check_backward, *args, torch.are_deterministic_algorithms_enabled())[:3]


def _swap(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads first to tokens first, and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """x, which is dense, with the strides of empty_like(like), as torch.compile was promised."""
    if x.stride() == like.stride():
        return x
    strides = torch.empty_like(like, device="meta").stride()
    if all(size <= 1 or stride == wanted for size, stride, wanted in zip(x.shape, x.stride(), strides)):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _state_of_dropout(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask, in their shapes: without dropout nobody reads them."""
    rng_state, unused = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return rng_state, unused, query.new_empty(0)


_KERNELS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
