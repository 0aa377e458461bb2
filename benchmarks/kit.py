"""What both benchmarks share: the fixed cases and the peers; counting and timing are the package's own."""
import importlib
from collections.abc import Callable

import torch
from gqa_attn._bench import MODELS
from gqa_attn._timing import FINDERS as IN_TORCH
from gqa_attn._timing import Case, Prepare, find_peers, through_autograd

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
