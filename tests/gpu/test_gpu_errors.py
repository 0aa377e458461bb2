"""What the ops refuse on CUDA: at the call, typed from Python, with the same text from the op and the rules."""
import gqa_attn
import pytest
import torch
from gqa_attn import _rules
from problems import Problem


def inputs():
    x = Problem(64, seqlen_q=32).inputs(0)
    return {"q": x.q, "k": x.k, "v": x.v}


def backward_inputs():
    x = Problem(64, seqlen_q=32).inputs(0)
    out, lse = torch.ops.gqa_attn.fwd(x.q, x.k, x.v)
    return {"dout": x.dout, "q": x.q, "k": x.k, "v": x.v, "out": out, "lse": lse}


def assert_refused(op, check, arguments, kind, *said):
    """The op and the rules raise the same text, the rules as `kind`; the text holds all of `said`."""
    with pytest.raises(kind) as by_rules:
        check(**arguments)
    with pytest.raises(RuntimeError) as by_op:
        op(**arguments)
    assert str(by_rules.value) in str(by_op.value)
    for words in said:
        assert words in str(by_rules.value)


def cuda(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, device="cuda", dtype=dtype)


B91 = {
    "v with 31 keys": ({"v": (2, 31, 2, 64)}, ValueError, "v must", "[2, 32, 2, 64]", "[2, 31, 2, 64]"),
    "k of another batch": ({"k": (1, 32, 2, 64), "v": (1, 32, 2, 64)}, ValueError, "k must", "[2, 32, 4, 64]",
                           "[1, 32, 2, 64]"),
    "q of rank 3": ({"q": (32, 4, 64)}, ValueError, "q must", "[32, 4, 64]"),
    "v with fewer heads": ({"k": (2, 32, 4, 64)}, ValueError, "v must", "[2, 32, 4, 64]", "[2, 32, 2, 64]"),
    "k of another head dim": ({"k": (2, 32, 2, 128)}, ValueError, "k must", "[2, 32, 4, 64]", "[2, 32, 2, 128]"),
    "heads that do not divide": ({"q": (2, 32, 3, 64)}, ValueError, "multiple", "3", "2"),
    "no kv heads": ({"k": (2, 32, 0, 64), "v": (2, 32, 0, 64)}, ValueError, "heads"),
    "head dim 257": ({"q": (2, 32, 4, 257), "k": (2, 32, 2, 257)}, ValueError, "256", "257"),
    "head dim 0 of v": ({"v": (2, 32, 2, 0)}, ValueError, "256", "0"),
}


@pytest.mark.parametrize("name", B91)
def test_B91_shapes(name):
    shapes, kind, *said = B91[name]
    arguments = inputs() | {argument: cuda(*shape) for argument, shape in shapes.items()}
    assert_refused(torch.ops.gqa_attn.fwd, _rules.check_forward, arguments, kind, *said)
    with pytest.raises(kind, match=said[0]):
        gqa_attn.attention(**arguments)


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "float16"),
                                    ("float32",) * 3, ("float64",) * 3, ("complex64",) * 3, ("int32",) * 3])
def test_B91_dtypes(dtypes):
    arguments = {name: t.to(getattr(torch, dtype)) for (name, t), dtype in zip(inputs().items(), dtypes)}
    assert_refused(torch.ops.gqa_attn.fwd, _rules.check_forward, arguments, TypeError, *dtypes, "float16, bfloat16")
    with pytest.raises(TypeError, match=dtypes[0]):
        gqa_attn.attention(**arguments)


def test_B91_sparse_and_nested():
    given = inputs()
    for odd in (given["k"].to_sparse(), torch.nested.nested_tensor(list(given["k"]))):
        with pytest.raises(TypeError, match="k must"):
            gqa_attn.attention(**given | {"k": odd})
        with pytest.raises(RuntimeError):
            torch.ops.gqa_attn.fwd(**given | {"k": odd})


def test_devices():
    given = inputs()
    for name in ("k", "v"):
        arguments = given | {name: given[name].cpu()}
        assert_refused(torch.ops.gqa_attn.fwd, _rules.check_forward, arguments, ValueError, f"{name} must", "cuda:0", "cpu")


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale_must_be_finite(scale):
    assert_refused(torch.ops.gqa_attn.fwd, _rules.check_forward, inputs() | {"scale": scale}, ValueError, "scale")


def test_B87_backward_messages():
    given = backward_inputs()
    bad = {
        "dout": [(given["dout"].float(), TypeError, "float32", "bfloat16"),
                 (given["dout"].transpose(1, 2).contiguous(), ValueError, "[2, 4, 32, 64]", "[2, 32, 4, 64]")],
        "lse": [(given["lse"].transpose(1, 2).contiguous(), ValueError, "[2, 32, 4]", "[2, 4, 32]"),
                (given["lse"].double(), TypeError, "float64", "float32")],
        "out": [(given["out"][:, :31], ValueError, "[2, 31, 4, 64]", "[2, 32, 4, 64]")],
    }
    for name, wrongs in bad.items():
        for value, kind, *said in wrongs:
            arguments = given | {name: value}
            assert_refused(torch.ops.gqa_attn.bwd, _rules.check_backward, arguments, kind, f"{name} must", *said)
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.gqa_attn.bwd(**given | {"out": None})
    with pytest.raises(RuntimeError, match="cpu"):
        torch.ops.gqa_attn.bwd(**given | {"q": given["q"].cpu()})


WRONG_OPTIONS = {
    "window of -2": ({"window_left": -2}, ValueError, "window sizes must be", "(-2, -1)"),
    "negative softcap": ({"softcap": -1.0}, ValueError, "softcap must be", "-1"),
    "sinks per kv head": ({"sinks": torch.zeros(2)}, ValueError, "sinks must have shape [Hq] = [4]", "[2]"),
    "sinks of another dtype": ({"sinks": torch.zeros(4).half()}, TypeError, "sinks must be float32", "float16"),
    "cu_seqlens with a batch": ({"cu_seqlens_q": torch.zeros(2).int(), "cu_seqlens_k": torch.zeros(2).int()}, ValueError,
                                "q must have shape [Tq, Hq, D]"),
    "one cu_seqlens": ({"cu_seqlens_q": torch.zeros(2).int()}, ValueError, "both or neither"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(name):
    options, kind, *said = WRONG_OPTIONS[name]
    options = {key: value.cuda() if torch.is_tensor(value) else value for key, value in options.items()}
    assert_refused(torch.ops.gqa_attn.fwd, _rules.check_forward, inputs() | options, kind, *said)
    assert_refused(torch.ops.gqa_attn.bwd, _rules.check_backward, backward_inputs() | options, kind, *said)


def test_the_fake_kernels_refuse_the_same():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = (torch.empty(2, 32, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        with pytest.raises(ValueError, match="v must"):
            torch.ops.gqa_attn.fwd(q, k, k[:, :31])
        with pytest.raises(ValueError, match="softcap"):
            torch.ops.gqa_attn.fwd(q, k, k, softcap=-1.0)


def test_an_error_leaves_the_gpu_usable():
    given = inputs()
    with pytest.raises(RuntimeError):
        torch.ops.gqa_attn.fwd(**given | {"v": given["v"][:, :31]})
    out, _ = torch.ops.gqa_attn.fwd(**given)
    assert torch.isfinite(out).all()
