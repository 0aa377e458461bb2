"""Sizes and numbers at the edges: nothing at all, past 65,535 and past 2^31, 131,072 tokens, huge scores, outliers."""
from dataclasses import replace

import pytest
import torch
from calls import assert_same, check, run
from problems import DEVICE, TUNED, Inputs, Problem
from reference import Results, reference

ON_GPU = DEVICE == "cuda"
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (200, 7)},
    "everything": {"causal": True, "window": (1023, 0), "softcap": 30.0, "sinks": "float32", "dlse": True},
}


def rows_of(x: Inputs, got: Results, begin: int, end: int) -> tuple[Inputs, Results]:
    """The problem of some query rows, causal or without a window: they and the keys up to them, whose offset is theirs.

    dk and dv get terms from all rows, so they are left out.
    """
    offset = x.k.shape[1] - x.q.shape[1]
    keys = end + offset if x.causal else x.k.shape[1]
    part = replace(x, q=x.q[:, begin:end], dout=x.dout[:, begin:end], dlse=None if x.dlse is None else x.dlse[..., begin:end],
                   k=x.k[:, :keys], v=x.v[:, :keys])
    return part, Results(got.out[:, begin:end], got.lse[..., begin:end], got.dq[:, begin:end])


@pytest.mark.parametrize("options", [{}, *OPTIONS.values(), {"sinks": "same", "deterministic": True}], ids=str)
@pytest.mark.parametrize("dims", TUNED + [(33, 40)], ids=str)
def test_empty_sizes(dims, options, seed):
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)):
        check(x := replace(Problem(*dims, seqlen_q, seqlen_k, batch=batch), **options).inputs(seed), run(x))


@pytest.mark.parametrize("lengths", [None, ((7, 7), (0, 3), (130, 9))])
def test_no_query_heads(lengths, seed):
    """dk and dv are zeros, and written."""
    x = Problem(64, seqlen_q=70, heads=0, kv_heads=2, lengths=lengths, tail=0 if lengths is None else 5).inputs(seed)
    got = run(x)
    assert all(not torch.count_nonzero(each) for each in (got.dk, got.dv))


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=str)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_one_token(dims, options, seed):
    for seqlen_k in (1, 129, 4000):
        check(x := Problem(*dims, 1, seqlen_k, heads=16, kv_heads=2, **options).inputs(seed), run(x))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("batch, heads, kv_heads", [(2, 40_000, 20_000), (1, 70_000, 70_000), (70_001, 2, 1)])
def test_more_heads_and_batches_than_a_grid_dimension(batch, heads, kv_heads, options, deterministic, seed):
    small = 1 if ON_GPU else 100
    x = Problem(64, None, 5, 6, batch=max(1, batch // small), heads=max(2, heads // small), kv_heads=max(1, kv_heads // small),
                deterministic=deterministic, **options).inputs(seed)
    check(x, run(x))


@pytest.mark.skipif(not ON_GPU, reason="takes 60 GB")
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences_of_more_elements_than_32_bits_count(deterministic, seed):
    length = 16_000
    x = Problem(128, lengths=((length, length),) * 137, heads=8, kv_heads=8, causal=True, window=(300, 0),
                deterministic=deterministic).inputs(seed)
    assert x.q.numel() > 2**31
    got = run(x)
    for sequence in (0, 136):
        rows = slice(sequence * length, (sequence + 1) * length)
        one = replace(x, **{name: getattr(x, name)[None, rows, :1] for name in ("q", "k", "v", "dout")}, cu_seqlens_q=None,
                      cu_seqlens_k=None)
        check(one, Results(got.out[None, rows, :1], got.lse[None, :1, rows],
                           *(each[None, rows, :1] for each in (got.dq, got.dk, got.dv))))


@pytest.mark.parametrize("options", [{"lengths": ((60, 60), (70, 70))}, {"batch": 1, "window": (70, 3), "sinks": "float32"},
                                     {"batch": 1, "causal": True}], ids=str)
def test_B33_strides_past_32_bits(options, seed):
    x = Problem(128, seqlen_q=130, heads=1, kv_heads=1, deterministic=True, **options).inputs(seed)
    big = torch.empty(130 * 2**24, device=DEVICE, dtype=torch.bfloat16)  # on the CPU untouched pages take no memory
    strides = (0, 2**24, 128, 1)[-x.q.dim() :]
    spread = {name: big.as_strided(getattr(x, name).shape, strides, 128 * i).copy_(getattr(x, name))
              for i, name in enumerate(("q", "k", "v", "dout"))}
    got = run(replace(x, **spread))
    check(x, got)
    assert_same(got, run(x))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_131072_tokens(dims, options, deterministic, seed):
    """Rows at both ends and in the middle; the last keys, which only the last rows see; short on the other side, everything."""
    seqlen = 131_072 if ON_GPU else 2048
    x = Problem(*dims, seqlen, batch=1, heads=2, kv_heads=1, deterministic=deterministic, **options).inputs(seed)
    got = run(x)
    for begin in (0, seqlen // 2 - 3, seqlen - 70):
        check(*rows_of(x, got, begin, begin + 70))
    if x.causal:
        last, _ = rows_of(x, got, seqlen - 70, seqlen)
        want = reference(last.q, last.k, last.v, last.dout, causal=True)
        for name in ("dk", "dv"):
            actual, expected = getattr(got, name)[:, -70:].double(), getattr(want, name)[:, -70:]
            assert (actual - expected).abs().max() <= 2**-6 * expected.abs().max(), name
    for lengths in ((seqlen, 70), (70, seqlen)):
        check(y := Problem(*dims, *lengths, batch=1, heads=2, kv_heads=1, deterministic=deterministic).inputs(seed), run(y))


@pytest.mark.parametrize("left", [127, 1023])
@pytest.mark.parametrize("deterministic", [False, True])
def test_131072_tokens_in_a_window(left, deterministic, seed):
    """Each part of the keys with all that sees them is a small problem."""
    seqlen = 131_072 if ON_GPU else 8192
    x = Problem(64, None, seqlen, batch=1, heads=8, kv_heads=2, causal=True, window=(left, 0), sinks="float32",
                deterministic=deterministic).inputs(seed)
    got = run(x)
    for begin in (left, seqlen // 2 + 5, seqlen - 200 - left):
        rows, keys = slice(begin, begin + 200 + left), slice(begin - left, begin + 200 + left)
        part = replace(x, q=x.q[:, rows], dout=x.dout[:, rows], k=x.k[:, keys], v=x.v[:, keys])
        check(part, Results(got.out[:, rows], got.lse[..., rows], got.dq[:, rows]))
        want = reference(part.q, part.k, part.v, part.dout, **part.options)
        for name in ("dk", "dv"):  # of keys whose rows are all in the part
            actual, expected = getattr(got, name)[:, begin : begin + 200].double(), getattr(want, name)[:, left : left + 200]
            assert (actual - expected).abs().max() <= 2**-6 * expected.abs().max(), name


@pytest.mark.parametrize("problem", [Problem(128, causal=True), Problem(64, dtype="float16"),
                                     Problem(192, 128, causal=True, dtype="float16", deterministic=True),
                                     Problem(256, causal=True, window=(4000, 0), sinks="float32", softcap=30.0)], ids=str)
def test_precision_at_16384_tokens(problem, seed):
    """P and dS in 16 bits, sums over thousands of terms: the rule of reference.py, for every element of one head."""
    x = replace(problem, seqlen_q=16_384 if ON_GPU else 1024, batch=1, heads=1, kv_heads=1).inputs(seed)
    check(x, run(x))


def shifted_scores(problem: Problem, seed: int, shift: float) -> Inputs:
    """Every score is `shift` and some tens of noise."""
    x = problem.inputs(seed)
    half = problem.head_dim // 2
    for tensor, sign in ((x.q, 1), (x.k, 1 if shift > 0 else -1)):
        tensor[..., half:] *= 4
        tensor[..., :half] = sign * (abs(shift) * problem.head_dim**0.5 / half) ** 0.5
    return x


@pytest.mark.parametrize("shift", [-1e5, 7e4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (50, 3)}, {"sinks": "absent"}, {"sinks": "float32"},
                                     {"softcap": 1.5}, {"softcap": 1000.0, "window": (90, 0)},
                                     {"lengths": ((60, 60), (0, 3), (90, 77)), "causal": True}], ids=str)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_scores_of_a_hundred_thousand(dims, options, shift, seed):
    """Past float16's largest number and past every finite stand-in for -inf. Float32 rounds such scores by 1/128, hence 5 %."""
    x = shifted_scores(Problem(*dims, 130, dtype="float16", dlse=True, **options), seed, shift)
    got, want = run(x), reference(x.q, x.k, x.v, x.dout, x.dlse, **x.options)
    seen = torch.isfinite(want.lse)
    assert torch.equal(got.lse.double()[~seen], want.lse[~seen])
    got, want = (each._replace(lse=each.lse.masked_fill(~seen, 0)) for each in (got, want))
    for name in ("out", "lse", "dv", "dsinks"):
        actual, expected = getattr(got, name).double(), getattr(want, name).double()
        assert torch.isfinite(actual).all(), name
        if actual.numel():
            assert (actual - expected).abs().max() <= 0.05 * expected.abs().max(), name
    for name in ("dq", "dk"):  # rounding errors times large inputs: finite is what can be asked
        assert torch.isfinite(getattr(got, name)).all(), name


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 40), "sinks": "float32"}, {"softcap": 50.0},
                                     {"lengths": ((160, 160), (70, 90)), "causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_outlier_channels_and_an_attention_sink(dims, options, seed):
    """B29 with options: a few channels 40 times as large, the first key 20 times."""
    x = Problem(*dims, 160, heads=16, kv_heads=2, **options).inputs(seed)
    for tensor in (x.q, x.k):
        tensor[..., [3, dims[0] - 7]] *= 40
    x.k[(slice(None),) * (x.k.dim() - 3) + (0,)] *= 20
    check(x, run(x))
