"""Writes csrc/generated: `python -m codegen`. GQA_ATTN_KERNELS=<substring> keeps only kernels whose name contains it.

Unchanged input gives the same bytes and leaves the files' times alone, so that ninja rebuilds only what changed.
"""

import importlib
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from build_tools.native import mark_generated
from build_tools.toolchain import jobs

from . import emit, rules
from .kernels.common import PASSES
from .lower import lower
from .table import KERNELS

GENERATED = Path(__file__).resolve().parent.parent / "csrc" / "generated"


def generate():
    """{file name: text} of csrc/generated."""
    wanted = os.environ.get("GQA_ATTN_KERNELS", "")
    specs = [spec for spec in KERNELS if wanted in spec.name]
    if not specs:
        names = ", ".join(kernel.name for kernel in KERNELS)
        raise SystemExit(f"GQA_ATTN_KERNELS={wanted}: no kernel's name contains it; names: {names}")
    with ProcessPoolExecutor(jobs()) as pool:
        kernels = list(zip(specs, pool.map(lower_kernel, specs)))
    files = {f"{spec.name}.cu": emit.cuda_file(spec, lowered, family(spec).INCLUDES) for spec, lowered in kernels}
    return {**files, "table.cpp": emit.table_file(kernels), "rules.h": rules.rules_header()}


def lower_kernel(spec):
    module = family(spec)
    boxes = module.boxes(spec) if hasattr(module, "boxes") else {}
    return lower(module.build(spec), spec.name, f"sm_{spec.arch}a", PASSES, boxes)


def family(spec):
    return importlib.import_module(f".kernels.{spec.family}", __package__)


def write(files, folder=GENERATED):
    """Makes the folder hold exactly `files`; a file that already has its text is not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write(generate())
    mark_generated()
