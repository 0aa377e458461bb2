"""What the benchmarks compute from times: flops, as torch counts those of the ops, and ratios."""

import sys
from pathlib import Path

import gqa_attn.flops  # noqa: F401  registers the ops, and how many FLOPs they are
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import compare  # noqa: E402
from kit import CASES, Case, measure  # noqa: E402


def test_flops_are_those_that_torch_counts():
    case = Case("test", 2, 40, 6, 3, 24, 16, False, torch.float32)
    q, k, v, dout = case.tensors("cpu")
    with FlopCounterMode(display=False) as counter:
        out, lse = torch.ops.gqa_attn.fwd(q, k, v)
        torch.ops.gqa_attn.bwd(dout, q, k, v, out, lse)
    counted = counter.get_flop_counts()["Global"]
    assert case.flops("fwd") == counted[torch.ops.gqa_attn.fwd] and case.flops("bwd") == counted[torch.ops.gqa_attn.bwd]


def test_a_causal_mask_counts_as_half():
    seed, causal = CASES[:2]
    assert (seed.name, causal.name) == ("seed", "seed_causal")
    assert [causal.flops(phase) / seed.flops(phase) for phase in ("fwd", "bwd")] == [0.5, 0.5]
    assert seed.tflops("bwd", 1.0) == pytest.approx(2 * 8 * 32 * 1024**2 * (3 * 192 + 2 * 128) / 1e9)


def test_ratios_are_to_the_baseline_and_unknown_where_a_time_is():
    rows = [{"peer": peer, "fwd_ms": fwd, "bwd_ms": bwd} for peer, fwd, bwd in (("gqa_attn", 2.0, 5.0), ("cudnn", 3.0, None))]
    compare.add_ratios(rows)
    assert [(row["fwd_ratio"], row["bwd_ratio"]) for row in rows] == [(1.5, None), (1.0, None)]


def test_a_peer_that_refuses_is_named_and_has_no_time(monkeypatch):
    """The median is over all rounds; a refusal in the second round takes the time away."""
    class Testing:
        @staticmethod
        def do_bench(call, **_):
            return call()

    def prepare(q, k, v, dout, causal):
        fwd, bwd = iter(([1.0, 9.0], [2.0])), iter(([1.0], ))
        return {"fwd": lambda: next(fwd), "bwd": lambda: next(bwd)}

    monkeypatch.setitem(sys.modules, "triton", type(sys)("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", Testing)
    monkeypatch.setattr(Case, "tensors", lambda case: [None] * 4)
    case = Case("test", 1, 8, 1, 1, 8, 8, False, torch.float32)
    (row,), reasons = measure(case, {"peer": prepare}, rounds=2, rep_ms=1)
    assert row["fwd_ms"] == 2.0 and row["bwd_ms"] is None
    assert reasons == ["test peer bwd: StopIteration: "]
