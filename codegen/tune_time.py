"""The tuner's second step: a folder of libraries -> times. Needs a Hopper GPU, torch and gqa_attn; no compiler, no TileLang.

Ops register once in a process, so each library has a process of its own, on the same tensors; they run in turns. A process that
fails, or hangs, is dropped with its candidate.
"""

import datetime
import json
import multiprocessing
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch  # and not gqa_attn: `serve` loads another library first

SCREENED_AT_ONCE = 15  # beside the table's: what fits in the GPU's and the host's memory
FINALISTS = 7
ROUNDS = 8             # of the final
REP_MS = 30            # of a candidate, a case and a round
PATIENCE = 60          # seconds until a candidate counts as hung; its start is among them
MARGIN = 1.01          # times faster than the table that a winner must be: less is noise


class Failed(Exception):
    """Of a candidate: why it is out."""


def serve(connection, phase, library):
    """The process of one library, or of the package's own: answers (case, action, argument) with (went well, result)."""
    if library:
        torch.ops.load_library(library)
    from gqa_attn import _timing

    if torch.cuda.is_available():
        torch.cuda.init()  # in all processes at once, not in each at its first question

    def save(path):
        torch.save(call(), path)

    def check(path):
        return _timing.largest_difference(call(), torch.load(path))

    def time(rep_ms):
        from triton.testing import do_bench  # which flushes the L2 cache before each run

        return do_bench(call, warmup=10, rep=rep_ms, return_mode="all")

    prepared = call = None
    while True:
        case, action, argument = connection.recv()
        try:
            if case != prepared:
                call = None
                torch.cuda.empty_cache()
                torch.manual_seed(0)
                call, prepared = _timing.ops()(*case.tensors(), case.causal)[phase], case
            with torch.no_grad():
                connection.send((True, {"save": save, "check": check, "time": time}[action](argument)))
        except Exception as error:
            connection.send((False, _timing.first_line(error)))


class Process:
    def __init__(self, phase, library=None):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, phase, library), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *question):
        try:
            self.connection.send(question)
            if not self.connection.poll(PATIENCE):
                raise Failed(f"no answer for {PATIENCE} s")
            went_well, answer = self.connection.recv()
        except (EOFError, OSError):
            raise Failed("its process died") from None
        if not went_well:
            raise Failed(answer)
        return answer

    def end(self):
        self.process.kill()
        self.process.join()


def race(names, folder, phase, cases, rounds, dropped):
    """Candidate -> case -> median milliseconds, of those that were right everywhere; why others were not goes to `dropped`."""
    from gqa_attn._timing import allowed_difference

    times = {name: {} for name in names}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        def start(*library):
            process = Process(phase, *library)
            stack.callback(process.end)
            return process

        shipped, processes = start(), {name: start(str(folder / f"{name}.so")) for name in names}
        values = str(Path(scratch) / "values.pt")
        for case in cases:
            shipped.ask(case, "save", values)
            runs = {name: [] for name in times}
            check = ("check", values)  # again afterwards: a race may show late
            for action, argument in (check, *[("time", REP_MS)] * rounds, check):
                for name in list(times):
                    try:
                        answer = processes[name].ask(case, action, argument)
                        if action == "time":
                            runs[name] += answer
                        elif not answer <= allowed_difference(case.dtype):  # NaN too
                            raise Failed(f"{answer:.2%} off the values of the package's library")
                    except Failed as failed:
                        dropped[name] = f"{case.name}: {failed}"
                        print(f"  dropped {name}: {dropped[name]}", flush=True)
                        processes[name].end()
                        del times[name]
            for name in times:
                times[name][case.name] = statistics.median(runs[name])
    return times


def relative(times, table):
    """Candidate -> its time as a multiple of the table's, the geometric mean over the cases."""
    if table not in times:
        raise SystemExit(f"the table's own {table} was dropped")
    return {name: statistics.geometric_mean(own[case] / times[table][case] for case in own) for name, own in times.items()}


def measure(phase, cases, folder):
    """The record of the candidates in `folder`: all are screened in groups, the fastest raced against the table's."""
    from gqa_attn import _info

    phase = {"forward": "fwd", "backward": "bwd"}[phase]
    built = json.loads((folder / "candidates.json").read_text())
    table, dropped = built["table"], dict(built["dropped"])
    others = [name for name in built["candidates"] if name != table]
    screened = {}
    for start in range(0, len(others), SCREENED_AT_ONCE):
        group = [table, *others[start : start + SCREENED_AT_ONCE]]
        screened |= relative(race(group, folder, phase, cases, 1, dropped), table)
        print(f"screened {len(screened)} of {1 + len(others)}, the fastest takes {min(screened.values()):.3f}", flush=True)
    screened.pop(table, None)
    finalists = [table, *sorted(screened, key=screened.get)[:FINALISTS]]
    times = race(finalists, folder, phase, cases, ROUNDS, dropped)
    ratios = relative(times, table)
    winner = min(ratios, key=ratios.get)
    if ratios[winner] * MARGIN > 1:
        winner = table
    for name in sorted(ratios, key=ratios.get):
        print(f"  {ratios[name]:.3f} {name}{' (table)' if name == table else ''}{' WINS' if name == winner else ''}")
    machine = _info.machine_and_build()
    return {
        "settings": built["candidates"][winner],
        "confirms_the_table": winner == table,
        "times_the_table": ratios[winner],
        "cases": {case.name: {"ms": times[winner][case.name], "table_ms": times[table][case.name],
                              "tflops": case.tflops(phase, times[winner][case.name])} for case in cases},
        "finalists": ratios,
        "screened": screened,
        "dropped": dropped,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **{name: machine[name] for name in ("gpus", "driver", "torch")},
        **{name: built[name] for name in ("nvcc", "tilelang")},
    }
