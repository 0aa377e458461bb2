"""The Python snippets of README.md run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["python", "ops"])
def test_snippet(snippet):
    names = {}
    exec(compile(snippet, str(README), "exec"), names)
    assert names["out"].shape[-1] == names["v"].shape[-1] and names["lse"].isfinite().all()
