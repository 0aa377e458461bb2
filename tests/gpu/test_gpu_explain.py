"""explain tells the memory that a call takes: results, workspace and copies, to a few bytes."""
import gc
from dataclasses import replace

import gqa_attn
import pytest
import torch
from problems import LAYOUTS, Problem

if gqa_attn._library.compiled is None:
    pytest.skip("gqa_attn._C is missing", allow_module_level=True)

SLACK = 4096  # bytes: device-side lists of packed sequences, dsinks


def requested_bytes(call) -> int:
    """Memory that a call asks the allocator for at its peak, its results included."""
    gc.collect()  # what an earlier test left would be freed in the middle
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = call()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return peak - sum(t.numel() * t.element_size() for t in results)


CASES = [(Problem(*dims, 150, 200, causal=True), layout) for dims in ((64, 64), (72, 33), (41, 128))
         for layout in (None, *LAYOUTS)]
CASES += [(Problem(*dims, 150, scale=-0.2), layout) for dims in ((64, 64), (33, 33)) for layout in (None, *LAYOUTS[:2])]
CASES += [(Problem(41, 41, lengths=((30, 30), (70, 90)), causal=True), None)]


@pytest.mark.parametrize("problem, layout", CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_memory_is_results_workspace_and_copies(problem, layout, seed):
    """Of q, k and v in this layout; out and dout are contiguous, as explain takes them to be."""
    x = problem.inputs(seed, layout, only=("q", "k", "v")) if layout else problem.inputs(seed)
    said = gqa_attn.explain(x.q, x.k, x.v, **x.options)
    out, lse = x.forward()
    x = replace(x, dout=torch.randn_like(out))
    for phase, call in {"forward": x.forward, "backward": lambda: x.backward(out, lse)}.items():
        call()  # whatever is set up once
        choice = getattr(said, phase)
        assert abs(requested_bytes(call) - choice.workspace_bytes - choice.copies_bytes) <= SLACK, (phase, choice)
