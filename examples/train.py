"""Train a small language model with grouped-query attention on the sources of Python's standard library.

    python examples/train.py

Bytes are the tokens. Every attention call goes through torch.ops.gqa_attn: compiled kernels on a Hopper GPU (bfloat16), the
CPU path elsewhere (float32). Then the first steps are run again, from the same start on the same data, with PyTorch's own attention:
exits with 1 unless the losses agree.
"""
import argparse
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gqa_attn.flops  # registers the ops, and how many FLOPs they are
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

VOCABULARY = 256
COMPARED_STEPS = 5
# Largest difference between the two losses of a step, in nats. Two attentions that round differently drift apart as they train.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-4}


@dataclass(frozen=True)
class Config:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    seqlen: int
    batch: int
    steps: int
    dtype: torch.dtype
    learning_rate: float

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


CPU = Config(layers=4, heads=8, kv_heads=2, head_dim=32, seqlen=128, batch=8, steps=150, dtype=torch.float32,
             learning_rate=1e-3)
GPU = Config(layers=8, heads=8, kv_heads=2, head_dim=128, seqlen=2048, batch=16, steps=300, dtype=torch.bfloat16,
             learning_rate=3e-4)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [batch, seqlen, heads, head_dim] -> out


def gqa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gqa_attn.attention(q, k, v, causal=True)


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, seqlen, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = (torch.arange(x.shape[1], device=x.device)[:, None] * frequencies)[:, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c: Config, attention: Attention):
        super().__init__()
        self.attention = attention
        self.heads = [c.heads, c.kv_heads, c.kv_heads]
        self.head_dim = c.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(c.width) for _ in range(2))
        self.qkv = nn.Linear(c.width, sum(self.heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)).split(self.heads, 2)
        x = x + self.out(self.attention(rotate(q), rotate(k), v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    def __init__(self, c: Config, attention: Attention):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, c.width)
        self.blocks = nn.Sequential(*(Block(c, attention) for _ in range(c.layers)))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss, in nats per byte, over tokens [batch, seqlen + 1]."""
        logits = self.head(self.norm(self.blocks(self.embedding(tokens[:, :-1]))))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def standard_library() -> Tensor:
    """The text of the standard library's modules, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Training:
    """A model and its data, the same from run to run for a config, whatever its attention."""

    def __init__(self, c: Config, attention: Attention, text: Tensor, device: torch.device):
        torch.manual_seed(0)
        self.config, self.text, self.device = c, text, device
        self.model = LanguageModel(c, attention).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=c.learning_rate)
        self.sampler = torch.Generator().manual_seed(0)

    def step(self) -> float:
        c = self.config
        starts = torch.randint(len(self.text) - c.seqlen, (c.batch, 1), generator=self.sampler)
        tokens = self.text[starts + torch.arange(c.seqlen + 1)].to(self.device, torch.long)
        with torch.autocast(self.device.type, c.dtype, enabled=c.dtype != torch.float32):
            loss = self.model(tokens)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def say_what_runs(c: Config, training: Training) -> None:
    """Counts the work of the ops in one more step, and explains the kernels behind them."""
    with FlopCounterMode(display=False) as counter:
        training.step()
    flops = counter.get_flop_counts()["Global"]
    for op in (torch.ops.gqa_attn.fwd, torch.ops.gqa_attn.bwd):
        print(f"{op}: {flops[op] / 1e9:.3f} of the {sum(flops.values()) / 1e9:.1f} GFLOP of a step")
    q, k = (torch.empty(c.batch, c.seqlen, heads, c.head_dim, device=training.device, dtype=c.dtype)
            for heads in (c.heads, c.kv_heads))
    print(gqa_attn.explain(q, k, k, causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"default: {GPU.steps} on a GPU, {CPU.steps} on the CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where it is a Hopper one")
    args = parser.parse_args()
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.device(args.device or ("cuda" if hopper else "cpu"))
    c = GPU if device.type == "cuda" else CPU
    text = standard_library()

    training = Training(c, gqa_attention, text, device)
    parameters = sum(p.numel() for p in training.model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {c.heads} query and {c.kv_heads} kv heads of {c.head_dim}, {c.dtype}, "
          f"{device.type}; {len(text) / 1e6:.1f} MB of text")
    losses = []
    steps = tqdm(range(max(args.steps or c.steps, COMPARED_STEPS)), unit="step", desc="training", file=sys.stdout)
    for _ in steps:
        losses.append(training.step())
        steps.set_postfix(loss=f"{losses[-1]:.3f}")
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last (nats per byte)")
    say_what_runs(c, training)
    del training

    theirs = Training(c, torch_attention, text, device)
    differences = []
    print(f"{'step':>4} {'gqa_attn':>10} {'PyTorch':>10} {'difference':>11}")
    for step, ours in enumerate(losses[:COMPARED_STEPS], 1):
        other = theirs.step()
        differences.append(abs(ours - other))
        print(f"{step:4} {ours:10.6f} {other:10.6f} {differences[-1]:11.2e}")
    largest, allowed = max(differences), TOLERANCE[c.dtype]
    agree = largest <= allowed
    print(f"losses {'agree' if agree else 'DISAGREE'}: the largest difference is {largest:.1e}, {allowed:.0e} allowed")
    sys.exit(not agree)


if __name__ == "__main__":
    main()
