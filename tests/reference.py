"""Float64 reference of grouped-query attention, its same-dtype eager run, and the tolerance rule that compares with both.

The formulas, for one query head h, its kv head, rows i and keys j (seen: bottom-right aligned mask, see `visible`):

    S = scale * Q K^T, softcap c: S = c * tanh(S / c);   lse = log(sum over seen keys of exp(S) + exp(sink));   P = exp(S - lse)
    O = P V;   delta = rowsum(dO * O) - dlse;   dS = P * (dO V^T - delta) * scale * (1 - tanh^2);
    dQ = dS K;   dK = dS^T Q;   dV = P^T dO;   dsink = -sum of exp(sink - lse) * delta;   dK and dV are summed over the group

`reference` takes them in float64. `eager` takes them in the input dtype: products accumulate in float32 (float64 for
float64 inputs), so does the softmax, and every stored intermediate (S, P, dP, dS, O) is rounded to the input dtype.
Both work on the device of their inputs, in chunks over batch and kv heads. Shapes are those of gqa_attn: q [B, Sq, Hq, D],
k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], dout [B, Sq, Hq, Dv], lse and dlse [B, Hq, Sq], sinks [Hq]; with cu_seqlens [T, H, D] and
[Hq, T].

The rule, for each result x:

    max|x - reference| <= 2 * max|eager - reference| + r * max|reference|

with r = 1e-5 (1e-12 for float64), and besides: x is finite where the reference is, the cosine with the reference is at least
0.999 in every head, and an element that no term goes into (an empty row, a key that no query sees) is exactly 0.

Eager's largest error may be small by luck (down to 0) where it is the largest of few: in results with fewer than TINY elements,
and in problems, or packed sequences, with fewer than TINY pairs of a query and a key that see each other, over all query heads,
fewer than TINY elements of the result (but lse), or fewer than FEW_ROWS rows, the errors of whose P and delta all their
gradients share. There, more is allowed, u being the unit roundoff of the input dtype: u/8 times the largest sum of absolute
terms, and the rounding of the result itself, u * max|reference|; and cosines, which hang on a few roundings, are left out. In
larger ones such a sum outgrows all rounding errors and would hide real ones. Cosines are also left out in heads of fewer than
FEW_ROWS rows where u/8 times the terms would turn the result further than the rule allows: sums that all but cancel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
MIN_COSINE = 0.999
TINY = 2048
FEW_ROWS = 64  # query rows, over all query heads
CHUNK_ELEMENTS = 1 << 26  # of one score matrix; float64 reference and terms need about ten of them


class Results(NamedTuple):
    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None


HEAD_DIM_INDEX = {"out": -2, "lse": -2, "dq": -2, "dk": -2, "dv": -2, "dsinks": None}


def visible(seqlen_q, seqlen_k, causal=False, window=(-1, -1), device="cpu"):
    """bool [Sq, Sk]: row i sees keys i + off - left ... i + off + right, off = Sk - Sq; -1 = no limit; causal: right = 0."""
    row = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None]
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen


def reference(q, k, v, dout=None, dlse=None, scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None,
              cu_seqlens_q=None, cu_seqlens_k=None) -> Results:
    """Float64 results; gradients where dout is given (dlse alone: pass a zero dout)."""
    return _evaluate(q, k, v, dout, dlse, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, torch.float64)[0]


def eager(q, k, v, dout=None, dlse=None, scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None,
          cu_seqlens_q=None, cu_seqlens_k=None) -> Results:
    """The same with every stored intermediate rounded to q's dtype, and results in the dtypes of gqa_attn."""
    return _evaluate(q, k, v, dout, dlse, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, q.dtype)[0]


def absolute_terms(q, k, v, dout=None, dlse=None, scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None,
                   cu_seqlens_q=None, cu_seqlens_k=None) -> Results:
    """For each element of `reference` the sum of the absolute values of the terms that it is made of."""
    return _evaluate(q, k, v, dout, dlse, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, torch.float64)[1]


def assert_matches(results, q, k, v, dout=None, dlse=None, *, names=None, **options):
    """Holds every result that is given (or only `names`) against the rule above; options as those of `reference`.

    One AssertionError lists everything that failed: the quantity, its error and limit, and the worst element.
    """
    expected, terms = _evaluate(q, k, v, dout, dlse, *_positional(options), torch.float64)
    in_dtype, _ = _evaluate(q, k, v, dout, dlse, *_positional(options), q.dtype)
    tiny = _tiny(q, k, v, *_positional(options))
    failures = []
    for name in names or [name for name in Results._fields if getattr(results, name) is not None]:
        quantity = (getattr(each, name) for each in (results, expected, in_dtype, terms))
        try:
            assert_close_to_float64(name, *quantity, q.dtype, getattr(tiny, name))
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, "\n".join(failures)


def assert_close_to_float64(name, actual, expected, in_dtype, terms, dtype, tiny=torch.tensor(False)):
    """The rule for one quantity: `expected` and `terms` in float64, `in_dtype` eager's, all shaped as `actual`; dtype of q.

    tiny, broadcast to their shape: which elements are of problems in which eager's error says little.
    """
    assert actual is not None, f"{name}: no result"
    assert expected is not None, f"{name}: no reference without dout"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == in_dtype.dtype, f"{name}: dtype {actual.dtype}, expected {in_dtype.dtype}"
    if actual.numel() == 0:
        return
    actual, in_dtype = actual.detach().double(), in_dtype.double()
    infinite = torch.isinf(expected)  # lse of rows that see no key
    assert torch.equal(actual[infinite], expected[infinite]), f"{name}: not -inf in every row that sees no key"
    actual, expected, in_dtype = (x.masked_fill(infinite, 0) for x in (actual, expected, in_dtype))
    not_finite = int((~torch.isfinite(actual)).sum())
    assert not not_finite, f"{name}: {not_finite} of {actual.numel()} elements are not finite"
    assert torch.isfinite(in_dtype).all(), f"{name}: eager itself is not finite, so there is nothing to compare with"
    if name != "lse":
        unfounded = (terms == 0) & (actual != 0)
        assert not unfounded.any(), f"{name}: {int(unfounded.sum())} elements that no term goes into are not 0"

    error = (actual - expected).abs()
    eager_error = (in_dtype - expected).abs().max().item()
    largest = expected.abs().max().item()
    tiny = (tiny.to(error.device) | torch.tensor(actual.numel() < TINY, device=error.device)).expand_as(error)
    floor = UNIT_ROUNDOFF[dtype] * ((terms * tiny).max().item() / 8 + (expected * tiny).abs().max().item())
    limit = 2 * eager_error + (1e-12 if dtype == torch.float64 else 1e-5) * largest
    excess = error - limit - floor * tiny
    at = tuple(int(x) for x in torch.unravel_index(excess.argmax(), error.shape))
    assert excess.max().item() <= 0, (
        f"{name}: error {error[at].item():.3e} is over {limit:.3e} (eager's {eager_error:.3e}) + "
        f"{floor * tiny[at].item():.3e}, "
        f"largest value {largest:.3e}, in {int((excess > 0).sum())} of {error.numel()} elements; "
        f"worst at {at}: {actual[at].item():.6e}, expected {expected[at].item():.6e}"
    )
    if HEAD_DIM_INDEX[name] is not None and not tiny.all():
        ours, eagers = (_cosine_per_head(x, expected, HEAD_DIM_INDEX[name]) for x in (actual, in_dtype))
        # A head where eager itself is off holds rounding noise only (dq of a single key is 0 in exact arithmetic).
        wrong = (ours < MIN_COSINE) & (eagers > (1 + MIN_COSINE) / 2)
        if actual.numel() < FEW_ROWS * wrong.numel() * (1 if name == "lse" else actual.shape[-1]):
            terms, expected = (x.movedim(HEAD_DIM_INDEX[name], 0).flatten(1).norm(dim=1) for x in (terms, expected))
            wrong &= UNIT_ROUNDOFF[dtype] / 8 * terms < (2 * (1 - MIN_COSINE)) ** 0.5 * expected
        assert not wrong.any(), f"{name}: cosine {ours[wrong].min().item():.6f} in heads {wrong.nonzero().flatten().tolist()}"


def _cosine_per_head(x, expected, head_dim_index):
    x, expected = (t.movedim(head_dim_index, 0).flatten(1) for t in (x, expected))
    return torch.where(expected.norm(dim=1) > 0, torch.cosine_similarity(x, expected, dim=1, eps=1e-300), 1.0)


def _positional(options):
    defaults = dict(scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None)
    unknown = set(options) - set(defaults)
    assert not unknown, f"unknown options {unknown}"
    return (defaults | options).values()


def _tiny(q, k, v, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k):
    """Results of bool, to be broadcast: which elements belong to a problem or sequence that is tiny as the rule above says."""
    batch, heads, kv_heads = q.shape[0] if cu_seqlens_q is None else 1, q.shape[-2], k.shape[-2]

    def tiny_one(seqlen_q, seqlen_k):
        rows_q, rows_k = batch * heads * seqlen_q, batch * kv_heads * seqlen_k
        whole = rows_q < FEW_ROWS or batch * heads * int(visible(seqlen_q, seqlen_k, causal, window).sum()) < TINY
        elements = dict(out=rows_q * v.shape[-1], dq=rows_q * q.shape[-1], dk=rows_k * k.shape[-1], dv=rows_k * v.shape[-1])
        return {name: torch.tensor(whole or elements.get(name, TINY) < TINY) for name in Results._fields}

    if cu_seqlens_q is None:
        return Results(**tiny_one(q.shape[1], k.shape[1]))
    sides = {name: 1 if name in ("dk", "dv") else 0 for name in Results._fields}
    tiny = {name: torch.ones((q, k)[side].shape[0], dtype=torch.bool) for name, side in sides.items()}
    bounds = [each.tolist() for each in (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)]
    for starts, ends in zip(zip(*bounds), zip(*(each[1:] for each in bounds))):
        for name, value in tiny_one(*(end - start for start, end in zip(starts, ends))).items():
            tiny[name][starts[sides[name]]:ends[sides[name]]] = value
    rows = {name: tiny[name][:, None, None] for name in ("out", "dq", "dk", "dv")}
    return Results(**rows, lse=tiny["lse"], dsinks=tiny["dsinks"].all())


def _evaluate(q, k, v, dout, dlse, scale, causal, window, softcap, sinks, cu_seqlens_q, cu_seqlens_k, dtype):
    """(results, absolute terms or None): float64 results and terms for dtype float64, else results rounded to `dtype`."""
    q, k, v, dout, dlse, sinks = (None if t is None else t.detach() for t in (q, k, v, dout, dlse, sinks))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = (scale, causal, window, softcap, dtype)
    if cu_seqlens_q is None:
        return _dense(q, k, v, dout, dlse, sinks, *options)

    bounds_q, bounds_k = cu_seqlens_q.tolist(), (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).tolist()
    whole_results, whole_terms = (_zeros_packed(q, k, v, dout, sinks, dtype, lse) for lse in (float("-inf"), 0.0))
    for q0, q1, k0, k1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        part = [q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], None if dout is None else dout[None, q0:q1]]
        part_dlse = None if dlse is None else dlse[None, :, q0:q1]
        for whole, piece in zip((whole_results, whole_terms), _dense(*part, part_dlse, sinks, *options)):
            whole.out[q0:q1], whole.lse[:, q0:q1] = piece.out[0], piece.lse[0]
            if dout is not None:
                whole.dq[q0:q1], whole.dk[k0:k1], whole.dv[k0:k1] = piece.dq[0], piece.dk[0], piece.dv[0]
                whole.dsinks.add_(piece.dsinks)
    return whole_results, whole_terms


def _zeros_packed(q, k, v, dout, sinks, dtype, lse):
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = q.new_full(q.shape[-2::-1], lse, dtype=_wide(dtype))
    if dout is None:
        return Results(out, lse)
    dsinks = (q.new_zeros(0, dtype=torch.float32) if sinks is None else
              sinks.new_zeros(sinks.shape, dtype=_of_sinks(sinks, dtype)))
    return Results(out, lse, *(t.new_zeros(t.shape, dtype=dtype) for t in (q, k, v)), dsinks)


def _dense(q, k, v, dout, dlse, sinks, scale, causal, window, softcap, dtype):
    (batch, seqlen_q, heads), (seqlen_k, kv_heads) = q.shape[:3], k.shape[1:3]
    group, wide = heads // kv_heads, _wide(dtype)
    seen = visible(seqlen_q, seqlen_k, causal, window, q.device)

    def by_query_head(x):  # [B, S, Hq, d] -> [B * Hk, G, S, d]
        return x.to(wide).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def by_kv_head(x):  # [B, S, Hk, d] -> [B * Hk, S, d]
        return x.to(wide).transpose(1, 2).flatten(0, 1)

    def per_row(x):  # [B, Hq, S] -> [B * Hk, G, S]
        return x.to(wide).unflatten(1, (kv_heads, group)).flatten(0, 1)

    inputs = [by_query_head(q), by_kv_head(k), by_kv_head(v)]
    inputs += [None if dout is None else by_query_head(dout), None if dlse is None else per_row(dlse)]
    sink = torch.full((heads,), float("-inf"), device=q.device) if sinks is None else sinks
    inputs.append(sink.to(wide).view(kv_heads, group).repeat(batch, 1))
    size = max(1, CHUNK_ELEMENTS // max(1, group * seqlen_q * seqlen_k))
    # At least one chunk, so that empty problems go the same way.
    starts = range(0, max(1, batch * kv_heads), size)
    chunks = [_chunk(*(None if x is None else x[at:at + size] for x in inputs), seen, scale, softcap, dtype) for at in starts]

    def whole(pieces):
        joined = [None if p[0] is None else torch.cat(p) for p in zip(*pieces)]
        by_head = [None if x is None else x.unflatten(0, (batch, kv_heads)) for x in joined]
        out, lse, dq, dk, dv, dsink = by_head

        def tokens_first(x):
            return x.permute(0, 3, 1, 2, 4).flatten(2, 3)

        out, lse = tokens_first(out).to(dtype), lse.flatten(1, 2)
        if dout is None:
            return Results(out, lse)
        dsinks = q.new_zeros(0, dtype=torch.float32) if sinks is None else dsink.sum(0).flatten().to(_of_sinks(sinks, dtype))
        return Results(out, lse, tokens_first(dq).to(dtype), dk.transpose(1, 2).to(dtype), dv.transpose(1, 2).to(dtype), dsinks)

    results, terms = zip(*chunks)
    return whole(results), whole(terms)


def _chunk(q, k, v, dout, dlse, sink, seen, scale, softcap, dtype):
    """Results and absolute terms for q, dout [N, G, Sq, .], k, v [N, Sk, .], dlse [N, G, Sq], sink [N, G] (-inf = none)."""
    def stored(x):
        return x.to(dtype).to(x.dtype)

    def times_kv(x, y):  # [N, G, Sq, a] with [N, a, b]
        return (x.flatten(1, 2) @ y).unflatten(1, x.shape[1:3])

    def over_group(x, y):  # [N, G, Sq, a], [N, G, Sq, b] -> [N, a, b]
        return x.flatten(1, 2).mT @ y.flatten(1, 2)

    empty = ~seen.any(1)
    scores, slope = stored(scale * times_kv(q, k.mT)), 1.0
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, slope = stored(softcap * tanh), 1 - tanh**2
    sink = sink[..., None]
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.cat([scores, sink[..., None].expand(*scores.shape[:3], 1)], -1).logsumexp(-1)
    finite_lse = lse.masked_fill(lse == float("-inf"), 0)
    probs = stored(torch.exp(scores - finite_lse[..., None]))
    out = stored(times_kv(probs, v))
    out_terms = times_kv(probs, v.abs())
    reach = times_kv(q.abs(), k.abs().mT).masked_fill(~seen, 0) * abs(scale)
    lse_terms = torch.cat([reach, sink.abs().nan_to_num(posinf=0)[..., None].expand(*scores.shape[:3], 1)], -1).amax(-1)
    if dout is None:
        return (out, lse, *[None] * 4), (out_terms, lse_terms, *[None] * 4)

    dout = dout.masked_fill(empty[:, None], 0)  # such a row adds nothing, whatever arrives there
    dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(empty & torch.isinf(sink), 0)
    sink_probs = torch.exp(sink - finite_lse)
    delta = (dout * out).sum(-1) - dlse
    dscores = stored(probs * (stored(times_kv(dout, v.mT)) - delta[..., None]) * slope * scale)
    delta_terms = (dout * out).abs().sum(-1) + dlse.abs()
    dscores_terms = probs * (times_kv(dout.abs(), v.abs().mT) + delta_terms[..., None]) * slope * abs(scale)
    gradients = times_kv(dscores, k), over_group(dscores, q), over_group(probs, dout), -(sink_probs * delta).sum(-1)
    terms = (times_kv(dscores_terms, k.abs()), over_group(dscores_terms, q.abs()), over_group(probs, dout.abs()),
             (sink_probs * delta_terms).sum(-1))
    return (out, lse, *gradients), (out_terms, lse_terms, *terms)


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_sinks(sinks, dtype):
    return torch.float64 if dtype == torch.float64 else sinks.dtype
