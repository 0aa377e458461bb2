"""The offline tuner: finds the settings of one main kernel, and says so in benchmarks/results/tune.json.

    PYTHONPATH=python python -m codegen.tune --phase backward --head-dims 128x128
    PYTHONPATH=python python -m codegen.tune --phase forward --head-dims 128x128 --mask causal

Two steps, in a row where both are possible: `build` (tune_build.py: candidates -> a folder of libraries) needs what a build of
the package needs; `time` (tune_time.py: the folder -> times) a Hopper GPU, and the package with its library. codegen/table.py
is then to be brought in line with the winner, which tests/test_tune.py checks; running the tuner again confirms it.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from .tune_space import TARGETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tune.json"


def cases(target):
    """The shapes that benchmarks/kit.py has for these head dims, with each mask that the kernel is to be fast for."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from kit import BF16, CASES, Case

    found = {}
    for case in (*CASES, Case("d192_8k", 1, 8192, 16, 4, 192, 192, True, BF16)):  # no benchmark has 192/192
        if (case.head_dim, case.head_dim_v) == (target.head_dim, target.head_dim_v):
            for mask in ("full", "causal") if target.mask == "general" else (target.mask,):
                name = f"{case.name.removesuffix('_full').removesuffix('_causal')}_{mask}"
                found[name] = replace(case, name=name, causal=mask == "causal")
    return list(found.values())


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m codegen.tune", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=("build", "time"), help="only this one")
    parser.add_argument("--phase", choices=("forward", "backward"), required=True)
    parser.add_argument("--head-dims", required=True, metavar="DxDV", help="of q and k, and of v, as in the table: 192x128")
    parser.add_argument("--mask", choices=("full", "causal", "general"), default="general", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tune",
                        help="of the candidates, in a folder of their own each kernel, default: %(default)s")
    args = parser.parse_args()
    args.target = next((t for t in TARGETS if t.name == f"{args.phase}_{args.head_dims}_{args.mask}"), None)
    if args.target is None:
        parser.error(f"the table has no such kernel; there are {', '.join(t.name for t in TARGETS)}")
    return args


def main():
    args = parse_arguments()
    folder = (args.folder / args.target.name).resolve()
    its_cases = cases(args.target)
    if args.step != "time":
        from .tune_build import build

        build(args.target, sorted({str(case.dtype).removeprefix("torch.") for case in its_cases}), folder)
    if args.step != "build":
        import torch

        from .tune_time import measure

        if not torch.cuda.is_available():
            sys.exit(f"no GPU here; where there is one, with {folder / 'libraries'}: "
                     f"python -m codegen.tune time {' '.join(a for a in sys.argv[1:] if a != 'time')}")
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[args.target.name] = measure(args.target.phase, its_cases, folder / "libraries")
        RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
