#!/usr/bin/env python3
"""One command from a fresh checkout to a trained model or to passed tests. Needs Python 3.10 or later, a C++ compiler and pip.

    python3 dev.py train    # trains the example: on a Hopper GPU, else on the CPU path
    python3 dev.py test     # runs the tests; those for the GPU where there is a Hopper one

Both first set up everything in .venv: the pinned requirements, the CUDA compiler where this machine has none, and the wheel,
built here and installed. What is up to date is not done again.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
DIST = ROOT / "dist"

TORCH = "torch==2.13.0"
GROUPS = ["build", "test", "examples"]  # of pyproject.toml; pip installs groups from 25.1 on
PIP = "pip>=25.1"


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*command: object, **variables: str) -> None:
    """Runs a command in the checkout; ends this one with its exit code where it fails."""
    code = subprocess.run([str(part) for part in command], cwd=ROOT, env=os.environ | variables).returncode
    if code:
        sys.exit(code)


def pip(*arguments: object) -> None:
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments)


def groups() -> list[str]:
    has_nvcc = "CUDA_HOME" in os.environ or shutil.which("nvcc")
    return GROUPS if has_nvcc else [*GROUPS, "toolchain"]


def install_requirements() -> None:
    """Everything but the package itself, into .venv; nothing where pyproject.toml and the pins here are as last time."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr((sys.version, TORCH, groups())).encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    say(f"installing {TORCH} and the groups {', '.join(groups())} of pyproject.toml into .venv")
    run(sys.executable, "-m", "venv", VENV)
    pip("install", "--upgrade", PIP)
    pip("install", TORCH, *(part for group in groups() for part in ("--group", group)))
    STAMP.write_text(wanted)


def build_and_install() -> None:
    """The wheel, from what ninja finds changed since the last time, then installed."""
    say("building the wheel")
    shutil.rmtree(DIST, ignore_errors=True)
    start = time.monotonic()
    pip("wheel", "--verbose", "--no-build-isolation", "--no-deps", "--wheel-dir", DIST, ROOT)
    (wheel,) = DIST.glob("*.whl")
    say(f"built {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s")
    pip("install", "--quiet", "--force-reinstall", "--no-deps", wheel)


def train() -> None:
    say("training the example")
    run(PYTHON, ROOT / "examples" / "train.py")


def test() -> None:
    say("testing the installed wheel")
    # pyproject.toml's pythonpath has the in-place build, which would hide the wheel.
    run(PYTHON, "-m", "pytest", "-o", "pythonpath=.", ROOT / "tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "test"))
    command = parser.parse_args().command
    if sys.version_info < (3, 10):
        sys.exit(f"gqa_attn needs Python 3.10 or later, this is {sys.version.split()[0]}")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        sys.exit(f"no C++ compiler: {compiler} is not on PATH; install it, or name another in CXX")
    install_requirements()
    build_and_install()
    {"train": train, "test": test}[command]()


if __name__ == "__main__":
    main()
