"""Argument rules: each fires with its text, from Python and from the C++ that the CUDA ops compile alike."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.rules import rules_header
from gqa_attn import _rules

ROOT = Path(__file__).resolve().parent.parent
VALUE, TYPE, UNSUPPORTED = _rules.ArgumentError, _rules.ArgumentTypeError, _rules.UnsupportedError
FAKE = FakeTensorMode()


@dataclass(frozen=True)
class Spec:
    """A tensor argument."""

    shape: tuple
    dtype: str = ""  # "": float16, lse and dlse float32
    device: str = ""  # "": the case's

    def fake(self):
        with FAKE:
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=self.device)

    def cpp(self):
        device = torch.device(self.device)
        index = 0 if device.type == "cuda" and device.index is None else -1 if device.index is None else device.index
        return f'tensor({{{", ".join(map(str, self.shape))}}}, "{self.dtype}", {{"{device.type}", {index}}})'


def S(*shape, dtype="", device=""):
    return Spec(shape, dtype, device)


DENSE = {"dout": S(2, 7, 6, 40), "q": S(2, 7, 6, 72), "k": S(2, 9, 3, 72), "v": S(2, 9, 3, 40),
         "out": S(2, 7, 6, 40), "lse": S(2, 6, 7)}
PACKED = {"dout": S(7, 6, 40), "q": S(7, 6, 72), "k": S(9, 3, 72), "v": S(9, 3, 40), "out": S(7, 6, 40), "lse": S(6, 7),
          "cu_seqlens_q": S(4, dtype="int32"), "cu_seqlens_k": S(4, dtype="int32")}
DEFAULTS = {"scale": 1.0, "causal": False, "window_left": -1, "window_right": -1, "softcap": 0.0, "deterministic": False}


@dataclass(frozen=True)
class Case:
    error: type
    text: str
    changes: dict = field(default_factory=dict)
    base: dict = field(default_factory=lambda: DENSE)
    device: str = "cpu"

    def arguments(self):
        result = {**DEFAULTS, **self.base, **self.changes}
        for name, value in result.items():
            if isinstance(value, Spec):
                default = "float32" if name in ("lse", "dlse") else "float16"
                result[name] = Spec(value.shape, value.dtype or default, value.device or self.device)
        return result

    @property
    def backward_only(self):
        return bool({"dout", "out", "lse", "dlse", "deterministic"} & self.changes.keys())


def all_like(dtype, base=DENSE):
    return {name: Spec(spec.shape, dtype) for name, spec in base.items() if name != "lse"}


FORWARD_CASES = [
    # ranks and shapes (B91: k and v of other lengths, batches, heads, head dims; q of rank 3)
    Case(VALUE, "q must have shape [B, Sq, Hq, D], got [7, 6, 72] ([Tq, Hq, D] needs cu_seqlens_q and cu_seqlens_k)",
         {"q": S(7, 6, 72)}),
    Case(VALUE, "k must have shape [B, Sk, Hk, D], got [9, 72] ([Tk, Hk, D] needs cu_seqlens_q and cu_seqlens_k)",
         {"k": S(9, 72)}),
    Case(VALUE, "v must have shape [B, Sk, Hk, Dv], got [1, 2, 9, 3, 40] ([Tk, Hk, Dv] needs cu_seqlens_q and cu_seqlens_k)",
         {"v": S(1, 2, 9, 3, 40)}),
    Case(VALUE, "q must have shape [Tq, Hq, D] when cu_seqlens_q and cu_seqlens_k are given, got [2, 7, 6, 72]",
         {"q": S(2, 7, 6, 72)}, PACKED),
    Case(VALUE, "k must have shape [Tk, Hk, D] when cu_seqlens_q and cu_seqlens_k are given, got []", {"k": S()}, PACKED),
    Case(VALUE, "v must have shape [Tk, Hk, Dv] when cu_seqlens_q and cu_seqlens_k are given, got [9, 3]",
         {"v": S(9, 3)}, PACKED),
    Case(VALUE, "k must have the batch size of q: q has shape [2, 7, 6, 72], k has [1, 9, 3, 72]", {"k": S(1, 9, 3, 72)}),
    Case(VALUE, "v must have the shape of k up to the head dim: k has shape [2, 9, 3, 72], v has [2, 8, 3, 40]",
         {"v": S(2, 8, 3, 40)}),
    Case(VALUE, "v must have the shape of k up to the head dim: k has shape [2, 9, 3, 72], v has [2, 9, 6, 40]",
         {"v": S(2, 9, 6, 40)}),
    Case(VALUE, "v must have the shape of k up to the head dim: k has shape [9, 3, 72], v has [8, 3, 40]",
         {"v": S(8, 3, 40)}, PACKED),
    Case(VALUE, "k must have the head dim of q: q has shape [2, 7, 6, 72], k has [2, 9, 3, 128]", {"k": S(2, 9, 3, 128)}),
    Case(VALUE, "the heads of q must be a multiple of the heads of k and v: q has 6, k has 4",
         {"k": S(2, 9, 4, 72), "v": S(2, 9, 4, 40)}),
    Case(VALUE, "the heads of q must be a multiple of the heads of k and v: q has 6, k has 0",
         {"k": S(2, 9, 0, 72), "v": S(2, 9, 0, 40)}),
    Case(VALUE, "head dims must be from 1 to 256: q and k have 257, v has 40", {"q": S(2, 7, 6, 257), "k": S(2, 9, 3, 257)}),
    Case(VALUE, "head dims must be from 1 to 256: q and k have 72, v has 0", {"v": S(2, 9, 3, 0), "out": S(2, 7, 6, 0)}),
    # dtypes and devices (B60)
    Case(TYPE, "q, k and v must share one dtype of float16, bfloat16 (not on CUDA: float32, float64), "
               "got bfloat16, bfloat16, float16",
         {"q": S(2, 7, 6, 72, dtype="bfloat16"), "k": S(2, 9, 3, 72, dtype="bfloat16")}),
    Case(TYPE, "q, k and v must share one dtype of float16, bfloat16 (not on CUDA: float32, float64), "
               "got float32, float32, float32", all_like("float32"), device="cuda"),
    Case(TYPE, "q, k and v must share one dtype of float16, bfloat16 (not on CUDA: float32, float64), "
               "got complex64, complex64, complex64", all_like("complex64")),
    Case(VALUE, "k must be on the device of q (cpu), got cuda:0", {"k": S(2, 9, 3, 72, device="cuda")}),
    Case(VALUE, "v must be on the device of q (cuda:1), got cuda:0", {"v": S(2, 9, 3, 40, device="cuda:0")}, device="cuda:1"),
    Case(VALUE, "sinks must be on the device of q (cuda:0), got cpu", {"sinks": S(6, device="cpu")}, device="cuda"),
    Case(VALUE, "cu_seqlens_q must be on the device of q (cuda:0), got cpu",
         {"cu_seqlens_q": S(4, dtype="int32", device="cpu")}, PACKED, "cuda"),
    Case(VALUE, "cu_seqlens_k must be on the device of q (cuda:0), got cpu",
         {"cu_seqlens_k": S(4, dtype="int32", device="cpu")}, PACKED, "cuda"),
    Case(TYPE, "q must be a strided torch.Tensor, got NoneType", {"q": None}),
    Case(TYPE, "v must be a strided torch.Tensor, got NoneType", {"v": None}, device="cuda"),
    # options (B26: negative windows)
    Case(VALUE, "scale must be finite, got inf", {"scale": float("inf")}),
    Case(VALUE, "scale must be finite, got nan", {"scale": float("nan")}),
    Case(VALUE, "window sizes must be >= 0, or -1 for no limit, got (-64, 0)", {"window_left": -64, "window_right": 0}),
    Case(VALUE, "window sizes must be >= 0, or -1 for no limit, got (3, -2)", {"window_left": 3, "window_right": -2}),
    Case(VALUE, "softcap must be finite and >= 0 (0: none), got -0.25", {"softcap": -0.25}),
    Case(VALUE, "softcap must be finite and >= 0 (0: none), got inf", {"softcap": float("inf")}),
    Case(VALUE, "sinks must have shape [Hq] = [6], got [3]", {"sinks": S(3)}),
    Case(TYPE, "sinks must be float32 or have the dtype of q (float16), got bfloat16", {"sinks": S(6, dtype="bfloat16")}),
    Case(VALUE, "cu_seqlens_q and cu_seqlens_k must be given both or neither", {"cu_seqlens_k": None}, PACKED),
    Case(VALUE, "cu_seqlens_q and cu_seqlens_k must be given both or neither", {"cu_seqlens_q": None}, PACKED),
    Case(TYPE, "cu_seqlens_q and cu_seqlens_k must be int32, got int32, int64", {"cu_seqlens_k": S(4, dtype="int64")}, PACKED),
    Case(VALUE, "cu_seqlens_q and cu_seqlens_k must have one shape [n + 1] for n sequences, got [4], [5]",
         {"cu_seqlens_k": S(5, dtype="int32")}, PACKED),
    Case(VALUE, "cu_seqlens_q and cu_seqlens_k must have one shape [n + 1] for n sequences, got [0], [0]",
         {"cu_seqlens_q": S(0, dtype="int32"), "cu_seqlens_k": S(0, dtype="int32")}, PACKED),
    Case(VALUE, "cu_seqlens_q and cu_seqlens_k must have one shape [n + 1] for n sequences, got [2, 2], [2, 2]",
         {"cu_seqlens_q": S(2, 2, dtype="int32"), "cu_seqlens_k": S(2, 2, dtype="int32")}, PACKED),
]
BACKWARD_CASES = [
    # B87: dout of another dtype or layout, lse of another layout, no out, tensors of another device
    Case(TYPE, "out must be a strided torch.Tensor, got NoneType", {"out": None}),
    Case(TYPE, "dout must have the dtype of q (float16), got float32", {"dout": S(2, 7, 6, 40, dtype="float32")}),
    Case(VALUE, "dout must have the shape of q [2, 7, 6, 72] with the head dim of v (40), got [2, 6, 7, 40]",
         {"dout": S(2, 6, 7, 40)}),
    Case(VALUE, "dout must have shape [B, Sq, Hq, Dv], got [7, 6, 40] ([Tq, Hq, Dv] needs cu_seqlens_q and cu_seqlens_k)",
         {"dout": S(7, 6, 40)}),
    Case(VALUE, "dout must have shape [Tq, Hq, Dv] when cu_seqlens_q and cu_seqlens_k are given, got [1, 7, 6, 40]",
         {"dout": S(1, 7, 6, 40)}, PACKED),
    Case(TYPE, "out must have the dtype of q (float16), got bfloat16", {"out": S(2, 7, 6, 40, dtype="bfloat16")}),
    Case(VALUE, "out must have the shape of q [2, 7, 6, 72] with the head dim of v (40), got [2, 7, 6, 72]",
         {"out": S(2, 7, 6, 72)}),
    Case(VALUE, "out must have shape [B, Sq, Hq, Dv], got [40] ([Tq, Hq, Dv] needs cu_seqlens_q and cu_seqlens_k)",
         {"out": S(40)}),
    Case(VALUE, "out must have shape [Tq, Hq, Dv] when cu_seqlens_q and cu_seqlens_k are given, got [40]",
         {"out": S(40)}, PACKED),
    Case(VALUE, "lse must have shape [B, Hq, Sq] = [2, 6, 7], got [2, 7, 6]", {"lse": S(2, 7, 6)}),
    Case(VALUE, "lse must have shape [Hq, Tq] = [6, 7], got [7, 6]", {"lse": S(7, 6)}, PACKED),
    Case(TYPE, "lse must be float32 (float64 for float64 inputs), got float16", {"lse": S(2, 6, 7, dtype="float16")}),
    Case(TYPE, "lse must be float32 (float64 for float64 inputs), got float32", {**all_like("float64"), "lse": S(2, 6, 7)}),
    Case(VALUE, "dlse must have shape [B, Hq, Sq] = [2, 6, 7], got [2, 6, 8]", {"dlse": S(2, 6, 8)}),
    Case(VALUE, "dlse must have shape [Hq, Tq] = [6, 7], got [6]", {"dlse": S(6)}, PACKED),
    Case(TYPE, "dlse must be float32 (float64 for float64 inputs), got float64", {"dlse": S(2, 6, 7, dtype="float64")}),
    *(Case(VALUE, f"{name} must be on the device of q (cuda:0), got cpu", {name: Spec(shape, device="cpu")}, device="cuda")
      for name, shape in (("dout", (2, 7, 6, 40)), ("out", (2, 7, 6, 40)), ("lse", (2, 6, 7)), ("dlse", (2, 6, 7)))),
]
REFUSED = FORWARD_CASES + BACKWARD_CASES
ACCEPTED = [
    Case(None, "", {}), Case(None, "", {}, PACKED), Case(None, "", {}, device="cuda"), Case(None, "", {}, device="meta"),
    Case(None, "", {"window_left": 3, "softcap": 30.0, "sinks": S(6, dtype="float32"), "deterministic": True}, device="cuda"),
    Case(None, "", {"window_right": 1, "causal": True}, PACKED, "cuda"),
    Case(None, "", {"window_right": 5, "causal": True}, device="cuda"),  # causal overrides the right window
    Case(None, "", {"scale": -2.5, "dlse": S(2, 6, 7)}, device="cuda"),
    Case(None, "", {"window_left": 0, "window_right": 2**31, "softcap": 15.0, "sinks": S(6, dtype="float32"),
                    "deterministic": True}),
    Case(None, "", {**all_like("float64"), "lse": S(2, 6, 7, dtype="float64"), "sinks": S(6, dtype="float32")}),
    Case(None, "", {"q": S(0, 7, 6, 72), "k": S(0, 0, 3, 72), "v": S(0, 0, 3, 40), "out": S(0, 7, 6, 40),
                    "dout": S(0, 7, 6, 40), "lse": S(0, 6, 7)}, device="cuda"),
    Case(None, "", {"q": S(2, 7, 0, 72), "out": S(2, 7, 0, 40), "dout": S(2, 7, 0, 40), "lse": S(2, 0, 7)}),
    Case(None, "", {"cu_seqlens_q": S(1, dtype="int32"), "cu_seqlens_k": S(1, dtype="int32"), "sinks": S(6)}, PACKED),
]


def python_error(case, backward):
    arguments = {name: value.fake() if isinstance(value, Spec) else value for name, value in case.arguments().items()}
    check = _rules.check_backward if backward else _rules.check_forward
    if not backward:
        for name in ("dout", "out", "lse", "dlse", "deterministic"):
            arguments.pop(name, None)
    try:
        check(**arguments)
    except RuntimeError as error:
        return error
    return None


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.text[:60])
def test_refused(case):
    for backward in (True, False)[:1 if case.backward_only else 2]:
        error = python_error(case, backward)
        assert type(error) is case.error
        assert str(error) == case.text


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    assert python_error(case, True) is None
    assert python_error(case, False) is None


def test_every_rule_has_a_case():
    texts = [case.text for case in REFUSED]
    for rule in _rules.BACKWARD_RULES:
        pattern = ".*".join(map(re.escape, _rules.FIELD.split(rule.message)[::2]))
        if "must be a strided" not in pattern.replace("\\", ""):  # test_not_strided
            assert any(re.fullmatch(pattern, text) for text in texts), rule.message


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("kind, value", [
    ("sparse_coo", torch.eye(4).to_sparse()), ("float", 1.0),
    ("a nested tensor", torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged))])
def test_not_strided(name, kind, value):
    arguments = {"q": torch.ones(2, 7, 6, 8), "k": torch.ones(2, 9, 3, 8), "v": torch.ones(2, 9, 3, 8), "sinks": torch.ones(6)}
    arguments[name] = value
    with pytest.raises(TypeError, match=f"^{name} must be a strided torch.Tensor, got {kind}$"):
        _rules.check_forward(**arguments)


def test_error_types():
    """Python users catch the kind of error; whoever calls an op directly, on any device, a RuntimeError."""
    for error, builtin in ((VALUE, ValueError), (TYPE, TypeError), (UNSUPPORTED, NotImplementedError)):
        assert issubclass(error, builtin) and issubclass(error, RuntimeError)


def test_symbolic_sizes():
    """Rules fix no batch size, length or number of heads."""
    from torch.fx.experimental.proxy_tensor import make_fx

    sizes = []

    def checked(q, k, v):
        _rules.check_forward(q, k, v, causal=True)
        sizes.extend((*q.shape[:3], *k.shape[1:3]))
        return q

    make_fx(checked, tracing_mode="symbolic")(torch.empty(2, 7, 6, 72), torch.empty(2, 9, 3, 72), torch.empty(2, 9, 3, 40))
    assert len(sizes) == 5
    assert all(size.node.maybe_as_int() is None for size in sizes)


PROBE = """
#include <cstdio>
#include <vector>
#include "rules.h"
using namespace gqa_attn::rules;
TensorFacts tensor(std::vector<int64_t> sizes, std::string_view dtype, Device device) {
  auto* kept = new std::vector<int64_t>(sizes);
  const auto rank = static_cast<int64_t>(kept->size());
  TensorFacts facts{true, rank, {kept->data(), rank}, dtype, device, "strided"};
  int64_t* named[] = {&facts.head_dim, &facts.heads, &facts.seqlen, &facts.batch};
  for (size_t i = 0; i < 4 && i < kept->size(); ++i) *named[i] = (*kept)[kept->size() - 1 - i];
  return facts;
}
void report(void (*check)(const Facts&), const Facts& facts) {
  try {
    check(facts);
    std::puts("accepted");
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
int main() {
  const double inf = HUGE_VAL, nan = NAN;
  (void)inf, (void)nan;
%s
}
"""


def test_cpp_says_the_same(tmp_path):
    """The generated header, compiled: every case of this file through both checks, against Python's text."""
    lines, expected = [], []
    for case in REFUSED + ACCEPTED:
        lines.append("  { Facts f;")
        for name, value in case.arguments().items():
            if value is not None:
                lines.append(f"    f.{name} = {value.cpp() if isinstance(value, Spec) else str(value).lower()};")
        lines.append("    f.varlen = f.cu_seqlens_q.given; f.device_type = f.q.device.type;")
        for backward in (True, False)[:1 if case.backward_only else 2]:
            lines.append(f"    report(check_{'backward' if backward else 'forward'}, f);")
            expected.append(str(python_error(case, backward) or "accepted"))
        lines.append("  }")
    (tmp_path / "rules.h").write_text(rules_header())
    (tmp_path / "probe.cpp").write_text(PROBE % "\n".join(lines))
    compiler = shutil.which("g++") or "c++"
    subprocess.run([compiler, "-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers",
                    f"-I{ROOT / 'csrc'}", f"-I{tmp_path}", "probe.cpp", "-o", "probe"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "probe"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == expected


def test_untranslatable_rule_is_named():
    from codegen.rules import _expression

    with pytest.raises(ValueError, match="a rule uses q.heads // 2, which codegen/rules.py does not translate"):
        _expression("q.heads // 2 == 1")
