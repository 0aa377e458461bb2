"""cu_seqlens over a padded or packed batch where it lies: no token is moved, and the host waits for the GPU at most once.

Rows of a batch lie one behind the other, so [B, S] tokens are B * S packed ones. Padding between them becomes sequences that
have queries but no keys, or keys but no queries: by the contract of the ops their outputs and gradients are exactly 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_tracing

_HOLES = ("attention_mask has padding between the tokens of a row: gqa_attn takes padding on the left and on the right of them "
          'only; use attn_implementation="sdpa"')
_SHARED_RESTART = ("position_ids of shape [1, S] begin several sequences, for a batch of more than 1 row: pass them as [B, S]")


def _once_per_forward(compute: Callable) -> Callable:
    """Keeps compute(tensor, ...) as long as the tensor lives unchanged: every layer of a forward is given the same one.

    Not while a graph is traced or captured, where the result must be part of the graph.
    """
    kept = WeakTensorKeyDictionary()

    def kept_or_computed(tensor: Tensor, *args):
        if is_tracing(tensor) or tensor.is_inference():  # an inference tensor does not count its changes
            return compute(tensor, *args)
        state = tensor._version, args
        if tensor not in kept or kept[tensor][0] != state:
            kept[tensor] = state, compute(tensor, *args)
        return kept[tensor][1]

    return kept_or_computed


@_once_per_forward
def of_padding(mask: Tensor, batch: int, seqlen_q: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """Boundaries (queries, keys), int32 [3 B + 1], for a mask [B or 1, Sk], true for tokens; nothing is read by the host.

    The queries are the last Sq positions of the keys where `aligned`; else (encoders, cross attention) every query counts.
    """
    mask = mask.bool().expand(batch, -1)
    seqlen_k, device = mask.shape[1], mask.device
    position = torch.arange(seqlen_k, device=device)
    first = mask.int().argmax(1)
    end = first + mask.sum(1)
    torch._assert_async((mask == ((position >= first[:, None]) & (position < end[:, None]))).all(), _HOLES)
    row = torch.arange(batch, device=device)
    if aligned:
        first_q, end_q = ((key - (seqlen_k - seqlen_q)).clamp(0, seqlen_q) for key in (first, end))
    else:
        first_q, end_q = torch.zeros_like(first), torch.full_like(end, seqlen_q)
    first_q, end_q, first, end = first_q + row * seqlen_q, end_q + row * seqlen_q, first + row * seqlen_k, end + row * seqlen_k
    # For each row: padding queries up to its first token, padding keys up to there, its tokens.
    queries = torch.stack([first_q, first_q, end_q], 1)
    keys = torch.stack([torch.cat([end.new_zeros(1), end[:-1]]), first, end], 1)
    return tuple(F.pad(bounds.flatten(), (1, 0)).int() for bounds in (queries, keys))


@_once_per_forward
def of_positions(position_ids: Tensor, batch: int) -> tuple[Tensor, Tensor] | None:
    """Boundaries (twice the same), int32, for position_ids [B or 1, S] that restart; None where each row is one sequence.

    The number of sequences sizes a launch, so it is read by the host: once per forward, as transformers does itself to look
    for packed sequences. Where that cannot be (torch.compile, CUDA graphs) there are S + 1 boundaries, most of them of empty
    sequences, which cost time: pass cu_seq_lens_q and cu_seq_lens_k there.
    """
    starts = position_ids.diff(dim=1) != 1
    traced = is_tracing(position_ids)
    if traced and position_ids.shape[0] < batch:  # what models make up when they are given none
        torch._assert_async((~starts).all(), _SHARED_RESTART)
        return None
    starts = F.pad(starts.expand(batch, -1), (1, 0), value=True).flatten()
    total = starts.shape[0]
    if traced:
        bounds = torch.where(starts, torch.arange(total, device=starts.device), total).sort().values
    else:
        bounds = starts.nonzero().flatten()
        if bounds.shape[0] == batch:
            return None
    bounds = F.pad(bounds, (0, 1), value=total).int()
    return bounds, bounds
