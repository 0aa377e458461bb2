"""What the benchmarks compute: flops, as torch counts those of the ops, times, ratios, values that disagree; about 10 s."""

import json
import sys
from pathlib import Path

import gqa_attn.flops  # noqa: F401  registers the ops, and how many FLOPs they are
import pytest
import torch
from gqa_attn import _bench, _info, _timing
from gqa_attn._timing import Case, allowed_difference, largest_difference, measure
from reference import reference
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import bench  # noqa: E402
import compare  # noqa: E402
from kit import CASES, FINDERS  # noqa: E402


@pytest.fixture
def clock(monkeypatch):
    """Lets a machine without GPU and triton measure: a list of the times that do_bench returns, in ms."""
    times = []

    class Testing:
        @staticmethod
        def do_bench(call, **_):
            call()
            return times.pop(0)

    monkeypatch.setitem(sys.modules, "triton", type(sys)("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", Testing)
    tensors = Case.tensors
    monkeypatch.setattr(Case, "tensors", lambda case: tensors(case, "cpu"))
    return times


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
    _bench.add_ratios(rows)
    assert [(row["fwd_ratio"], row["bwd_ratio"]) for row in rows] == [(1.5, None), (1.0, None)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["gqa_attn", "math"])
def test_peers_compute_attention(name, causal):
    """In the layout of gqa_attn, by their own backward."""
    case = Case("test", 2, 65, 6, 2, 24, 16, causal, torch.float64)
    q, k, v, dout = case.tensors("cpu")
    calls = (_timing.ops() if name == "gqa_attn" else _timing.sdpa(SDPBackend.MATH))(q, k, v, dout, causal)
    expected = reference(q, k, v, dout, causal=causal)
    with torch.no_grad():
        got = [*calls["fwd"](), *calls["bwd"]()]
    for one, other in zip(got, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_times_are_medians_over_rounds_and_a_refusal_takes_the_time_away(clock):
    def failing_the_third_time():
        calls.append(None)
        if len(calls) > 2:
            raise RuntimeError("out of luck\nwith details")
        return [torch.ones(3)]

    calls, ticks = [], []
    peers = {"peer": lambda q, k, v, dout, causal: {"fwd": lambda: [torch.ones(3)], "bwd": failing_the_third_time}}
    clock += [[1.0, 9.0], [4.0], [2.0]]  # fwd and bwd of the first round, fwd of the second
    case = Case("test", 1, 8, 1, 1, 8, 8, False, torch.float32)
    (row,), reasons = measure(case, peers, rounds=2, rep_ms=1, after_each=lambda: ticks.append(None))
    assert row["fwd_ms"] == 2.0 and row["bwd_ms"] is None and row["fwd_tflops"] == case.tflops("fwd", 2.0)
    assert reasons == ["test peer bwd: RuntimeError: out of luck"]
    assert len(ticks) == _timing.runs(peers, rounds=2) == 6


def test_differences_are_relative_and_the_largest_counts():
    a, b = torch.randn(7, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    assert largest_difference([a * 1.5, b * 1.25], [a, b]) == pytest.approx(0.5)
    assert largest_difference([a, b], [a, b]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_rounding_is_no_disagreement_and_a_wrong_head_is_one(clock, dtype, causal):
    """One of 32 heads that misses the first 16 of 256 keys."""
    def with_keys_missing(q, k, v, dout, causal):
        def forward():
            out, _ = torch.ops.gqa_attn.fwd(q, k, v, None, causal)
            fewer, _ = torch.ops.gqa_attn.fwd(q, k[:, 16:], v[:, 16:], None, causal)
            out[:, :, 31] = fewer[:, :, 31]
            return [out]

        return _timing.ops()(q, k, v, dout, causal) | {"fwd": forward}

    case = Case("test", 1, 256, 32, 4, 64, 64, causal, dtype)
    peers = {"gqa_attn": _timing.ops(), "flash": _timing.sdpa(SDPBackend.FLASH_ATTENTION), "wrong": with_keys_missing}
    clock += [[1.0]] * 6
    rows, reasons = measure(case, peers, rounds=1, rep_ms=1)
    assert not reasons and all(0 < rows[1][f"{phase}_difference"] < allowed_difference(dtype) for phase in ("fwd", "bwd"))
    (found,) = _bench.disagreements(case, rows)
    assert found.startswith("test fwd: wrong and gqa_attn DISAGREE")


def test_disagreements_name_both_sides_and_nan_is_one():
    case = Case("test", 1, 8, 1, 1, 8, 8, False, torch.bfloat16)
    rows = [dict(peer="gqa_attn", fwd_difference=0.0, bwd_difference=None),
            dict(peer="cudnn", fwd_difference=0.5, bwd_difference=0.0),
            dict(peer="fa2", fwd_difference=0.01, bwd_difference=float("nan"))]
    assert _bench.disagreements(case, rows) == ["test fwd: cudnn and gqa_attn DISAGREE by 50.00%, rounding explains 3.12%",
                                                "test bwd: fa2 and cudnn DISAGREE by nan%, rounding explains 3.12%"]


def test_peers_that_cannot_be_imported_are_named():
    found, missing = _timing.find_peers({name: FINDERS[name] for name in ("gqa_attn", "cudnn", "fa4")})
    assert list(found) == ["gqa_attn", "cudnn"] and len(missing) == 1 and missing[0].startswith("fa4: ModuleNotFoundError")


@pytest.fixture
def with_gpu(monkeypatch):
    pytest.importorskip("tqdm", reason="the benchmarks group is needed")
    pytest.importorskip("matplotlib", reason="the benchmarks group is needed")
    monkeypatch.setattr(_info, "missing", dict)
    monkeypatch.setattr(_bench, "require_packages", lambda *names: None)  # triton is the clock's
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a test")
    cases = [Case("one", 1, 33, 4, 2, 16, 16, True, torch.bfloat16), Case("two", 1, 20, 4, 1, 16, 8, False, torch.float16)]
    monkeypatch.setattr(_bench, "MODELS", cases)


def test_bench_writes_a_table_a_record_and_a_plot(with_gpu, clock, monkeypatch, tmp_path, capsys):
    peers = {"gqa_attn": _timing.ops, "cudnn": lambda: _timing.sdpa(SDPBackend.MATH)}
    monkeypatch.setattr(_bench, "FINDERS", peers | {"absent": lambda: __import__("no_such_module")})
    clock += [[ms] for ms in (1.0, 2.0, 3.0, 4.0) * 8]
    assert _bench.run(tmp_path / "results") == 0
    printed = capsys.readouterr().out
    assert "values agree" in printed and "absent: ModuleNotFoundError" in printed
    record = json.loads((tmp_path / "results" / "bench.json").read_text())
    assert [[row[name] for name in ("case", "peer", "fwd_ms", "bwd_ms", "fwd_ratio")] for row in record["rows"]] == [
        [case, *rest] for case in ("one", "two") for rest in (("gqa_attn", 1.0, 2.0, 3.0), ("cudnn", 3.0, 4.0, 1.0))]
    assert record["torch"] == torch.__version__ and record["disagreements"] == []
    assert str(Path(gqa_attn.__file__).parent) not in json.dumps(record)
    assert (tmp_path / "results" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_bench_does_not_claim_what_it_could_not_compare(with_gpu, clock, monkeypatch, tmp_path, capsys):
    def refuse(*args):
        raise RuntimeError("no kernel")

    refusing = {"fwd": refuse, "bwd": refuse}
    monkeypatch.setattr(_bench, "FINDERS", {"gqa_attn": _timing.ops, "cudnn": lambda: lambda *inputs: refusing})
    clock += [[1.0]] * 16
    assert _bench.run(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "values agree" not in printed and "values: nothing to compare with, no peer ran" in printed
    assert "two cudnn bwd: RuntimeError: no kernel" in printed


def test_bench_fails_where_values_disagree(with_gpu, clock, monkeypatch, tmp_path, capsys):
    def wrong(q, k, v, dout, causal):
        return _timing.sdpa(SDPBackend.MATH)(q, k.flip(1), v, dout, causal)

    monkeypatch.setattr(_bench, "FINDERS", {"gqa_attn": _timing.ops, "cudnn": lambda: wrong})
    clock += [[1.0]] * 32
    assert _bench.run(tmp_path) == 1
    assert "one fwd: cudnn and gqa_attn DISAGREE" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "bench.json").read_text())["disagreements"]) == 4


def test_bench_refuses_without_a_gpu_and_without_its_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(_info, "missing", lambda: {"GPU": "torch sees no GPU or no driver"})
    with pytest.raises(SystemExit, match=r"needs a Hopper GPU.*missing: GPU \(torch sees no GPU or no driver\)"):
        _bench.run(tmp_path / "never")
    with pytest.raises(SystemExit, match="^timing needs no_such_a and no_such_b: pip install no_such_a no_such_b$"):
        _bench.require_packages("no_such_a", "torch", "no_such_b")
    assert not (tmp_path / "never").exists()


def test_compare_measures_the_chosen_cases_and_peers(with_gpu, clock, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compare, "CASES", _bench.MODELS)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--cases", "on", "--peers", "gqa_attn,fa2,fa4", "--rounds", "2",
                                      "--commit", "abc", "--out", str(tmp_path)])
    clock += [[ms] for ms in (1.0, 2.0, 3.0, 4.0) * 2]
    assert compare.main() == 0
    record = json.loads((tmp_path / "compare.json").read_text())
    assert [(row["case"], row["peer"], row["fwd_ms"], row["bwd_ms"]) for row in record["rows"]] == [
        ("one", "gqa_attn", 1.0, 2.0), ("one", "fa2", 3.0, 4.0)]
    assert record["commit"] == "abc" and record["not_measured"][0].startswith("fa4: ModuleNotFoundError")
    assert "one               fa2" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, said", [
    (["--cases", "thing"], "no case begins with thing; there are seed, "),
    (["--peers", "gqa_attn,fa9"], "no such peers: fa9; there are gqa_attn, cudnn, fa2, fa3, fa4"),
])
def test_compare_says_what_there_is(arguments, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit, match=said):
        compare.main()


def test_bench_script_checks_against_float64_and_times(clock, monkeypatch, capsys):
    sizes = "--batch 1 --heads 4 --groups 2 --seqlen 70 --head-dim-qk 16 --head-dim-v 16"
    monkeypatch.setattr(sys, "argv", ["bench.py", *sizes.split(), "--causal", "--peers", "gqa_attn,fa2"])
    clock += [[1.0], [2.0]] * 8
    bench.main()
    printed = capsys.readouterr().out
    assert "agree with float64" in printed and "DISAGREE" not in printed
    given = Case("given", 1, 70, 4, 2, 16, 16, True, torch.float16)
    assert f"given             fa2            1.000{given.tflops('fwd', 1.0):8.0f}" in printed
