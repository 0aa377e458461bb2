"""Windows, softcap, sinks and gradients through lse against float64, alone and together: every head dim, mask and layout."""
from dataclasses import replace

import gqa_attn
import pytest
import torch
from calls import assert_same, check, forward, run
from problems import DTYPES, HEADS, LAYOUTS, TUNED, UNTUNED, Problem
from reference import Results

WINDOWS = [(0, 0), (-1, 0), (0, -1), (5, 7), (63, 0), (64, -1), (65, 64), (127, 129), (128, 128), (129, 1), (-1, 63), (-1, 100),
           (300, -1), (1000, 1000), (2**31 - 1, 2**31 - 1)]
LENGTHS = [(257, 257), (1, 257), (65, 130), (300, 129), (129, 40), (128, 128), (200, 64), (513, 400), (64, 320), (2, 1)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (70, -1)},
    "right": {"window": (-1, 20)},
    "causal window": {"causal": True, "window": (65, 5)},
    "band": {"window": (31, 66)},
}


def walk(i: int) -> dict:
    """Lengths, heads and batch of problem i of a list."""
    (seqlen_q, seqlen_k), (heads, kv_heads) = LENGTHS[i % len(LENGTHS)], HEADS[i % len(HEADS)]
    return dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads, kv_heads=kv_heads, batch=1 + i % 2, dlse=i % 3 == 0)


def window_problems() -> list[Problem]:
    """Every tuned head dim and dtype meets every window, causal and not; one head dim meets every window at every length."""
    found = []
    for dims in TUNED:
        for dtype in DTYPES:
            for window in WINDOWS:
                i = len(found)
                found.append(Problem(*dims, causal=i % 2 == 1, dtype=dtype, window=window, **walk(i)))
    for window in WINDOWS:
        for seqlen_q, seqlen_k in LENGTHS:
            i = len(found)
            found.append(Problem(64, None, seqlen_q, seqlen_k, causal=i % 3 == 0, dtype=DTYPES[i % 2], window=window))
    return found


def softcap_problems() -> list[Problem]:
    """Logits of some tens, so that each cap bends them or leaves them alone."""
    return [Problem(*dims, dtype=dtype, softcap=softcap, factor=8.0, **MASKS[mask], **walk(i))
            for dims in TUNED for dtype in DTYPES for i, mask in enumerate(MASKS) for softcap in (1.5, 20.0, 50.0, 1000.0)]


def sink_problems() -> list[Problem]:
    return [Problem(*dims, dtype=DTYPES[(i + j) % 2], sinks=sinks, **MASKS[mask], **walk(i + j))
            for dims in TUNED for i, mask in enumerate(MASKS) for j, sinks in enumerate(("float32", "same", "absent"))]


def combined_problems() -> list[Problem]:
    """Everything at once, at all head dims."""
    found = []
    for dims in TUNED + UNTUNED + [(7, 7), (7, 160), (160, 7), (1, 256), (256, 1)]:
        for dtype in DTYPES:
            for mask in MASKS:
                i = len(found)
                sinks, scale = ("float32", "same", "absent", None)[i % 4], (None, 0.2, -0.15, 0.0)[i // 3 % 4]
                found.append(Problem(*dims, dtype=dtype, softcap=(0.0, 15.0)[i % 2], sinks=sinks, scale=scale, **MASKS[mask],
                                     **walk(i)))
    return found


@pytest.mark.parametrize("problem", window_problems(), ids=str)
def test_windows(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("problem", softcap_problems(), ids=str)
def test_softcap(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("problem", sink_problems(), ids=str)
def test_sinks(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("problem", combined_problems(), ids=str)
def test_together(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_gradient_through_lse_alone(dims, mask, seed):
    """From the op with dout 0, and from autograd, where no dout arrives at all."""
    x = Problem(*dims, 150, 140, dlse=True, dout=False, sinks="float32", **MASKS[mask]).inputs(seed)
    got = run(x)
    check(x, got)
    assert not got.dv.any()
    leaves = {name: getattr(x, name).clone().requires_grad_() for name in ("q", "k", "v", "sinks")}
    _, lse = torch.ops.gqa_attn.fwd(**x.arguments | leaves)
    gradients = torch.autograd.grad(lse, list(leaves.values()), x.dlse)
    check(x, Results(None, lse, *gradients))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (33, 40)], ids=str)
def test_strided_inputs(dims, layout, seed):
    options = dict(causal=True, window=(66, 0), softcap=20.0, sinks="float32", dlse=True, deterministic=True)
    x = Problem(*dims, 150, 131, **options).inputs(seed, layout)
    got = run(x)
    check(x, got)
    contiguous = replace(x, **{name: getattr(x, name).contiguous() for name in ("q", "k", "v", "dout")})
    assert_same(got, run(contiguous))


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_a_window_wider_than_the_keys_is_no_window(dims, seed):
    """Also one that is causal by its right side alone: the same kernels or others, the same function."""
    x = Problem(*dims, 200, 170, causal=True, dlse=True).inputs(seed)
    for causal, window in ((True, (200, 7)), (False, (-1, 0)), (False, (2**31 - 1, 0)), (True, (2**40, 2**40))):
        got = run(replace(x, causal=causal, window=window))
        check(x, got)


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_only_the_own_key(dims, seed):
    x = Problem(*dims, 133, window=(0, 0)).inputs(seed)
    got = run(x)
    check(x, got)
    assert torch.equal(got.out, x.v.repeat_interleave(2, 2))


@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_a_sink_of_minus_infinity_is_no_sink(dims, seed):
    """Also in rows without keys, where -inf meets -inf, and for whatever arrives at their lse."""
    x = Problem(*dims, 90, 33, causal=True, dlse=True, sinks="absent").inputs(seed)
    assert torch.isnan(x.dlse[:, ::2, :57]).all() and torch.isfinite(x.dlse[:, 1::2]).all()
    got = run(x)
    check(x, got)
    assert not got.dsinks[::2].any() and got.dsinks[1::2].all()
    plain, _ = forward(replace(x, sinks=None))
    assert torch.equal(got.out[:, :, ::2], plain[:, :, ::2])


@pytest.mark.parametrize("sinks", ["float32", "same"])
def test_dlse_of_an_empty_row_is_the_gradient_of_its_sink(sinks, seed):
    x = Problem(64, None, 200, 40, causal=True, dlse=True, dout=False, sinks=sinks).inputs(seed)
    got = run(x)
    check(x, got)
    assert torch.equal(got.lse[..., :160], x.sinks.float()[:, None].expand(2, 4, 160))
    visible_only = run(replace(x, dlse=x.dlse.index_fill(-1, torch.arange(160, device=x.dlse.device), 0.0)))
    difference = got.dsinks.double() - visible_only.dsinks.double()
    want = x.dlse[..., :160].double().sum((0, 2))
    assert (difference - want).abs().max() <= (1e-4 if sinks == "float32" else 2e-2) * want.abs().max()


@pytest.mark.parametrize("window, heads", [((127, 0), 64), ((128, 0), 8)])
def test_as_gpt_oss_trains(window, heads, seed):
    """64 query heads on 8, head dim 64, sinks in bf16, every other layer with a window."""
    x = Problem(64, None, 700, heads=heads, kv_heads=8, batch=1, causal=True, window=window, sinks="same").inputs(seed)
    leaves = [getattr(x, name).requires_grad_() for name in ("q", "k", "v", "sinks")]
    out = gqa_attn.attention(*leaves[:3], causal=True, window=window, sinks=x.sinks)
    check(x, Results(out, None, *torch.autograd.grad(out, leaves, x.dout)))


@pytest.mark.parametrize("softcap", [1e-300, 1e-40, 1e30, 1e300])
def test_softcaps_that_float32_does_not_hold(softcap, seed):
    """A cap near 0 makes every score 0, which a scale of 0 does too; a huge one caps nothing."""
    problem = Problem(128, 64, 70, 133, causal=True)
    x = problem.inputs(seed)
    check(replace(x, scale=0.0) if softcap < 1 else x, run(replace(x, softcap=softcap)))


@pytest.mark.parametrize("scale", [1e-300, -1e-40, 1e-30])
def test_scales_that_leave_every_score_at_zero(scale, seed):
    x = Problem(64, seqlen_q=100, heads=2, dtype="float16").inputs(seed)
    got = run(replace(x, scale=scale))
    check(replace(x, scale=0.0), got)
