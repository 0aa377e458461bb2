"""Check and time one shape of your choice beside the peers, on one GPU:  python benchmarks/bench.py --causal

The defaults are the seed case: 32 query heads in groups of 16 to a kv head, head dims 192/128.
"""
import argparse
import sys
from pathlib import Path

import torch
from gqa_attn import _info
from gqa_attn._bench import HEADER, add_ratios, disagreements, table_line
from gqa_attn._timing import Case, measure
from kit import FINDERS, peers_named

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from reference import Results, assert_matches  # noqa: E402

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32, help="query heads, default: %(default)s")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim-qk", type=int, default=192)
    parser.add_argument("--head-dim-v", type=int, default=128)
    parser.add_argument("--groups", type=int, default=16, help="query heads per kv head, default: %(default)s")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--peers", default=",".join(FINDERS), help="comma-separated, default: %(default)s")
    args = parser.parse_args()
    if args.heads % args.groups:
        parser.error(f"--heads {args.heads} is not a multiple of --groups {args.groups}")
    return args


def check(case: Case) -> None:
    """Holds the first and the last kv head, with their query heads, against float64 by the rule of the tests."""
    q, k, v, dout = case.tensors()
    out, lse = torch.ops.gqa_attn.fwd(q, k, v, None, case.causal)
    dq, dk, dv, _ = torch.ops.gqa_attn.bwd(dout, q, k, v, out, lse, None, None, case.causal)
    group = case.heads // case.kv_heads
    for b, h in {(0, 0), (case.batch - 1, case.kv_heads - 1)}:
        batch, kv_head, heads = slice(b, b + 1), slice(h, h + 1), slice(h * group, (h + 1) * group)
        got = Results(out[batch, :, heads], lse[batch, heads], dq[batch, :, heads], dk[batch, :, kv_head],
                      dv[batch, :, kv_head])
        assert_matches(got, q[batch, :, heads], k[batch, :, kv_head], v[batch, :, kv_head], dout[batch, :, heads],
                       causal=case.causal)


def main() -> None:
    args = parse_arguments()
    case = Case("given", args.batch, args.seqlen, args.heads, args.heads // args.groups, args.head_dim_qk, args.head_dim_v,
                args.causal, DTYPES[args.dtype])
    peers, missing = peers_named(args.peers)
    print(_info.as_text(_info.machine_and_build()), case, sep="\n")
    if "gqa_attn" in peers:
        check(case)
        print("gqa_attn: forward and backward agree with float64")
    rows, refusals = measure(case, peers, rounds=4, rep_ms=50)
    add_ratios(rows)
    print(HEADER, *map(table_line, rows), *missing, *refusals, *disagreements(case, rows), sep="\n")


if __name__ == "__main__":
    main()
