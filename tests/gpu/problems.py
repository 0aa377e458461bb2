"""The problems of the GPU tests, as data, and how their inputs are made."""
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # problems and checks hold for both, so they can be tried without a GPU

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
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: str | None = None  # "float32", "same" (the dtype of q) or "absent" (every other one is -inf)
    dout: bool = True  # False: zeros, so that every gradient comes through lse
    deterministic: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None  # queries and keys of packed sequences, instead of batch and seqlens
    tail: int = 0  # rows behind the last sequence

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        dv = self.head_dim if self.head_dim_v is None else self.head_dim_v
        if self.lengths is None:
            tokens_q = (self.batch, self.seqlen_q)
            tokens_k = (self.batch, self.seqlen_q if self.seqlen_k is None else self.seqlen_k)
        else:
            tokens_q, tokens_k = ((bounds[-1] + self.tail,) for bounds in self.bounds)
        return {"q": (*tokens_q, self.heads, self.head_dim), "k": (*tokens_k, self.kv_heads, self.head_dim),
                "v": (*tokens_k, self.kv_heads, dv), "dout": (*tokens_q, self.heads, dv)}

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """cu_seqlens of queries and keys; of a dense problem those of one batch element."""
        lengths = ((self.shapes["q"][1], self.shapes["k"][1]),) if self.lengths is None else self.lengths
        return [0, *accumulate(q for q, _ in lengths)], [0, *accumulate(k for _, k in lengths)]

    @property
    def empty_rows(self) -> list[int]:
        """Query rows (of every batch element) that see no key: the leading ones of each sequence."""
        right = 0 if self.causal else self.window[1]
        rows = []
        for q0, q1, k0, k1 in zip(*(each for bounds in self.bounds for each in (bounds, bounds[1:]))):
            hidden = q1 - q0 if k0 == k1 else max(0, (q1 - q0) - (k1 - k0) - right) if right >= 0 else 0
            rows += range(q0, min(q1, q0 + hidden))
        return rows

    def __str__(self) -> str:
        """What differs from the defaults, for test names; pytest's -k takes colons."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.lengths is not None and len(self.lengths) > 8:
            given["lengths"] = f"{len(self.lengths)} sequences"
        return "-".join(f"{name}:{value}" for name, value in given.items())

    def inputs(self, seed: int, layout: Callable = contiguous, only: tuple[str, ...] = ("q", "k", "v", "dout")) -> "Inputs":
        """Random tensors; `layout` is for those named in `only`. What must not be read holds NaN."""
        return self.inputs_laid_out(seed, dict.fromkeys(only, layout))

    def inputs_laid_out(self, seed: int, layouts: Mapping[str, Callable]) -> "Inputs":
        """`inputs` with a layout for each tensor."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        dtype = getattr(torch, self.dtype)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=DEVICE)

        def tensor(name, shape):
            factor = self.factor if name == "q" else float(self.dout) if name == "dout" else 1.0
            shape_4d = shape if len(shape) == 4 else (1, *shape)
            whole = layouts.get(name, contiguous)(lambda *shape: (factor * normal(*shape)).to(dtype), shape_4d)
            return whole if len(shape) == 4 else whole[0]

        x = {name: tensor(name, shape) for name, shape in self.shapes.items()}
        *first, seqlen_q, heads, _ = x["q"].shape
        x["dlse"] = normal(*first, heads, seqlen_q) if self.dlse else None
        x["sinks"] = None if self.sinks is None else 2 * normal(heads)
        if self.sinks == "absent":
            x["sinks"][::2] = float("-inf")
        elif self.sinks == "same":
            x["sinks"] = x["sinks"].to(dtype)
        if self.lengths is not None:
            bounds = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in self.bounds)
            x["cu_seqlens_q"], x["cu_seqlens_k"] = bounds
        return self._with_nan_where_nothing_reads(Inputs(**x, scale=self.scale, causal=self.causal, window=self.window,
                                                         softcap=self.softcap, deterministic=self.deterministic))

    def _with_nan_where_nothing_reads(self, x: "Inputs") -> "Inputs":
        """dout and dlse of rows that see no key; every tensor behind the last sequence."""
        def fill(tensor, dim, rows):
            tensor = tensor.clone() if 0 in tensor.stride() else tensor  # elements that share memory would all get it
            return tensor.index_fill_(dim, torch.tensor(rows, device=DEVICE, dtype=torch.int64), float("nan"))

        behind = {name: list(range(self.shapes[name][0] - self.tail, self.shapes[name][0])) for name in self.shapes}
        for name in ("q", "k", "v"):
            if self.tail:
                setattr(x, name, fill(getattr(x, name), 0, behind[name]))
        unread = self.empty_rows + (behind["dout"] if self.tail else [])
        if unread:
            x.dout = fill(x.dout, -3, unread)
        if unread and x.dlse is not None:
            hidden = torch.zeros(x.dlse.shape[-2:], device=DEVICE, dtype=torch.bool)
            # Where a head has a sink, dlse of its empty rows is the sink's gradient.
            hidden[:, self.empty_rows] = True if x.sinks is None else torch.isinf(x.sinks)[:, None]
            hidden[:, behind["dout"] if self.tail else []] = True
            x.dlse = x.dlse.masked_fill(hidden, float("nan"))
        return x


@dataclass
class Inputs:
    """One call: q, k, v, dout [batch, seqlen, heads, head_dim], dlse [batch, heads, seqlen_q]; packed ones have no batch."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    deterministic: bool = False

    @property
    def options(self) -> dict:
        """What forward, backward and reference share, by the names of the reference."""
        names = ("scale", "causal", "window", "softcap", "sinks", "cu_seqlens_q", "cu_seqlens_k")
        return {name: getattr(self, name) for name in names}

    @property
    def arguments(self) -> dict:
        """The same as the ops name them."""
        options = self.options
        left, right = options.pop("window")
        return options | {"window_left": left, "window_right": right}

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, by the op."""
        return torch.ops.gqa_attn.fwd(self.q, self.k, self.v, **self.arguments)

    def backward(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv and dsinks, by the op."""
        return torch.ops.gqa_attn.bwd(self.dout, self.q, self.k, self.v, out, lse, self.dlse, **self.arguments,
                                      deterministic=self.deterministic)


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
