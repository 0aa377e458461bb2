"""What both benchmarks share: the cases, the counting of flops, the peers and the timing."""
import importlib.metadata
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PHASES = ("fwd", "bwd")


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int  # of q and k
    head_dim_v: int
    causal: bool
    dtype: torch.dtype

    def flops(self, phase: str) -> float:
        """Two matrix products forward, five backward, each 2 flops per multiply-add; a causal mask counts as half."""
        per_dim = 2.0 * self.batch * self.heads * self.seqlen**2 * (0.5 if self.causal else 1.0)
        if phase == "fwd":
            return per_dim * (self.head_dim + self.head_dim_v)
        return per_dim * (3 * self.head_dim + 2 * self.head_dim_v)

    def tflops(self, phase: str, milliseconds: float) -> float:
        return self.flops(phase) / milliseconds * 1e-9

    def tensors(self, device: str = "cuda") -> list[torch.Tensor]:
        """Random q, k, v and dout, [batch, seqlen, heads, head_dim]."""
        shapes = ((self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim_v),
                  (self.heads, self.head_dim_v))
        return [torch.randn(self.batch, self.seqlen, *shape, device=device, dtype=self.dtype) for shape in shapes]


F16, BF16 = torch.float16, torch.bfloat16
CASES = [
    Case("seed", 8, 1024, 32, 2, 192, 128, False, F16),
    Case("seed_causal", 8, 1024, 32, 2, 192, 128, True, F16),
    Case("llama8b_4k", 2, 4096, 32, 8, 128, 128, True, BF16),
    Case("llama8b_4k_full", 2, 4096, 32, 8, 128, 128, False, BF16),
    Case("llama8b_16k", 1, 16384, 32, 8, 128, 128, True, BF16),
    Case("llama8b_16k_full", 1, 16384, 32, 8, 128, 128, False, BF16),
    Case("llama8b_512", 32, 512, 32, 8, 128, 128, True, BF16),
    Case("llama70b_8k", 1, 8192, 64, 8, 128, 128, True, BF16),
    Case("d64_2k", 4, 2048, 64, 8, 64, 64, True, BF16),
    Case("d64_16k", 1, 16384, 32, 8, 64, 64, True, BF16),
    Case("d96_4k", 2, 4096, 32, 8, 96, 96, True, BF16),
    Case("mla_8k", 1, 8192, 64, 64, 192, 128, True, BF16),
    Case("d256_8k", 1, 8192, 16, 4, 256, 256, True, BF16),
    Case("mqa_4k", 2, 4096, 32, 1, 128, 128, True, BF16),
]

# (q, k, v, dout, causal) -> one callable per phase; each call of one runs the whole phase.
Prepare = Callable[..., dict[str, Callable[[], object]]]


def _ops() -> Prepare:
    import gqa_attn  # noqa: F401  registers the ops

    def prepare(q, k, v, dout, causal):
        def forward():
            return torch.ops.gqa_attn.fwd(q, k, v, None, causal)

        saved = []

        def backward():
            if not saved:
                saved.extend(forward())
            return torch.ops.gqa_attn.bwd(dout, q, k, v, *saved, None, None, causal)

        return {"fwd": forward, "bwd": backward}

    return prepare


def _through_autograd(attention: Callable) -> Prepare:
    """For a peer without a public backward: its backward is torch.autograd.grad of its forward."""

    def prepare(q, k, v, dout, causal):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        saved = []

        def backward():
            if not saved:
                with torch.enable_grad():
                    saved.append(attention(*leaves, causal))
            return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)

        return {"fwd": lambda: attention(q, k, v, causal), "bwd": backward}

    return prepare


def _sdpa(backend: SDPBackend) -> Prepare:
    def attention(q, k, v, causal):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)

    return _through_autograd(attention)


def _flash_attn_func(module_name: str) -> Prepare:
    module = importlib.import_module(module_name)

    def attention(q, k, v, causal):
        out = module.flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return _through_autograd(attention)


FINDERS = {
    "gqa_attn": _ops,
    "cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
    "fa3": lambda: _flash_attn_func("flash_attn_interface"),
    "fa4": lambda: _flash_attn_func("flash_attn.cute"),
}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def find_peers(names: list[str]) -> tuple[dict[str, Prepare], dict[str, str]]:
    """The importable ones of `names`, and why the others are not."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = FINDERS[name]()
        except Exception as error:
            missing[name] = first_line(error)
    return found, missing


def measure(case: Case, peers: dict[str, Prepare], rounds: int, rep_ms: int) -> tuple[list[dict], list[str]]:
    """Times every peer on the same tensors, and why a peer has no time.

    A round times each peer once, for about `rep_ms` ms per phase, so that a clock that drifts hits all alike. The time of a
    peer is the median over all its runs; triton clears the L2 cache before each run.
    """
    from triton.testing import do_bench

    inputs = case.tensors()
    calls = {name: prepare(*inputs, case.causal) for name, prepare in peers.items()}
    times = {(name, phase): [] for name in calls for phase in PHASES}
    refused = {}
    with torch.no_grad():
        for _ in range(rounds):
            for name, phase in times:
                if (name, phase) in refused:
                    continue
                try:
                    times[name, phase] += do_bench(calls[name][phase], warmup=10, rep=rep_ms, return_mode="all")
                except Exception as error:
                    refused[name, phase] = f"{case.name} {name} {phase}: {first_line(error)}"
    rows = []
    for name in calls:
        row = {"case": case.name, "peer": name}
        for phase in PHASES:
            known = times[name, phase] and (name, phase) not in refused
            row[f"{phase}_ms"] = statistics.median(times[name, phase]) if known else None
            row[f"{phase}_tflops"] = case.tflops(phase, row[f"{phase}_ms"]) if known else None
        rows.append(row)
    return rows, list(refused.values())


def environment() -> dict:
    """What a number depends on: the GPU and the versions of everything that ran."""
    packages = ("gqa-attn", "torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "tokenspeed-fa3")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "versions": versions}
