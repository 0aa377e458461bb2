"""The Python snippets of README.md run as they stand, and what they compute is held against float64; about 3 s."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from gqa_attn import __main__ as command_line
from gqa_attn import _library
from reference import Results, assert_matches

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.M | re.S)
SNIPPETS = {f"{title} {number}": code for title, body in SECTIONS
            for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", body, re.M | re.S), start=1)}

# Options of the calls that leave q, k, v and out in gqa_attn's layout behind; the other snippets check themselves.
COMPUTED = {
    "Python 1": lambda names: dict(causal=True),
    "Python 2": lambda names: names["options"] | dict(cu_seqlens_q=names["cu_seqlens"], cu_seqlens_k=names["cu_seqlens"]),
    "The ops 1": lambda names: dict(causal=True),
}


@pytest.mark.parametrize("title", SNIPPETS)
def test_snippet(title):
    names = {}
    try:
        exec(compile(SNIPPETS[title], f"README.md, {title}", "exec"), names)
    except ModuleNotFoundError as missing:
        if missing.name.split(".")[0] in ("gqa_attn", "torch"):
            raise
        pytest.skip(f"{missing.name} is not installed")
    if title in COMPUTED:
        grads = [names[name] if name in names else names[name[1:]].grad for name in ("dq", "dk", "dv")]
        dout = names.get("dout", torch.ones_like(names["out"]))
        dsinks = names["sinks"].grad if "sinks" in names else None
        results = Results(names["out"], names["lse"], *grads, dsinks)
        assert_matches(results, *(names[name] for name in "qkv"), dout, **COMPUTED[title](names))


def test_every_computed_snippet_is_there():
    assert COMPUTED.keys() <= SNIPPETS.keys()


@pytest.mark.skipif(bool(_library.problems), reason=f"the compiled parts are not all there: {_library.problems}")
@pytest.mark.parametrize("arguments", re.findall(r"^    python -m gqa_attn (explain.*)$", README, re.M))
def test_explain(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gqa_attn", *shlex.split(arguments)])
    assert command_line.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("on a GPU of sm_90") and "forward: " in printed and "backward: " in printed
