"""The example trains on the CPU path, agrees with PyTorch's attention, and would notice if it did not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("tqdm", reason="the examples group is needed")

WRONG_SCALE = """
import sys
import gqa_attn
sys.path.insert(0, "examples")
import train
right = gqa_attn.attention
gqa_attn.attention = lambda q, k, v, **options: right(q, k, v, scale=0.9 * q.shape[-1] ** -0.5, **options)
train.main()
"""


def train(*command):
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run([sys.executable, *command, "--device", "cpu", "--steps", "5"], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)


def test_the_first_steps_agree():
    result = train("examples/train.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "losses agree" in result.stdout and "gqa_attn.bwd" in result.stdout


def test_a_wrong_scale_is_noticed():
    result = train("-c", WRONG_SCALE)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "losses DISAGREE" in result.stdout
