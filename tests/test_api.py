"""attention, attention_varlen, explain and `python -m gqa_attn info`: arguments, errors, autocast, what is said."""

import dataclasses
import json

import gqa_attn
import pytest
import torch
from cpu import OpCalls, bwd, fwd, in_new_process, int32, random_inputs
from gqa_attn import _attention, _library, _ops, _rules
from reference import Results, assert_matches
from torch._subclasses import FakeTensorMode


def test_attention_passes_every_option():
    x = random_inputs(2, 30, 40, 4, 2, 16, 8)
    options = dict(scale=0.2, causal=True, window=(9, 3), softcap=2.0, sinks=torch.randn(4))
    out, lse = gqa_attn.attention(x.q, x.k, x.v, **options, return_lse=True)
    assert_matches(Results(out, lse), *x[:3], **options)
    assert torch.equal(gqa_attn.attention(x.q, x.k, x.v, **options), out)


def test_attention_varlen_passes_every_option():
    x = random_inputs(None, 30, 40, 4, 2, 16, 8)
    options = dict(scale=0.2, causal=True, window=(9, 3), softcap=2.0, sinks=torch.randn(4))
    cu_seqlens_q, cu_seqlens_k = int32(0, 10, 30), int32(0, 25, 40)
    out, lse = gqa_attn.attention_varlen(x.q, x.k, x.v, cu_seqlens_q, cu_seqlens_k, **options, return_lse=True)
    assert_matches(Results(out, lse), *x[:3], **options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def test_attention_varlen_takes_one_cu_seqlens_for_self_attention():
    x = random_inputs(None, 30, 30, 4, 2, 16)
    cu_seqlens = int32(0, 10, 30)
    out = gqa_attn.attention_varlen(x.q, x.k, x.v, cu_seqlens, causal=True)
    assert_matches(Results(out), *x[:3], causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


@pytest.mark.parametrize("given, flag, expected",
                         [(None, False, False), (None, True, True), (None, "warn", True), (True, False, True),
                          (False, True, False)])
def test_deterministic_reaches_bwd(given, flag, expected):
    x = random_inputs(1, 9, 9, 2, 1, 8)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    torch.use_deterministic_algorithms(bool(flag), warn_only=flag == "warn")
    try:
        with OpCalls() as seen:
            out = gqa_attn.attention(*leaves, deterministic=given)
            grads = torch.autograd.grad(out, leaves, x.dout)
    finally:
        torch.use_deterministic_algorithms(False)
    (_, arguments), = [call for call in seen.calls if call[0] is bwd.default]
    names = [argument.name for argument in bwd.default._schema.arguments]
    assert dict(zip(names, arguments)).get("deterministic", False) is expected
    assert_matches(Results(out, None, *grads), *x[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_its_dtype(dtype):
    x = random_inputs(1, 33, 33, 4, 2, 16)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    sinks = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = gqa_attn.attention(*leaves, sinks=sinks)
        assert torch.equal(gqa_attn.attention(*(t.double() for t in leaves)), fwd(*(t.double() for t in leaves))[0])
    out.backward(x.dout.to(dtype))
    assert out.dtype == dtype and all(leaf.grad.dtype == torch.float32 for leaf in (*leaves, sinks))
    low = [t.to(dtype) for t in (x.q, x.k, x.v, x.dout)]
    results = Results(out, None, *(leaf.grad.to(dtype) for leaf in leaves), sinks.grad)
    assert_matches(results, *low, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cpu_path_sums_as_exactly_under_autocast(dtype):
    x = random_inputs(1, 33, 33, 4, 2, 16, dtype=dtype)
    out, lse = fwd(x.q, x.k, x.v)
    with torch.autocast("cpu", dtype):
        assert all(map(torch.equal, fwd(x.q, x.k, x.v), (out, lse)))
        grads = bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse)
    assert all(map(torch.equal, grads, bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse)))


WRONG = {
    "k of another batch": (lambda q, k, v: ((q, k[:1], v), {}), ValueError,
                           "k must have the batch size of q: q has shape [2, 5, 4, 8], k has [1, 5, 2, 8]"),
    "heads": (lambda q, k, v: ((q[:, :, :3], k, v), {}), ValueError,
              "the heads of q must be a multiple of the heads of k and v: q has 3, k has 2"),
    "dtypes": (lambda q, k, v: ((q, k, v.half()), {}), TypeError, "got float32, float32, float16"),
    "integers": (lambda q, k, v: ((q.int(), k.int(), v.int()), {}), TypeError, "got int32, int32, int32"),
    "sparse": (lambda q, k, v: ((q.to_sparse(), k, v), {}), TypeError, "q must be a strided torch.Tensor, got sparse_coo"),
    "numpy": (lambda q, k, v: ((q, k.numpy(), v), {}), TypeError, "k must be a strided torch.Tensor, got ndarray"),
    "meta and cpu": (lambda q, k, v: ((q, k.to("meta"), v), {}), ValueError, "k must be on the device of q (cpu), got meta"),
    "rank": (lambda q, k, v: ((q[0], k[0], v[0]), {}), ValueError, "q must have shape [B, Sq, Hq, D], got [5, 4, 8]"),
    "scale": (lambda q, k, v: ((q, k, v), {"scale": float("nan")}), ValueError, "scale must be finite, got nan"),
    "softcap": (lambda q, k, v: ((q, k, v), {"softcap": -1.0}), ValueError, "softcap must be finite and >= 0"),
    "window": (lambda q, k, v: ((q, k, v), {"window": (-64, 0)}), ValueError, "got (-64, 0)"),
    "sinks": (lambda q, k, v: ((q, k, v), {"sinks": torch.zeros(2)}), ValueError, "sinks must have shape [Hq] = [4], got [2]"),
}


@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_typed_and_name_the_argument(name, deterministic):
    x = random_inputs(2, 5, 5, 4, 2, 8)
    change, error, text = WRONG[name]
    args, options = change(x.q, x.k, x.v)
    with pytest.raises(error) as raised:
        gqa_attn.attention(*args, **options, deterministic=deterministic)
    assert text in str(raised.value)


@pytest.mark.parametrize("name", WRONG)
def test_the_ops_raise_runtime_errors_with_the_same_text(name):
    x = random_inputs(2, 5, 5, 4, 2, 8)
    change, _, text = WRONG[name]
    args, options = change(x.q, x.k, x.v)
    if name in ("sparse", "numpy"):  # torch's dispatcher is first
        text = ""
    if "window" in options:
        options["window_left"], options["window_right"] = options.pop("window")
    with pytest.raises(RuntimeError) as raised:
        fwd(*args, **options)
    assert text in str(raised.value)


@pytest.mark.parametrize("window", [3, (1,), (1.0, 2), None, "ab"])
def test_window_must_be_two_ints(window):
    x = random_inputs(2, 5, 5, 4, 2, 8)
    with pytest.raises(TypeError, match="window must be two ints"):
        gqa_attn.attention(x.q, x.k, x.v, window=window)


def test_errors_of_the_compiled_op_are_translated():
    """The CUDA op can throw RuntimeError only; here, functions that throw the same stand for it."""
    def throws(text):
        def op(*args):
            raise RuntimeError(text)
        return op

    def check(*args):
        if args == ("bad",):
            raise _rules.ArgumentError("said by the rules")

    with pytest.raises(torch.OutOfMemoryError, match="could not allocate 123 bytes on cuda:0"):
        _ops.call(throws("could not allocate 123 bytes on cuda:0"), check, "good")
    with pytest.raises(NotImplementedError, match="Missing: these head dims"):
        _ops.call(throws("gqa_attn has no forward kernel for this call. Missing: these head dims"), check, "good")
    with pytest.raises(ValueError, match="said by the rules"):
        _ops.call(throws("said by C++"), check, "bad")
    with pytest.raises(RuntimeError, match="^an illegal memory access$"):
        _ops.call(throws("an illegal memory access"), check, "good")


def test_explain_on_the_cpu():
    x = random_inputs(2, 5, 5, 4, 2, 8)
    said = gqa_attn.explain(x.q, x.k, x.v, window=(3, 3), sinks=torch.zeros(4), deterministic=True)
    assert said.device == "cpu" and "CPU path" in said.forward and "CPU path" in said.backward
    with pytest.raises(ValueError, match="k must have the batch size of q"):
        gqa_attn.explain(x.q, x.k[:1], x.v)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def explain_without_gpu(**options):
    return gqa_attn.explain(meta(2, 512, 8, 128), meta(2, 512, 2, 128), meta(2, 512, 2, 128), **options)


def test_explain_refuses_what_kernels_do_not_take():
    assert "assumed" in str(explain_without_gpu())
    with pytest.raises(TypeError, match="float64"):
        gqa_attn.explain(*(meta(1, 5, 1, 8, dtype=torch.float64) for _ in range(3)))


def test_explain_gives_what_selection_gives(monkeypatch):
    asked = []

    class Compiled:
        @staticmethod
        def select(phase, **problem):
            asked.append((phase, problem))
            if phase == "backward":
                raise NotImplementedError("required this, supported that")
            return dict(
                name="forward_x", phase=phase, arch=90, dtype="bfloat16", mask="causal", head_dim=128, head_dim_v=128,
                block_q=128, block_kv=160, stages_q=1, stages_kv=2, threads=384, registers=240, smem_bytes=196608,
                prepare="prepare_x", finish_dq="finish_x", finish_dk=None, finish_dv=None, tile_heads=2, splits=3,
                workspace_bytes=77, reason="it fits",
            )

    monkeypatch.setattr(_library, "compiled", Compiled)
    said = explain_without_gpu(causal=True)
    problem = dict(dtype="bfloat16", causal=True, batch=2, seqlen_q=512, seqlen_k=512, heads=8, kv_heads=2, head_dim=128,
                   head_dim_v=128, window_left=-1, window_right=-1, softcap=False, sequences=None, arch=90, num_sms=132)
    assert asked == [("forward", problem), ("backward", problem | dict(deterministic=False))]
    assert said.backward == "required this, supported that"
    assert dataclasses.asdict(said.forward) == dict(
        name="forward_x", block_q=128, block_kv=160, stages_q=1, stages_kv=2, threads=384, registers=240, smem_bytes=196608,
        workspace_bytes=77, tile_heads=2, splits=3, helpers=("prepare_x", "finish_x"), copies=(), copies_bytes=0,
        reason="it fits",
    )
    for part in ("forward_x", "128 queries x 160 keys", "384 threads", "240 registers", "196608 bytes", "77 bytes",
                 "2 query heads", "3 blocks"):
        assert part in str(said)


def test_explain_without_the_compiled_module(monkeypatch):
    monkeypatch.setattr(_library, "compiled", None)
    monkeypatch.setitem(_library.problems, "_C", "it was not built")
    said = explain_without_gpu()
    assert "it was not built" in said.forward and "it was not built" in said.backward


def test_every_option_reaches_selection(monkeypatch):
    problems = []

    class Compiled:
        @staticmethod
        def select(phase, **problem):
            problems.append(problem)
            raise NotImplementedError("nothing")

    monkeypatch.setattr(_library, "compiled", Compiled)
    sinks, cu_seqlens = meta(8, dtype=torch.float32), meta(4, dtype=torch.int32)
    options = dict(window=(5, 3), softcap=2.0, sinks=sinks, deterministic=True)
    gqa_attn.explain(meta(9, 8, 64), meta(9, 2, 64), meta(9, 2, 64), cu_seqlens, **options)
    asked = dict(window_left=5, window_right=3, softcap=True, sequences=3)
    assert problems[0].items() >= asked.items() and problems[1].items() >= (asked | dict(deterministic=True)).items()


def test_compiled_calls_raise_too():
    x = random_inputs(2, 5, 5, 4, 2, 8)
    with pytest.raises(Exception, match="k must have the batch size of q"):
        torch.compile(gqa_attn.attention, backend="aot_eager", fullgraph=True)(x.q, x.k[:1], x.v)


def test_attention_under_fake_tensors():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 5, h, 8, dtype=torch.float16, device="cuda") for h in (4, 2, 2))
        assert gqa_attn.attention(q, k, v, causal=True).shape == (2, 5, 4, 8)
        with pytest.raises(TypeError, match="float64"):
            gqa_attn.attention(q.double(), k.double(), v.double())


def test_info():
    code = "import sys; sys.argv = ['gqa_attn', 'info'] + {}; import runpy; runpy.run_module('gqa_attn', run_name='__main__')"
    found = json.loads(in_new_process(code.format(["--json"])))
    text = in_new_process(code.format([]))
    assert found["gqa_attn"] == gqa_attn.__version__ and found["torch"] == torch.__version__
    assert not [value for value in found.values() if str(value).startswith("unknown")]
    assert "torch" in text and torch.__version__ in text and all(f"{name}:" in text for name in found)
    if _library.compiled:
        assert sum(found["kernels"].values()) == len(_library.compiled.kernels())


def test_window_sizes_accepts_lists():
    assert _attention.window_sizes([3, -1]) == (3, -1)


def test_explain_under_autocast_sees_what_attention_sees():
    q, k, v = (torch.empty(1, 8, 2, 16, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert gqa_attn.explain(q, k, v).device == "cpu"
