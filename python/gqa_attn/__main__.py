"""python -m gqa_attn info [--json]: versions, GPUs, compiled kernels, and what is missing and why.

Meant to be pasted into an issue: it works on every machine, so each line is asked for on its own and says what failed.
"""

import argparse
import json
import platform
from collections import Counter
from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gqa_attn")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, GPUs, compiled kernels, and what is missing and why")
    info.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = collect()
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))


def collect() -> dict:
    """The report: name -> a string, a number, a list of strings, or a dict of such; "unknown: ..." where a probe failed."""
    return {
        "gqa_attn": _probe(_version),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": _probe(lambda: __import__("torch").__version__),
        "torch cuda": _probe(lambda: __import__("torch").version.cuda or "none: a CPU build of torch"),
        "gpus": _probe(_gpus),
        "build": _probe(_build),
        "kernels": _probe(_kernels),
        "missing": _probe(_missing),
    }


def as_text(found: dict) -> str:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = [f"{key}: {', '.join(map(str, each)) if isinstance(each, list) else each}" for key, each in value.items()]
        first, *more = value if isinstance(value, list) and value else [value or "none"]
        lines += [f"{name + ':':<12} {first}", *(f"{'':<12} {line}" for line in more)]
    return "\n".join(lines)


def _probe(probe: Callable):
    try:
        return probe()
    except Exception as error:  # whatever is broken here is what the report is for
        return f"unknown: {type(error).__name__}: {error}"


def _version() -> str:
    from . import __version__

    return __version__


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    each = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {gpu.total_memory >> 30} GiB"
            for gpu in each]


def _build() -> dict:
    from . import _library

    return dict(_library.compiled.build_info()) if _library.compiled else {}


def _kernels() -> dict[str, int]:
    from . import _library

    return dict(Counter(row["phase"] for row in _library.compiled.kernels())) if _library.compiled else {}


def _missing() -> dict[str, str]:
    import torch

    from . import _library

    missing = dict(_library.problems)
    if not torch.cuda.is_available():
        missing["GPU"] = "torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU or no driver"
    elif _library.compiled:
        archs = _library.compiled.build_info()["archs"]
        built_for = ", ".join(f"sm_{arch}" for arch in archs)
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            if 10 * major + minor not in archs:
                missing[f"kernels for cuda:{index}"] = f"it has sm_{major}{minor}; this build is for {built_for}"
    return missing


if __name__ == "__main__":
    main()
