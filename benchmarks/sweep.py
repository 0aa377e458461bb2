"""Look for cliffs: time per FLOP over sequence lengths, batch sizes and group sizes, on one GPU:  python benchmarks/sweep.py

Causal, bfloat16. A line's jump is the largest ratio of time per FLOP from one size to the next larger one: it counts only
upwards, for the time of small problems is that of a launch. Writes sweep.json and sweep.png and prints a table; exit code 1
where a jump is beyond the bar. Takes about half a minute.
"""
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gqa_attn import _bench
from gqa_attn._timing import PHASES, Case
from kit import BF16, facts, median_ms, op_calls, parser_with_common_arguments
from torch import Tensor

BAR = 1.3
SEQLENS = {"fwd": (64, 16384), "bwd": (128, 8192)}  # first and last
OTHER_SEQLENS = (1024, 4096)  # at which batch and group size vary
COUNTS = range(1, 17)  # batch sizes and group sizes


@dataclass(frozen=True)
class Line:
    along: str
    phase: str
    shape: str  # what stays the same
    cases: dict[int, Case]  # by size


def lines_of(head_dim: int, head_dim_v: int, step: int) -> Iterator[Line]:
    def case(batch, seqlen, heads, kv_heads):
        return Case("", batch, seqlen, heads, kv_heads, head_dim, head_dim_v, True, BF16)

    dims = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}/{head_dim_v}"
    for phase in PHASES:
        first, last = SEQLENS[phase]
        seqlens = range(max(first, step), last + 1, step)
        yield Line("seqlen", phase, f"{dims} B1 32:8", {seqlen: case(1, seqlen, 32, 8) for seqlen in seqlens})
        for seqlen in OTHER_SEQLENS:
            yield Line("batch", phase, f"{dims} S{seqlen} 32:8", {batch: case(batch, seqlen, 32, 8) for batch in COUNTS})
            yield Line("group size", phase, f"{dims} B1 S{seqlen}, 4 kv heads",
                       {group: case(1, seqlen, 4 * group, 4) for group in COUNTS})


def views(cases: list[Case], device: str) -> Callable[[Case], list[Tensor]]:
    """Gives q, k, v and dout of each case, contiguous, from memory allocated once."""
    def shapes(case):
        return [tensor.shape for tensor in case.tensors("meta")]

    sizes = [max(shape.numel() for shape in each) for each in zip(*map(shapes, cases))]
    buffers = [torch.randn(size, device=device, dtype=BF16) for size in sizes]
    return lambda case: [buffer[:shape.numel()].view(shape) for buffer, shape in zip(buffers, shapes(case))]


def measure(lines: list[Line], timer: Callable[[dict], dict], device: str = "cuda") -> list[dict]:
    """Times every case of every line."""
    tensors_of = views([case for line in lines for case in line.cases.values()], device)
    rows = []
    for line in lines:
        times = []
        for case in line.cases.values():
            calls = op_calls(*tensors_of(case), causal=case.causal)
            times.append(timer({line.phase: calls[line.phase]})[line.phase])
        tflops = [case.tflops(line.phase, ms) for case, ms in zip(line.cases.values(), times)]
        sizes = list(line.cases)
        rows.append({"along": line.along, "phase": line.phase, "shape": line.shape, "sizes": sizes, "ms": times,
                     "tflops": tflops} | largest_jump(sizes, tflops))
    return rows


def largest_jump(sizes: list[int], tflops: list[float]) -> dict:
    """Of the time per FLOP, between neighbours; below 1 where it falls all the way, nothing where there are no neighbours."""
    jumps = [(here / there, [size, next_size])
             for size, next_size, here, there in zip(sizes, sizes[1:], tflops, tflops[1:])]
    ratio, between = max(jumps, default=(None, None))
    return {"jump": ratio, "between": between}


def within_bar(row: dict) -> bool:
    return row["jump"] is None or row["jump"] <= BAR


def table(rows: list[dict]) -> str:
    lines = [f"{'along':12}{'phase':6}{'shape':26}{'max TFLOPS':>10}{'jump':>7}  {'between':17}ok (<= {BAR})"]
    for row in rows:
        jump, between = ("-", "") if row["jump"] is None else (f"{row['jump']:.2f}", "{} and {}".format(*row["between"]))
        lines.append(f"{row['along']:12}{row['phase']:6}{row['shape']:26}{max(row['tflops']):10.0f}{jump:>7}  {between:17}"
                     f"{'yes' if within_bar(row) else 'NO'}")
    return "\n".join(lines)


def plot(rows: list[dict], title: str, path: Path) -> None:
    """Time per FLOP, forward above backward, a column for each thing that varies; a dot ends each line's largest jump."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(row["along"] for row in rows))
    figure = Figure(figsize=(6 * len(columns), 9), layout="constrained")
    axes = figure.subplots(len(PHASES), len(columns), sharex="col", squeeze=False)
    for row in rows:
        axis = axes[PHASES.index(row["phase"])][columns.index(row["along"])]
        times = [1000 / tflops for tflops in row["tflops"]]
        marked = [row["sizes"].index(row["between"][1])] if row["between"] else []
        label = row["shape"] if row["jump"] is None else f"{row['shape']}: {row['jump']:.2f}"
        axis.plot(row["sizes"], times, marker="o", markevery=marked, markersize=5, linewidth=1, label=label)
    for phase, of_phase in zip(PHASES, axes):
        of_phase[0].set_ylabel(f"{'forward' if phase == 'fwd' else 'backward'}, fs per FLOP")
        for axis in of_phase:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.grid(alpha=0.3, which="both")
            axis.legend(title="shape: largest jump")
    for axis, along in zip(axes[-1], columns):
        axis.set_xlabel(along)
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def head_dims(text: str) -> list[tuple[int, int]]:
    """"128,192/128" -> [(128, 128), (192, 128)]"""
    pairs = [tuple(map(int, each.split("/"))) for each in text.split(",")]
    return [(dims[0], dims[-1]) for dims in pairs]


def main() -> int:
    parser = parser_with_common_arguments(__doc__, rounds=21)
    parser.add_argument("--head-dims", type=head_dims, default="128,64",
                        help="comma-separated, q and v apart as in 192/128, default: %(default)s")
    parser.add_argument("--step", type=int, default=64, help="between sequence lengths, default: %(default)s")
    args = parser.parse_args()
    _bench.require_gpu()
    _bench.require_packages("matplotlib")
    record = facts(args.commit)
    lines = [line for dims in args.head_dims for line in lines_of(*dims, args.step)]
    rows = measure(lines, partial(median_ms, rounds=args.rounds))
    args.out.mkdir(parents=True, exist_ok=True)
    json_path, png_path = args.out / "sweep.json", args.out / "sweep.png"
    json_path.write_text(json.dumps(record | {"rounds": args.rounds, "rows": rows}) + "\n")
    plot(rows, f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, causal", png_path)
    print(f"written: {json_path}, {png_path}", table(rows), sep="\n")
    return 0 if all(map(within_bar, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
