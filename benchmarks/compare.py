"""Compare gqa_attn with its peers on a fixed set of cases, on one GPU:  python benchmarks/compare.py

All peers of a case run interleaved on the same random tensors, and their values are compared. Prints a table with every time as
a multiple of cuDNN's (more is faster) and writes compare.json and compare.png.
"""
import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from gqa_attn import _bench, _info
from kit import CASES, FINDERS, peers_named

HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="comma-separated beginnings of case names; all when empty")
    parser.add_argument("--peers", default=",".join(FINDERS), help="comma-separated, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds, default: %(default)s")
    parser.add_argument("--rep-ms", type=int, default=50, help="time per peer, phase and round, default: %(default)s")
    parser.add_argument("--commit", default=None, help="recorded in the JSON; asked from git where it is not given")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results, default: %(default)s")
    return parser.parse_args()


def current_commit() -> str | None:
    try:
        git = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    except OSError:
        return None
    return git.stdout.strip() or None


def main() -> int:
    args = parse_arguments()
    wanted = tuple(name for name in args.cases.split(",") if name)
    cases = [case for case in CASES if not wanted or case.name.startswith(wanted)]
    if not cases:
        sys.exit(f"no case begins with {args.cases}; there are {', '.join(case.name for case in CASES)}")
    peers, missing = peers_named(args.peers)
    facts = _info.machine_and_build() | {"commit": args.commit or current_commit(),
                                         "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    print(_info.as_text(facts))
    return _bench.compare(cases, peers, missing, facts, args.out / "compare", rounds=args.rounds, rep_ms=args.rep_ms)


if __name__ == "__main__":
    sys.exit(main())
