"""Values of forward and backward against float64: the grid of problems, and the public failures that are about values."""
import math
from dataclasses import replace

import pytest
import torch
from calls import assert_same, backward, check, forward, run
from problems import DTYPES, TUNED, Inputs, Problem, corner_problems, correctness_problems
from reference import Results, reference


@pytest.mark.parametrize("problem", correctness_problems(), ids=str)
def test_correctness(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("problem", corner_problems(), ids=str)
def test_corner(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("dims", TUNED + [(40, 40), (129, 128)], ids=str)
@pytest.mark.parametrize("seqlens", [(130, 66), (66, 2), (200, 1)], ids=str)
def test_B02_causal_with_more_queries_than_keys(dims, seqlens, seed):
    x = Problem(*dims, *seqlens, causal=True, dlse=True).inputs(seed)
    got = run(x)
    check(x, got)
    empty = seqlens[0] - seqlens[1]
    assert (got.out[:, :empty] == 0).all() and torch.isneginf(got.lse[..., :empty]).all() and (got.dq[:, :empty] == 0).all()
    group = x.q.shape[2] // x.k.shape[2]
    assert torch.equal(got.out[:, empty], x.v[:, 0].repeat_interleave(group, 1)), "the first row that sees a key sees one"


@pytest.mark.parametrize("causal", [False, True])
def test_B04_logits_below_a_finite_stand_in_for_minus_infinity(causal, seed):
    x = Problem(128, seqlen_q=64, heads=2, kv_heads=1, batch=1, causal=causal).inputs(seed)
    x.q[..., 0], x.k[..., 0] = 400, -1800
    got, expected = run(x), reference(x.q, x.k, x.v, x.dout, causal=causal)
    for name in ("out", "lse", "dq", "dk", "dv"):
        actual, want = getattr(got, name).double(), getattr(expected, name)
        assert torch.isfinite(actual).all(), name
        if name in ("dq", "dk"):  # the dS of a row sum to 0, so channel 0 is rounding errors times 400 and 1800
            actual, want = actual[..., 1:], want[..., 1:]
        assert (actual - want).abs().max() <= 0.05 * want.abs().max(), name


@pytest.mark.parametrize("head_dim", [72, 104])
def test_B20_every_column_of_dq_is_written(head_dim, seed):
    x = Problem(head_dim, seqlen_q=160, batch=1, heads=8, kv_heads=8, deterministic=True).inputs(seed)
    first = run(x)
    torch.randn(1 << 24, device="cuda").sum()
    second = run(x)
    check(x, first)
    check(x, second)
    assert_same(second, first)
    want = reference(x.q, x.k, x.v, x.dout).dq
    error = (first.dq.double() - want).abs().amax((0, 1, 2))
    assert error.max() <= 0.02 * want.abs().max(), f"worst column {error.argmax().item()}"


@pytest.mark.parametrize("head_dim", [72, 40, 80, 96, 112, 160])
def test_B21_a_store_stays_inside_its_head(head_dim, seed):
    for seqlen in (33, 37):
        x = Problem(head_dim, seqlen_q=seqlen, batch=1, heads=3, kv_heads=3).inputs(seed)
        check(x, run(x))


def test_B29_structured_activations(seed):
    x = Problem(256, seqlen_q=160, heads=16, kv_heads=2, causal=True, deterministic=True).inputs(seed)
    for tensor in (x.q, x.k):
        tensor[..., [3, 200]] *= 40
    x.k[:, 0] *= 20
    for tensor in (x.q, x.k, x.v, x.dout):
        tensor[1] = tensor[0].flip(0)
    got = run(x)
    want = reference(x.q, x.k, x.v, x.dout, causal=True)
    for b in range(2):
        alone = run(one := replace(x, **{name: getattr(x, name)[b : b + 1] for name in ("q", "k", "v", "dout")}))
        check(one, alone)
        assert_same(Results(*(each[b : b + 1] for each in got[:5])), alone)
        for name in ("dq", "dk", "dv"):
            actual, expected = getattr(got, name)[b].double().flatten(), getattr(want, name)[b].flatten()
            assert torch.cosine_similarity(actual, expected, dim=0) >= 0.999, (b, name)


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_B67_lse_is_a_natural_logarithm_that_merges(dims, seed):
    x = Problem(*dims, 5, 7).inputs(seed)
    _, lse = forward(Inputs(x.q, torch.zeros_like(x.k), x.v, x.dout))
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert (lse - math.log(7)).abs().max() <= 1e-6
    out, lse = forward(x)
    parts = [forward(Inputs(x.q, x.k[:, at], x.v[:, at], x.dout)) for at in (slice(0, 3), slice(3, 7))]
    lses = torch.stack([part_lse for _, part_lse in parts]).double()
    weights = (lses - lses.logsumexp(0)).exp().transpose(2, 3).unsqueeze(-1)
    merged = sum(w * part_out.double() for w, (part_out, _) in zip(weights, parts))
    assert (lses.logsumexp(0) - lse).abs().max() <= 1e-5
    assert (merged - out.double()).abs().max() <= 2**-7 * out.double().abs().max()


@pytest.mark.parametrize("dims", TUNED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_a_part_of_the_keys(dims, dtype, seed):
    """Ring attention gives out and lse of all keys with some keys: the parts' dq sum up, dk and dv are those of the keys."""
    x = Problem(*dims, 190, 300, dtype=dtype, dlse=True).inputs(seed)
    out, lse = forward(x)
    parts = [backward(Inputs(x.q, x.k[:, at], x.v[:, at], x.dout, x.dlse), out, lse) for at in (slice(0, 130), slice(130, 300))]
    dq = sum(part[0].double() for part in parts).to(x.q.dtype)
    check(x, Results(dq=dq, dk=torch.cat([part[1] for part in parts], 1), dv=torch.cat([part[2] for part in parts], 1)))


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_float16_scores_may_pass_its_largest_number(dims, seed):
    x = Problem(*dims, 130, dtype="float16", causal=True).inputs(seed)
    half = dims[0] // 2
    for tensor in (x.q, x.k):
        tensor *= 60
        tensor[..., :half] = (80000 * dims[0] ** 0.5 / half) ** 0.5  # adds 80000 to every score
    got, want = run(x), reference(x.q, x.k, x.v, x.dout, causal=True)
    assert (want.lse > 65504).any(), "the case is too mild"
    for name in ("out", "lse", "dv"):
        actual, expected = getattr(got, name).double(), getattr(want, name)
        assert torch.isfinite(actual).all(), name
        assert (actual - expected).abs().max() <= 0.05 * expected.abs().max(), name  # as B04: float32 rounds such scores too


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_float16_gradients_that_overflow_are_infinite(dims):
    """As a cast does it: inf where the sum passes the largest number, not NaN and not clipped; the others stay right."""
    x = Problem(*dims, 4, 1, dtype="float16", heads=2, kv_heads=1, batch=1).inputs(0)
    x.v.zero_()
    x.dout.fill_(60000)
    x.dout[..., 1::2] = 1
    got = run(x)
    assert torch.isposinf(got.dv[..., ::2]).all() and (got.dv[..., 1::2] == 8).all()
    assert (got.dq == 0).all() and (got.dk == 0).all() and (got.out == 0).all()


def check_some_batches(problem: Problem, seed: int, *batches: slice):
    x = problem.inputs(seed)
    got = run(x)
    for at in batches:
        part = Inputs(*(t[at] for t in (x.q, x.k, x.v, x.dout)), causal=x.causal)
        check(part, Results(*(t[at] for t in got[:5])))


@pytest.mark.parametrize("batch", [65535, 65536, 70001])
def test_B45_batch_above_the_limit_of_a_grid_dimension(batch, seed):
    problem = Problem(64, seqlen_q=4, batch=batch, heads=2, kv_heads=1)
    check_some_batches(problem, seed, slice(0, 2), slice(65533, 65538), slice(batch - 2, batch))


def test_more_elements_than_32_bits_count(seed):
    batch = 17000
    problem = Problem(128, seqlen_q=129, batch=batch, heads=8, kv_heads=8, causal=True)
    assert torch.Size(problem.shapes["k"]).numel() > 2**31
    check_some_batches(problem, seed, slice(0, 2), slice(batch - 2, batch))
