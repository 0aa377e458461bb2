"""Threads racing for the first calls, spawned and forked processes, and a GPU of which another kernel leaves a few SMs."""
import faulthandler
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gqa_attn  # noqa: F401  registers the ops
import pytest
import torch
from calls import check, step
from few_sms import step_on_few_sms
from problems import TUNED, Inputs, Problem
from reference import Results

LENGTHS = ((0, 5), (700, 700), (1, 333), (799, 462))
KINDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (400, 30)},
    "packed": {"lengths": LENGTHS},
}
RACERS = [
    Problem(64, seqlen_q=300, causal=True),
    Problem(96, seqlen_q=200, seqlen_k=333, deterministic=True, dtype="float16"),
    Problem(128, seqlen_q=257, heads=12, kv_heads=3, window=(100, 0)),
    Problem(128, lengths=LENGTHS, causal=True, deterministic=True),
    Problem(192, 128, 129, heads=7, kv_heads=1),
    Problem(256, seqlen_q=150, softcap=15.0, sinks="float32"),
]


def step_through_autograd(x: Inputs) -> Results:
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = torch.ops.gqa_attn.fwd(*leaves, **x.arguments)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, x.dout))


def race(_, seed: int) -> None:
    """For a fresh process: all threads make their first call at once, two with each problem, on streams of their own."""
    faulthandler.dump_traceback_later(90, exit=True)  # what hangs shows where, and ends
    inputs = [problem.inputs(seed + i) for i, problem in enumerate(2 * RACERS)]
    torch.cuda.synchronize()  # the threads' streams do not wait for the stream that fills the inputs
    start = threading.Barrier(len(inputs), timeout=30)

    def attend(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait()
            results = [step(x), *(step_through_autograd(x) for _ in range(3))]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(len(inputs)) as pool:
        for x, results in zip(inputs, pool.map(attend, inputs)):
            for got in results:
                check(x, got)


def test_threads_of_a_spawned_process_race_for_the_first_calls(seed):
    """This process has used CUDA already; what the child raises is raised here."""
    check(x := RACERS[0].inputs(seed), step(x))
    torch.multiprocessing.spawn(race, args=(seed,))


FORKS = """
import faulthandler
import sys

import gqa_attn
import torch
from torch.multiprocessing import start_processes

seed = int(sys.argv[1])
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork


def attend(seed):
    from calls import check, run  # not before the first fork: it asks whether there is a GPU
    from problems import Problem

    x = Problem(128, seqlen_q=200, causal=True, dlse=True).inputs(seed)
    check(x, run(x))
    return x


def early_child(_):
    faulthandler.dump_traceback_later(20, exit=True)
    attend(seed)


def late_child(_):
    faulthandler.dump_traceback_later(20, exit=True)
    for call in (lambda: torch.zeros(1, device="cuda"), lambda: torch.ops.gqa_attn.fwd(x.q, x.k, x.v)):
        try:
            call()
        except RuntimeError as error:
            print("raised:", error, flush=True)
        else:
            raise AssertionError("a forked child uses the CUDA of its parent")


q = torch.randn(1, 9, 2, 64)
out, lse = torch.ops.gqa_attn.fwd(q, q, q)
torch.ops.gqa_attn.bwd(out, q, q, q, out, lse)
assert not torch.cuda.is_initialized()
start_processes(early_child, start_method="fork")

x = attend(seed + 1)
start_processes(late_child, start_method="fork")
attend(seed + 2)
"""


def test_forks_before_and_after_the_parent_uses_cuda(seed):
    """Before, with the package imported and its CPU path used, the child works. After, it is told why it cannot.

    A call with tensors of the parent, which torch does not look at again, raises as well; the parent goes on.
    """
    done = subprocess.run([sys.executable, "-c", FORKS, str(seed)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                          timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "raised: Cannot re-initialize CUDA in forked subprocess" in done.stdout
    assert done.stdout.count("raised:") == 2, done.stdout


@pytest.mark.parametrize("free_sms", [1, 12])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", TUNED, ids=str)
def test_many_kv_tiles_pass_through_few_free_sms(dims, kind, deterministic, free_sms, seed):
    """Most blocks start only after others have ended: one that waits for a block behind it hangs until the SMs are free."""
    x = Problem(*dims, 1500, heads=8, kv_heads=2, batch=1, deterministic=deterministic, **KINDS[kind]).inputs(seed)
    check(x, step_on_few_sms(x, free_sms))
