"""What the ops accept: every argument rule and its text, stated once, as data.

A rule is a condition that must hold, the kind of error where it does not, and a message. Conditions are Python expressions
over the facts of a call (`Facts` below). This module compiles them for the fake kernels, the CPU path and the Python front;
codegen/rules.py turns the same rules into csrc/generated/rules.h for the CUDA ops. Nothing here imports torch.
"""

import re
from dataclasses import dataclass
from math import isfinite

# The facts that conditions and messages may name: arguments as the ops take them, in the order of fwd and bwd. Of tensors,
# attributes of TensorFacts; `scale` is 1 where none is given.
FORWARD_TENSORS = ("q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k")
BACKWARD_TENSORS = ("dout", "out", "lse", "dlse", *FORWARD_TENSORS)
OPTIONAL_TENSORS = ("sinks", "cu_seqlens_q", "cu_seqlens_k", "dlse")
SCALARS = {"scale": float, "causal": bool, "window_left": int, "window_right": int, "softcap": float, "deterministic": bool}
# Facts that follow from those: cu_seqlens were given; the type of q's device.
DERIVED = {"varlen": bool, "device_type": str}


class ArgumentError(ValueError, RuntimeError):
    """A value, shape or device that the ops do not take."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A dtype, or a kind of object, that the ops do not take."""


class UnsupportedError(NotImplementedError):
    """A call that is right but has no kernel (NotImplementedError is a RuntimeError already)."""


FIELD = re.compile(r"\{([a-z_.]+)\}")  # a fact in a message
ERRORS = {"value": ArgumentError, "type": ArgumentTypeError}


@dataclass(frozen=True)
class Rule:
    kind: str  # a key of ERRORS
    condition: str  # must hold
    message: str  # with {facts}


@dataclass(slots=True)
class TensorFacts:
    """A tensor as rules see it. The last four sizes have names; a size that the tensor lacks is 1."""

    given: bool = False
    rank: int = 0
    shape: list | None = None
    dtype: str = ""
    device: object = ""
    layout: str = "NoneType"  # of what is no tensor, its type
    batch: int = 1
    seqlen: int = 1
    heads: int = 1
    head_dim: int = 1


def _strided(name):
    return Rule("type", f'{_absent(name)}{name}.layout == "strided"',
                f"{name} must be a strided torch.Tensor, got {{{name}.layout}}")


def _absent(name):
    return f"not {name}.given or " if name in OPTIONAL_TENSORS else ""


def _same_device(name):
    return Rule("value", f"{_absent(name)}{name}.device == q.device",
                f"{name} must be on the device of q ({{q.device}}), got {{{name}.device}}")


def _ranks(name, dense, packed):
    return (
        Rule("value", f"varlen or {name}.rank == 4",
             f"{name} must have shape {dense}, got {{{name}.shape}} ({packed} needs cu_seqlens_q and cu_seqlens_k)"),
        Rule("value", f"not varlen or {name}.rank == 3",
             f"{name} must have shape {packed} when cu_seqlens_q and cu_seqlens_k are given, got {{{name}.shape}}"),
    )


def _row_statistics(name):
    """lse and dlse: one number per head and query."""
    return (
        Rule("type", f'{_absent(name)}{name}.dtype == ("float64" if q.dtype == "float64" else "float32")',
             f"{name} must be float32 (float64 for float64 inputs), got {{{name}.dtype}}"),
        Rule("value", f"varlen or {_absent(name)}{name}.shape == [q.batch, q.heads, q.seqlen]",
             f"{name} must have shape [B, Hq, Sq] = [{{q.batch}}, {{q.heads}}, {{q.seqlen}}], got {{{name}.shape}}"),
        Rule("value", f"not varlen or {_absent(name)}{name}.shape == [q.heads, q.seqlen]",
             f"{name} must have shape [Hq, Tq] = [{{q.heads}}, {{q.seqlen}}], got {{{name}.shape}}"),
    )


def _like_output(name):
    return (
        *_ranks(name, "[B, Sq, Hq, Dv]", "[Tq, Hq, Dv]"),
        Rule("value", f"{name}.batch == q.batch and {name}.seqlen == q.seqlen and {name}.heads == q.heads "
                      f"and {name}.head_dim == v.head_dim",
             f"{name} must have the shape of q {{q.shape}} with the head dim of v ({{v.head_dim}}), got {{{name}.shape}}"),
        Rule("type", f"{name}.dtype == q.dtype", f"{name} must have the dtype of q ({{q.dtype}}), got {{{name}.dtype}}"),
    )


_SHARED = (
    Rule("value", "cu_seqlens_q.given == cu_seqlens_k.given", "cu_seqlens_q and cu_seqlens_k must be given both or neither"),
    *_ranks("q", "[B, Sq, Hq, D]", "[Tq, Hq, D]"),
    *_ranks("k", "[B, Sk, Hk, D]", "[Tk, Hk, D]"),
    *_ranks("v", "[B, Sk, Hk, Dv]", "[Tk, Hk, Dv]"),
    Rule("type", "q.dtype == k.dtype and k.dtype == v.dtype and (q.dtype in ('float16', 'bfloat16') or "
                 "(device_type != 'cuda' and q.dtype in ('float32', 'float64')))",
         "q, k and v must share one dtype of float16, bfloat16 (not on CUDA: float32, float64), "
         "got {q.dtype}, {k.dtype}, {v.dtype}"),
    Rule("value", "k.batch == q.batch", "k must have the batch size of q: q has shape {q.shape}, k has {k.shape}"),
    Rule("value", "v.batch == k.batch and v.seqlen == k.seqlen and v.heads == k.heads",
         "v must have the shape of k up to the head dim: k has shape {k.shape}, v has {v.shape}"),
    Rule("value", "k.head_dim == q.head_dim", "k must have the head dim of q: q has shape {q.shape}, k has {k.shape}"),
    Rule("value", "k.heads > 0 and q.heads % k.heads == 0",
         "the heads of q must be a multiple of the heads of k and v: q has {q.heads}, k has {k.heads}"),
    Rule("value", "1 <= q.head_dim <= 256 and 1 <= v.head_dim <= 256",
         "head dims must be from 1 to 256: q and k have {q.head_dim}, v has {v.head_dim}"),
    Rule("value", "isfinite(scale)", "scale must be finite, got {scale}"),
    Rule("value", "window_left >= -1 and window_right >= -1",
         "window sizes must be >= 0, or -1 for no limit, got ({window_left}, {window_right})"),
    Rule("value", "isfinite(softcap) and softcap >= 0", "softcap must be finite and >= 0 (0: none), got {softcap}"),
    Rule("value", "not sinks.given or sinks.shape == [q.heads]",
         "sinks must have shape [Hq] = [{q.heads}], got {sinks.shape}"),
    Rule("type", "not sinks.given or sinks.dtype == 'float32' or sinks.dtype == q.dtype",
         "sinks must be float32 or have the dtype of q ({q.dtype}), got {sinks.dtype}"),
    Rule("type", "not varlen or (cu_seqlens_q.dtype == 'int32' and cu_seqlens_k.dtype == 'int32')",
         "cu_seqlens_q and cu_seqlens_k must be int32, got {cu_seqlens_q.dtype}, {cu_seqlens_k.dtype}"),
    Rule("value", "not varlen or (cu_seqlens_q.rank == 1 and cu_seqlens_q.shape == cu_seqlens_k.shape "
                  "and cu_seqlens_q.shape != [0])",
         "cu_seqlens_q and cu_seqlens_k must have one shape [n + 1] for n sequences, "
         "got {cu_seqlens_q.shape}, {cu_seqlens_k.shape}"),
)

FORWARD_RULES = (
    *map(_strided, FORWARD_TENSORS),
    *map(_same_device, FORWARD_TENSORS[1:]),
    *_SHARED,
)
BACKWARD_RULES = (
    *map(_strided, BACKWARD_TENSORS),
    *(_same_device(name) for name in BACKWARD_TENSORS if name != "q"),
    *_SHARED,
    *_like_output("out"),
    *_like_output("dout"),
    *_row_statistics("lse"),
    *_row_statistics("dlse"),
)


def check_forward(q, k, v, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0,
                  sinks=None, cu_seqlens_q=None, cu_seqlens_k=None):
    """Raises one of ERRORS where gqa_attn::fwd does not take these arguments.

    Takes any tensors: FakeTensors with symbolic sizes and meta tensors too.
    """
    _check_forward(*map(_facts_of, (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)),
                   1.0 if scale is None else scale, causal, window_left, window_right, softcap, False)


def check_backward(dout, q, k, v, out, lse, dlse=None, scale=None, causal=False, window_left=-1, window_right=-1, softcap=0.0,
                   sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False):
    """Raises one of ERRORS where gqa_attn::bwd does not take these arguments."""
    _check_backward(*map(_facts_of, (dout, out, lse, dlse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)),
                    1.0 if scale is None else scale, causal, window_left, window_right, softcap, deterministic)


def _facts_of(tensor):
    if tensor is None:
        return TensorFacts()
    if not hasattr(tensor, "layout"):
        return TensorFacts(True, layout=type(tensor).__name__)
    if tensor.is_nested:
        return TensorFacts(True, layout="a nested tensor")
    shape = list(tensor.shape)
    return TensorFacts(True, len(shape), shape, str(tensor.dtype)[6:], tensor.device, str(tensor.layout)[6:],
                       *([1] * 4 + shape)[-4:])


def _error(rule, facts):
    def text(field):  # csrc/facts.h prints facts alike
        fact = eval(field[1], {}, facts)
        return f"{fact:g}" if isinstance(fact, float) else str(fact)

    return ERRORS[rule.kind](FIELD.sub(text, rule.message))


def _compile(rules, tensors):
    """One function over the facts that runs all rules: no loop, no look-up for a call that passes."""
    lines = [f"def check({', '.join((*tensors, *SCALARS))}):",
             "    varlen = cu_seqlens_q.given",
             '    device_type = getattr(q.device, "type", "")']
    for number, rule in enumerate(rules):
        lines.append(f"    if not ({rule.condition}): raise error(rules[{number}], locals())")
    scope = {"isfinite": isfinite, "error": _error, "rules": rules}
    exec("\n".join(lines), scope)
    return scope["check"]


_check_forward = _compile(FORWARD_RULES, FORWARD_TENSORS)
_check_backward = _compile(BACKWARD_RULES, BACKWARD_TENSORS)
