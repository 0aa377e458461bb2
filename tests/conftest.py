import random

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are small: threads that wait for each other cost more than they help


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh inputs in every run; printed, so that pytest shows it with a failure."""
    value = random.SystemRandom().randrange(2**31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
