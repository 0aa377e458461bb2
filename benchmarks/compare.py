"""Compare gqa_attn with its peers on a fixed set of cases, on one GPU:  python benchmarks/compare.py

All peers of a case run interleaved on the same random tensors, and their values are compared. Prints a table with every time as
a multiple of cuDNN's (more is faster) and writes compare.json and compare.png.
"""
import argparse
import sys

from gqa_attn import _bench, _info
from kit import CASES, FINDERS, facts, parser_with_common_arguments, peers_named


def parse_arguments() -> argparse.Namespace:
    parser = parser_with_common_arguments(__doc__, rounds=4)
    parser.add_argument("--cases", default="", help="comma-separated beginnings of case names; all when empty")
    parser.add_argument("--peers", default=",".join(FINDERS), help="comma-separated, default: %(default)s")
    parser.add_argument("--rep-ms", type=int, default=50, help="time per peer, phase and round, default: %(default)s")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    wanted = tuple(name for name in args.cases.split(",") if name)
    cases = [case for case in CASES if not wanted or case.name.startswith(wanted)]
    if not cases:
        sys.exit(f"no case begins with {args.cases}; there are {', '.join(case.name for case in CASES)}")
    peers, missing = peers_named(args.peers)
    record = facts(args.commit)
    print(_info.as_text(record))
    return _bench.compare(cases, peers, missing, record, args.out / "compare", rounds=args.rounds, rep_ms=args.rep_ms)


if __name__ == "__main__":
    sys.exit(main())
