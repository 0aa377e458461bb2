"""The float64 reference against finite differences, and the rule against results that are wrong."""

from contextlib import nullcontext

import pytest
import torch
from cpu import random_inputs
from reference import Results, _tiny, absolute_terms, assert_close_to_float64, assert_matches, eager, reference

OPTIONS = [
    {},
    {"causal": True},
    {"window": (2, 1), "softcap": 1.5},
    {"causal": True, "softcap": 2.0, "sinks": True},
    {"scale": -0.3, "window": (1, -1), "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_finite_differences(options):
    x = random_inputs(2, 5, 7, 4, 2, 8, 6, torch.float64)
    sinks = torch.randn(4, dtype=torch.float64) if options.pop("sinks", False) else None
    leaves = {"dq": x.q, "dk": x.k, "dv": x.v} | ({} if sinks is None else {"dsinks": sinks})

    def loss():
        r = reference(x.q, x.k, x.v, sinks=sinks, **options)
        return ((r.out * x.dout).sum() + (r.lse * x.dlse).sum()).item()

    analytic = reference(*x, sinks=sinks, **options)
    step = 1e-5
    for name, leaf in leaves.items():
        for at in torch.randint(leaf.numel(), (5,)):
            flat = leaf.view(-1)
            value = flat[at].item()
            flat[at] = value + step
            above = loss()
            flat[at] = value - step
            below = loss()
            flat[at] = value
            assert (above - below) / (2 * step) == pytest.approx(getattr(analytic, name).flatten()[at].item(), abs=1e-8), name


def test_forward_by_the_definition():
    x = random_inputs(1, 3, 4, 2, 1, 5, dtype=torch.float64)
    r = reference(x.q, x.k, x.v, causal=True)
    for head in range(2):
        for row in range(3):
            keys = row + 2  # off = 1, and the key on the diagonal
            scores = x.k[0, :keys, 0] @ x.q[0, row, head] / 5**0.5
            torch.testing.assert_close(r.lse[0, head, row], scores.exp().sum().log())
            torch.testing.assert_close(r.out[0, row, head], scores.softmax(0) @ x.v[0, :keys, 0])


def with_one(tensor, at, value):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_eager_passes_its_own_rule_and_faults_do_not(dtype):
    x = random_inputs(2, 90, 70, 4, 2, 16, dtype=dtype)
    good = eager(*x, causal=True)
    assert_matches(good, *x, causal=True)

    def fails(text, **wrong):
        with pytest.raises(AssertionError, match=text):
            assert_matches(good._replace(**wrong), *x, causal=True)

    fails("dq: error", dq=good.dq * 1.03)
    fails("dv: error", dv=good.dv.flip(2))
    fails("out: 1 elements that no term", out=with_one(good.out, (0, 3, 1, 2), 1e-3))
    fails("lse: not -inf", lse=good.lse.nan_to_num(neginf=0))
    fails("dq: 1 of .* not finite", dq=with_one(good.dq, (1, 80, 1, 2), float("nan")))
    fails("out: dtype", out=good.out.double())
    fails("out: shape", out=good.out[:, 1:])


def test_a_head_of_small_values_is_looked_at_by_itself():
    x = random_inputs(2, 90, 70, 4, 2, 16, dtype=torch.bfloat16)
    x.dout[:, :, :2] *= 1e-4  # the query heads of kv head 0
    good = eager(*x)
    good.dv[:, :, 0] *= -1
    with pytest.raises(AssertionError, match="^dv: cosine -0.9.* in heads .0.$"):
        assert_matches(good, *x)


def test_packed_sequences_are_separate_ones():
    x = random_inputs(None, 12, 11, 4, 2, 8, dtype=torch.float64)
    r = reference(*x, causal=True, cu_seqlens_q=torch.tensor([0, 3, 3, 10]), cu_seqlens_k=torch.tensor([0, 2, 4, 9]))
    alone = reference(x.q[None, 3:10], x.k[None, 4:9], x.v[None, 4:9], x.dout[None, 3:10], x.dlse[None, :, 3:10], causal=True)
    for name, rows in dict(out=slice(3, 10), dq=slice(3, 10), dk=slice(4, 9), dv=slice(4, 9)).items():
        assert torch.equal(getattr(r, name)[rows], getattr(alone, name)[0])
    assert torch.equal(r.lse[:, 3:10], alone.lse[0]) and r.lse[:, 10:].isneginf().all()
    assert not any(t.any() for t in (r.out[10:], r.dq[10:], r.dk[2:4], r.dk[9:], r.dv[2:4], r.dv[9:]))


def test_chunks_change_nothing(monkeypatch):
    x = random_inputs(3, 9, 8, 4, 2, 8, dtype=torch.float64)
    whole, terms = reference(*x), absolute_terms(*x)
    monkeypatch.setattr("reference.CHUNK_ELEMENTS", 1)
    for a, b in zip((*whole, *terms), (*reference(*x), *absolute_terms(*x))):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    assert isinstance(whole, Results)


def test_which_sequences_are_tiny():
    """By seen pairs, rows, and for each result its elements: eager's largest error is one of few."""
    x = random_inputs(None, 501, 2503, 4, 2, 1, dtype=torch.bfloat16)
    bounds_q, bounds_k = torch.tensor([0, 400, 500, 501]), torch.tensor([0, 100, 2500, 2503])
    tiny = _tiny(x.q, x.k, x.v, None, False, (-1, -1), 0.0, None, bounds_q, bounds_k)

    def by_sequence(flags, bounds):
        flags = flags.flatten()
        assert all((flags[start:end] == flags[start]).all() for start, end in zip(bounds, bounds[1:]))
        return flags[bounds[:-1]].tolist()

    assert by_sequence(tiny.lse, bounds_q) == [False, False, True]
    assert by_sequence(tiny.out, bounds_q) == by_sequence(tiny.dq, bounds_q) == [True, True, True]  # of 4 heads and head dim 1
    assert by_sequence(tiny.dk, bounds_k) == by_sequence(tiny.dv, bounds_k) == [True, False, True]
    assert not tiny.dsinks


def test_cosines_of_few_rows_whose_sums_all_but_cancel():
    expected = torch.randn(2, 1, 32, 64, dtype=torch.float64)
    expected[:, :, 5] *= 1e-3
    near = expected + 1e-6 * torch.randn_like(expected)
    off = near.clone()
    off[:, :, 5] += 1.5e-4 * torch.randn(2, 1, 64)  # cosine 0.99
    near[0, 0, 0, 0] += 1e-3  # eager's largest error, of another head
    for terms_there, wrong in (1e-2, True), (10.0, False):
        terms = expected.abs()
        terms[:, :, 5] = terms_there
        with pytest.raises(AssertionError, match=r"dq: cosine 0.9.* in heads \[5\]") if wrong else nullcontext():
            assert_close_to_float64("dq", off, expected, near, terms, torch.float16)
