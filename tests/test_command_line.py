"""python -m gqa_attn: answers, exit codes and texts of explain, bench and info; about 5 s."""

import json
import sys

import gqa_attn
import numpy
import pytest
import torch
from gqa_attn import __main__ as command_line
from gqa_attn import _bench, _explain, _info, _library

SHAPES = ["--q", "8,1024,32,64", "--k", "8,1024,2,64", "--v", "8,1024,2,64"]
PACKED = ["--q", "900,32,64", "--k", "900,2,64", "--v", "900,2,64"]

needs_library = pytest.mark.skipif(bool(_library.problems), reason=f"the compiled parts are not all there: {_library.problems}")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command: (exit code, what it prints, what it prints as errors)."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gqa_attn", *arguments])
        try:
            code = command_line.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def explained(monkeypatch):
    """The calls of explain: a list of (tensors as (shape, dtype, device), options)."""
    calls, explain = [], _explain.explain

    def described(tensor):
        return tensor if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def record(*tensors, sinks, **options):
        calls.append(([*map(described, tensors)], options | {"sinks": described(sinks)}))
        return explain(*tensors, sinks=sinks, **options)

    monkeypatch.setattr(_explain, "explain", record)
    return calls


DEFAULTS = dict(scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None, deterministic=False)


@needs_library
def test_explain_asks_for_what_was_given(run, explained):
    assert run("explain", *SHAPES)[0] == 0
    dense = [((8, 1024, heads, 64), torch.bfloat16, "meta") for heads in (32, 2, 2)]
    assert explained.pop() == ([*dense, None], DEFAULTS)
    assert run("explain", *PACKED, "--dtype", "float16", "--causal", "--window", "100,0", "--softcap", "30", "--scale", "-0.5",
               "--sinks", "--varlen", "3", "--deterministic")[0] == 0
    packed = [((900, heads, 64), torch.float16, "meta") for heads in (32, 2, 2)]
    assert explained.pop() == ([*packed, ((4,), torch.int32, "meta")], dict(
        scale=-0.5, causal=True, window=(100, 0), softcap=30.0, sinks=((32,), torch.float32, "meta"), deterministic=True))
    run("explain", *SHAPES, "--window=-1,5")
    assert explained.pop()[1] == DEFAULTS | dict(window=(-1, 5))


@needs_library
def test_explain_prints_what_explain_says(run):
    q, k, v = (torch.empty(8, 1024, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (32, 2, 2))
    assert run("explain", *SHAPES, "--causal") == (0, f"{gqa_attn.explain(q, k, v, causal=True)}\n", "")


@needs_library
def test_a_refusal_is_an_answer(run, monkeypatch):
    monkeypatch.setattr(_explain, "ASSUMED_ARCH", 80)
    code, printed, _ = run("explain", *SHAPES)
    assert code == 0
    assert printed.count("Required: bfloat16, head dims 64/64") == 2 and printed.count("Supported: ") == 2
    assert printed.count("Missing: kernels for this GPU's architecture") == 2


def test_a_build_that_cannot_tell_has_none(run, monkeypatch):
    monkeypatch.setattr(_library, "compiled", None)
    monkeypatch.setitem(_library.problems, "_C", "it was not built")
    code, printed, _ = run("explain", *SHAPES)
    assert code == 1 and printed.count("unknown: gqa_attn._C is missing (it was not built)") == 2


@pytest.mark.parametrize("arguments, said", [
    (["--q", "8,9,5,64", "--k", "8,9,2,64", "--v", "8,9,2,64"],
     "the heads of q must be a multiple of the heads of k and v: q has 5, k has 2"),
    ([*SHAPES, "--varlen", "3"], "q must have shape [Tq, Hq, D] when cu_seqlens_q and cu_seqlens_k are given, "
                                 "got [8, 1024, 32, 64]"),
    (PACKED, "q must have shape [B, Sq, Hq, D], got [900, 32, 64] ([Tq, Hq, D] needs cu_seqlens_q and cu_seqlens_k)"),
    ([*SHAPES, "--dtype", "float32"], "q, k and v must share one dtype of float16, bfloat16 (not on CUDA: float32, float64), "
                                      "got float32, float32, float32"),
    ([*SHAPES, "--softcap", "-1"], "softcap must be finite and >= 0 (0: none), got -1"),
    ([*SHAPES, "--scale", "nan"], "scale must be finite, got nan"),
    ([*SHAPES, "--window=-2,0"], "window sizes must be >= 0, or -1 for no limit, got (-2, 0)"),
    ([*SHAPES, "--window", "5"], "window must be two ints (left, right), -1 for no limit, got (5,)"),
    (["--q", "8,9,2,257", "--k", "8,9,2,257", "--v", "8,9,2,64"],
     "head dims must be from 1 to 256: q and k have 257, v has 64"),
    (["--q", "9", "--k", "9", "--v", "9", "--sinks"], "q must have shape [B, Sq, Hq, D], got [9]"),
    ([*PACKED, "--varlen", "-1"], "--varlen must be >= 0 sequences, got -1"),
    (["--q", "8,-1,2,64", *SHAPES[2:]], "argument --q: invalid list of sizes value: '8,-1,2,64'"),
    (["--q", "8,x", *SHAPES[2:]], "argument --q: invalid list of sizes value: '8,x'"),
    (["--q", f"{2**40},{2**40},2,64", *SHAPES[2:]], "Storage size calculation overflowed"),
    (SHAPES[2:], "the following arguments are required: --q"),
    pytest.param(["--q", f"1,{2**31},1,64", "--k", "1,8,1,64", "--v", "1,8,1,64"],
                 "on CUDA 4 * seqlen, and batch * heads * (seqlen / 64 + sequences), must be below 2**31", marks=needs_library),
])
def test_wrong_arguments(run, arguments, said):
    code, printed, errors = run("explain", *arguments)
    assert code == 2 and printed == "" and f"error: {said}" in errors


def test_bench_writes_where_it_is_told(run, monkeypatch, tmp_path):
    monkeypatch.setattr(_bench, "run", lambda out: 7 if out == tmp_path else None)
    assert run("bench", "--out", str(tmp_path))[0] == 7


def test_bench_refuses_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed, _ = run("bench")
    assert "needs a Hopper GPU (sm_90)" in code and "GPU (torch " in code and printed == ""


def test_info_has_what_a_bug_report_needs(run, monkeypatch, tmp_path):
    (tmp_path / "driver").write_text("NVRM version: 580.95.05\nGCC version: 12\n")
    monkeypatch.setattr(_info, "DRIVER", tmp_path / "driver")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = json.loads(run("info", "--json")[1])
    assert found["driver"] == "NVRM version: 580.95.05" and found["environment"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert found["packages"]["numpy"] == numpy.__version__
    assert "NVRM version: 580.95.05\n" in run("info")[1]


def test_a_probe_that_fails_says_how(run, monkeypatch):
    def broken():
        raise RuntimeError("no driver answers")

    monkeypatch.setattr(_info, "_gpus", broken)
    assert json.loads(run("info", "--json")[1])["gpus"] == "unknown: RuntimeError: no driver answers"


def test_info_names_a_gpu_that_this_build_is_not_for(monkeypatch):
    class Compiled:
        build_info = staticmethod(lambda: {"archs": [90]})

    monkeypatch.setattr(_library, "compiled", Compiled)
    monkeypatch.setattr(_library, "problems", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (8, 6))[index])
    assert _info.missing() == {"kernels for cuda:1": "it has sm_86; this build is for sm_90"}
