"""attn_implementation="gqa_attn" for Hugging Face transformers.

    import gqa_attn.integrations.transformers

    gqa_attn.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="gqa_attn", dtype=torch.bfloat16)

transformers makes masks once per forward and then calls the attention function in every layer, so two functions are registered.
`mask_function` gives None or the padding mask [B, Sk] where the kernels know the pattern, else a mask [B, 1, Sq, Sk]. For
`attention_function` the first is one dense call, the second a packed call over the same memory (_sequences.py), the third
scaled_dot_product_attention.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .._attention import attention, attention_varlen

OLDEST = "5.17"

try:
    import transformers
    from packaging.version import Version
except ImportError:
    transformers = None
if transformers is None or Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(f"gqa_attn.integrations.transformers needs transformers {OLDEST} or later, "
                      f"got {transformers and transformers.__version__}: pip install 'transformers>={OLDEST}'")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from . import _sequences

NAME = "gqa_attn"
logger = logging.get_logger(__name__)

# What models pass to every attention function and what changes nothing in it.
HARMLESS = {"use_cache", "cache_position", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch",
            "output_hidden_states", "output_router_logits", "return_dict"}


def register() -> None:
    """Makes attn_implementation="gqa_attn" known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def attention_function(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, s_aux: Tensor | None = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, deterministic: bool | None = None, **others,
) -> tuple[Tensor, None]:
    """The attention function of transformers' AttentionInterface.

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None.
        query: [B, Hq, Sq, D]; with key and value in any strides.
        key: [B, Hk, Sk, D].
        value: [B, Hk, Sk, Dv].
        attention_mask: None; or [B, Sk], true for tokens, which must stand side by side in each row, and false for padding; or
            [B or 1, Hq or 1, Sq, Sk], bool or added to the scores, which says everything about who sees whom.
        dropout: must be 0.
        sliding_window: W tokens are seen, the query itself included; without causality W - 1 on both sides.
        s_aux: [Hq], the sinks.
        position_ids: [B or 1, Sq]: where they do not go up by 1, another sequence begins. Not looked at with a mask,
            cu_seq_lens or a KV cache.
        cu_seq_lens_q: with cu_seq_lens_k the boundaries of packed sequences, counted over all B * Sq tokens.
        others: what is known to change nothing, or None or False.

    Returns:
        ([B, Sq, Hq, Dv], None). Rows of padding are 0.
    """
    _refuse(dropout, others)
    if deterministic is False:
        deterministic = None  # transformers' "not asked for", which torch.use_deterministic_algorithms may still ask for
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and cu_seq_lens_q is not None:
        raise ValueError("attention_mask and cu_seq_lens_q cannot be combined")
    dtype = _compute_dtype(query, module)
    if dtype != query.dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if s_aux is not None and s_aux.dtype != query.dtype:
        s_aux = s_aux.float()
    if attention_mask is not None and attention_mask.dim() == 4:
        return _scaled_dot_product_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None

    if attention_mask is not None:
        seqlen_k = attention_mask.shape[-1]
        key, value = key[:, :, :seqlen_k], value[:, :, :seqlen_k]  # a static cache has room behind the tokens so far
    options = dict(scale=scaling, causal=causal, window=_window(sliding_window, causal, key.shape[2]), softcap=softcap or 0.0,
                   sinks=s_aux, deterministic=deterministic)
    cu_seqlens = _boundaries(query, key, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k,
                             aligned=causal or options["window"] != (-1, -1))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if cu_seqlens is None:
        return attention(query, key, value, **options), None
    out = attention_varlen(*(x.flatten(0, 1) for x in (query, key, value)), *cu_seqlens, **options)
    return out.unflatten(0, query.shape[:2]), None


def mask_function(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, *, mask_function,
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    use_vmap: bool = False, config=None, **others,
) -> Tensor | None:
    """The mask function of transformers' AttentionMaskInterface.

    Returns None or the bool mask [B, Sk] of `attention_function` where causality, a window, packed sequences and padding are
    all there is; else bool [B, 1, Sq, Sk].
    """
    kind = mask_function.__name__  # more than that cannot be seen of it under torch.compile
    chunked = local_size is not None and local_size != getattr(config, "sliding_window", None)
    # A cache with room behind the tokens so far: a mask says how many these are, but here is none.
    unknown_end = attention_mask is None and kind != "bidirectional_mask_function" and (
        isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length)
    # The model wants to see the mask, and not because of packed sequences: those are an and_mask.
    wanted = not allow_is_causal_skip and kind == "causal_mask_function" and q_length > 1
    if use_vmap or kind == "or_mask" or (chunked and kv_offset + kv_length > local_size) or unknown_end or wanted:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
                         local_size=local_size, allow_is_causal_skip=False, use_vmap=use_vmap, **others)
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def _refuse(dropout: float, others: dict) -> None:
    if dropout:
        raise NotImplementedError(f"gqa_attn has no dropout: set the attention dropout of the model to 0, got {dropout}")
    # Identity, not equality: there are tensors among the values.
    asked = [name for name, given in others.items() if name not in HARMLESS and given is not None and given is not False]
    if asked:
        raise NotImplementedError(f"gqa_attn does not support {', '.join(asked)}; it takes scaling, sliding_window, softcap, "
                                  "s_aux, is_causal, position_ids, cu_seq_lens_q, cu_seq_lens_k and deterministic")


def _compute_dtype(query: Tensor, module: torch.nn.Module) -> torch.dtype:
    """float32 queries beside weights of another dtype come from layer norms kept in float32, as PEFT does: that of the weights.

    Under autocast, `attention` casts.
    """
    if query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type):
        return query.dtype
    if hasattr(getattr(module, "config", None), "_is_quantized"):
        return module.config.dtype
    return next((layer.weight.dtype for layer in module.modules() if isinstance(layer, torch.nn.Linear)), query.dtype)


def _window(sliding_window: int | None, causal: bool, seqlen_k: int) -> tuple[int, int]:
    if sliding_window is None:
        return -1, -1
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, or None for no limit, got {sliding_window}")
    if seqlen_k <= sliding_window:
        return -1, -1
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _boundaries(query, key, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k, aligned):
    """(cu_seqlens_q, cu_seqlens_k) over the tokens of all rows, or None: each row is one sequence."""
    batch, _, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, batch) or attention_mask.shape[1] != seqlen_k:
            raise ValueError(f"attention_mask must have shape [B, Sk] = [{batch}, {seqlen_k}] or [B, 1, Sq, Sk], "
                             f"got {list(attention_mask.shape)}")
        return _sequences.of_padding(attention_mask, batch, seqlen_q, aligned)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given both or neither")
        return cu_seq_lens_q.int(), cu_seq_lens_k.int()
    if position_ids is None or seqlen_q != seqlen_k or seqlen_q == 1:
        return None
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != seqlen_q:
        raise ValueError(f"position_ids must have shape [B, S] = [{batch}, {seqlen_q}] or [1, {seqlen_q}], "
                         f"got {list(position_ids.shape)}; with several positions per token (multimodal RoPE) pass those of "
                         "the text, or cu_seq_lens_q and cu_seq_lens_k")
    return _sequences.of_positions(position_ids, batch)


def _scaled_dot_product_attention(query, key, value, mask, scaling, softcap, s_aux):
    """torch's own attention for masks [B, 1, Sq, Sk] -> [B, Sq, Hq, Dv]; a sink becomes a key, whose score the mask holds."""
    if softcap:
        raise NotImplementedError('gqa_attn takes no softcap together with a mask of shape [B, 1, Sq, Sk]: use '
                                  'attn_implementation="eager" for that')
    logger.warning_once("gqa_attn has no kernel for this attention mask of shape [B, 1, Sq, Sk]: "
                        "torch's scaled_dot_product_attention runs instead")
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)  # with enable_gqa CUDA has no fused kernel
    if mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if s_aux is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        sinks = s_aux.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
        mask = torch.cat([mask.expand(*query.shape[:3], -1), sinks], -1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(1, 2).contiguous()
