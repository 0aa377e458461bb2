"""The CPU path: forward and backward in plain torch, tile by tile, with every option of the contract.

No Sq x Sk matrix is ever held: a tile has BLOCK query rows (times the group) and BLOCK keys, for all batches and kv heads
at once. Sums are taken in float32, for float64 inputs in float64. The formulas are those of FlashAttention-2 (Dao, 2023,
arXiv:2307.08691), with the query heads of a kv head as further rows, so that k and v are never expanded.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import _rules

BLOCK = 128


class _Options(NamedTuple):
    scale: float
    left: int  # keys seen before the diagonal, -1 = no limit
    right: int
    softcap: float


@torch.autocast("cpu", enabled=False)  # or it would take the products of float32 below in its own dtype
def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, sinks: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """gqa_attn::fwd on CPU tensors."""
    _rules.check_forward(q, k, v, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q, cu_seqlens_k)
    options = _options(q, scale, causal, window_left, window_right, softcap)
    if cu_seqlens_q is None or cu_seqlens_k is None:  # by the rules, both or neither
        return _forward(q, k, v, sinks, options)

    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=_wide(q))
    for tokens_q, tokens_k in _sequences(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        part_out, part_lse = _forward(q[None, tokens_q], k[None, tokens_k], v[None, tokens_k], sinks, options)
        out[tokens_q], lse[:, tokens_q] = part_out[0], part_lse[0]
    return out, lse


@torch.autocast("cpu", enabled=False)
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
    sinks: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gqa_attn::bwd on CPU tensors; always deterministic."""
    _rules.check_backward(dout, q, k, v, out, lse, dlse, scale, causal, window_left, window_right, softcap, sinks, cu_seqlens_q,
                          cu_seqlens_k, deterministic)
    options = _options(q, scale, causal, window_left, window_right, softcap)
    if cu_seqlens_q is None or cu_seqlens_k is None:  # by the rules, both or neither
        dq, dk, dv, dsinks = _backward(dout, q, k, v, out, lse, dlse, sinks, options)
    else:
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        dsinks = q.new_zeros(q.shape[1] if sinks is not None else 0, dtype=_wide(q))
        for tokens_q, tokens_k in _sequences(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
            dq[tokens_q], dk[tokens_k], dv[tokens_k], part_dsinks = (grad.squeeze(0) for grad in _backward(
                dout[None, tokens_q], q[None, tokens_q], k[None, tokens_k], v[None, tokens_k], out[None, tokens_q],
                lse[None, :, tokens_q], None if dlse is None else dlse[None, :, tokens_q], sinks, options,
            ))
            dsinks += part_dsinks
    return dq, dk, dv, dsinks.to(torch.float32 if sinks is None else sinks.dtype)


def _options(q: Tensor, scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float) -> _Options:
    if softcap and q.dtype != torch.float64:
        softcap = min(max(softcap, 1e-18), 1e18)  # what is beyond gives the same in float32, but would be 0 or inf itself
    return _Options(q.shape[-1] ** -0.5 if scale is None else scale, window_left, 0 if causal else window_right, softcap)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> Iterator[tuple[slice, slice]]:
    """Token ranges of the sequences, forced into order and bounds whatever the values are."""
    bounds_q = cu_seqlens_q.clamp(0, total_q).cummax(0).values.tolist()
    bounds_k = cu_seqlens_k.clamp(0, total_k).cummax(0).values.tolist()
    return zip(map(slice, bounds_q, bounds_q[1:]), map(slice, bounds_k, bounds_k[1:]))


class _Tiles(NamedTuple):
    """Which tiles of the score matrix hold a visible pair: row i sees keys i + off - left to i + off + right, off = Sk - Sq."""

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int

    @property
    def first_row(self) -> int:
        """Rows before it see no key; every later row sees one."""
        if self.seqlen_k == 0:
            return self.seqlen_q
        return min(max(self.seqlen_q - self.seqlen_k - self.right, 0), self.seqlen_q) if self.right >= 0 else 0

    def query_blocks(self) -> Iterator[range]:
        for start in range(self.first_row, self.seqlen_q, BLOCK):
            yield range(start, min(start + BLOCK, self.seqlen_q))

    def key_blocks(self, rows: range) -> Iterator[tuple[slice, Tensor | None]]:
        """Key ranges with what is hidden in them: bool [rows, 1, keys], or None where every row sees every key."""
        offset = self.seqlen_k - self.seqlen_q
        first = max(rows[0] + offset - self.left, 0) if self.left >= 0 else 0
        end = min(rows[-1] + offset + self.right + 1, self.seqlen_k) if self.right >= 0 else self.seqlen_k
        for start in range(first, end, BLOCK):
            keys = range(start, min(start + BLOCK, end))
            cut_left = self.left >= 0 and keys[0] < rows[-1] + offset - self.left
            cut_right = self.right >= 0 and keys[-1] > rows[0] + offset + self.right
            hidden = None
            if cut_left or cut_right:
                distance = torch.arange(keys.start, keys.stop) - (torch.arange(rows.start, rows.stop)[:, None] + offset)
                hidden = torch.zeros_like(distance, dtype=torch.bool)
                if cut_left:
                    hidden |= distance < -self.left
                if cut_right:
                    hidden |= distance > self.right
                hidden = hidden[:, None]
            yield slice(keys.start, keys.stop), hidden


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, in one pass."""
    return torch.empty(x.shape, dtype=dtype).copy_(x)


def _by_kv_head(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, S, H, d] -> [B * Hk, S * G, d], contiguous: for each kv head the rows of its group, a token's rows side by side."""
    x = x.unflatten(2, (kv_heads, x.shape[2] // kv_heads)).transpose(1, 2)
    return _copy(x, dtype).flatten(2, 3).flatten(0, 1)


def _by_token(x: Tensor, like: Tensor, kv_heads: int) -> Tensor:
    """[B * Hk, S * G, d] -> [B, S, H, d], contiguous, with sizes and dtype of `like` [B, S, H, ...]."""
    batch, seqlen, heads = like.shape[:3]
    x = x.unflatten(0, (batch, kv_heads)).unflatten(2, (seqlen, heads // kv_heads)).transpose(1, 2).flatten(2, 3)
    return _copy(x, like.dtype)


def _rows_of_lse(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, S] -> [B * Hk, S * G, 1]"""
    return _by_kv_head(x.transpose(1, 2)[..., None], kv_heads, x.dtype)


def _rows_of_sinks(sinks: Tensor | None, q: Tensor, kv_heads: int) -> Tensor:
    """[H] -> [B * Hk, Sq * G, 1]; -inf, which adds nothing to any sum, where there are none."""
    if sinks is None:
        return q.new_full((q.shape[0] * kv_heads, q.shape[1] * (q.shape[2] // kv_heads), 1), float("-inf"), dtype=_wide(q))
    return _by_kv_head(sinks[None, None, :, None].expand(*q.shape[:3], 1), kv_heads, _wide(q))


def _scores(q: Tensor, k: Tensor, options: _Options) -> Tensor:
    """Scaled and capped scores of a tile [B * Hk, rows * G, keys]."""
    scores = torch.bmm(q, k.mT).mul_(options.scale)
    return scores.div_(options.softcap).tanh_().mul_(options.softcap) if options.softcap else scores


def _hide(tile: Tensor, hidden: Tensor | None, value: float) -> None:
    """Writes value where hidden [rows, 1, keys] into a tile [B * Hk, rows * G, keys]."""
    if hidden is not None:
        tile.unflatten(1, (hidden.shape[0], tile.shape[1] // hidden.shape[0])).masked_fill_(hidden, value)


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads = q.shape[:3]
    seqlen_k, kv_heads = k.shape[1:3]
    group, tiles = heads // kv_heads, _Tiles(seqlen_q, seqlen_k, options.left, options.right)
    rows_q, rows_k, rows_v = (_by_kv_head(x, kv_heads, _wide(q)) for x in (q, k, v))
    lse = _rows_of_sinks(sinks, q, kv_heads)
    out = rows_q.new_zeros(*rows_q.shape[:2], v.shape[-1])

    for rows in tiles.query_blocks():
        at = slice(rows.start * group, rows.stop * group)
        top = lse[:, at].clone()  # the largest logit so far, and the sum of exp(logit - top)
        total = torch.ones_like(top).masked_fill_(top == float("-inf"), 0)
        acc = out[:, at].clone()
        for keys, hidden in tiles.key_blocks(rows):
            scores = _scores(rows_q[:, at], rows_k[:, keys], options)
            _hide(scores, hidden, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            finite_top = new_top.masked_fill(new_top == float("-inf"), 0)  # a row may see nothing in its first tiles
            shrink = torch.exp(top - finite_top)
            probs = scores.sub_(finite_top).exp_()
            total = total * shrink + probs.sum(-1, keepdim=True)
            acc = torch.baddbmm(acc * shrink, probs, rows_v[:, keys])
            top = new_top
        out[:, at] = acc / total
        lse[:, at] = top + total.log()
    lse = lse.unflatten(0, (batch, kv_heads)).unflatten(2, (seqlen_q, group)).squeeze(-1).transpose(2, 3).flatten(1, 2)
    return _by_token(out, q, kv_heads), _copy(lse, lse.dtype)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sinks: Tensor | None,
    options: _Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, seqlen_q, heads = q.shape[:3]
    seqlen_k, kv_heads = k.shape[1:3]
    group, tiles = heads // kv_heads, _Tiles(seqlen_q, seqlen_k, options.left, options.right)
    rows_q, rows_k, rows_v, rows_out, rows_dout = (_by_kv_head(x, kv_heads, _wide(q)) for x in (q, k, v, out, dout))
    rows_lse = _rows_of_lse(lse, kv_heads)
    delta = (rows_dout * rows_out).sum(-1, keepdim=True)
    delta[:, :tiles.first_row * group] = 0  # rows that see no key: nothing from dout, whatever stands there
    if dlse is not None:
        delta -= _rows_of_lse(dlse, kv_heads)
    dq, dk, dv = (torch.zeros_like(x) for x in (rows_q, rows_k, rows_v))

    for rows in tiles.query_blocks():
        at = slice(rows.start * group, rows.stop * group)
        for keys, hidden in tiles.key_blocks(rows):
            scores = _scores(rows_q[:, at], rows_k[:, keys], options)
            slope = (scores / options.softcap).square_().neg_().add_(1) if options.softcap else None
            probs = scores.sub_(rows_lse[:, at]).exp_()
            _hide(probs, hidden, 0)
            dscores = torch.bmm(rows_dout[:, at], rows_v[:, keys].mT).sub_(delta[:, at]).mul_(probs).mul_(options.scale)
            if slope is not None:
                dscores.mul_(slope)
            dv[:, keys].baddbmm_(probs.mT, rows_dout[:, at])
            dq[:, at].baddbmm_(dscores, rows_k[:, keys])
            dk[:, keys].baddbmm_(dscores.mT, rows_q[:, at])

    dsinks = q.new_zeros(0)
    if sinks is not None:
        rows_sink = _rows_of_sinks(sinks, q, kv_heads)
        dsinks = torch.exp(rows_sink - rows_lse).mul_(delta).neg_()
        dsinks.masked_fill_(rows_sink == float("-inf"), 0)  # a row without keys has lse -inf there, and anything as its dlse
        dsinks = dsinks.view(batch, kv_heads, seqlen_q, group).sum((0, 2)).flatten()
    return _by_token(dq, q, kv_heads), _by_token(dk, k, kv_heads), _by_token(dv, v, kv_heads), dsinks
