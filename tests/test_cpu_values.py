"""The CPU path against float64: every option, both layouts, odd sizes, empty rows, empty tensors."""

import gqa_attn
import pytest
import torch
from cpu import bwd, check, fwd, in_new_process, int32, random_inputs, run, same
from reference import assert_matches

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "scale": -0.3},
    {"scale": 0.0},
    {"window": (20, 3)},
    {"window": (-1, 100), "softcap": 1.5},
    {"causal": True, "window": (0, 5), "sinks": True},
    {"causal": True, "softcap": 30.0, "sinks": True},
    {"window": (150, -1), "sinks": True},
]
# Around the tile of 128, fewer and more queries than keys (the latter have rows that see nothing when causal).
LENGTHS = [(1, 1), (1, 300), (2, 1), (127, 129), (128, 128), (257, 130), (130, 257), (300, 1)]
HEADS = [(1, 1), (4, 2), (6, 2), (7, 1), (3, 3)]
HEAD_DIMS = [(64, 64), (1, 1), (40, 33), (72, 96), (192, 128), (256, 256)]


def with_sinks(options, heads, dtype):
    if options.get("sinks"):
        options = options | {"sinks": torch.randn(heads).to(dtype)}
    return options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense(dtype, options):
    turn = DTYPES.index(dtype) + OPTIONS.index(options)
    for i, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        heads, kv_heads = HEADS[(i + turn) % len(HEADS)]
        head_dims = HEAD_DIMS[(i + turn) % len(HEAD_DIMS)]
        x = random_inputs(1 + i % 2, seqlen_q, seqlen_k, heads, kv_heads, *head_dims, dtype)
        sinks_dtype = dtype if i % 2 or dtype == torch.float64 else torch.float32
        given = with_sinks(options, heads, sinks_dtype)
        check(x if i % 3 else x._replace(dlse=None), **given)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype, options):
    """With empty sequences on either side and rows behind the last one."""
    x = random_inputs(None, 310, 290, 6, 2, 40, 24, dtype)
    cu_seqlens_q, cu_seqlens_k = int32(0, 5, 5, 140, 141, 150, 301), int32(0, 9, 20, 150, 150, 155, 285)
    results = check(x, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **with_sinks(options, 6, dtype))
    assert not results.out[301:].any() and results.lse[:, 301:].isneginf().all()
    assert not results.dk[285:].any() and not results.dv[9:20].any()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_empty_rows_add_nothing_whatever_arrives(packed, sinks):
    x = random_inputs(1, 200, 40, 4, 2, 16)
    options = {"causal": True} | ({"sinks": torch.randn(4)} if sinks else {})
    x.dout[:, :160] = float("nan")
    if not sinks:
        x.dlse[:, :, :160] = float("inf")
    if packed:
        x = x._replace(**{name: t[0] for name, t in x._asdict().items()})
        options |= dict(cu_seqlens_q=int32(0, 200), cu_seqlens_k=int32(0, 40))
    results = check(x, **options)
    out, lse = (results.out, results.lse) if packed else (results.out[0], results.lse[0])
    assert not out[:160].any() and not results.dq.flatten(0, -3)[:160].any()
    assert torch.equal(lse[:, :160], options["sinks"][:, None].expand(4, 160) if sinks else torch.full((4, 160), float("-inf")))
    if sinks:  # what arrives at such a row's lse is the sink's gradient
        alone = run(x._replace(dout=torch.zeros_like(x.dout)), **options)
        k_hidden = run(x._replace(dout=torch.zeros_like(x.dout), dlse=x.dlse.index_fill(-1, torch.arange(160), 0.0)), **options)
        torch.testing.assert_close(alone.dsinks - k_hidden.dsinks, x.dlse.reshape(4, 200)[:, :160].sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_tensors(batch, seqlen_q, seqlen_k, sinks):
    options = {"sinks": torch.randn(4)} if sinks else {}
    for causal in (False, True):
        x = random_inputs(batch, seqlen_q, seqlen_k, 4, 2, 8, 6)
        check(x, causal=causal, **options)
    x = random_inputs(None, seqlen_q, seqlen_k, 4, 2, 8, 6)
    check(x, cu_seqlens_q=int32(0), cu_seqlens_k=int32(0), **options)
    check(x, cu_seqlens_q=int32(0, seqlen_q), cu_seqlens_k=int32(0, seqlen_k), **options)


BAD = [(0, 40, 30, 60), (0, 10, 1000, 20), (-5, 10, 20, 30), (0, 2**31 - 1, -(2**31), 7), (70, 80, 90, 100)]


@pytest.mark.parametrize("bad", BAD)
def test_bad_cu_seqlens_stay_in_bounds(bad):
    """Any values may come out; rows of other tensors around them must not be touched."""
    x = random_inputs(None, 60, 60, 4, 2, 8)
    for cu in ((int32(*bad), int32(0, 20, 40, 60)), (int32(0, 20, 40, 60), int32(*bad)), (int32(*bad), int32(*bad))):
        results = run(x, causal=True, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
        assert results.out.shape == x.dout.shape and all(t.isfinite().all() for t in (results.out, *results[2:]))


def test_gradients_in_float64_are_finite_differences():
    x = random_inputs(1, 5, 7, 4, 2, 3, 2, torch.float64)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    assert torch.autograd.gradcheck(lambda q, k, v, s: fwd(q, k, v, 0.7, True, 3, -1, 1.5, s), (*leaves, sinks))
    packed = [t.detach()[0].requires_grad_() for t in leaves]
    cu_seqlens = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 3, 6))
    assert torch.autograd.gradcheck(lambda q, k, v: fwd(q, k, v, **cu_seqlens), packed)


def test_keys_in_two_parts_with_the_lse_of_all():
    """As ring attention calls bwd: with out and lse of all keys and a part of k and v."""
    x = random_inputs(2, 150, 260, 4, 2, 16)
    whole = check(x)
    first, second = (bwd(x.dout, x.q, k, v, whole.out, whole.lse, x.dlse) for k, v in zip(x.k.split(130, 1), x.v.split(130, 1)))
    dk, dv = (torch.cat([first[i], second[i]], 1) for i in (1, 2))
    assert_matches(whole._replace(dq=first[0] + second[0], dk=dk, dv=dv), *x)


def test_which_rows_are_empty_follows_from_the_mask_alone():
    """lse of all keys is finite in rows that see none of this part."""
    x = random_inputs(1, 30, 50, 2, 1, 8)
    whole = check(x, causal=True)
    dq, dk, dv, _ = bwd(x.dout, x.q, x.k[:, :10], x.v[:, :10], whole.out, whole.lse, x.dlse, causal=True)
    assert not dq[:, :20].any() and dq[:, 20:].any() and dk.isfinite().all() and dv.isfinite().all()


def test_runs_are_bitwise_equal():
    x = random_inputs(2, 200, 300, 12, 4, 64, dtype=torch.bfloat16)
    first = run(x, causal=True)
    assert all(same(first, run(x, causal=True)) for _ in range(3))


def test_no_memory_of_the_size_of_the_score_matrix():
    """In another process, whose peak memory is its own. The matrix would have 8192 * 8192 * 4 bytes = 256 MiB."""
    code = """
        import resource, torch, gqa_attn
        torch.set_num_threads(1)
        def step(seqlen):
            q, k, v = (torch.randn(1, seqlen, heads, 16, requires_grad=True) for heads in (2, 1, 1))
            gqa_attn.attention(q, k, v, causal=True).sum().backward()
        step(64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(8192)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    assert int(in_new_process(code)) * 1024 < 64 << 20


def test_k_and_v_are_not_expanded_to_the_query_heads():
    """64 query heads on one kv head: k and v of 64 heads would be 2 * 128 MiB in float32."""
    x = random_inputs(1, 1, 32768, 64, 1, 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        run(x)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 8 << 20


def test_a_sink_of_minus_infinity_is_no_sink():
    """Also in a row that sees no key, where -inf would meet -inf."""
    x = random_inputs(1, 3, 1, 2, 2, 8)
    q, k, v = (t.requires_grad_() for t in x[:3])
    sinks = torch.tensor([0.3, float("-inf")], requires_grad=True)
    out, lse = gqa_attn.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    (out.sum() + lse[:, 0].sum()).backward()
    assert torch.isfinite(sinks.grad).all() and sinks.grad[1] == 0
    _, lse = fwd(q.detach(), k.detach(), v.detach(), causal=True, sinks=sinks.detach())
    dlse = torch.zeros_like(lse)
    dlse[:, 1, :2] = float("nan")  # of rows that see neither a key nor a sink
    results = bwd(torch.ones_like(out), q.detach(), k.detach(), v.detach(), out.detach(), lse, dlse, causal=True,
                  sinks=sinks.detach())
    assert all(t.isfinite().all() for t in results) and results[3][1] == 0
    plain = gqa_attn.attention(q, k, v, causal=True)
    assert torch.equal(out[:, :, 1], plain[:, :, 1])


@pytest.mark.parametrize("softcap", [1e-300, 1e-40, 1e30, 1e300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcaps_that_float32_does_not_hold(dtype, softcap):
    """A cap near 0 makes every score 0, which a scale of 0 does too; a huge one caps nothing."""
    x = random_inputs(2, 40, 70, 4, 2, 32, dtype=dtype)
    assert_matches(run(x, softcap=softcap), *x, **{"scale": 0.0} if softcap < 1 else {})
