"""The tuner's first step: candidates of a kernel -> a library for each. Needs what a build needs, no GPU.

A candidate's library is libgqa_attn.so with that kernel instead of the table's, and of other kernels only those that it is
timed with. All that they share is compiled once.
"""

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from ninja.ninja_syntax import Writer

from build_tools import native
from build_tools.toolchain import find_cuda, jobs, require_build_packages, tilelang_pin

from . import emit
from .__main__ import family, lower_kernel, write
from .table import KERNELS
from .tune_space import BARRIERS, SHARED_MEMORY, Target, candidates, label, settings, target_of


def build(target, dtypes, folder):
    """Fills folder/libraries: <candidate>.so, and candidates.json about them and those that were dropped, and why."""
    require_build_packages()
    if not (native.GENERATED / "rules.h").exists():
        raise SystemExit("the tuner checks values against the library of the table: build that first")
    kernels = {label(kernel): [replace(kernel, dtype=dtype) for dtype in dtypes] for kernel in candidates(target)}
    current = next(iter(kernels))
    helpers = list(dict.fromkeys(helper for group in kernels.values() for kernel in group for helper in _helpers(kernel)))
    print(f"{target.name}: {len(kernels)} candidates for {', '.join(dtypes)}", flush=True)
    lowered = _lower([*helpers, *(kernel for group in kernels.values() for kernel in group)])
    if broken := _unfit([lowered[helper] for helper in helpers]):
        raise SystemExit(f"a kernel beside the candidates: {broken}")

    dropped = {}
    for name, group in kernels.items():
        if reason := _unfit([lowered[kernel] for kernel in group]):
            dropped[name] = reason
    _require(current, dropped)
    built = [name for name in kernels if name not in dropped]
    write(_cuda_files(helpers, lowered), folder / "sources" / "common")
    for name in built:
        table = emit.table_file([(kernel, lowered[kernel]) for kernel in (*kernels[name], *helpers)])
        write({**_cuda_files(kernels[name], lowered), "table.cpp": table}, folder / "sources" / name)
    _compile(folder, built)

    allowed = _spilled(folder / current)  # a spill that the table has is known to pay
    for name in built:
        if reason := _miscompiled(folder, name, allowed):
            dropped[name] = reason
    _require(current, dropped)
    libraries = folder / "libraries"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir()
    kept = [name for name in built if name not in dropped]
    for name in kept:
        shutil.copyfile(folder / f"{name}.so", libraries / f"{name}.so")
    (libraries / "candidates.json").write_text(json.dumps({
        "nvcc": find_cuda().version, "tilelang": tilelang_pin(), "table": current,
        "candidates": {name: settings(kernels[name][0]) for name in kept}, "dropped": dropped}, indent=1) + "\n")
    print(f"{len(kept)} libraries in {libraries}; dropped:", *map(": ".join, dropped.items()), sep="\n  ")


def _require(current, dropped):
    if current in dropped:
        raise SystemExit(f"the table's own {current}: {dropped[current]}")


def _helpers(kernel):
    """Kernels without which this one cannot be timed: a forward, and those around the backward."""
    if kernel.phase == "forward":
        return []
    rows = [row for row in KERNELS if row.dtype == kernel.dtype]
    forward = Target("forward", kernel.head_dim, kernel.head_dim_v, "general")
    finish = next(row for row in rows if row.phase == "backward_finish")
    return [
        next(row for row in rows if target_of(row) == forward),
        next(row for row in rows if row.phase == "backward_prepare" and row.head_dim_v >= kernel.head_dim_v),
        *(replace(finish, block_q=tile_rows, head_dim=head_dim) for tile_rows, head_dim in kernel.accumulated_tiles),
    ]


def _lower(kernels):
    """Kernel -> Lowered, or the text of why it cannot be."""
    with ProcessPoolExecutor(jobs()) as pool:
        return dict(zip(kernels, pool.map(_lower_or_say_why, kernels)))


def _lower_or_say_why(kernel):
    try:
        return lower_kernel(kernel)
    except Exception as error:  # whatever TileLang does not like about a configuration
        return f"not lowered: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:160]}"


def _unfit(group):
    for lowered in group:
        if isinstance(lowered, str):
            return lowered
        if lowered.smem_bytes + BARRIERS > SHARED_MEMORY:
            return f"{lowered.smem_bytes} bytes of shared memory"
    return None


def _cuda_files(kernels, lowered):
    return {f"{kernel.name}.cu": emit.cuda_file(kernel, lowered[kernel], family(kernel).INCLUDES) for kernel in kernels}


def _compile(folder, names):
    """Everything that compiles; a candidate that does not leaves no library."""
    sources = {name: sorted((folder / "sources" / name).glob("*.cu")) for name in ("common", *names)}
    with (folder / "build.ninja").open("w") as file:
        ninja = Writer(file, width=130)
        native.write_rules(ninja, find_cuda())
        common = [*(native.write_kernel(ninja, source, "common/") for source in sources["common"]),
                  *native.write_common(ninja, sources[names[0]])]
        for name in names:
            (folder / f"{name}.so").unlink(missing_ok=True)  # of an earlier run, where this one fails
            native.write_library(ninja, f"{name}.so", [
                *(native.write_kernel(ninja, source, f"{name}/") for source in sources[name]), *common,
                native.write_source(ninja, folder / "sources" / name / "table.cpp", f"{name}/")])
    subprocess.run([sys.executable, "-m", "ninja", "-C", folder, "-k0", f"-j{jobs()}"])


def _logs(folder):
    return "".join(log.read_text() for log in folder.glob("*.ptxas.log"))


def _spilled(folder):
    return sum(map(int, re.findall(r"(\d+) bytes spill", _logs(folder))))


def _miscompiled(folder, name, allowed):
    logs = _logs(folder / name)
    if not (folder / f"{name}.so").exists():
        return "not compiled: " + next((line for line in logs.splitlines() if "error" in line), "no library")[:160]
    if serialized := re.search(r"\bC75\d\d\b", logs):
        return f"serialized wgmma ({serialized[0]})"
    if (spilled := _spilled(folder / name)) > allowed:
        return f"{spilled} bytes of spills, the table's {allowed}"
    return None
