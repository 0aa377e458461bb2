"""One call of the ops: memory poisoned before it, every output looked at, values held against float64."""
import gqa_attn  # noqa: F401  registers the ops
import torch
from problems import Inputs
from reference import Results, assert_matches


def poison() -> None:
    """Fills what the caching allocator hands out next with NaN, so that an element left unwritten shows.

    Blocks up to 1 MB, up to 10 MB and above come from separate pools, and the allocator takes the smallest free block that fits.
    """
    sizes = [1 << 30] + 4 * [64 << 20] + 8 * [16 << 20] + 8 * [4 << 20] + 8 * [1 << p for p in range(20, 8, -1)]
    held = [torch.empty(size // 4, device="cuda") for size in sorted(sizes, reverse=True)]
    torch._foreach_add_(held, float("nan"))


def forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    poison()
    return torch.ops.gqa_attn.fwd(x.q, x.k, x.v, x.scale, x.causal)


def backward(x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and the empty dsinks."""
    poison()
    return torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse, x.scale, x.causal)


def run(x: Inputs) -> Results:
    """Forward and backward, with what the contract says of every output's shape, dtype and strides."""
    out, lse = forward(x)
    got = Results(out, lse, *backward(x, out, lse))
    batch, seqlen_q, heads, _ = x.q.shape
    shapes = Results((batch, seqlen_q, heads, x.v.shape[-1]), (batch, heads, seqlen_q), x.q.shape, x.k.shape, x.v.shape, (0,))
    for name, tensor, shape in zip(Results._fields, got, shapes):
        assert tensor.shape == shape, name
        assert tensor.dtype == (torch.float32 if name in ("lse", "dsinks") else x.q.dtype), name
        assert tensor.is_contiguous(), name
    return got


def check(x: Inputs, got: Results) -> None:
    """The tolerance rule of reference.py, for everything that `got` holds."""
    assert_matches(got, x.q, x.k, x.v, x.dout, x.dlse, scale=x.scale, causal=x.causal)


def assert_same(got: Results, expected: Results, names=("out", "lse", "dk", "dv")) -> None:
    """Bitwise equal. dq is left out by default: its terms are added in the order in which blocks get there."""
    for name in names:
        assert torch.equal(getattr(got, name), getattr(expected, name)), f"{name} differs"
