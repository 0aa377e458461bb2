"""Inputs and calls of the CPU tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import gqa_attn
import torch
from reference import Results, assert_matches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

fwd = torch.ops.gqa_attn.fwd
bwd = torch.ops.gqa_attn.bwd


class Inputs(NamedTuple):
    """q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], dout [B, Sq, Hq, Dv], dlse [B, Hq, Sq]; packed ones without B."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None = None


def random_inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v=None, dtype=torch.float32) -> Inputs:
    """batch None: packed."""
    first = [] if batch is None else [batch]
    head_dim_v = head_dim_v or head_dim
    shapes = [(seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim)]
    shapes += [(seqlen_k, kv_heads, head_dim_v), (seqlen_q, heads, head_dim_v)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(*first, heads, seqlen_q, dtype=wide)
    return Inputs(*(torch.randn(*first, *shape).to(dtype) for shape in shapes), dlse)


def run(x: Inputs, window=(-1, -1), **options) -> Results:
    """Forward and backward of the raw ops."""
    options |= dict(window_left=window[0], window_right=window[1])
    out, lse = fwd(x.q, x.k, x.v, **options)
    return Results(out, lse, *bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse, **options))


def check(x: Inputs, **options) -> Results:
    """Every result of `run`, held against float64."""
    results = run(x, **options)
    assert_matches(results, *x, **options)
    assert all(t.is_contiguous() for t in results)
    return results


def same(a: Results, b: Results) -> bool:
    """Bitwise."""
    return all(torch.equal(*pair) for pair in zip(a, b))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def in_new_process(*code: str, package_parent: Path = Path(gqa_attn.__file__).parents[1]) -> str:
    """What pieces of Python code print in a process of their own; it finds the package under package_parent."""
    environment = os.environ | {"PYTHONPATH": str(package_parent)}
    program = "\n".join(map(textwrap.dedent, code))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


class OpCalls(TorchDispatchMode):
    """Records the calls of both ops: (op, arguments by position)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (fwd.default, bwd.default):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def count(self, op) -> int:
        return sum(func is op.default for func, _ in self.calls)
