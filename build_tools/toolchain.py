"""What a build needs on this machine, found or asked for by name. Imports nothing but the standard library."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BYTES_PER_JOB = 1 << 30  # the largest process of this build held 0.6 GB

INSTALL = """\
    pip install "pip>=25.1" "torch>=2.10"
    pip install --group build
    pip install --no-build-isolation ."""


def require_build_packages():
    """Exits with the right commands unless the packages of pyproject.toml's build group, and torch, are importable here.

    In pip's isolated build environment they never are, by intention (pyproject.toml says why).
    """
    missing = [name for name in ("torch", "pybind11", "ninja", "tilelang") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"""
gqa_attn is built against the torch that is installed, in an environment that has its build packages, never an isolated one.
Not importable by {sys.executable}: {', '.join(missing)}. In the folder of pyproject.toml, run:
{INSTALL}
""")
    found = importlib.metadata.version("tilelang")
    if found != tilelang_pin():
        raise SystemExit(f"gqa_attn's kernels need tilelang=={tilelang_pin()}, found {found}; run:\n{INSTALL}")


def tilelang_pin():
    (pin,) = re.findall(r'"tilelang==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    return pin


@dataclass(frozen=True)
class Cuda:
    nvcc: Path
    version: str  # "13.0.88"
    include: Path
    libraries: Path


def find_cuda():
    """nvcc of CUDA_HOME, else on PATH, else of the pip packages in pyproject.toml's toolchain group."""
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
    elif on_path:
        nvcc = Path(on_path)
    else:
        nvcc = _pip_nvcc()
    if nvcc is None or not nvcc.exists():
        where = f"in CUDA_HOME={home}" if home else "on PATH or from pip"
        raise SystemExit(f"no nvcc {where}; in the folder of pyproject.toml, run: pip install --group toolchain")
    # nvcc may be a wrapper elsewhere: only nvcc itself knows its toolkit.
    dryrun = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True).stderr
    top = Path(re.search(r"^#\$ TOP=(.*)$", dryrun, re.M)[1]).resolve()
    version = re.search(r"V([\d.]+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout)[1]
    return Cuda(nvcc, version, _holding(top, "cuda_runtime_api.h", "include", "targets/x86_64-linux/include"),
                _holding(top, "libcudart_static.a", "lib64", "lib", "targets/x86_64-linux/lib"))


def _pip_nvcc():
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for nvcc in Path(folder).glob("cu*/bin/nvcc"):
            return nvcc
    return None


def _holding(top, file, *folders):
    for folder in folders:
        if (top / folder / file).exists():
            return top / folder
    raise SystemExit(f"the CUDA toolkit in {top} lacks {file}")


def jobs():
    """Compilers to run at once: MAX_JOBS, else one per core that this process may use and per BYTES_PER_JOB of its memory."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    return max(1, min(len(os.sched_getaffinity(0)), memory_limit() // BYTES_PER_JOB))


def memory_limit(cgroups=Path("/sys/fs/cgroup"), membership=Path("/proc/self/cgroup")):
    """Bytes: physical memory, or the least limit of this process's cgroups (version 1 or 2)."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, file = cgroups / path.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = cgroups / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may not exist below its own mount; the limit then stands at the top.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(cgroups):
                break
            text = (place / file).read_text().strip() if (place / file).exists() else "max"
            if text != "max":
                limits.append(int(text))
    return min(limits)
