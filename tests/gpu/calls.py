"""One call of the ops: memory poisoned before it, every output looked at, values held against float64."""
from collections.abc import Sequence
from dataclasses import replace

import gqa_attn  # noqa: F401  registers the ops
import problems
import torch
from problems import Inputs
from reference import Results, assert_matches


def poison() -> None:
    """Fills what the caching allocator hands out next with NaN, so that an element left unwritten shows.

    Blocks up to 1 MB, up to 10 MB and above come from separate pools; the allocator takes the smallest free block that fits.
    """
    if problems.DEVICE == "cpu":
        return
    sizes = [1 << 30] + 4 * [64 << 20] + 8 * [16 << 20] + 8 * [4 << 20] + 8 * [1 << p for p in range(20, 8, -1)]
    held = [torch.empty(size // 4, device="cuda") for size in sorted(sizes, reverse=True)]
    torch._foreach_add_(held, float("nan"))


def forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    poison()
    return x.forward()


def backward(x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and dsinks."""
    poison()
    return x.backward(out, lse)


def step(x: Inputs) -> Results:
    """Both, queued as fast as it goes: nothing is poisoned or looked at."""
    out, lse = x.forward()
    return Results(out, lse, *x.backward(out, lse))


def run(x: Inputs) -> Results:
    """Forward and backward, with what the contract says of every output's shape, dtype and strides."""
    out, lse = forward(x)
    got = Results(out, lse, *backward(x, out, lse))
    *batch, seqlen_q, heads, _ = x.q.shape
    shapes = Results((*batch, seqlen_q, heads, x.v.shape[-1]), (*batch, heads, seqlen_q), x.q.shape, x.k.shape, x.v.shape,
                     (0,) if x.sinks is None else (heads,))
    dtypes = dict.fromkeys(Results._fields, x.q.dtype) | {"lse": torch.float32}
    dtypes["dsinks"] = torch.float32 if x.sinks is None else x.sinks.dtype
    for name, tensor, shape in zip(Results._fields, got, shapes):
        assert tensor.shape == shape, name
        assert tensor.dtype == dtypes[name], name
        assert tensor.is_contiguous(), name
    return got


def check(x: Inputs, got: Results) -> None:
    """The tolerance rule of reference.py, for everything that `got` holds."""
    assert_matches(got, x.q, x.k, x.v, x.dout, x.dlse, **x.options)


def assert_same(got: Results, expected: Results) -> None:
    """Bitwise equal, all that `got` holds. Of gradients only where deterministic: else blocks add as they get there."""
    for name, result in got._asdict().items():
        assert result is None or torch.equal(result, getattr(expected, name)), f"{name} differs"


def some_sequences(x: Inputs, got: Results, which: Sequence[int]) -> tuple[Inputs, Results]:
    """A packed problem of these sequences only, and their part of the results (dsinks are of all)."""
    lengths, rows = zip(*(_tokens(bounds, which) for bounds in (x.cu_seqlens_q, x.cu_seqlens_k)))
    (rows_q, rows_k), (cu_seqlens_q, cu_seqlens_k) = rows, lengths
    dlse = None if x.dlse is None else x.dlse[:, rows_q]
    part = replace(x, q=x.q[rows_q], k=x.k[rows_k], v=x.v[rows_k], dout=x.dout[rows_q], dlse=dlse, cu_seqlens_q=cu_seqlens_q,
                   cu_seqlens_k=cu_seqlens_k)
    return part, Results(got.out[rows_q], got.lse[:, rows_q], got.dq[rows_q], got.dk[rows_k], got.dv[rows_k])


def _tokens(bounds: torch.Tensor, which: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlens of the chosen sequences, and the rows that they have now."""
    known = bounds.tolist()
    rows = [torch.arange(known[i], known[i + 1], device=bounds.device) for i in which]
    return torch.tensor([0, *map(len, rows)], device=bounds.device).cumsum(0, dtype=torch.int32), torch.cat(rows)


def as_batch(x: Inputs, got: Results, count: int) -> tuple[Inputs, Results]:
    """Packed sequences of equal lengths as the batch of a dense problem, with their results."""
    def rows(tensor):
        return tensor.unflatten(0, (count, -1))

    def per_row(tensor):
        return None if tensor is None else tensor.unflatten(1, (count, -1)).transpose(0, 1)

    dense = replace(x, q=rows(x.q), k=rows(x.k), v=rows(x.v), dout=rows(x.dout), dlse=per_row(x.dlse), cu_seqlens_q=None,
                    cu_seqlens_k=None)
    return dense, Results(rows(got.out), per_row(got.lse), rows(got.dq), rows(got.dk), rows(got.dv), got.dsinks)


def peak_bytes(call) -> int:
    """Memory that a call takes at its peak, its results included, over what was there before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before
