"""What the benchmarks share: the fixed cases and the peers; how gqa_attn's own ops are called, timed and recorded."""
import argparse
import datetime
import importlib
import statistics
import subprocess
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from gqa_attn import _info
from gqa_attn._bench import MODELS
from gqa_attn._timing import FINDERS as IN_TORCH
from gqa_attn._timing import Calls, Case, Prepare, find_peers, through_autograd
from torch import Tensor

HERE = Path(__file__).resolve().parent
Name = TypeVar("Name", bound=Hashable)
FLUSH_BYTES = 256 << 20  # several times the L2 cache; writing them also gives the host time to enqueue the call behind them
F16, BF16 = torch.float16, torch.bfloat16
CASES = [
    Case("seed", 8, 1024, 32, 2, 192, 128, False, F16),
    Case("seed_causal", 8, 1024, 32, 2, 192, 128, True, F16),
    *MODELS,
    Case("llama8b_4k_full", 2, 4096, 32, 8, 128, 128, False, BF16),
    Case("llama8b_16k", 1, 16384, 32, 8, 128, 128, True, BF16),
    Case("llama8b_16k_full", 1, 16384, 32, 8, 128, 128, False, BF16),
    Case("llama8b_512", 32, 512, 32, 8, 128, 128, True, BF16),
    Case("d64_16k", 1, 16384, 32, 8, 64, 64, True, BF16),
    Case("d96_4k", 2, 4096, 32, 8, 96, 96, True, BF16),
    Case("mqa_4k", 2, 4096, 32, 1, 128, 128, True, BF16),
]


def _flash_attn_func(module_name: str) -> Prepare:
    module = importlib.import_module(module_name)

    def attention(q, k, v, causal):
        out = module.flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return through_autograd(attention)


FINDERS: dict[str, Callable[[], Prepare]] = IN_TORCH | {
    "fa3": lambda: _flash_attn_func("flash_attn_interface"),
    "fa4": lambda: _flash_attn_func("flash_attn.cute"),
}


def peers_named(names: str) -> tuple[dict[str, Prepare], list[str]]:
    """Those of a comma-separated list that can be imported, and why the others cannot."""
    chosen = names.split(",")
    if unknown := set(chosen) - FINDERS.keys():
        raise SystemExit(f"no such peers: {', '.join(sorted(unknown))}; there are {', '.join(FINDERS)}")
    return find_peers({name: FINDERS[name] for name in chosen})


def op_calls(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, deterministic: bool = False, **options) -> Calls:
    """The ops as they stand, with the options of their schemas; deterministic is the backward's."""
    out, lse = torch.ops.gqa_attn.fwd(q, k, v, **options)
    return {"fwd": lambda: torch.ops.gqa_attn.fwd(q, k, v, **options),
            "bwd": lambda: torch.ops.gqa_attn.bwd(dout, q, k, v, out, lse, **options, deterministic=deterministic)}


def median_ms(calls: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """The median time of each call on the GPU, the L2 cache flushed before it.

    A round runs each call once, so that a clock that drifts hits all alike. The host waits once, at the end.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = {name: [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)] for name in calls}
    for call in calls.values():  # loads its kernels, fills the allocator
        call()
    for number in range(rounds):
        for name, call in calls.items():
            start, end = events[name][number]
            flush.zero_()
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


def parser_with_common_arguments(description: str, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds, default: %(default)s")
    parser.add_argument("--commit", default=None, help="recorded in the JSON; asked from git where it is not given")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results, default: %(default)s")
    return parser


def facts(commit: str | None) -> dict:
    """What a record says of where its times come from."""
    return _info.machine_and_build() | {"commit": commit or _current_commit(),
                                        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def _current_commit() -> str | None:
    try:
        git = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    except OSError:
        return None
    return git.stdout.strip() or None
