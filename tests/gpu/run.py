"""Run all GPU tests on this machine:  python tests/gpu/run.py --out FOLDER [--sanitizer memcheck]

Writes a junit file and a log to FOLDER, prints a table last, and exits non-zero where anything failed.
"""
import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SANITIZERS = ("memcheck", "initcheck", "racecheck", "synccheck")
SHOWN_FAILURES = 3  # per group


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu-tests", help="default: %(default)s")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="one small shape per kernel under compute-sanitizer instead")
    parser.add_argument("-k", default="", help="only tests whose name matches, as for pytest")
    return parser.parse_args()


def run_logged(command: list[str], log: Path, **variables: str) -> int:
    """Runs a command with these environment variables, showing its output as it comes and keeping it in `log`."""
    with log.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                                 env=os.environ | variables) as process:
        for line in process.stdout:
            sys.stdout.write(line)
            file.write(line)
    return process.returncode


def print_table(junit: Path) -> Counter:
    """Per test function: how many passed and failed, and the first failures. The sums over all."""
    counts, failures = defaultdict(Counter), defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        group = (case.get("classname").split(".")[-1], case.get("name").split("[")[0])
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        counts[group]["skipped" if case.find("skipped") is not None else "passed" if bad is None else "failed"] += 1
        if bad is not None:
            failures[group].append(f"{case.get('name')}: {(bad.get('message') or '').strip().splitlines()[0][:200]}")
    print(f"\n{'passed':>6} {'failed':>6} {'skipped':>7}  tests")
    for group, count in counts.items():
        print(f"{count['passed']:6} {count['failed']:6} {count['skipped']:7}  {'::'.join(group)}")
        for failure in failures[group][:SHOWN_FAILURES]:
            print(f"{'':23}{failure}")
    total = sum(counts.values(), Counter())
    print(f"{total['passed']:6} {total['failed']:6} {total['skipped']:7}  all")
    return total


def run_tests(out: Path, only: str) -> int:
    junit = out / "junit.xml"
    command = [sys.executable, "-m", "pytest", str(HERE), "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    code = run_logged(command + (["-k", only] if only else []), out / "pytest.log")
    total = print_table(junit) if junit.exists() else Counter()
    if code == 0 and not total["passed"]:
        sys.exit("every test was skipped: there is no Hopper GPU here, or torch does not see it")
    return total["failed"] or code


def run_sanitizer(tool: str, out: Path) -> int:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, str(HERE / "sanitize.py")]
    # An allocation of its own for every tensor, so that the tool sees a step from one into the next.
    return run_logged(command, out / f"{tool}.log", PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.exit(min(1, run_sanitizer(args.sanitizer, args.out) if args.sanitizer else run_tests(args.out, args.k)))


if __name__ == "__main__":
    main()
