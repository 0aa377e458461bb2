"""The public failures of tests/test_cases.py on the GPU, under the same ids, with poisoned memory."""
import pytest
import test_cases
import torch
from calls import poison

# About the CPU path alone (B78, B84) or its float32 and its bitwise equal dq: these ids have tests of their own in this folder.
ELSEWHERE = ("B20", "B29", "B30", "B33", "B35", "B36", "B42", "B55", "B59", "B60", "B61", "B62", "B67", "B68",
             "B69", "B78", "B84", "B87", "B91")
globals().update({name: test for name, test in vars(test_cases).items()
                  if name.startswith("test_B") and not name.startswith(tuple(f"test_{case}" for case in ELSEWHERE))})


@pytest.fixture(autouse=True)
def device():
    poison()
    with torch.device("cuda"):
        yield "cuda"
