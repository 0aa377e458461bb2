"""Everything in this folder needs a Hopper GPU and is skipped where there is none."""

from pathlib import Path

import pytest
import torch


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_collection_modifyitems(items):
    if has_hopper():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
