"""What a bug report and a record of a benchmark need to know of this machine and this build.

Works on every machine, so what asks libraries or drivers is asked on its own and says what failed.
"""

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from . import __version__, _library

# Packages whose versions matter where they are installed.
RELATED = ("triton", "numpy", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "tokenspeed-fa3")
# Environment variables that change what is built, seen, or how it runs.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_HOME", "GQA_ATTN_KERNELS", "LD_LIBRARY_PATH",
             "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
DRIVER = Path("/proc/driver/nvidia/version")


def collect() -> dict:
    """The report: name -> a string, a number, a list of strings, or a dict of such; "unknown: ..." where a probe failed."""
    return machine_and_build() | {
        "missing": _probe(missing),
        "installed in": str(Path(__file__).parent),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def machine_and_build() -> dict:
    """The part that times depend on; without paths, so that a record of it can be published."""
    return {
        "gqa_attn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch cuda": torch.version.cuda or "none: a CPU build of torch",
        "cudnn": _probe(lambda: torch.backends.cudnn.version() or "none"),
        "driver": _probe(lambda: DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "none"),
        "gpus": _probe(_gpus),
        "build": _probe(_build),
        "kernels": _probe(_kernels),
        "packages": _probe(_packages),
    }


def as_text(found: dict) -> str:
    width = max(map(len, found)) + 2
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = [f"{key}: {', '.join(map(str, each)) if isinstance(each, list) else each}" for key, each in value.items()]
        first, *more = value if isinstance(value, list) and value else [value or "none"]
        lines += [f"{name + ':':<{width}}{first}", *(f"{'':<{width}}{line}" for line in more)]
    return "\n".join(lines)


def _probe(probe: Callable):
    try:
        return probe()
    except Exception as error:  # whatever is broken here is what the report is for
        return f"unknown: {type(error).__name__}: {error}"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    each = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {gpu.total_memory >> 30} GiB"
            for gpu in each]


def _build() -> dict:
    return dict(_library.compiled.build_info()) if _library.compiled else {}


def _kernels() -> dict[str, int]:
    return dict(Counter(row["phase"] for row in _library.compiled.kernels())) if _library.compiled else {}


def missing() -> dict[str, str]:
    """What CUDA calls need and this machine or build lacks -> why."""
    lacking = dict(_library.problems)
    if not torch.cuda.is_available():
        lacking["GPU"] = "torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU or no driver"
    elif _library.compiled:
        archs = _library.compiled.build_info()["archs"]
        built_for = ", ".join(f"sm_{arch}" for arch in archs)
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            if 10 * major + minor not in archs:
                lacking[f"kernels for cuda:{index}"] = f"it has sm_{major}{minor}; this build is for {built_for}"
    return lacking


def _packages() -> dict[str, str]:
    versions = {}
    for package in RELATED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
