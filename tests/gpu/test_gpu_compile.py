"""torch.compile, export, checkpointing, saved-tensor hooks and torch.func on a GPU."""
from dataclasses import replace

import gqa_attn
import pytest
import torch
from calls import check, run
from problems import DEVICE, DTYPES, LAYOUTS, Inputs, Problem
from reference import Results, assert_matches
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SMALL = Problem(64, seqlen_q=128, batch=3, causal=True)
PACKED = Problem(64, lengths=((40, 40), (1, 1), (87, 87)), causal=True)
OPTIONS = {
    "causal": SMALL,
    "window": Problem(64, seqlen_q=128, seqlen_k=200, batch=3, window=(50, 20)),
    "softcap and sinks": Problem(128, seqlen_q=130, batch=3, causal=True, softcap=20.0, sinks="float32"),
    "packed": PACKED,
    "deterministic": Problem(128, seqlen_q=300, batch=3, causal=True, deterministic=True),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def attend(q, k, v, x: Inputs):
    """(out, lse), by the Python front."""
    options = dict(scale=x.scale, causal=x.causal, window=x.window, softcap=x.softcap, sinks=x.sinks, return_lse=True,
                   deterministic=x.deterministic or None)
    if x.cu_seqlens_q is None:
        return gqa_attn.attention(q, k, v, **options)
    return gqa_attn.attention_varlen(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, **options)


def step(x: Inputs, function=attend) -> Results:
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = function(*leaves, x)
    return Results(out, lse, *torch.autograd.grad(out, leaves, x.dout))


@pytest.mark.parametrize("problem", OPTIONS.values(), ids=OPTIONS)
def test_reduce_overhead_replays_graphs(problem, seed):
    """Between other operations, so that there is something to fuse and q, k and v live in the graph's memory."""
    x = problem.inputs(seed)

    def block(q, k, v):
        return attend(q * 1, k * 1, v * 1, x)

    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for i in range(4):
        new = replace(problem.inputs(seed + i), sinks=x.sinks)
        torch.compiler.cudagraph_mark_step_begin()
        got = step(new, lambda q, k, v, _: compiled(q, k, v))
        check(new, Results(*(t.clone() for t in got[:5])))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_reduce_overhead_takes_other_lengths_of_packed_sequences(seed):
    """The lengths are read on the GPU: one graph serves all that have as many rows and sequences."""
    def block(q, k, v, cu_seqlens):
        return gqa_attn.attention_varlen(q * 1, k * 1, v * 1, cu_seqlens, causal=True)

    compiled = torch.compile(block, mode="reduce-overhead")
    for i, lengths in enumerate([(40, 1, 87), (128, 0, 0), (1, 126, 1), (0, 64, 64)]):
        x = Problem(64, lengths=tuple((n, n) for n in lengths), causal=True).inputs(seed + i)
        torch.compiler.cudagraph_mark_step_begin()
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out = compiled(*leaves, x.cu_seqlens_q)
        gradients = torch.autograd.grad(out, leaves, x.dout)
        check(x, Results(out.clone(), None, *(t.clone() for t in gradients)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_one_graph_for_every_length(seed):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for batch, seqlen_q, seqlen_k in ((3, 20, 25), (5, 133, 34), (2, 70, 600), (4, 25, 25)):
        x = Problem(64, 64, seqlen_q, seqlen_k, True, batch=batch, heads=12, kv_heads=6).inputs(seed)
        check(x, step(x, compiled))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


@pytest.mark.parametrize("problem", [SMALL, Problem(72, 40, 33, 50, batch=3, sinks="same")], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B55_fakes_have_the_metadata_of_real_results(layout, problem, seed):
    x = problem.inputs(seed, layout)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Inputs(**{name: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for name, t in vars(x).items()})
        fakes = run(fake)
    for name, real, fake in zip(Results._fields, run(x), fakes):
        assert (real.shape, real.stride(), real.dtype, real.storage_offset(), real.device) == (
            fake.shape, fake.stride(), fake.dtype, fake.storage_offset(), fake.device), name


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return gqa_attn.attention(q, k, v, causal=True)


def exported(seed: int) -> torch.export.ExportedProgram:
    x = Problem(64, seqlen_q=64, batch=2).inputs(seed)
    batch, seqlen = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("seqlen", min=2, max=512)
    with torch.no_grad():
        return torch.export.export(Attend(), (x.q, x.k, x.v), dynamic_shapes={name: {0: batch, 1: seqlen} for name in "qkv"})


def test_B59_export(seed):
    other = Problem(64, seqlen_q=133, batch=3, causal=True).inputs(seed)
    check(other, Results(exported(seed).module()(other.q, other.k, other.v)))


def compile_load_and_check(_, path: str, seed: int) -> None:
    package = torch._inductor.aoti_compile_and_package(exported(seed), package_path=path)
    other = Problem(64, seqlen_q=133, batch=3, causal=True).inputs(seed)
    check(other, Results(torch._inductor.aoti_load_package(package)(other.q, other.k, other.v)))


@pytest.mark.xfail(torch.__version__.startswith("2.11"), reason="loading the package crashes in torch 2.11, cause not known")
def test_B59_ahead_of_time_compilation(tmp_path, seed):
    """In a process of its own: a crash is this test's alone."""
    torch.multiprocessing.spawn(compile_load_and_check, args=(str(tmp_path / "compiled.pt2"), seed))


def save_attention(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.gqa_attn.fwd.default else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "none": ({}, 1),
    "selective": (dict(use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_attention)), 1),
    "not reentrant": (dict(use_reentrant=False), 2),
    "reentrant": (dict(use_reentrant=True), 2),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_B61_forward_kernels_launched_under_checkpointing(how, seed):
    x = Problem(64, seqlen_q=133, causal=True, deterministic=True).inputs(seed)
    options, launches = CHECKPOINTS[how]

    def block(q, k, v):
        return gqa_attn.attention(q * 2, k, v, causal=True, deterministic=True)

    def gradients(options):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out = checkpoint(block, *leaves, **options) if options else block(*leaves)
        out.backward(x.dout)
        return [leaf.grad for leaf in leaves]

    expected = gradients({})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        got = gradients(options)
        torch.cuda.synchronize()
    assert sum("forward_sm90" in event.name for event in profile.events()) == launches
    assert all(torch.equal(*pair) for pair in zip(got, expected))


@pytest.mark.parametrize("hooks", [lambda: torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda"),
                                   lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t)],
                         ids=["save_on_cpu", "contiguous"])
def test_B42_saved_tensors_with_other_strides(hooks, seed):
    packed = torch.randn(2, 130, 8, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn(2, 130, 4, 64, device=DEVICE, dtype=torch.bfloat16)

    def attend():
        return gqa_attn.attention(*packed.split([4, 2, 2], dim=2), causal=True, deterministic=True)

    expected, = torch.autograd.grad(attend(), packed, dout)
    with hooks():
        out = attend()
    assert torch.equal(torch.autograd.grad(out, packed, dout)[0], expected)


def test_B69_frozen_inputs_are_not_kept(seed):
    x = Problem(128, seqlen_q=1000).inputs(seed)
    kept = [t.clone() for t in (x.q, x.k, x.v)]
    before = torch.cuda.memory_allocated()
    out = gqa_attn.attention(*kept)
    del kept
    assert torch.cuda.memory_allocated() - before == out.nbytes - sum(t.nbytes for t in (x.q, x.k, x.v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vmap_and_torch_func(dtype, seed):
    each = [Problem(64, seqlen_q=70, causal=True, dtype=dtype).inputs(seed + i) for i in range(3)]

    def loss(q, k, v, dout):
        return (gqa_attn.attention(q, k, v, causal=True) * dout).sum()

    stacked = [torch.stack([getattr(x, name) for x in each]) for name in ("q", "k", "v", "dout")]
    gradients = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for i, x in enumerate(each):
        assert_matches(Results(None, None, *(gradient[i] for gradient in gradients)), x.q, x.k, x.v, x.dout, causal=True)
