"""Lowering: reproducible to the byte, and files that are as they should be are not touched. Needs tilelang, no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from codegen.__main__ import write  # noqa: E402
from codegen.table import KERNELS  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
# One of each family, with shared buffers of one size, which TileLang places in the order of addresses.
FAMILIES = ("forward_sm90_d64x64_bf16_causal", "forward_sm90_d128x128_bf16_general", "backward_sm90_d128x128_fp16",
            "backward_wide_sm90_d256x256_bf16_softcap", "prepare_sm90_d128_fp16", "finish_sm90_d96_r64_bf16")
LOWER = """
import sys
from codegen.__main__ import lower_kernel
from codegen.table import KERNELS
for name in sys.argv[1:]:
    print(lower_kernel(next(spec for spec in KERNELS if spec.name == name)))
"""


def lowered(seed):
    run = subprocess.run([sys.executable, "-c", LOWER, *FAMILIES], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed},
                         capture_output=True, text=True, check=True)
    return run.stdout


def test_lowering_is_reproducible():
    first = lowered("1")
    assert all(f") {name}(" in first for name in FAMILIES)
    assert lowered("2") == first


def test_names_are_unique():
    assert len({spec.name for spec in KERNELS}) == len(KERNELS)


def test_unchanged_files_keep_their_times(tmp_path):
    write({"a.cu": "one", "b.cu": "two"}, tmp_path)
    for name in ("a.cu", "b.cu"):
        os.utime(tmp_path / name, (1, 1))
    write({"a.cu": "one", "c.cu": "three"}, tmp_path)
    assert (tmp_path / "a.cu").stat().st_mtime == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cu", "c.cu"]
