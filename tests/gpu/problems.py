"""The problems of the GPU tests, as data, and how their inputs are made."""
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

TUNED = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
UNTUNED = [(40, 40), (72, 72), (80, 80), (104, 104), (112, 112), (160, 160), (1, 1), (33, 33), (129, 128), (64, 128), (128, 64),
           (256, 64), (65, 40), (72, 64), (96, 128), (200, 256)]
DTYPES = ["float16", "bfloat16"]

SQUARE = [1, 2, 63, 64, 65, 127, 128, 129, 257, 1000]
RECTANGULAR = [(1, 257), (64, 128), (65, 130), (128, 1000), (300, 301),  # fewer queries than keys
               (2, 1), (66, 2), (128, 64), (130, 66), (200, 1), (257, 129), (1000, 300)]  # more: a causal mask empties rows
HEADS = [(1, 1), (4, 4), (8, 2), (12, 3), (7, 1), (10, 5), (32, 2)]


# Ways to lay out a tensor [batch, seqlen, heads, head_dim]; each is given a function that fills a shape.
def contiguous(randn, shape):
    return randn(*shape)


def heads_first(randn, shape):
    b, s, h, d = shape
    return randn(b, h, s, d).transpose(1, 2)


def seqlen_first(randn, shape):
    b, s, h, d = shape
    return randn(s, b, h, d).transpose(0, 1)


def head_slice(randn, shape):
    b, s, h, d = shape
    return randn(b, s, 2 * h + 1, d)[:, :, h : 2 * h]


def column_slice(randn, shape):
    b, s, h, d = shape
    return randn(b, s, h, d + 128)[..., 64 : 64 + d]


def every_other_row(randn, shape):
    b, s, h, d = shape
    return randn(b, 2 * s, h, d)[:, ::2]


def one_batch_expanded(randn, shape):
    b, s, h, d = shape
    return randn(1, s, h, d).expand(b, s, h, d)


def one_head_expanded(randn, shape):
    b, s, h, d = shape
    return randn(b, s, 1, d).expand(b, s, h, d)


def one_scalar_expanded(randn, shape):
    return randn(1).expand(shape)


def misaligned(randn, shape):
    numel = torch.Size(shape).numel()
    return randn(numel + 1)[1:].view(shape)


def odd_row_stride(randn, shape):
    b, s, h, d = shape
    return randn(b, s, h, d + 1)[..., :d]


def last_stride_two(randn, shape):
    b, s, h, d = shape
    return randn(b, s, h, 2 * d)[..., ::2]


LAYOUTS = [heads_first, seqlen_first, head_slice, column_slice, every_other_row, one_batch_expanded, one_head_expanded,
           one_scalar_expanded, misaligned, odd_row_stride, last_stride_two]


@dataclass(frozen=True)
class Problem:
    head_dim: int = 128
    head_dim_v: int | None = None  # head_dim when None
    seqlen_q: int = 128
    seqlen_k: int | None = None  # seqlen_q when None
    causal: bool = False
    dtype: str = "bfloat16"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    scale: float | None = None
    dlse: bool = False
    factor: float = 1.0  # on q, so on the logits

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        dv = self.head_dim if self.head_dim_v is None else self.head_dim_v
        sk = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        return {"q": (self.batch, self.seqlen_q, self.heads, self.head_dim), "k": (self.batch, sk, self.kv_heads, self.head_dim),
                "v": (self.batch, sk, self.kv_heads, dv), "dout": (self.batch, self.seqlen_q, self.heads, dv)}

    @property
    def empty_rows(self) -> int:
        """Leading query rows that see no key."""
        sq, sk = self.shapes["q"][1], self.shapes["k"][1]
        return sq if sk == 0 else max(0, sq - sk) if self.causal else 0

    def __str__(self) -> str:
        """What differs from the defaults, for test names; pytest's -k takes colons."""
        return "-".join(f"{f.name}:{getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)

    def inputs(self, seed: int, layout: Callable = contiguous, only: tuple[str, ...] = ("q", "k", "v", "dout")) -> "Inputs":
        """Random tensors on the GPU; `layout` is for those named in `only`."""
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, device="cuda").to(getattr(torch, self.dtype))

        x = {name: (layout if name in only else contiguous)(randn, shape) for name, shape in self.shapes.items()}
        x["q"] = x["q"].mul_(self.factor) if self.factor != 1 else x["q"]
        dlse = torch.randn(self.batch, self.heads, self.seqlen_q, generator=generator, device="cuda") if self.dlse else None
        if self.empty_rows:  # whatever arrives at rows that see no key must not be read
            x["dout"] = x["dout"].clone()
            x["dout"][:, : self.empty_rows] = float("nan")
            if dlse is not None:
                dlse[..., : self.empty_rows] = float("nan")
        return Inputs(**x, dlse=dlse, scale=self.scale, causal=self.causal)


@dataclass
class Inputs:
    """One call: q, k, v, dout [batch, seqlen, heads, head_dim], dlse [batch, heads, seqlen_q] or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    scale: float | None = None
    causal: bool = False


def correctness_problems() -> list[Problem]:
    """Every dtype x head dims x causal, walking through the lengths, the head ratios and dlse so that all meet all in turn."""
    lengths = [(s, s) for s in SQUARE] + RECTANGULAR
    found, step = [], 0
    for dims in TUNED + UNTUNED:
        for dtype in DTYPES:
            for causal in (False, True):
                for i, (sq, sk) in enumerate(lengths):
                    if dims not in TUNED and (i + step) % 4:
                        continue
                    heads, kv_heads = HEADS[(i + step) % len(HEADS)]
                    found.append(Problem(*dims, sq, sk, causal, dtype, batch=1 + (i + step) % 3, heads=heads, kv_heads=kv_heads,
                                         dlse=(i + step) % 2 == 0))
                step += 1
    return found


def corner_problems() -> list[Problem]:
    """Every dtype x tuned head dims x causal with what the walk above leaves at its default; empty sizes."""
    found = []
    for dims in TUNED:
        for dtype in DTYPES:
            for causal in (False, True):
                common = dict(head_dim=dims[0], head_dim_v=dims[1], causal=causal, dtype=dtype, dlse=True)
                found += [Problem(**common, seqlen_q=130, scale=scale) for scale in (0.3, -0.11, 0.0)]
                found += [Problem(**common, seqlen_q=201, seqlen_k=200, factor=20.0),
                          Problem(**common, seqlen_q=190, seqlen_k=190, heads=32, kv_heads=2, batch=1)]
        causal = dims[0] % 128 == 0
        found += [Problem(*dims, 0, 5, causal), Problem(*dims, 5, 0, causal), Problem(*dims, 5, 5, causal, batch=0),
                  Problem(*dims, 0, 0, causal), Problem(*dims, 5, 0, causal, dlse=True)]
    return found
