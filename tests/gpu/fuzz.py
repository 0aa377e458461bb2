"""Random problems over the whole contract against float64:  python tests/gpu/fuzz.py [--problems 2000] [--first N]

Problem N is the same on every run, so a line that reports a failure reproduces it. Exits non-zero where anything failed.
"""
import argparse
import random
import sys
import time
import traceback
from pathlib import Path

if __name__ == "__main__":  # pytest finds reference.py by itself
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import problems
import torch
from calls import check, run
from problems import DTYPES, LAYOUTS, TUNED, Inputs, Problem, one_head_expanded, one_scalar_expanded

BORDERS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 321, 383, 385]
LARGEST_SCORES = 1 << 24  # elements of the score matrices of one problem: bounds the time of the reference


def problem_of(number: int) -> tuple[Problem, dict]:
    """Problem `number` and the layout of each of its tensors."""
    draw = random.Random(number)

    def maybe(probability):
        return draw.random() < probability

    def length():
        return draw.choice(BORDERS) if maybe(0.5) else draw.randint(1, 12) if maybe(0.2) else draw.randint(1, 640)

    def side():
        return draw.choice([-1, -1, 0, 1, 7, 700, 2**31 - 1, draw.choice(BORDERS), draw.randint(0, 300)])

    kv_heads = draw.choice([1, 1, 2, 2, 3, 4, 8])
    shape = dict(heads=kv_heads * draw.choice([1, 1, 2, 3, 4, 5, 7, 8, 16]), kv_heads=kv_heads)
    shape["head_dim"], shape["head_dim_v"] = draw.choice(TUNED) if maybe(0.5) else any_head_dims(draw)
    if maybe(0.45):
        empty = draw.choice([0.0, 0.1, 0.4])
        shape["lengths"] = tuple(tuple(0 if maybe(empty) else length() for _ in "qk") if maybe(0.6) else (length(),) * 2
                                 for _ in range(draw.choice([0, 1, 1, 2, 3, 5, 8])))
        shape["tail"] = draw.choice([0, 0, 1, 70])
        scores = sum(q * k for q, k in shape["lengths"])
    else:
        seqlen_q = length()
        seqlen_k = seqlen_q if maybe(0.4) else length()
        batch = draw.choice([1, 1, 2, 3])
        if maybe(0.04):
            batch, seqlen_q, seqlen_k = draw.choice([(0, seqlen_q, seqlen_k), (batch, 0, seqlen_k), (batch, seqlen_q, 0)])
        shape |= dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        scores = batch * seqlen_q * seqlen_k
    if scores * shape["heads"] > LARGEST_SCORES:
        shape["heads"] = kv_heads

    options = dict(dtype=draw.choice(DTYPES), causal=maybe(0.4), dlse=maybe(0.5), dout=maybe(0.9), deterministic=maybe(0.5))
    options["window"] = (side(), side()) if maybe(0.5) else (-1, -1)
    options["softcap"] = draw.choice([0.5, 1.5, 20.0, 50.0, 1000.0]) if maybe(0.35) else 0.0
    options["sinks"] = draw.choice(["float32", "same", "absent"]) if maybe(0.35) else None
    options["scale"] = draw.choice([0.0, -0.11, -0.5, 0.02, 0.3, 0.3, 1.0]) if maybe(0.35) else None
    options["factor"] = draw.choice([1.0, 1.0, 1.0, 4.0, 16.0]) if options["scale"] is None else 1.0
    strided = maybe(0.5)
    layouts = {name: draw.choice(LAYOUTS) for name in ("q", "k", "v", "dout") if strided and maybe(0.5)}
    for name in layouts.keys() - {"dout"}:  # one value for all of q, k or v shows no mixed-up rows; eager's error is its luck
        if layouts[name] is one_scalar_expanded:
            layouts[name] = one_head_expanded
    return Problem(**shape, **options), layouts


def any_head_dims(draw: random.Random) -> tuple[int, int]:
    step = draw.choice([1, 8])
    head_dim, head_dim_v = (step * draw.randint(1, 256 // step) for _ in range(2))
    return head_dim, head_dim if draw.random() < 0.4 else head_dim_v


def try_problem(number: int) -> str:
    """What is wrong with problem `number`, or nothing."""
    problem, layouts = problem_of(number)
    try:
        x: Inputs = problem.inputs_laid_out(number, layouts)
        check(x, run(x))
    except Exception as error:  # of any kind: the others shall run, too
        laid_out = ", ".join(f"{name} {layout.__name__}" for name, layout in layouts.items())
        return (f"python tests/gpu/fuzz.py --device {problems.DEVICE} --problems 1 --first {number}\n    {problem!r}\n"
                f"    {laid_out or 'contiguous'}\n    {type(error).__name__}: {str(error).strip()[:1500]}\n"
                + "".join(traceback.format_tb(error.__traceback__)[-3:]))
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=problems.DEVICE, help="default: %(default)s")
    arguments = parser.parse_args()
    problems.DEVICE = arguments.device
    torch.set_num_threads(1)
    start, failures = time.monotonic(), 0
    for number in range(arguments.first, arguments.first + arguments.problems):
        if failure := try_problem(number):
            failures += 1
            print(failure, flush=True)
            if "CUDA error" in failure or "illegal memory access" in failure:
                sys.exit(f"stopped at problem {number}: after such an error nothing runs in this process")
    print(f"{failures} of {arguments.problems} problems failed, {time.monotonic() - start:.0f} s")
    sys.exit(min(1, failures))


if __name__ == "__main__":
    main()
