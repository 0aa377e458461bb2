"""What options and layouts cost against the plain call, on one GPU:  python benchmarks/options.py

Each comparison is one interleaved run of both sides. Prints ratios with their bars and writes options.json; exit code 1 where
a bar is missed or a comparison could not be measured. Takes less than a minute.
"""
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from gqa_attn import _bench
from gqa_attn._timing import PHASES, Calls, Case, first_line
from kit import BF16, CASES, F16, facts, median_ms, op_calls, parser_with_common_arguments

Timer = Callable[[dict], dict]  # of calls: their times in ms
MATMUL_SIZE = 8192
COPY_BYTES = 1 << 30
SHORT_QUERIES = [(batch, seqlen_q, 16384) for batch in (16, 1) for seqlen_q in (1, 16, 64)]  # and seqlen_k


@dataclass(frozen=True)
class Bar:
    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high

    def __str__(self) -> str:
        limits = [f"{sign} {limit}" for sign, limit in ((">=", self.low), ("<=", self.high)) if math.isfinite(limit)]
        return ", ".join(limits) or "none"


@dataclass(frozen=True)
class Row:
    what: str
    ratio: float
    bar: Bar = field(default_factory=Bar)

    def __str__(self) -> str:
        ok = "-" if self.bar == Bar() else "yes" if self.ratio in self.bar else "NO"
        return f"{self.what:58}{self.ratio:7.3f}  {str(self.bar):18}{ok}"


HEADER = f"{'what':58}{'ratio':>7}  {'bar':18}ok"


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    calls: Calls
    work: float = 1.0  # in a unit that both sides share


def costs(timer: Timer, reference: Side, others: dict[str, Side], phases: tuple[str, ...] = PHASES) -> dict[str, float]:
    """Time per work as a multiple of the reference's, by name and phase."""
    sides = {"reference": reference} | others
    ms = timer({(name, phase): side.calls[phase] for name, side in sides.items() for phase in phases})
    per_work = {(name, phase): time / sides[name].work for (name, phase), time in ms.items()}
    return {f"{name} {phase}": per_work[name, phase] / per_work["reference", phase] for name in others for phase in phases}


def rows(found: dict[str, float], bar: Bar) -> Iterator[Row]:
    return (Row(what, ratio, bar) for what, ratio in found.items())


def named(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in names]


def plain(case: Case, **changes) -> Side:
    """The case with other sizes or another dtype; its work is that of the forward, to which the backward's is proportional."""
    case = replace(case, **changes)
    return Side(op_calls(*case.tensors(), causal=case.causal), case.flops("fwd"))


def rectangular(case: Case, seqlen_q: int, seqlen_k: int) -> list[torch.Tensor]:
    """q, k, v and dout of the case with lengths of their own for queries and keys."""
    q, _, _, dout = replace(case, seqlen=seqlen_q).tensors()
    _, k, v, _ = replace(case, seqlen=seqlen_k).tensors()
    return [q, k, v, dout]


def window(timer: Timer) -> Iterator[Row]:
    """Time against causal."""
    for case in named("llama8b_16k"):
        x = case.tensors()
        limited = {f"window 1023, {case.name}": Side(op_calls(*x, causal=True, window_left=1023))}
        yield from rows(costs(timer, Side(op_calls(*x, causal=True)), limited), Bar(high=0.2))


def packed_equal_lengths(timer: Timer) -> Iterator[Row]:
    """Time against the dense call on the same memory."""
    for case in named("llama8b_512", "llama8b_4k", "llama8b_4k_full", "d64_2k"):
        x = case.tensors()
        batch, seqlen = x[0].shape[:2]
        packed = Side(packed_calls(x, [seqlen] * batch, case.causal))
        yield from rows(costs(timer, Side(op_calls(*x, causal=case.causal)), {f"packed, equal lengths, {case.name}": packed}),
                        Bar(high=1.05))


def packed_mix(timer: Timer) -> Iterator[Row]:
    """TFLOPS against dense sequences of one length with about as many tokens and FLOPs."""
    for tokens in (16384, 65536):
        lengths = mixed_lengths(tokens)
        case = Case("mix", 1, tokens, 32, 8, 128, 128, True, BF16)
        work = sum(replace(case, seqlen=length).flops("fwd") for length in lengths)
        mix = Side(packed_calls(case.tensors(), lengths, case.causal), work)
        batch, seqlen = dense_like(lengths)
        what = f"TFLOPS, packed mix, {tokens} tokens, dense {batch} x {seqlen}"
        found = costs(timer, plain(case, batch=batch, seqlen=seqlen), {what: mix})
        yield from rows({name: 1 / cost for name, cost in found.items()}, Bar(low=0.9))


def packed_calls(x: list[torch.Tensor], lengths: list[int], causal: bool) -> Calls:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(x[0].device, torch.int32)
    return op_calls(*(tensor.flatten(0, 1) for tensor in x), causal=causal, cu_seqlens_q=ends, cu_seqlens_k=ends)


def mixed_lengths(tokens: int) -> list[int]:
    """Lognormal like those of documents and chats: median 600, mean about 1,000; the same in every run."""
    draw, lengths = random.Random(0), []
    while left := tokens - sum(lengths):
        lengths.append(min(left, max(16, round(draw.lognormvariate(math.log(600), 1.0)))))
    return lengths


def dense_like(lengths: list[int]) -> tuple[int, int]:
    """Batch and seqlen, a multiple of 128: batch * seqlen is near the tokens, batch * seqlen**2 near the sum of squares."""
    tokens = sum(lengths)
    batch = max(1, round(tokens**2 / sum(length**2 for length in lengths)))
    return batch, max(1, round(tokens / batch / 128)) * 128


def deterministic(timer: Timer) -> Iterator[Row]:
    """Time of the backward against the default one."""
    found = {}
    for case in CASES:
        x = case.tensors()
        other = Side(op_calls(*x, causal=case.causal, deterministic=True))
        found |= costs(timer, Side(op_calls(*x, causal=case.causal)), {f"deterministic, {case.name}": other}, ("bwd",))
    yield from rows(found, Bar())
    yield Row("deterministic, geometric mean", statistics.geometric_mean(found.values()), Bar(high=1.08))


def softcap_and_sinks(timer: Timer) -> Iterator[Row]:
    """Time against the same call without."""
    for case in named("llama8b_4k", "d64_2k", "d256_8k"):
        x = case.tensors()
        sinks = torch.randn(case.heads, device=x[0].device)
        others = {f"softcap, {case.name}": Side(op_calls(*x, causal=case.causal, softcap=50.0)),
                  f"sinks, {case.name}": Side(op_calls(*x, causal=case.causal, sinks=sinks))}
        yield from rows(costs(timer, Side(op_calls(*x, causal=case.causal)), others), Bar())


def dtypes(timer: Timer) -> Iterator[Row]:
    """The share of a large matrix product's TFLOPS that float16 reaches, against bfloat16's share of its own."""
    for case in named("llama8b_4k", "llama8b_4k_full", "d64_2k"):
        calls = {}
        for dtype in (F16, BF16):
            x = replace(case, dtype=dtype).tensors()
            matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=x[0].device, dtype=dtype)
            of_dtype = op_calls(*x, causal=case.causal) | {"matmul": partial(torch.matmul, matrix, matrix)}
            calls |= {(dtype, name): call for name, call in of_dtype.items()}
        ms = timer(calls)
        for phase in PHASES:
            float16, bfloat16 = (ms[dtype, "matmul"] / ms[dtype, phase] for dtype in (F16, BF16))
            yield Row(f"share of matmul, fp16 / bf16, {case.name} {phase}", float16 / bfloat16, Bar(0.95, 1.05))


def strided(timer: Timer) -> Iterator[Row]:
    """q, k and v as slices of one packed tensor [B, S, Hq + 2 Hk, D]: time against contiguous ones."""
    for case in named("llama8b_4k", "llama8b_4k_full", "d64_2k"):
        *qkv, dout = case.tensors()
        slices = torch.cat(qkv, 2).split([each.shape[2] for each in qkv], 2)
        other = Side(op_calls(*slices, dout, causal=case.causal))
        found = costs(timer, Side(op_calls(*qkv, dout, causal=case.causal)), {f"slices of packed qkv, {case.name}": other})
        yield from rows(found, Bar(high=1.05))


def lengths(timer: Timer) -> Iterator[Row]:
    """Time per FLOP against S = 4096."""
    for case in named("llama8b_4k", "llama8b_4k_full"):
        others = {f"S {seqlen}, {case.name}": plain(case, seqlen=seqlen) for seqlen in (4000, 4095, 4097)}
        if not case.causal:  # as many pairs of a query and a key
            for seqlen_q, seqlen_k in ((2048, 8192), (8192, 2048)):
                x = rectangular(case, seqlen_q, seqlen_k)
                others[f"Sq {seqlen_q}, Sk {seqlen_k}, {case.name}"] = Side(op_calls(*x), case.flops("fwd"))
        yield from rows(costs(timer, plain(case), others), Bar(high=1.05))


def short_queries(timer: Timer) -> Iterator[Row]:
    """Bytes of q, k, v and out per time against a copy's, which moves each byte twice, at 32:8 heads and d128."""
    for batch, seqlen_q, seqlen_k in SHORT_QUERIES:
        *qkv, dout = rectangular(Case("", batch, seqlen_k, 32, 8, 128, 128, True, BF16), seqlen_q, seqlen_k)
        moved = sum(each.numel() * each.element_size() for each in (*qkv, dout))
        source = torch.empty(COPY_BYTES, dtype=torch.int8, device=dout.device)
        ms = timer({"fwd": partial(torch.ops.gqa_attn.fwd, *qkv, causal=True),
                    "copy": partial(torch.empty_like(source).copy_, source)})
        share = moved / ms["fwd"] / (2 * source.numel() / ms["copy"])
        what = f"share of copy bandwidth, B {batch} Sq {seqlen_q} Sk {seqlen_k} fwd"
        yield Row(what, share, Bar(low=0.8) if (batch, seqlen_q) == (16, 1) else Bar())


COMPARISONS = (window, packed_equal_lengths, packed_mix, deterministic, softcap_and_sinks, dtypes, strided, lengths,
               short_queries)


def measure(timer: Timer) -> tuple[list[Row], list[str]]:
    """Prints each row when it is known. Returns them all, and why some are missing."""
    print(HEADER)
    found, reasons = [], []
    for comparison in COMPARISONS:
        try:
            for row in comparison(timer):
                print(row, flush=True)
                found.append(row)
        except Exception as error:
            reasons.append(f"{comparison.__name__}: {first_line(error)}")
    return found, reasons


def main() -> int:
    args = parser_with_common_arguments(__doc__, rounds=41).parse_args()
    _bench.require_gpu()
    record = facts(args.commit)
    found, reasons = measure(partial(median_ms, rounds=args.rounds))
    print(*reasons, sep="\n")
    as_dicts = [{"what": row.what, "ratio": row.ratio, "bar": str(row.bar), "ok": row.ratio in row.bar} for row in found]
    record |= {"rounds": args.rounds, "rows": as_dicts, "not_measured": reasons}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "options.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}")
    return 1 if reasons or any(row.ratio not in row.bar for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
