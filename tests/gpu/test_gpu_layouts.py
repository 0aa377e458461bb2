"""Strides, offsets and hidden copies: values equal to those of contiguous copies, with the memory and kernels they take."""
from dataclasses import replace

import pytest
import torch
from calls import assert_same, check, forward, peak_bytes, run
from problems import LAYOUTS, TUNED, Inputs, Problem, column_slice, contiguous, heads_first, seqlen_first
from reference import Results
from torch.profiler import ProfilerActivity, profile


def contiguous_copy(x: Inputs) -> Inputs:
    return replace(x, **{name: getattr(x, name).contiguous().clone() for name in ("q", "k", "v", "dout")})


def kernel_names(call) -> list[str]:
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    names = sorted(event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    assert names
    return names


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dims", TUNED + [(40, 40), (72, 80), (33, 33)], ids=str)
def test_any_layout_equals_contiguous(layout, dims, seed):
    x = Problem(*dims, 150, causal=dims[0] % 128 == 0, dlse=True, deterministic=True).inputs(seed, layout)
    got = run(x)
    check(x, got)
    assert_same(got, run(contiguous_copy(x)))


@pytest.mark.parametrize("only", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("layout", [heads_first, column_slice], ids=lambda f: f.__name__)
def test_one_tensor_in_another_layout(only, layout, seed):
    x = Problem(192, 128, 77, 131, causal=True, deterministic=True).inputs(seed, layout, only=(only,))
    got = run(x)
    check(x, got)
    assert_same(got, run(contiguous_copy(x)))


@pytest.mark.parametrize("layout", [heads_first, seqlen_first, column_slice], ids=lambda f: f.__name__)
def test_B30_transposed_dout(layout, seed):
    problem = Problem(128, seqlen_q=32, heads=4, kv_heads=1, dtype="float16", deterministic=True)
    x = problem.inputs(seed, layout, only=("dout",))
    assert not x.dout.is_contiguous()
    got = run(x)
    check(x, got)
    assert_same(got, run(contiguous_copy(x)))


@pytest.mark.parametrize("loss", [lambda out: out.sum(), lambda out: out.mean(dim=1).sum(), lambda out: out[:, -1].sum()],
                         ids=["sum", "mean", "last row"])
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_B31_gradients_of_a_sum(loss, dims, seed):
    x = Problem(*dims, 5, heads=2, kv_heads=2, batch=1).inputs(seed)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = torch.ops.gqa_attn.fwd(*leaves)
    gradients = torch.autograd.grad(loss(out), leaves)
    seen = out.detach().requires_grad_()
    x.dout = torch.autograd.grad(loss(seen), seen)[0]
    check(x, Results(out, lse, *gradients))


def test_B33_strides_beyond_32_bits(seed):
    big = torch.full((130 * 2**24,), float("nan"), device="cuda", dtype=torch.bfloat16)
    problem = Problem(128, seqlen_q=32, seqlen_k=130, batch=1, heads=1, kv_heads=1, deterministic=True)
    small = problem.inputs(seed)

    def spread(tensor, offset):
        view = big.as_strided(tensor.shape, (0, 2**24, 128, 1), offset)
        return view.copy_(tensor)

    x = replace(small, k=spread(small.k, 0), v=spread(small.v, 128))
    assert_same(run(x), expected := run(small))
    check(small, expected)
    small = replace(problem, seqlen_q=130).inputs(seed)
    x = replace(small, q=spread(small.q, 256), k=spread(small.k, 384), v=spread(small.v, 512), dout=spread(small.dout, 640))
    got = run(x)
    check(small, got)
    assert_same(got, run(small))


def packed_by_part(packed: torch.Tensor, head_dim: int):
    q, k, v = packed.split([4 * head_dim, 2 * head_dim, 2 * head_dim], -1)
    return q.unflatten(-1, (4, head_dim)), k.unflatten(-1, (2, head_dim)), v.unflatten(-1, (2, head_dim))


def packed_by_group(packed: torch.Tensor, head_dim: int):
    """[batch, seqlen, kv heads, group + 2, head_dim], as some checkpoints store their projection."""
    x = packed.unflatten(-1, (2, 4, head_dim))
    q = x[..., :2, :]  # [batch, seqlen, kv heads, group, head_dim], which only a copy can flatten
    return q.flatten(2, 3), x[..., 2, :], x[..., 3, :]


@pytest.mark.parametrize("split,head_dim", [(packed_by_part, 256), (packed_by_part, 64), (packed_by_group, 64)])
def test_B35_slices_of_a_packed_projection(split, head_dim, seed):
    torch.manual_seed(seed)
    packed = torch.randn(2, 130, 8 * head_dim, device="cuda").bfloat16().requires_grad_()
    q, k, v = split(packed, head_dim)
    x = Inputs(q, k, v, torch.randn(2, 130, 4, head_dim, device="cuda").bfloat16(), causal=True)
    out, lse = torch.ops.gqa_attn.fwd(q, k, v, None, True)
    (gradient,) = torch.autograd.grad(out, packed, x.dout)
    check(x, Results(out, lse, *split(gradient, head_dim)))
    copies = [t.detach().contiguous() for t in (q, k, v)]
    assert_same(Results(out, lse), Results(*torch.ops.gqa_attn.fwd(*copies, None, True)))
    with torch.no_grad():
        assert peak_bytes(lambda: torch.ops.gqa_attn.fwd(q, k, v)) == peak_bytes(lambda: torch.ops.gqa_attn.fwd(*copies))


@pytest.mark.parametrize("only", [("v",), ("k",), ("q",), ("q", "k", "v")], ids="".join)
def test_B36_one_transposed_view(only, seed):
    x = Problem(64, seqlen_q=77, dtype="float16", deterministic=True).inputs(seed, heads_first, only=only)
    got = run(x)
    check(x, got)
    assert_same(got, run(contiguous_copy(x)))


@pytest.mark.parametrize("causal", [False, True])
def test_B81_backward_does_not_expand_k_and_v(causal, seed):
    x = Problem(128, seqlen_q=256, seqlen_k=8192, batch=4, heads=16, kv_heads=2, causal=causal).inputs(seed)
    out, lse = torch.ops.gqa_attn.fwd(x.q, x.k, x.v, None, causal)
    peak = peak_bytes(lambda: torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, out, lse, None, None, causal))
    outputs = 2 * (x.q.numel() + x.k.numel() + x.v.numel())
    assert peak <= 1.2 * (outputs + 4 * (x.q.numel() + x.k.numel() + x.v.numel())), f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize("layout", ["heads first", "packed"])
def test_B86_no_hidden_copies(layout, seed):
    from triton.testing import do_bench  # which a CPU build of torch comes without

    problem = Problem(128, seqlen_q=4096, batch=4, heads=16, kv_heads=4)
    x = problem.inputs(seed, heads_first if layout == "heads first" else contiguous, only=("q", "k", "v"))
    if layout == "packed":
        x.q, x.k, x.v = torch.cat([x.q, x.k, x.v], 2).split([16, 4, 4], 2)
    plain = contiguous_copy(x)
    out, lse = forward(plain)
    for call in (lambda x: torch.ops.gqa_attn.fwd(x.q, x.k, x.v),
                 lambda x: torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, out, lse)):
        assert kernel_names(lambda: call(x)) == kernel_names(lambda: call(plain))
        assert peak_bytes(lambda: call(x)) <= 1.01 * peak_bytes(lambda: call(plain))
        times = [do_bench(lambda: call(y), warmup=20, rep=60, return_mode="median") for y in (x, plain, x, plain)]
        assert min(times[0::2]) <= 1.05 * min(times[1::2])
