"""python -m gqa_attn info | explain | bench: what a bug report needs, which kernels a call runs, this GPU against PyTorch."""

import argparse
import json
import sys
from pathlib import Path

from . import _info


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gqa_attn")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="versions, GPUs, compiled kernels, and what is missing and why: for bug reports")
    info.add_argument("--json", action="store_true", help="print JSON")

    explain = commands.add_parser("explain", help="which kernels a call runs and why; needs no GPU",
                                  description="Which kernels a call runs on a Hopper GPU, and why; this machine needs none. "
                                              "Exit code 2 where attention does not take such arguments.")
    for name, sizes in (("q", "B,Sq,Hq,D"), ("k", "B,Sk,Hk,D"), ("v", "B,Sk,Hk,Dv")):
        explain.add_argument(f"--{name}", type=sizes_of, required=True, metavar=sizes, help=f"shape of {name}")
    explain.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), default="bfloat16",
                         help="default: %(default)s")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument("--window", type=ints_of, default=(-1, -1), metavar="LEFT,RIGHT",
                         help="keys seen before and behind the diagonal, -1 for no limit; write --window=-1,0")
    explain.add_argument("--scale", type=float)
    explain.add_argument("--softcap", type=float, default=0.0)
    explain.add_argument("--sinks", action="store_true", help="with one sink per query head")
    explain.add_argument("--varlen", type=int, metavar="N", help="N packed sequences; then q, k and v have no batch size")
    explain.add_argument("--deterministic", action="store_true")

    bench = commands.add_parser("bench", help="times this GPU against PyTorch's attention; writes a plot and a JSON",
                                description="Times forward and backward on this Hopper GPU against the backends of PyTorch's "
                                            "scaled_dot_product_attention, on shapes of real models; compares their values. "
                                            "Exit code 1 where they differ by more than rounding.")
    bench.add_argument("--out", type=Path, default=Path("."), help="folder of bench.json and bench.png, default: this one")

    args = parser.parse_args()
    if args.command == "explain":
        return print_explanation(args, explain)
    if args.command == "bench":
        from . import _bench

        return _bench.run(args.out)
    found = _info.collect()
    print(json.dumps(found, indent=2) if args.json else _info.as_text(found))
    return 0


def ints_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def sizes_of(text: str) -> tuple[int, ...]:
    sizes = ints_of(text)
    if min(sizes) < 0:
        raise ValueError
    return sizes


# How argparse names them in "invalid ... value".
ints_of.__name__, sizes_of.__name__ = "list of ints", "list of sizes"


def print_explanation(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0, or 1 where this build cannot tell; ends with 2 where attention would raise."""
    import torch

    from . import _library
    from ._explain import explain

    def meta(shape, dtype=getattr(torch, args.dtype)):
        return torch.empty(shape, dtype=dtype, device="meta")

    if args.varlen is not None and args.varlen < 0:
        parser.error(f"--varlen must be >= 0 sequences, got {args.varlen}")
    try:
        print(explain(
            meta(args.q), meta(args.k), meta(args.v), None if args.varlen is None else meta(args.varlen + 1, torch.int32),
            scale=args.scale, causal=args.causal, window=args.window, softcap=args.softcap,
            sinks=meta(args.q[-2:-1], torch.float32) if args.sinks else None, deterministic=args.deterministic,
        ))
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: torch cannot even name such a tensor
        parser.error(str(error))
    return 0 if _library.compiled else 1


if __name__ == "__main__":
    sys.exit(main())
