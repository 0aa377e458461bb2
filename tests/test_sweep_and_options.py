"""sweep.py and options.py with a clock of their own and tiny tensors: what is timed, ratios, bars, records; about 5 s."""

import json
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gqa_attn import _info
from gqa_attn._timing import PHASES, Case

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import kit  # noqa: E402
import options  # noqa: E402
import sweep  # noqa: E402
from kit import BF16  # noqa: E402
from options import Bar, Row, Side  # noqa: E402


class Clock:
    """A timer that runs every call once and keeps what it returned; a call takes 1 ms, or what `ms` says of its name."""

    def __init__(self):
        self.ms, self.results = {}, []

    def __call__(self, calls, rounds=1):
        self.results.append({name: call() for name, call in calls.items()})
        return {name: next((ms for text, ms in self.ms.items() if text in str(name)), 1.0) for name in calls}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tiny(monkeypatch):
    """The cases as they are, but their tensors small and on the CPU."""
    tensors = Case.tensors

    def small(case):
        return tensors(replace(case, batch=min(case.batch, 2), seqlen=max(2, case.seqlen // 512), head_dim=case.head_dim // 8,
                               head_dim_v=case.head_dim_v // 8), "cpu")

    monkeypatch.setattr(Case, "tensors", small)
    monkeypatch.setattr(options, "MATMUL_SIZE", 8)
    monkeypatch.setattr(options, "COPY_BYTES", 64)


@pytest.fixture
def with_gpu(monkeypatch):
    pytest.importorskip("matplotlib", reason="the benchmarks group is needed")
    monkeypatch.setattr(_info, "missing", dict)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a test")


def assert_equal(results, others):
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(results, others, strict=True))


def test_the_median_is_of_rounds_in_which_each_call_runs_once_behind_a_flush(monkeypatch):
    now, order = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    class Flush:
        def zero_(self):
            order.append("flush")

    def call(name, *ms):
        each = iter(ms)

        def run():
            order.append(name)
            now[0] += next(each)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: Flush())
    calls = {"a": call("a", 90.0, 1.0, 8.0, 3.0), "b": call("b", 90.0, 5.0, 4.0, 6.0)}  # the first run is not counted
    assert kit.median_ms(calls, rounds=3) == {"a": 3.0, "b": 5.0}
    a_round = ["flush", "record", "a", "record", "flush", "record", "b", "record"]
    assert order == ["a", "b", *a_round * 3, "wait"]


# sweep.py

def test_lines_cover_what_they_say():
    lines = list(sweep.lines_of(192, 128, 64))
    sizes = {(line.along, line.phase): list(line.cases) for line in lines}
    assert sizes["seqlen", "fwd"] == list(range(64, 16385, 64)) and sizes["seqlen", "bwd"] == list(range(128, 8193, 64))
    for along in ("batch", "group size"):
        assert sizes[along, "fwd"] == sizes[along, "bwd"] == list(range(1, 17))
    for line in lines:
        for size, case in line.cases.items():
            of_case = {"seqlen": case.seqlen, "batch": case.batch, "group size": case.heads // case.kv_heads}
            assert of_case[line.along] == size and case.causal and case.dtype == BF16
            assert (case.head_dim, case.head_dim_v) == (192, 128) and line.shape.startswith("d192/128 ")
    thinned = {line.phase: list(line.cases) for line in sweep.lines_of(64, 64, 4096) if line.along == "seqlen"}
    assert thinned == {"fwd": [4096, 8192, 12288, 16384], "bwd": [4096, 8192]}


def test_only_jumps_upwards_count():
    """Time per FLOP is 1 / TFLOPS."""
    assert sweep.largest_jump([1, 2, 3, 4], [10.0, 40.0, 20.0, 16.0]) == {"jump": 2.0, "between": [2, 3]}
    assert sweep.largest_jump([1, 2, 3], [10.0, 20.0, 25.0]) == {"jump": 0.8, "between": [2, 3]}
    assert sweep.largest_jump([1], [10.0]) == {"jump": None, "between": None}


def test_views_have_the_shapes_of_the_cases_and_share_memory():
    cases = [Case("", 1, 40, 2, 1, 16, 8, True, BF16), Case("", 3, 5, 8, 4, 16, 8, True, BF16)]
    tensors_of = sweep.views(cases, "cpu")
    for case in cases:
        assert [x.shape for x in tensors_of(case)] == [x.shape for x in case.tensors("meta")]
        assert all(x.is_contiguous() and x.isfinite().all() for x in tensors_of(case))
    assert [x.data_ptr() for x in tensors_of(cases[0])] == [x.data_ptr() for x in tensors_of(cases[1])]


def test_sweep_times_each_case(clock):
    cases = {seqlen: Case("", 1, seqlen, 4, 2, 16, 16, True, BF16) for seqlen in (8, 16)}
    rows = sweep.measure([sweep.Line("seqlen", phase, "tiny", cases) for phase in PHASES], clock, "cpu")
    assert [(row["phase"], row["sizes"], row["ms"]) for row in rows] == [(phase, [8, 16], [1.0, 1.0]) for phase in PHASES]
    assert rows[1]["tflops"] == [cases[seqlen].tflops("bwd", 1.0) for seqlen in (8, 16)]
    assert rows[0]["jump"] == 0.25  # four times the FLOPs in the same time
    assert [[len(result) for result in each.values()] for each in clock.results] == [[2], [2], [4], [4]]


def test_sweep_writes_a_record_a_plot_and_a_table(with_gpu, clock, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "median_ms", clock)
    cases = {size: Case("", size, 8, 4, 2, 16, 16, True, BF16) for size in (3, 2)}  # the second has fewer FLOPs
    lines = [sweep.Line(along, phase, "tiny", cases) for along in ("batch", "seqlen") for phase in PHASES]
    monkeypatch.setattr(sweep, "lines_of", lambda *args: lines if args == (96, 64, 128) else [])
    monkeypatch.setattr(sweep, "measure", partial(sweep.measure, device="cpu"))
    arguments = ["--head-dims", "32,96/64", "--step", "128", "--commit", "abc", "--out", str(tmp_path / "new")]
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    assert sweep.main() == 1
    record = json.loads((tmp_path / "new" / "sweep.json").read_text())
    assert record["commit"] == "abc" and record["torch"] == torch.__version__ and record["date"] and record["rounds"] == 21
    assert [(row["jump"], row["between"]) for row in record["rows"]] == [(pytest.approx(1.5), [3, 2])] * 4
    assert (tmp_path / "new" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "batch       bwd   tiny" in printed and printed.count("1.50  3 and 2          NO") == 4


@pytest.mark.parametrize("text, dims", [("128,64", [(128, 128), (64, 64)]), ("192/128", [(192, 128)])])
def test_head_dims_are_read(text, dims):
    assert sweep.head_dims(text) == dims


# options.py

def test_costs_are_times_per_work(clock):
    clock.ms = {"('reference', 'bwd')": 4.0, "('other', 'fwd')": 3.0, "('other', 'bwd')": 2.0}
    nothing = {"fwd": list, "bwd": list}
    assert options.costs(clock, Side(nothing, 2.0), {"other": Side(nothing, 3.0)}) == {"other fwd": 2.0, "other bwd": 2 / 6}


@pytest.mark.parametrize("bar, ratio, said", [
    (Bar(), 9.0, "none              -"),
    (Bar(high=1.05), 1.05, "<= 1.05           yes"),
    (Bar(low=0.9), 0.89, ">= 0.9            NO"),
    (Bar(0.95, 1.05), 1.06, ">= 0.95, <= 1.05  NO"),
    (Bar(high=1.05), float("nan"), "<= 1.05           NO"),
])
def test_bars(bar, ratio, said):
    assert str(Row("what", ratio, bar)) == f"{'what':58}{ratio:7.3f}  {said}"


@pytest.mark.parametrize("tokens", [16384, 65536])
def test_the_mix_and_its_dense_reference_have_about_as_many_tokens_and_flops(tokens):
    lengths = options.mixed_lengths(tokens)
    assert sum(lengths) == tokens and lengths == options.mixed_lengths(tokens)
    assert max(lengths) > 4 * statistics.median(lengths)
    batch, seqlen = options.dense_like(lengths)
    assert seqlen % 128 == 0 and batch * seqlen == pytest.approx(tokens, rel=0.1)
    assert batch * seqlen**2 == pytest.approx(sum(length**2 for length in lengths), rel=0.15)


def test_packed_and_sliced_calls_compute_what_the_dense_call_does(tiny, clock):
    assert all(row.ratio == 1.0 for comparison in (options.packed_equal_lengths, options.strided) for row in comparison(clock))
    for results in clock.results:
        (reference_fwd, reference_bwd), (fwd, bwd) = (list(results.values())[at:at + 2] for at in (0, 2))
        assert_equal(fwd[:1], reference_fwd[:1])
        assert_equal(bwd, reference_bwd)


def test_options_prints_every_row_and_writes_a_record(with_gpu, tiny, clock, monkeypatch, tmp_path, capsys):
    def broken(timer):
        raise RuntimeError("out of luck")

    clock.ms = {"window 1023": 0.1, "deterministic, seed_causal": 4.0, "(torch.float16, 'bwd')": 2.0}
    monkeypatch.setattr(options, "median_ms", clock)
    monkeypatch.setattr(options, "COMPARISONS", (broken, *options.COMPARISONS))
    monkeypatch.setattr(sys, "argv", ["options.py", "--commit", "abc", "--out", str(tmp_path / "new")])
    assert options.main() == 1
    record = json.loads((tmp_path / "new" / "options.json").read_text())
    assert record["commit"] == "abc" and record["rounds"] == 41
    assert record["not_measured"] == ["broken: RuntimeError: out of luck"]
    rows = {row.pop("what"): row for row in record["rows"]}
    assert rows["window 1023, llama8b_16k fwd"] == {"ratio": 0.1, "bar": "<= 0.2", "ok": True}
    mean = 4.0 ** (1 / len(kit.CASES))
    assert rows["deterministic, geometric mean"] == {"ratio": pytest.approx(mean), "bar": "<= 1.08", "ok": mean <= 1.08}
    assert rows["share of matmul, fp16 / bf16, d64_2k bwd"] == {"ratio": 0.5, "bar": ">= 0.95, <= 1.05", "ok": False}
    assert rows["S 4097, llama8b_4k fwd"] == {"ratio": pytest.approx((4096 / 4097) ** 2), "bar": "<= 1.05", "ok": True}
    assert rows["Sq 8192, Sk 2048, llama8b_4k_full bwd"]["ratio"] == 1.0
    moved = 2 * 2 * (2 * 2 * 32 * 16 + 2 * 32 * 8 * 16)  # bytes: q and out of 2 x 2 tokens, k and v of 2 x 32
    short = {"ratio": moved / 128, "bar": ">= 0.8", "ok": True}
    assert rows["share of copy bandwidth, B 16 Sq 1 Sk 16384 fwd"] == short | {"ratio": pytest.approx(short["ratio"])}
    printed = capsys.readouterr().out
    assert all(what in printed for what in rows) and "broken: RuntimeError: out of luck" in printed


def test_both_refuse_without_a_gpu(monkeypatch):
    monkeypatch.setattr(_info, "missing", lambda: {"GPU": "torch sees no GPU or no driver"})
    for script in (options, sweep):
        monkeypatch.setattr(sys, "argv", [script.__name__])
        with pytest.raises(SystemExit, match="needs a Hopper GPU"):
            script.main()
