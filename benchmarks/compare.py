"""Compare gqa_attn with its peers on a fixed set of cases, on one GPU:  python benchmarks/compare.py

All peers of a case run interleaved on the same random tensors. Prints a table with every time as a multiple of cuDNN's (more
is faster) and writes compare.json and compare.png.
"""
import argparse
import datetime
import json
import subprocess
from pathlib import Path

import torch
from kit import CASES, FINDERS, PHASES, environment, find_peers, measure

HERE = Path(__file__).resolve().parent
BASELINE = "cudnn"


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


def add_ratios(rows: list[dict]) -> None:
    """Adds to the rows of one case how many times faster than the baseline each is."""
    base = next((row for row in rows if row["peer"] == BASELINE), {})
    for row in rows:
        for phase in PHASES:
            mine, theirs = row[f"{phase}_ms"], base.get(f"{phase}_ms")
            row[f"{phase}_ratio"] = theirs / mine if mine and theirs else None


HEADER = f"{'case':18}{'peer':10}" + "".join(f"{phase + ' ms':>10}{'TFLOPS':>8}{'x ' + BASELINE:>9}" for phase in PHASES)


def table_line(row: dict) -> str:
    def cell(value, width, digits):
        return "-".rjust(width) if value is None else f"{value:{width}.{digits}f}"

    cells = (cell(row[f"{p}_ms"], 10, 3) + cell(row[f"{p}_tflops"], 8, 0) + cell(row[f"{p}_ratio"], 9, 2) for p in PHASES)
    return f"{row['case']:18}{row['peer']:10}" + "".join(cells)


def plot(rows: list[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    width = 0.8 / len(peers)
    figure, axes = plt.subplots(2, 1, figsize=(max(6, 1.1 * len(cases)), 8), sharex=True, layout="constrained")
    for axis, phase in zip(axes, PHASES):
        for i, peer in enumerate(peers):
            heights = {row["case"]: row[f"{phase}_tflops"] or 0 for row in rows if row["peer"] == peer}
            axis.bar([x + (i - (len(peers) - 1) / 2) * width for x in range(len(cases))], [heights[c] for c in cases], width,
                     label=peer)
        axis.set_ylabel(f"{'forward' if phase == 'fwd' else 'backward'} TFLOPS")
        axis.grid(axis="y", alpha=0.3)
        axis.margins(x=0.01)
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(peers))
    axes[1].set_xticks(range(len(cases)), cases, rotation=40, ha="right")
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_arguments()
    wanted = tuple(name for name in args.cases.split(",") if name)
    peers, missing = find_peers(args.peers.split(","))
    reasons = [f"{name}: {why}" for name, why in missing.items()]
    facts = environment() | {"commit": args.commit or current_commit(),
                             "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), HEADER, sep="\n")
    rows = []
    for case in CASES:
        if wanted and not case.name.startswith(wanted):
            continue
        new_rows, new_reasons = measure(case, peers, args.rounds, args.rep_ms)
        add_ratios(new_rows)
        print(*map(table_line, new_rows), sep="\n", flush=True)
        rows += new_rows
        reasons += new_reasons
        torch.cuda.empty_cache()
    print(*reasons, sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "compare.json").write_text(json.dumps(facts | {"rows": rows, "not_measured": reasons}, indent=1) + "\n")
    plot(rows, f"{facts['gpu']}, torch {torch.__version__}, cuDNN {facts['cudnn']}", args.out / "compare.png")


if __name__ == "__main__":
    main()
