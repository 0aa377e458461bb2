"""Tables, plots and records of times, and `python -m gqa_attn bench`, which makes them for shapes of real models."""

import importlib.util
import json
import sys
from pathlib import Path

import torch

from . import _info
from ._timing import FINDERS, PHASES, Case, Prepare, allowed_difference, find_peers, measure, runs

BASELINE = "cudnn"

# Llama 3 8B and 70B; gpt-oss; multi-head latent attention in training; head dim 256, as in Gemma and Qwen.
MODELS = [
    Case("llama8b_4k", 2, 4096, 32, 8, 128, 128, True, torch.bfloat16),
    Case("llama70b_8k", 1, 8192, 64, 8, 128, 128, True, torch.bfloat16),
    Case("d64_2k", 4, 2048, 64, 8, 64, 64, True, torch.bfloat16),
    Case("mla_8k", 1, 8192, 64, 64, 192, 128, True, torch.bfloat16),
    Case("d256_8k", 1, 8192, 16, 4, 256, 256, True, torch.bfloat16),
]


def run(out: Path) -> int:
    """The command: writes bench.json and bench.png."""
    peers, missing = find_peers(FINDERS)
    return compare(MODELS, peers, missing, _info.machine_and_build(), out / "bench", rounds=4, rep_ms=50)


def compare(cases: list[Case], peers: dict[str, Prepare], missing: list[str], facts: dict, stem: Path, *, rounds: int,
            rep_ms: int) -> int:
    """Measures every case and prints a table; writes stem.json and stem.png.

    Returns the exit code, 1 where two attentions disagree; ends at once, with a text, where it cannot run.
    """
    require_gpu()
    require_packages("matplotlib", "tqdm", "triton")
    from tqdm import tqdm

    stem.parent.mkdir(parents=True, exist_ok=True)
    rows, reasons, wrong = [], list(missing), []
    with tqdm(total=len(cases) * runs(peers, rounds), unit="run") as bar:
        bar.write(HEADER, file=sys.stdout)
        for case in cases:
            bar.set_description(case.name)
            new_rows, new_reasons = measure(case, peers, rounds, rep_ms, after_each=bar.update)
            add_ratios(new_rows)
            bar.write("\n".join(map(table_line, new_rows)), file=sys.stdout)
            rows += new_rows
            reasons += new_reasons
            wrong += disagreements(case, new_rows)
            torch.cuda.empty_cache()
    print(*reasons, *wrong, sep="\n")
    if not wrong:
        print(agreement(rows))
    json_path, png_path = stem.with_suffix(".json"), stem.with_suffix(".png")
    json_path.write_text(json.dumps(facts | {"rows": rows, "not_measured": reasons, "disagreements": wrong}, indent=1) + "\n")
    plot(rows, f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", png_path)
    print(f"written: {json_path}, {png_path}")
    return 1 if wrong else 0


def require_gpu() -> None:
    if missing := _info.missing():
        sys.exit("timing needs a Hopper GPU (sm_90) and gqa_attn's kernels for it; missing: "
                 + "; ".join(f"{name} ({why})" for name, why in missing.items()))


def require_packages(*names: str) -> None:
    if lacking := [name for name in names if importlib.util.find_spec(name) is None]:
        sys.exit(f"timing needs {' and '.join(lacking)}: pip install {' '.join(lacking)}")


def disagreements(case: Case, rows: list[dict]) -> list[str]:
    """One line for each row that differs by more than rounding from the first that ran."""
    allowed, found = allowed_difference(case.dtype), []
    for phase in PHASES:
        first, *others = [row for row in rows if row[f"{phase}_difference"] is not None] or [None]
        for row in others:
            difference = row[f"{phase}_difference"]
            if not difference <= allowed:  # NaN too
                found.append(f"{case.name} {phase}: {row['peer']} and {first['peer']} DISAGREE by {difference:.2%}, "
                             f"rounding explains {allowed:.2%}")
    return found


def agreement(rows: list[dict]) -> str:
    """What to say where nothing disagrees: the first peer of a case that ran differs from itself by 0."""
    largest = max((row[f"{phase}_difference"] or 0.0 for row in rows for phase in PHASES), default=0.0)
    return f"values agree: the largest relative difference is {largest:.2%}" if largest else \
        "values: nothing to compare with, no peer ran"


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
    """TFLOPS of every peer, forward above backward, as bars in groups by case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    width = 0.8 / len(peers)
    figure = Figure(figsize=(max(6, 1.1 * len(cases)), 8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, phase in zip(axes, PHASES):
        for i, peer in enumerate(peers):
            heights = {row["case"]: row[f"{phase}_tflops"] or 0 for row in rows if row["peer"] == peer}
            axis.bar([x + (i - (len(peers) - 1) / 2) * width for x in range(len(cases))], [heights[c] for c in cases], width,
                     label=peer)
        axis.set_ylabel(f"{'forward' if phase == 'fwd' else 'backward'} TFLOPS")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.margins(x=0.01)
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(peers))
    axes[1].set_xticks(range(len(cases)), cases, rotation=40, ha="right")
    figure.savefig(path, dpi=120)
