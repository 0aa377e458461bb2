"""Public failures of attention kernels as small inputs, under their ids. tests/gpu/test_gpu_cases.py runs them on a GPU.

Elsewhere: CUDA grids, streams, graphs, sanitizer, memory and times (B45, B47, B48, B52, B53, B81, B86: tests/gpu), the
build (B73, B75, B77: tests/test_build.py), and what other issues bring: B57 (flash_attn functions), B40, B93, B95, B96 and the
second half of B25 (transformers).
"""

import itertools

import gqa_attn
import pytest
import torch
from cpu import Inputs, bwd, check, fwd, in_new_process, int32, random_inputs, run, same
from gqa_attn import _cpu
from reference import Results, assert_matches, reference
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def device():
    """Where the tests of this file make their tensors."""
    with torch.device("cpu"):
        yield "cpu"


def compiled_attention():
    torch._dynamo.reset()  # recompilations of this function are limited
    return torch.compile(gqa_attn.attention, backend="aot_eager", fullgraph=True)


def leaves_of(x: Inputs) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]


# ---- 1: NaN, Inf, empty rows ----

def test_B01_packed_causal_with_more_queries_than_keys():
    x = random_inputs(None, 230, 5, 2, 1, 64, dtype=FP16)
    x = Inputs(3 * x.q, 3 * x.k, 3 * x.v, torch.ones_like(x.dout))
    r = check(x, causal=True, cu_seqlens_q=int32(0, 70, 101, 230), cu_seqlens_k=int32(0, 2, 3, 5))
    for start, empty in ((0, 68), (70, 30), (101, 127)):
        rows = slice(start, start + empty)
        assert not r.out[rows].any() and r.lse[:, rows].isneginf().all() and not r.dq[rows].any()
    assert r.lse.isneginf().sum() == 2 * 225


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 66), (66, 2), (200, 1)])
def test_B02_dense_causal_with_more_queries_than_keys(seqlen_q, seqlen_k):
    x = random_inputs(2, seqlen_q, seqlen_k, 4, 2, 64, dtype=BF16)
    r = check(x, causal=True)
    first = seqlen_q - seqlen_k
    assert not r.out[:, :first].any() and r.lse[..., :first].isneginf().all() and not r.dq[:, :first].any()
    assert torch.equal(r.out[:, first], x.v[:, 0].repeat_interleave(2, 1))


def test_B04_scores_far_below_any_sentinel():
    x = random_inputs(1, 64, 64, 2, 1, 128, dtype=BF16)
    x.q[..., 0], x.k[..., 0] = 400, -1800
    r, expected = run(x), reference(*x)
    assert expected.lse.max() < -60000 and r.lse.isfinite().all()
    # Scores of 60000 carry float32 errors of about 0.005: relative to the largest value.
    for name in ("out", "lse", "dq", "dk", "dv"):
        a, b = getattr(r, name).double(), getattr(expected, name)
        assert (a - b).abs().max() <= 0.05 * b.abs().max(), name
    assert r.out.abs().max() > 0.5


def test_B07_more_rows_than_cu_seqlens_cover():
    x = random_inputs(None, 96, 96, 4, 2, 64, dtype=BF16)
    leaves = leaves_of(x)
    cu_seqlens = int32(0, 40, 64)
    out = gqa_attn.attention_varlen(*leaves, cu_seqlens)
    out[:64].float().pow(2).sum().backward()
    dout = torch.zeros_like(out)
    dout[:64] = (2 * out[:64].float()).to(BF16)
    results = Results(out, None, *(leaf.grad for leaf in leaves))
    assert_matches(results, x.q, x.k, x.v, dout, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    assert not any(t[64:].any() for t in results if t is not None)


def test_B09_single_queries_and_empty_sequences():
    x = random_inputs(None, 2, 8, 9, 3, 64, dtype=BF16)
    check(x, causal=True, scale=1.0, cu_seqlens_q=int32(0, 0, 1, 1, 2), cu_seqlens_k=int32(0, 0, 3, 3, 8))


def test_B13_right_window_wider_than_the_keys():
    x = random_inputs(1, 129, 40, 4, 2, 64, dtype=BF16)
    assert check(x, window=(-1, 100)).lse.isfinite().all()
    r = check(x, window=(32, 64))
    assert r.lse[..., :25].isneginf().all() and r.lse[..., 25:].isfinite().all() and not r.out[:, :25].any()


# ---- 2: heads, dims, tails, masks ----

@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(12, 3), (6, 3), (6, 2), (7, 7), (7, 1), (10, 5), (12, 2)])
def test_B14_query_heads_read_their_kv_head(heads, kv_heads, packed):
    x = random_inputs(None if packed else 2, 80, 80, heads, kv_heads, 64, dtype=FP16)
    x.v.mul_(torch.arange(1, kv_heads + 1)[:, None])
    options = dict(causal=True) | (dict(cu_seqlens_q=int32(0, 33, 80), cu_seqlens_k=int32(0, 33, 80)) if packed else {})
    r = check(x, **options)
    group = heads // kv_heads
    expanded = run(x._replace(k=x.k.repeat_interleave(group, -2), v=x.v.repeat_interleave(group, -2)), **options)
    summed = [t.unflatten(-2, (kv_heads, group)).float().sum(-2).half() for t in (expanded.dk, expanded.dv)]
    assert_matches(r._replace(dk=summed[0], dv=summed[1]), *x, **options)


@pytest.mark.parametrize("head_dim, head_dim_v", [(72, 64), (40, 40), (129, 128)])
@pytest.mark.parametrize("given", [False, True])
def test_B17_scale_of_the_true_head_dim(head_dim, head_dim_v, given):
    x = random_inputs(1, 128, 128, 4, 2, head_dim, head_dim_v, FP16)
    r = check(x, scale=head_dim**-0.5 if given else None)
    expected = reference(*x)
    assert abs((r.dq.double() * expected.dq).sum() / expected.dq.square().sum() - 1) < 0.002


@pytest.mark.parametrize("head_dim", [72, 104])
def test_B20_every_column_of_dq_is_written(head_dim):
    x = random_inputs(None, 160, 160, 8, 8, head_dim, dtype=BF16)
    options = dict(cu_seqlens_q=int32(0, 160), cu_seqlens_k=int32(0, 160))
    first = check(x, **options)
    torch.full((1 << 20,), float("nan"))
    assert same(first, run(x, **options))


@pytest.mark.parametrize("head_dim", [72, 40, 80, 96, 112, 160])
def test_B21_no_store_behind_the_head_dim(head_dim):
    x = random_inputs(None, 70, 70, 3, 3, head_dim, dtype=BF16)
    check(x, cu_seqlens_q=int32(0, 33, 70), cu_seqlens_k=int32(0, 33, 70))


def test_B24_keys_that_no_query_sees():
    x = random_inputs(2, 16, 300, 4, 2, 64, dtype=BF16)
    r = check(x, causal=True, window=(20, 0))
    assert not r.dk[:, :264].any() and not r.dv[:, :264].any() and r.dk[:, 264:].any()


def test_B25_window_counts_the_keys_before_the_diagonal():
    q = k = torch.zeros(1, 8, 1, 16, dtype=FP16)
    v = torch.eye(8, 16, dtype=FP16)[None, :, None]
    out = gqa_attn.attention(q, k, v, causal=True, window=(3, 0))[0, :, 0]
    counts = torch.tensor([1, 2, 3, 4, 4, 4, 4, 4])
    assert torch.equal((out != 0).sum(1), counts)
    torch.testing.assert_close(out.sum(1), torch.ones(8, dtype=FP16), rtol=0, atol=2e-3)
    assert torch.equal(out.amax(1), (1 / counts).half())


def test_B26_window_boundaries():
    x = random_inputs(1, 200, 200, 2, 2, 64, dtype=BF16)
    check(x, causal=True)
    for window in ((-1, 0), (199, 0), (200, 0), (2**31 - 1, 0)):
        assert_matches(run(x, window=window), *x, causal=True)
    assert torch.equal(check(x, window=(0, 0)).out, x.v)
    for left in (63, 64, 65):
        check(x, window=(left, 0))
    with pytest.raises(ValueError, match=r"window sizes must be >= 0, or -1 for no limit, got \(-64, 0\)"):
        gqa_attn.attention(x.q, x.k, x.v, window=(-64, 0))


def test_B29_outlier_channels_and_an_attention_sink():
    x = random_inputs(2, 160, 160, 16, 2, 256, dtype=BF16)
    for t in (x.q, x.k, x.v):
        t[..., [3, 200]] *= 40
    x.k[:, 0] *= 20
    for t in x[:4]:
        t[1] = t[0].flip(0)
    r = check(x, causal=True)
    for b in range(2):
        alone = run(Inputs(*(t[b : b + 1] for t in x)), causal=True)
        for whole, part in zip(r[:5], alone):
            torch.testing.assert_close(whole[b : b + 1], part)


# ---- 3: strides, layouts, alignment ----

DOUT_LAYOUTS = {
    "heads first": lambda: torch.randn(2, 4, 32, 128).half().transpose(1, 2),
    "seqlen first": lambda: torch.randn(32, 2, 4, 128).half().transpose(0, 1),
    "columns": lambda: torch.randn(2, 32, 4, 256).half()[..., 64:192],
}


@pytest.mark.parametrize("layout", DOUT_LAYOUTS)
def test_B30_dout_with_other_strides(layout):
    x = random_inputs(2, 32, 32, 4, 1, 128, dtype=FP16)
    dout = DOUT_LAYOUTS[layout]()
    assert same(run(x._replace(dout=dout)), check(x._replace(dout=dout.contiguous())))


def test_B31_dout_with_stride_0():
    x = random_inputs(1, 5, 5, 2, 2, 64, dtype=BF16)
    last = torch.zeros_like(x.dout)
    last[:, -1] = 1
    losses = [
        (lambda out: out.sum(), torch.ones_like(x.dout)),
        (lambda out: out.mean(dim=1).sum(), torch.full_like(x.dout, 0.2)),
        (lambda out: out[:, -1].sum(), last),
    ]
    for loss, dout in losses:
        leaves = leaves_of(x)
        out = gqa_attn.attention(*leaves)
        loss(out).backward()
        assert_matches(Results(out, None, *(leaf.grad for leaf in leaves)), x.q, x.k, x.v, dout)


def test_B33_a_token_stride_that_passes_32_bits():
    """Untouched pages of the large buffer take no memory."""
    big = torch.empty(129 * 2**24 + 256, dtype=BF16)
    k = big.as_strided((1, 130, 1, 128), (0, 2**24, 128, 1))
    v = big.as_strided((1, 130, 1, 128), (0, 2**24, 128, 1), 128)
    k.copy_(torch.randn(k.shape)), v.copy_(torch.randn(v.shape))
    short, long = random_inputs(1, 32, 130, 1, 1, 128, dtype=BF16), random_inputs(1, 130, 130, 1, 1, 128, dtype=BF16)
    x = Inputs(short.q, k, v, short.dout)
    assert same(run(x), check(Inputs(*(t.contiguous() for t in x[:4]))))
    assert all(t.is_contiguous() for t in run(x))
    assert same(run(long._replace(q=k)), check(long._replace(q=k.contiguous())))


@pytest.mark.parametrize("head_dim, interleaved", [(256, False), (64, True)])
def test_B35_slices_of_a_packed_projection(head_dim, interleaved):
    packed = torch.randn(2, 130, 8 * head_dim).to(BF16).requires_grad_()

    def slices(packed):
        if interleaved:
            by_kv_head = packed.view(2, 130, 2, 4, head_dim)
            return by_kv_head[:, :, :, :2].flatten(2, 3), by_kv_head[:, :, :, 2], by_kv_head[:, :, :, 3]
        return packed.view(2, 130, 8, head_dim).split([4, 2, 2], dim=2)

    dout = torch.randn(2, 130, 4, head_dim).to(BF16)
    gqa_attn.attention(*slices(packed)).backward(dout)
    grads = slices(packed.grad)
    x = Inputs(*(t.detach().contiguous() for t in slices(packed)), dout)
    expected = check(x)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[2:5]))


@pytest.mark.parametrize("transposed", ["v", "k", "q", "qkv"])
def test_B36_only_some_are_transposed(transposed):
    x = random_inputs(2, 77, 77, 4, 2, 64, dtype=FP16)
    views = x._replace(**{name: getattr(x, name).transpose(1, 2).contiguous().transpose(1, 2) for name in transposed})
    assert same(run(views), check(x))


def at_odd_offset(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


HOOKS = {
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "contiguous": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t),
    "odd offset": lambda: torch.autograd.graph.saved_tensors_hooks(at_odd_offset, lambda t: t),
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_B42_saved_tensors_with_other_strides(hooks):
    packed = torch.randn(1, 70, 8, 64).to(BF16).requires_grad_()
    dout = torch.randn(1, 70, 4, 64).to(BF16)

    def gradient(out):
        return torch.autograd.grad(out, packed, dout)[0]

    expected = gradient(gqa_attn.attention(*packed.split([4, 2, 2], dim=2), causal=True, deterministic=True))
    with HOOKS[hooks]():
        out = gqa_attn.attention(*packed.split([4, 2, 2], dim=2), causal=True, deterministic=True)
    assert torch.equal(gradient(out), expected)


# ---- 7: torch.compile, export, transforms ----

LAYOUTS = {
    "contiguous": lambda b, s, h, d: torch.randn(b, s, h, d),
    "heads first": lambda b, s, h, d: torch.randn(b, h, s, d).transpose(1, 2),
    "packed slice": lambda b, s, h, d: torch.randn(b, s, 3 * h, d)[:, :, h : 2 * h],
    "expanded": lambda b, s, h, d: torch.randn(b, 1, 1, d).expand(b, s, h, d),
}


@pytest.mark.parametrize("seqlen, heads, kv_heads", [(20, 12, 4), (1, 12, 4), (20, 1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B55_fakes_have_the_metadata_of_real_results(layout, seqlen, heads, kv_heads):
    shapes = [(2, seqlen, h, 128) for h in (heads, kv_heads, kv_heads, heads)]
    x = Inputs(*(LAYOUTS[layout](*shape).to(BF16) for shape in shapes))
    with FakeTensorMode() as mode:
        fake = run(Inputs(*(mode.from_tensor(t) for t in x[:4])))
    for name, a, b in zip(Results._fields, run(x), fake):
        assert (a.shape, a.stride(), a.dtype, a.storage_offset()) == (b.shape, b.stride(), b.dtype, b.storage_offset()), name


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return gqa_attn.attention(q, k, v, causal=True)


def test_B59_export_and_ahead_of_time_compilation(tmp_path):
    x = random_inputs(2, 64, 64, 4, 2, 64, dtype=BF16)
    batch, seqlen = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("seqlen", min=2, max=512)
    shapes = {name: {0: batch, 1: seqlen} for name in "qkv"}
    with torch.no_grad():
        program = torch.export.export(Attend(), (x.q, x.k, x.v), dynamic_shapes=shapes)
    assert [node.target for node in program.graph.nodes if "gqa_attn" in str(node.target)] == [fwd.default]
    path = tmp_path / "attend.pt2"
    torch.export.save(program, path)
    compiled = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2"))
    other = random_inputs(3, 33, 33, 4, 2, 64, dtype=BF16)
    inputs, outputs = tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    torch.save(list(other[:3]), inputs)
    in_new_process(f"""
        import torch, gqa_attn
        inputs = torch.load({str(inputs)!r})
        programs = torch.export.load({str(path)!r}).module(), torch._inductor.aoti_load_package({str(compiled)!r})
        torch.save([program(*inputs) for program in programs], {str(outputs)!r})
    """)
    expected = gqa_attn.attention(*other[:3], causal=True)
    for out in torch.load(outputs):
        assert torch.equal(out, expected)


def test_B60_autocast_with_mixed_dtypes():
    x = random_inputs(1, 33, 33, 4, 2, 64)
    for attention in (gqa_attn.attention, compiled_attention()):
        leaves = leaves_of(x._replace(v=x.v.to(BF16)))
        with torch.autocast(x.q.device.type, BF16):
            out = attention(*leaves)
        out.backward(x.dout.to(BF16))
        assert out.dtype == BF16 and [leaf.grad.dtype for leaf in leaves] == [torch.float32, torch.float32, BF16]
        assert_matches(Results(out, None, *(leaf.grad.to(BF16) for leaf in leaves)), *(t.to(BF16) for t in x[:4]))
    for q, k, v in ((x.q, x.k.to(BF16), x.v.to(BF16)), (x.q.to(BF16), x.k.to(BF16), x.v.half())):
        with pytest.raises(TypeError, match="float16, bfloat16.*got " + ", ".join(str(t.dtype)[6:] for t in (q, k, v))):
            gqa_attn.attention(q, k, v)


def save_attention(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is fwd.default else CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(save_attention)


CHECKPOINTS = {
    "none": (lambda f: f, 1),
    "selective": (lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False, context_fn=selective), 1),
    "not reentrant": (lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False), 2),
    "reentrant": (lambda f: lambda *x: checkpoint(f, *x, use_reentrant=True), 2),
}


@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("kind, compiled",
                         [*((kind, False) for kind in CHECKPOINTS), ("selective", True), ("not reentrant", True)])
def test_B61_activation_checkpointing_sees_one_op(kind, compiled, deterministic, monkeypatch):
    x = random_inputs(1, 33, 33, 4, 2, 16)
    runs = []
    # Counted below every mode: what a policy takes from its store does not get here.
    forward = _cpu._forward
    monkeypatch.setattr(_cpu, "_forward", lambda *args: runs.append(1) or forward(*args))

    def block(q, k, v):
        return gqa_attn.attention(q.sin(), k.sin(), v, deterministic=deterministic).cos()

    def gradients(f):
        leaves = leaves_of(x)
        f(*leaves).sum().backward()  # autograd.grad does not go with reentrant checkpoints
        return [leaf.grad for leaf in leaves]

    expected = gradients(block)
    runs.clear()
    wrap, count = CHECKPOINTS[kind]
    step = torch.compile(wrap(block), backend="aot_eager", fullgraph=True) if compiled else wrap(block)
    assert all(torch.equal(a, b) for a, b in zip(gradients(step), expected))
    assert len(runs) == count


def test_B62_double_backward_is_refused():
    x = random_inputs(1, 16, 16, 2, 2, 64, dtype=BF16)
    for options in ({}, {"deterministic": True}):
        q, k, v = leaves_of(x)
        out = gqa_attn.attention(q, k, v, **options)
        gradient, = torch.autograd.grad(out.float().pow(2).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="gqa_attn::bwd.*double backward"):
            gradient.float().pow(2).sum().backward()


# ---- 8: autograd contract, lse, modules ----

def test_B67_unit_and_shape_of_lse():
    x = random_inputs(2, 5, 7, 4, 2, 64)
    _, lse = fwd(x.q, torch.zeros_like(x.k), x.v)
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.full((2, 4, 5), 1.945910))
    _, packed = fwd(x.q[0], torch.zeros_like(x.k[0]), x.v[0], cu_seqlens_q=int32(0, 5), cu_seqlens_k=int32(0, 7))
    torch.testing.assert_close(packed, lse[0])
    whole, whole_lse = fwd(x.q, x.k, x.v)
    (a, lse_a), (b, lse_b) = (fwd(x.q, x.k[:, keys], x.v[:, keys]) for keys in (slice(0, 3), slice(3, 7)))
    merged_lse = torch.logaddexp(lse_a, lse_b)
    merged = sum(out * (lse - merged_lse).exp().transpose(1, 2)[..., None] for out, lse in ((a, lse_a), (b, lse_b)))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, whole_lse)


@pytest.mark.parametrize("compiled", [False, True])
def test_B68_only_some_inputs_need_gradients(compiled):
    x = random_inputs(1, 70, 70, 4, 2, 64, dtype=BF16)
    attention = compiled_attention() if compiled else gqa_attn.attention
    expected = check(x._replace(dlse=None))[2:5]
    for needed in itertools.product([False, True], repeat=3):
        if any(needed):
            leaves = [t.detach().clone().requires_grad_(n) for t, n in zip((x.q, x.k, x.v), needed)]
            attention(*leaves).backward(x.dout)
            for leaf, gradient, n in zip(leaves, expected, needed):
                assert torch.equal(leaf.grad, gradient) if n else leaf.grad is None
    attention = compiled_attention() if compiled else gqa_attn.attention
    same_object = torch.randn(1, 70, 4, 64, requires_grad=True)
    attention(same_object, same_object, same_object).sum().backward()
    t = same_object.detach()
    torch.testing.assert_close(same_object.grad, sum(run(Inputs(t, t, t, torch.ones_like(t)))[2:5]))


def test_B69_grad_mode():
    x = random_inputs(1, 33, 33, 4, 2, 16)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert gqa_attn.attention(*leaves_of(x), return_lse=True)[0].grad_fn is None
    assert gqa_attn.attention(x.q, x.k, x.v).grad_fn is None  # frozen inputs in grad mode
    assert gqa_attn.attention(x.q, x.k, x.v, deterministic=True).grad_fn is None
    with torch.inference_mode():
        q = x.q.clone()
    with pytest.raises(RuntimeError, match="[Ii]nference tensor"):
        gqa_attn.attention(q, *leaves_of(x)[1:]).sum().backward()


# ---- 9: build, install, import ----

@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_B78_without_gpu_or_driver(dtype):
    x = random_inputs(1, 9, 9, 4, 2, 192, 128, dtype)
    for options in ({}, {"causal": True}, {"window": (3, 1)}):
        check(x, **options)
    check(random_inputs(None, 9, 9, 4, 2, 192, 128, dtype), cu_seqlens_q=int32(0, 2, 9), cu_seqlens_k=int32(0, 5, 9))
    assert gqa_attn.attention(*(t.to("meta") for t in x[:3])).shape == (1, 9, 4, 128)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError), match="NVIDIA driver|not compiled with CUDA|No CUDA GPUs"):
            gqa_attn.attention(*(t.to("cuda") for t in x[:3]))


# ---- 10: memory and performance ----

@pytest.mark.parametrize("seqlen, left, most", [(16384, 1023, 0.25), (4096, 2047, 1.05)])
def test_B84_tiles_outside_the_window_are_skipped(seqlen, left, most):
    def count(left):
        tiles = _cpu._Tiles(seqlen, seqlen, left, 0)
        return sum(1 for rows in tiles.query_blocks() for _ in tiles.key_blocks(rows))

    assert count(left) <= most * count(-1)


# ---- 11: argument checks and messages ----

def test_B87_messages_of_the_backward():
    x = random_inputs(2, 5, 5, 4, 2, 8, dtype=BF16)
    out, lse = fwd(x.q, x.k, x.v)
    good = dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=out, lse=lse)
    wrong = {
        "dout must have the dtype of q (bfloat16), got float32": dict(dout=x.dout.float()),
        "dout must have the shape of q [2, 5, 4, 8] with the head dim of v (8), got [2, 4, 5, 8]":
            dict(dout=x.dout.transpose(1, 2)),
        "lse must have shape [B, Hq, Sq] = [2, 4, 5], got [2, 5, 4]": dict(lse=lse.transpose(1, 2)),
        "must be on the device of q (meta), got cpu": dict(q=x.q.to("meta")),
    }
    for text, argument in wrong.items():
        with pytest.raises(RuntimeError) as raised:
            bwd(**good | argument)
        assert text in str(raised.value)
    with pytest.raises(RuntimeError, match="out must be a strided torch.Tensor, got NoneType"):
        bwd(**good | dict(out=None))


B91 = {
    "v of 31 keys": (dict(v=(2, 31, 2, 64)), ["[2, 32, 2, 64]", "[2, 31, 2, 64]"]),
    "k of batch 1": (dict(k=(1, 32, 2, 64), v=(1, 32, 2, 64)), ["[2, 32, 4, 64]", "[1, 32, 2, 64]"]),
    "q of rank 3": (dict(q=(32, 4, 64)), ["q must have shape [B, Sq, Hq, D]", "[32, 4, 64]"]),
    "k and v of other heads": (dict(k=(2, 32, 4, 64)), ["[2, 32, 4, 64]", "[2, 32, 2, 64]"]),
    "k of another head dim": (dict(k=(2, 32, 2, 128)), ["[2, 32, 4, 64]", "[2, 32, 2, 128]"]),
}


@pytest.mark.parametrize("device", ["cpu", "meta", "fake cuda"])
@pytest.mark.parametrize("name", B91)
def test_B91_shapes_that_do_not_fit(name, device):
    changed, said = B91[name]
    shapes = dict(q=(2, 32, 4, 64), k=(2, 32, 2, 64), v=(2, 32, 2, 64)) | changed
    with FakeTensorMode() if device == "fake cuda" else torch.no_grad():
        arguments = {n: torch.empty(shape, dtype=BF16, device=device.removeprefix("fake ")) for n, shape in shapes.items()}
        with pytest.raises(ValueError) as raised:
            gqa_attn.attention(**arguments)
    assert all(text in str(raised.value) for text in said)


OTHER_KINDS = {
    "float16": lambda q: q.half(),
    "complex64": lambda q: q.to(torch.complex64),
    "sparse_coo": lambda q: q.to_sparse(),
    "a nested tensor": lambda q: torch.nested.nested_tensor(list(q), layout=torch.jagged),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_B91_tensors_of_other_kinds(kind):
    x = random_inputs(2, 32, 32, 4, 2, 64, dtype=BF16)
    with pytest.raises(TypeError, match=f"q.*got {kind}"):
        gqa_attn.attention(OTHER_KINDS[kind](x.q), x.k, x.v)
