"""Times attentions side by side on one GPU and compares their values: for `python -m gqa_attn bench` and benchmarks/.

Imported by those alone: the timing is triton's, which gqa_attn does without otherwise.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
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

    def tensors(self, device: str = "cuda") -> list[Tensor]:
        """Random q, k, v and dout, [batch, seqlen, heads, head_dim]."""
        shapes = ((self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim_v),
                  (self.heads, self.head_dim_v))
        return [torch.randn(self.batch, self.seqlen, *shape, device=device, dtype=self.dtype) for shape in shapes]


# phase -> a function that runs all of it: "fwd" returns [out], "bwd" [dq, dk, dv].
Calls = dict[str, Callable[[], list[Tensor]]]
Prepare = Callable[..., Calls]  # of (q, k, v, dout, causal)


def ops() -> Prepare:
    """gqa_attn's own, without autograd."""

    def prepare(q, k, v, dout, causal):
        def forward():
            return torch.ops.gqa_attn.fwd(q, k, v, None, causal)

        saved = []

        def backward():
            if not saved:
                saved.extend(forward())
            return torch.ops.gqa_attn.bwd(dout, q, k, v, *saved, None, None, causal)[:3]

        return {"fwd": lambda: forward()[:1], "bwd": backward}

    return prepare


def through_autograd(attention: Callable[..., Tensor]) -> Prepare:
    """For a peer without a public backward: its backward is torch.autograd.grad of attention(q, k, v, causal)."""

    def prepare(q, k, v, dout, causal):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        saved = []

        def backward():
            if not saved:
                with torch.enable_grad():
                    saved.append(attention(*leaves, causal))
            return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)

        return {"fwd": lambda: [attention(q, k, v, causal)], "bwd": backward}

    return prepare


def sdpa(backend: SDPBackend) -> Prepare:
    def attention(q, k, v, causal):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)

    return through_autograd(attention)


FINDERS: dict[str, Callable[[], Prepare]] = {
    "gqa_attn": ops,
    "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
}


def largest_difference(results: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative difference between tensors of two attentions, each over the whole tensor (Frobenius norm).

    Two that are right differ by a few roundings; a tile, a head or a mask that is wrong is far beyond that.
    """
    def relative(a, b):
        return (torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float())).item()

    return max(relative(a, b) for a, b in zip(results, others, strict=True))


def allowed_difference(dtype: torch.dtype) -> float:
    # Two of the CPU differ by up to one eps, where one of them rounds each query head's part of dk and dv.
    return 4 * torch.finfo(dtype).eps


def find_peers(finders: dict[str, Callable[[], Prepare]]) -> tuple[dict[str, Prepare], list[str]]:
    """The importable ones, and why the others are not."""
    found, missing = {}, []
    for name, find in finders.items():
        try:
            found[name] = find()
        except Exception as error:
            missing.append(f"{name}: {first_line(error)}")
    return found, missing


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def runs(peers: dict[str, Prepare], rounds: int) -> int:
    """How often `measure` calls after_each."""
    return (1 + rounds) * len(peers) * len(PHASES)


def measure(case: Case, peers: dict[str, Prepare], rounds: int, rep_ms: int,
            after_each: Callable[[], object] = lambda: None) -> tuple[list[dict], list[str]]:
    """Times every peer on the same tensors. Returns one row per peer, and why a row has gaps.

    Each phase first runs once for its values: `*_difference` is the largest one to the first peer that runs. A round then
    times each peer once, for about `rep_ms` ms per phase, so that a clock that drifts hits all alike. The time of a peer is
    the median over all its runs; triton clears the L2 cache before each run.
    """
    from triton.testing import do_bench

    inputs = case.tensors()
    calls = {name: prepare(*inputs, case.causal) for name, prepare in peers.items()}
    times = {(name, phase): [] for name in calls for phase in PHASES}
    firsts, differences, refused = {}, {}, {}

    def compare(name, phase):
        results = calls[name][phase]()
        differences[name, phase] = largest_difference(results, firsts.setdefault(phase, results))

    def time(name, phase):
        times[name, phase] += do_bench(calls[name][phase], warmup=10, rep=rep_ms, return_mode="all")

    with torch.no_grad():
        for action in (compare, *[time] * rounds):
            for name, phase in times:
                if (name, phase) not in refused:
                    try:
                        action(name, phase)
                    except Exception as error:
                        refused[name, phase] = f"{case.name} {name} {phase}: {first_line(error)}"
                after_each()
    rows = []
    for name in calls:
        row = {"case": case.name, "peer": name}
        for phase in PHASES:
            known = times[name, phase] and (name, phase) not in refused
            row[f"{phase}_ms"] = statistics.median(times[name, phase]) if known else None
            row[f"{phase}_tflops"] = case.tflops(phase, row[f"{phase}_ms"]) if known else None
            row[f"{phase}_difference"] = differences.get((name, phase))
        rows.append(row)
    return rows, list(refused.values())
