"""No access beyond a tensor, as the memory management unit sees it.

It found that TMA looks up the start of a packed tensor's map, 256 rows before the tensor, for a box of columns that lies wholly
behind the head dim (fuzz problem 220).
"""
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("end", ["first", "last"])
def test_no_access_beyond_a_tensor(end):
    command = [sys.executable, Path(__file__).with_name("guarded.py"), end]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-500:] + run.stderr[-2000:]
