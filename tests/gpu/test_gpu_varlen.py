"""Packed sequences: values at any lengths, what lies outside a sequence stays outside, and no length ever reaches the host."""
import random
from dataclasses import replace

import gqa_attn
import pytest
import torch
from calls import as_batch, assert_same, check, forward, peak_bytes, poison, run, some_sequences, step
from problems import DEVICE, DTYPES, HEADS, LAYOUTS, TUNED, UNTUNED, Inputs, Problem
from reference import Results

LENGTHS = {
    "one": ((130, 130),),
    "empty ones": ((0, 0), (5, 9), (0, 11), (17, 0), (135, 130), (1, 1), (9, 64), (0, 0)),
    "tile borders": ((64, 64), (128, 128), (63, 65), (129, 127), (1, 256), (192, 63)),
    "more queries": ((70, 2), (31, 1), (129, 2), (200, 66)),  # B01: a causal mask empties 68, 30, 127 and 134 rows
    "more keys": ((1, 300), (1, 1), (64, 257), (3, 129)),
}
MASKS = [{}, {"causal": True}, {"causal": True, "window": (66, 0), "sinks": "float32"}, {"window": (-1, 20), "softcap": 15.0},
         {"window": (31, 66), "sinks": "absent", "softcap": 20.0}, {"causal": True, "sinks": "same"}]


def random_lengths(seed: int, count: int, longest: int) -> tuple[tuple[int, int], ...]:
    """A fifth of them empty on either side."""
    draw = random.Random(seed)
    return tuple(tuple(draw.randint(1, longest) if draw.random() < 0.8 else 0 for _ in "qk") for _ in range(count))


def problems() -> list[Problem]:
    """Every head dim meets all lengths; masks, dtypes, heads, dlse and the rows behind the last sequence walk along."""
    found = []
    for dims in TUNED + UNTUNED[::3]:
        for name in LENGTHS:
            for _ in range(4 if dims in TUNED else 1):
                i = len(found)
                heads, kv_heads = HEADS[i % len(HEADS)]
                found.append(Problem(*dims, lengths=LENGTHS[name], tail=(0, 37)[i % 2], dtype=DTYPES[i // 2 % 2], heads=heads,
                                     kv_heads=kv_heads, dlse=i % 3 == 0, deterministic=i % 5 == 0, **MASKS[i % len(MASKS)]))
    return found


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_values(problem, seed):
    check(x := problem.inputs(seed), run(x))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_random_lengths(mask, seed):
    check(x := Problem(64, lengths=random_lengths(seed, 12, 300), tail=5, dlse=True, **mask).inputs(seed), run(x))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_hundreds_of_sequences(dims, mask, seed):
    x = Problem(*dims, lengths=random_lengths(seed, 700, 40), tail=99, dlse=True, **mask).inputs(seed)
    got = run(x)
    check(*some_sequences(x, got, [0, *random.Random(seed).sample(range(1, 699), 10), 699]))
    behind = x.q.shape[0] - 99, x.k.shape[0] - 99
    assert got.lse[:, behind[0] :].isneginf().all() and not got.out[behind[0] :].any()
    assert not got.dq[behind[0] :].any() and not got.dk[behind[1] :].any() and not got.dv[behind[1] :].any()


@pytest.mark.parametrize("mask", MASKS[1:4], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_long_beside_a_thousand_short_ones(mask, deterministic, seed):
    draw = random.Random(seed)
    lengths = [(length := draw.randint(0, 30), length) for _ in range(1000)]
    lengths.insert(500, (4001, 4001))
    x = Problem(128, lengths=tuple(lengths), deterministic=deterministic, **mask).inputs(seed)
    check(*some_sequences(x, run(x), [0, 499, 500, 501, 1000]))


@pytest.mark.parametrize("count, length", [(80_000, 16), (70_000, 1)])
def test_B47_very_many_short_sequences(count, length, seed):
    count //= 1 if DEVICE == "cuda" else 100
    for deterministic in (False, True):
        x = Problem(64, lengths=((length, length),) * count, heads=1, kv_heads=1, dtype="float16", causal=True,
                    deterministic=deterministic).inputs(seed)
        check(*as_batch(x, run(x), count))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_equal_lengths_are_a_batch(dims, mask, seed):
    """The same numbers through both kinds of kernels."""
    x = Problem(*dims, lengths=((150, 131),) * 3, dlse=True, **mask).inputs(seed)
    dense, of_packed = as_batch(x, got := run(x), 3)
    check(x, got)
    check(dense, of_packed)
    check(dense, run(dense))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_a_nan_stays_in_its_sequence(dims, name, value, seed):
    """Sequences shorter than a tile, so that one tile holds rows of its neighbours; every row of the middle one is spoilt."""
    lengths = ((33, 40), (70, 75), (50, 61), (20, 20))
    x = Problem(*dims, lengths=lengths, dlse=True).inputs(seed)
    first, end = (33, 103) if name in ("q", "dout", "dlse") else (40, 115)
    getattr(x, name)[(slice(None), slice(first, end)) if name == "dlse" else slice(first, end)] = value
    got = run(x)
    check(*some_sequences(x, got, [0, 2, 3]))
    middle = Results(got.out[33:103], got.lse[:, 33:103], got.dq[33:103], got.dk[40:115], got.dv[40:115])
    spoilt = {"q": ("out", "lse", "dq"), "k": ("out", "lse", "dk"), "v": ("out", "dq"), "dout": ("dq", "dv"),
              "dlse": ("dq", "dk")}
    for result in spoilt[name]:
        assert not torch.isfinite(getattr(middle, result)).any(), f"{result} hides it"


@pytest.mark.parametrize("dims", TUNED, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
def test_a_nan_stays_in_its_batch_element(dims, name, seed):
    x = Problem(*dims, 33, 40, batch=3, dlse=True, causal=True).inputs(seed)
    getattr(x, name)[1] = float("nan")
    got = run(x)
    kept = [0, 2]
    check(replace(x, **{each: getattr(x, each)[kept] for each in ("q", "k", "v", "dout", "dlse")}),
          Results(*(each[kept] for each in got[:5])))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (33, 40)], ids=str)
def test_strided_inputs(dims, layout, seed):
    problem = Problem(*dims, lengths=LENGTHS["empty ones"], tail=3, causal=True, dlse=True, deterministic=True)
    x = problem.inputs(seed, layout)
    got = run(x)
    check(x, got)
    assert_same(got, run(replace(x, **{name: getattr(x, name).contiguous() for name in ("q", "k", "v", "dout")})))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_slices_of_a_packed_projection(head_dim, seed):
    torch.manual_seed(seed)
    projected = torch.randn(230, 8, head_dim, device=DEVICE).bfloat16().requires_grad_()
    bounds = torch.tensor([0, 33, 33, 150, 230], dtype=torch.int32, device=DEVICE)
    dout = torch.randn(230, 4, head_dim, device=DEVICE).bfloat16()
    out = gqa_attn.attention_varlen(*projected.split([4, 2, 2], 1), bounds, causal=True)
    (gradient,) = torch.autograd.grad(out, projected, dout)
    q, k, v = projected.detach().split([4, 2, 2], 1)
    x = Inputs(q, k, v, dout, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    check(x, Results(out, None, *gradient.split([4, 2, 2], 1)))


def test_no_sequences_and_no_rows(seed):
    for lengths, tail in (((), 0), ((), 9), (((0, 0),), 0), (((0, 0),) * 3, 9), (((0, 5),), 0), (((5, 0),), 3)):
        for sinks in (None, "float32"):
            check(x := Problem(64, lengths=lengths, tail=tail, sinks=sinks, dlse=True).inputs(seed), run(x))


BAD = [(0, 40, 30, 60), (0, 10, 1000, 20), (-5, 10, 20, 30), (0, 2**31 - 1, -(2**31), 7), (70, 80, 90, 100), (60, 40, 20, 0),
       (2**31 - 1,) * 4, (-(2**31), 2**31 - 1, 0, 60), (61, 61, 61, 61)]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "deterministic": True}, {"window": (20, 3), "sinks": "same"}],
                         ids=str)
def test_bad_cu_seqlens_stay_in_bounds(options, bad, seed):
    """Any values may come out. Around every tensor of the call lie others of its size, which must keep theirs."""
    x = Problem(64, lengths=((20, 20),) * 3, dlse=True, **options).inputs(seed)
    bad = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    for changes in ({"cu_seqlens_q": bad}, {"cu_seqlens_k": bad}, {"cu_seqlens_q": bad, "cu_seqlens_k": bad}):
        wrong, neighbours = replace(x, **changes), []
        for name in ("q", "k", "v", "dout", "dlse"):  # outputs have these sizes too
            given = getattr(x, name)
            nine = [torch.full_like(given, 7.0) for _ in range(9)]
            nine[4].copy_(given)
            setattr(wrong, name, nine[4])
            neighbours += nine[0:4:2] + nine[5::2]  # the others leave holes for the outputs
        del nine
        out, lse = torch.ops.gqa_attn.fwd(wrong.q, wrong.k, wrong.v, **wrong.arguments)
        torch.ops.gqa_attn.bwd(wrong.dout, wrong.q, wrong.k, wrong.v, out, lse, wrong.dlse, **wrong.arguments,
                               deterministic=x.deterministic)
        assert all((each == 7).all() for each in neighbours)
        for name in ("q", "k", "v", "dout", "dlse"):
            assert torch.equal(getattr(wrong, name), getattr(x, name)), name
    check(x, run(x))  # and the next call is right


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_cu_seqlens_leave_nothing_unwritten(bad, seed):
    """q, k and v are all ones, so whatever sequences a kernel makes of such bounds, out is 1, or 0 where it sees none."""
    x = Problem(64, lengths=((20, 20),) * 3).inputs(seed)
    bounds = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    x = replace(x, **{name: torch.ones_like(getattr(x, name)) for name in ("q", "k", "v", "dout")}, cu_seqlens_q=bounds)
    got = run(x)
    assert ((got.out == 0) | ((got.out - 1).abs() < 0.01)).all()
    assert all(torch.isfinite(each).all() for each in got[2:])


@pytest.mark.parametrize("mask", MASKS[:3] + [{"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_B53_a_captured_step_replays_with_other_lengths(dims, mask, seed):
    def replayed(cu_seqlens_q, cu_seqlens_k):
        with torch.no_grad():
            new = problem.inputs(seed + cu_seqlens_q[1])
            for name in ("q", "k", "v", "dout", "dlse"):
                getattr(x, name).copy_(getattr(new, name))
        for bounds, values in ((x.cu_seqlens_q, cu_seqlens_q), (x.cu_seqlens_k, cu_seqlens_k)):
            bounds.copy_(torch.tensor(values))
        for result in got:
            result.fill_(float("nan"))
        graph.replay()
        check(x, got)

    problem = Problem(*dims, lengths=((16, 16),) * 40, dlse=True, **mask)
    x = problem.inputs(seed)
    poison()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(x)
    replayed(range(0, 641, 16), range(0, 641, 16))
    replayed([0, 5] + 39 * [640], [0, 3] + 39 * [640])
    replayed(40 * [0] + [640], 40 * [0] + [640])
    replayed([0, 0, 1, 1, 300] + 36 * [301], [0, 7, 7, 9, 200] + 36 * [639])  # rows behind the last sequence


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_waits_for_nothing(deterministic, seed):
    """Neither torch nor CUDA is made to wait: the stream is still busy with what was queued before when the calls return."""
    problem = Problem(128, lengths=random_lengths(seed, 30, 100), causal=True, sinks="float32", deterministic=deterministic)
    x = problem.inputs(seed)
    run(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        leaves = [getattr(x, name).requires_grad_() for name in ("q", "k", "v", "sinks")]
        out = gqa_attn.attention_varlen(*leaves[:3], x.cu_seqlens_q, x.cu_seqlens_k, causal=True, sinks=x.sinks,
                                        deterministic=deterministic)
        gradients = torch.autograd.grad(out, leaves, x.dout)
        assert not torch.cuda.current_stream().query(), "the call waited for the stream"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(x, Results(out, None, *gradients))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_memory_follows_from_the_shapes_alone(dims, deterministic, seed):
    """Nothing is padded to the longest sequence: all tokens in one of 64 sequences take what 64 equal ones take."""
    equal = Problem(*dims, lengths=((128, 128),) * 64, deterministic=deterministic).inputs(seed)
    peaks = {"forward": peak_bytes(lambda: equal.forward()), "step": peak_bytes(lambda: step(equal))}
    for lengths in (((8192, 8192),) + ((0, 0),) * 63, ((1, 1),) * 63 + ((8129, 8129),)):
        x = Problem(*dims, lengths=lengths, deterministic=deterministic).inputs(seed)
        assert peak_bytes(lambda: x.forward()) == peaks["forward"]
        assert peak_bytes(lambda: step(x)) == peaks["step"]
    io = 2 * sum(getattr(equal, name).numel() for name in ("q", "k", "v", "dout"))
    assert peaks["step"] <= 4 * io + (64 << 20)


def test_keys_alone_may_be_packed_otherwise(seed):
    """cu_seqlens_k may leave gaps to cu_seqlens_q: a decoder's last queries against all of its keys."""
    x = Problem(128, lengths=((1, 90), (1, 1), (4, 400), (1, 0)), heads=32, kv_heads=4, causal=True).inputs(seed)
    got = run(x)
    check(x, got)
    out, _ = forward(x)
    assert torch.equal(out, got.out)
