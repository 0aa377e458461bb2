"""How the ops live with the rest of PyTorch on a GPU: streams, devices, graphs, autograd, autocast, compile."""
import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gqa_attn
import pytest
import torch
from calls import assert_same, check, run
from problems import TUNED, Inputs, Problem
from reference import Results

SMALL = Problem(64, seqlen_q=128, batch=1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile stops at a number of variants of one function, whichever tests asked for them."""
    torch.compiler.reset()


def leaves(x: Inputs) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]


def step(q, k, v, dout, causal):
    """Forward and deterministic backward through autograd."""
    out, lse = gqa_attn.attention(q, k, v, causal=causal, deterministic=True, return_lse=True)
    return Results(out, lse, *torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_runs_on_the_current_stream(dims, seed):
    """The side stream's inputs are NaN until work queued on it fills them in: a kernel on another stream would read the NaN."""
    x = Problem(*dims, 200, causal=True).inputs(seed)
    late = Inputs(*(torch.full_like(t, float("nan")) for t in (x.q, x.k, x.v, x.dout)), causal=True)
    torch.cuda.synchronize()

    def attend(x):
        out, lse = torch.ops.gqa_attn.fwd(x.q, x.k, x.v, None, True)
        return Results(out, lse, *torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, out, lse, None, None, True))

    with torch.cuda.stream(torch.cuda.Stream()):
        attend(x)  # leaves memory of this stream in the cache: to ask CUDA for it may wait
        torch.cuda._sleep(20_000_000)
        for name in ("q", "k", "v", "dout"):
            getattr(late, name).copy_(getattr(x, name))
        got = attend(late)
        assert not torch.cuda.current_stream().query(), "the call waited for the stream"
    torch.cuda.synchronize()
    check(x, got)


def test_the_device_of_the_inputs_need_not_be_current(seed):
    if torch.cuda.device_count() < 2:
        library = Path(gqa_attn.__file__).parent / "libgqa_attn.so"
        assert b"aoti_torch_create_device_guard" in library.read_bytes(), "the ops never ask torch for a device guard"
        return
    x = Problem(128, seqlen_q=150).inputs(seed)
    away = Inputs(*(t.to("cuda:1") for t in (x.q, x.k, x.v, x.dout)))
    assert torch.cuda.current_device() == 0
    out, lse = torch.ops.gqa_attn.fwd(away.q, away.k, away.v)
    got = Results(out, lse, *torch.ops.gqa_attn.bwd(away.dout, away.q, away.k, away.v, out, lse))
    assert all(t.device == torch.device("cuda:1") for t in got)
    check(away, got)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_thread_may_call_nothing_else(phase, seed):
    """Its memory comes from the cache, so CUDA has given the thread no context before the kernels ask for tensor maps."""
    x = Problem(64, seqlen_q=120, batch=1).inputs(seed)
    everything = run(x)
    calls = {"forward": lambda: torch.ops.gqa_attn.fwd(x.q, x.k, x.v),
             "backward": lambda: torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, everything.out, everything.lse)[:3]}
    for _ in range(2):
        calls[phase]()  # leaves memory of the right sizes in the cache
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(calls[phase]).result()
    check(x, Results(*got) if phase == "forward" else everything._replace(dq=got[0], dk=got[1], dv=got[2]))


@pytest.mark.parametrize("warm", [True, False], ids=["after warm-ups", "with no warm-up"])
@pytest.mark.parametrize("problem", [Problem(64, seqlen_q=128, batch=1), Problem(256, seqlen_q=128, batch=1),
                                     Problem(192, 128, 1000, heads=16, kv_heads=1, batch=1, causal=True)], ids=str)
def test_B52_step_under_cuda_graph_capture(problem, warm, seed):
    problem = dataclasses.replace(problem, deterministic=True)
    if not warm:  # lengths and a batch that no other test runs
        problem = dataclasses.replace(problem, seqlen_q=problem.seqlen_q + 21, batch=5)
    static = problem.inputs(seed)
    q, k, v = leaves(static)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3 if warm else 0):
            step(q, k, v, static.dout, static.causal)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(q, k, v, static.dout, static.causal)
    for replay in range(3):
        new = problem.inputs(seed + replay + 1)
        with torch.no_grad():
            for old, value in zip((q, k, v, static.dout), (new.q, new.k, new.v, new.dout)):
                old.copy_(value)
        for result in got[:5]:
            result.detach().fill_(float("nan"))
        graph.replay()
        check(new, got)
        assert_same(got, run(new))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_step(mode, seed):
    x = SMALL.inputs(seed)

    def attend(q, k, v):
        return gqa_attn.attention(q * 1, k * 1, v * 1, causal=True)

    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    x.causal = True
    for _ in range(3):
        inputs = leaves(x)
        out = compiled(*inputs)
        gradients = torch.autograd.grad(out, inputs, x.dout)
        check(x, Results(out=out.clone(), dq=gradients[0].clone(), dk=gradients[1].clone(), dv=gradients[2].clone()))


def test_opcheck(seed):
    x = Problem(72, 64, 33, 50, causal=True).inputs(seed)
    q, k, v = leaves(x)
    torch.library.opcheck(torch.ops.gqa_attn.fwd, (q, k, v, None, True))
    out, lse = torch.ops.gqa_attn.fwd(q, k, v, None, True)
    args = (x.dout, x.q, x.k, x.v, out.detach(), lse.detach(), None, None, True)
    torch.library.opcheck(torch.ops.gqa_attn.bwd, args)


def test_gradient_through_lse(seed):
    x = Problem(96, seqlen_q=90, dlse=True).inputs(seed)
    inputs = leaves(x)
    out, lse = torch.ops.gqa_attn.fwd(*inputs)
    gradients = torch.autograd.grad((out, lse), inputs, (x.dout, x.dlse))
    check(x, Results(out, lse, *gradients))


def test_B62_double_backward_is_refused(seed):
    x = Problem(64, seqlen_q=16, batch=1, heads=2, kv_heads=2).inputs(seed)
    q, k, v = leaves(x)
    with pytest.raises((NotImplementedError, RuntimeError), match="(?i)double backward"):
        (gradient,) = torch.autograd.grad(gqa_attn.attention(q, k, v).float().pow(2).sum(), q, create_graph=True)
        gradient.float().pow(2).sum().backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_B68_any_subset_of_the_inputs_needs_a_gradient(compiled, seed):
    x = Problem(64, seqlen_q=70, batch=1, deterministic=True).inputs(seed)
    attend = torch.compile(gqa_attn.attention, backend="aot_eager", fullgraph=True) if compiled else gqa_attn.attention
    everything = run(x)
    for count in (1, 2, 3):
        for needed in itertools.combinations("qkv", count):
            inputs = {name: getattr(x, name).detach().clone().requires_grad_(name in needed) for name in "qkv"}
            attend(**inputs, deterministic=True).backward(x.dout)
            for name, tensor in inputs.items():
                assert (tensor.grad is not None) == (name in needed)
            got = Results(**{f"d{name}": inputs[name].grad for name in needed})
            check(x, got)
            assert_same(got, everything)


def test_B68_one_tensor_for_all_three(seed):
    x = Problem(64, seqlen_q=70, batch=1, kv_heads=4).inputs(seed)
    same = x.q.detach().clone().requires_grad_()
    gqa_attn.attention(same, same, same).backward(x.dout)
    parts = run(Inputs(x.q, x.q, x.q, x.dout))
    want = sum(getattr(parts, name).double() for name in ("dq", "dk", "dv"))
    assert (same.grad.double() - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_B60_autocast(compiled, seed):
    """Under autocast float32 q and k are cast; their gradients come back in float32. Outside, mixed dtypes are an error."""
    x = Problem(64, seqlen_q=33, batch=1).inputs(seed)
    q, k = (t.float().requires_grad_() for t in (x.q, x.k))
    v = x.v.detach().clone().requires_grad_()
    attend = torch.compile(gqa_attn.attention, backend="aot_eager", fullgraph=True) if compiled else gqa_attn.attention
    with torch.autocast("cuda", torch.bfloat16):
        out = attend(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), x.dout)
    assert [out.dtype] + [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    check(x, Results(out=out, dq=gradients[0].bfloat16(), dk=gradients[1].bfloat16(), dv=gradients[2]))
    with pytest.raises((TypeError, ValueError), match="float32.*bfloat16"):
        gqa_attn.attention(q, k, v)


def test_no_graph_is_kept_without_gradients(seed):
    """B69 (b) and (c)."""
    x = SMALL.inputs(seed)
    inputs = leaves(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = gqa_attn.attention(*inputs)
        assert out.grad_fn is None and not out.requires_grad
        check(x, Results(out=out.clone()))


def test_out_of_memory_has_its_type():
    q = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16).expand(1 << 20, 1 << 12, 8, 64)
    with pytest.raises(torch.OutOfMemoryError):
        gqa_attn.attention(q, q, q)


@pytest.mark.parametrize("head_dim, head_dim_v, causal", [(192, 128, False), (128, 128, True), (128, 128, False),
                                                          (64, 64, True)])
def test_many_blocks_add_beside_other_work(head_dim, head_dim_v, causal, seed):
    """Blocks store and add tiles in any order: over many runs on a busy GPU only the rounding of float32 sums may change."""
    x = Problem(head_dim, head_dim_v, seqlen_q=1024, batch=4, heads=16, kv_heads=2, causal=causal).inputs(seed)
    out, lse = torch.ops.gqa_attn.fwd(x.q, x.k, x.v, causal=causal)
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    expected = None
    for _ in range(100):
        with torch.cuda.stream(other):
            a @ a
        gradients = [each.double() for each in torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, out, lse, causal=causal)[:3]]
        expected = expected or gradients
        # One float32 sum in two orders rounds to neighbours in 16 bit at most; a tile that is lost or stored over is far off.
        for gradient, first in zip(gradients, expected):
            step = torch.finfo(x.q.dtype).eps * (first.abs() + 1e-3 * first.abs().max())
            assert ((gradient - first).abs() <= 2 * step).all()
