"""deterministic=True: bitwise equal from run to run whatever else the GPU does, right values, bounded memory, no hang."""
from dataclasses import replace

import gqa_attn
import pytest
import torch
from calls import check, peak_bytes, step
from few_sms import step_on_few_sms
from problems import DEVICE, DTYPES, TUNED, Inputs, Problem
from reference import Results

LENGTHS = ((0, 3), (200, 200), (1, 77), (129, 128), (64, 64), (31, 0), (300, 350))
# More than seven for each block: kv tiles from the last one down in all but the last section of heads; not where a block walks
# two heads, as in the second.
MANY_ITEMS = [
    Problem(64, seqlen_q=390, batch=16, heads=20, kv_heads=20, causal=True),
    Problem(128, seqlen_q=390, batch=15, heads=64, kv_heads=32, causal=True, dtype="float16"),
    Problem(256, seqlen_q=390, seqlen_k=450, batch=9, heads=16, kv_heads=16, causal=True),
    Problem(192, 128, lengths=((390, 390), (200, 260), (500, 380)) * 12, heads=10, kv_heads=10, causal=True),
]
KINDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "band with sinks": {"window": (70, 90), "sinks": "float32", "softcap": 20.0},
    "packed": {"lengths": LENGTHS},
    "packed causal": {"lengths": LENGTHS, "causal": True, "sinks": "same"},
    "packed window": {"lengths": LENGTHS, "window": (64, 3)},
}


@pytest.fixture
def busy():
    """A function that queues a matrix product on a stream of its own, to disturb what runs beside it."""
    stream, a = torch.cuda.Stream(), torch.randn(1536, 1536, device=DEVICE, dtype=torch.bfloat16)

    def disturb():
        with torch.cuda.stream(stream):
            a @ a

    yield disturb
    torch.cuda.synchronize()


def assert_repeats(x: Inputs, runs: int, disturb) -> None:
    """Equality is collected on the GPU: to look at every run from the host would keep it from getting ahead."""
    check(x, first := step(x))
    different = torch.zeros(len(Results._fields), device=DEVICE, dtype=torch.int64)
    for _ in range(runs):
        disturb()
        different += torch.stack([(a != b).any() for a, b in zip(step(x), first)])
    assert not different.any(), dict(zip(Results._fields, different.tolist()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_B48_results_repeat_bitwise(dims, kind, busy, seed):
    """A group of six: some head dims share a kv tile among blocks."""
    problem = Problem(*dims, 600, 650, heads=12, kv_heads=2, dlse=True, deterministic=True, dtype=DTYPES[len(kind) % 2])
    assert_repeats(replace(problem, **KINDS[kind]).inputs(seed), 100, busy)


@pytest.mark.parametrize("problem", [Problem(64, seqlen_q=300, causal=True, heads=12, kv_heads=4),
                                     Problem(128, seqlen_q=1024, causal=True, heads=12, kv_heads=4),
                                     Problem(192, 128, 300, heads=16, kv_heads=1),
                                     Problem(256, seqlen_q=257, causal=True),
                                     Problem(64, lengths=LENGTHS, window=(100, 0), sinks="float32"),
                                     *MANY_ITEMS], ids=str)
def test_a_thousand_runs_beside_other_work(problem, busy, seed):
    assert_repeats(replace(problem.inputs(seed), deterministic=True), 1000 if DEVICE == "cuda" else 3, busy)


@pytest.mark.parametrize("problem", [Problem(64, seqlen_q=1024, heads=12, kv_heads=4, dtype="float16", causal=True),
                                     Problem(192, 128, 200, 1500, window=(900, 0)), Problem(33, 40, 129),
                                     Problem(128, lengths=LENGTHS, causal=True)], ids=str)
def test_use_deterministic_algorithms_is_followed(problem, busy, seed):
    """From Python: by torch's setting, by the argument, and by the argument against the setting."""
    x = problem.inputs(seed)
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.gqa_attn.bwd.default:
                seen.append((*args, *[False] * (16 - len(args)))[15])
            return func(*args, **(kwargs or {}))

    def gradients(deterministic):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        options = dict(causal=x.causal, window=x.window, deterministic=deterministic)
        out = (gqa_attn.attention(*leaves, **options) if x.cu_seqlens_q is None else
               gqa_attn.attention_varlen(*leaves, x.cu_seqlens_q, x.cu_seqlens_k, **options))
        busy()
        return torch.autograd.grad(out, leaves, x.dout)

    torch.use_deterministic_algorithms(True)
    try:
        with Spy():
            by_setting, by_both, refused = gradients(None), gradients(True), gradients(False)
    finally:
        torch.use_deterministic_algorithms(False)
    with Spy():
        by_argument, default = gradients(True), gradients(None)
    assert seen == [True, True, False, True, False]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(by_setting, by_both, by_argument))
    for each in (by_setting, refused, default):
        check(x, Results(None, None, *each))


@pytest.mark.parametrize("dims", TUNED, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_workspace_grows_with_the_lengths_not_with_their_product(dims, causal):
    def peak(seqlen, deterministic):
        problem = Problem(*dims, seqlen, causal=causal, batch=1, heads=8, kv_heads=2, deterministic=deterministic)
        x = problem.inputs(0)
        results = x.forward()
        return peak_bytes(lambda: x.backward(*results))

    long = peak(16384, True)
    assert long <= 4.4 * peak(4096, True)
    assert long <= 1.5 * peak(16384, False)


@pytest.mark.parametrize("problem", MANY_ITEMS, ids=str)
def test_many_items_finish_on_few_sms(problem, seed):
    x = replace(problem.inputs(seed), deterministic=True)
    check(x, step_on_few_sms(x, free_sms=6))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_finishes_beside_a_kernel_that_holds_nearly_all_of_the_gpu(dims, kind, deterministic, seed):
    """All SMs but two are taken for longer than the call needs: its blocks come one after the other, in whatever order."""
    x = Problem(*dims, 500, 450, heads=8, kv_heads=2, batch=1, deterministic=deterministic, **KINDS[kind]).inputs(seed)
    check(x, step_on_few_sms(x, free_sms=2))
