"""Loads the compiled part: libgqa_attn.so (ops and kernels) and gqa_attn._C (kernel table and selection, without tensors).

Either may be missing: `problems` then says why, and everything but CUDA tensors still works.
"""

import importlib
from pathlib import Path
from types import ModuleType

import torch

PATH = Path(__file__).with_name("libgqa_attn.so")

# The schemas of csrc/ops.cpp, for where that library is missing (tests hold the two against each other).
SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, float? scale=None, bool causal=False, int window_left=-1, int window_right=-1, "
    "float softcap=0.0, Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None) -> (Tensor out, Tensor lse)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, float? scale=None, "
    "bool causal=False, int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? sinks=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, bool deterministic=False) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
)

# Name of a compiled part -> why it is not there.
problems: dict[str, str] = {}

# gqa_attn._C, or None. Use it through this name: where it was built for another library it must not be imported at all.
compiled: ModuleType | None = None

_definitions: torch.library.Library | None = None


def _load() -> None:
    global compiled
    if hasattr(torch.ops.gqa_attn, "fwd"):
        # Another copy is in this process (a second one would abort it). Only the one beside this file fits our _C.
        if str(PATH.resolve()) not in torch.ops.loaded_libraries:
            problems["_C"] = f"not imported: the ops in this process come from another library than {PATH.name} of this package"
            return
    else:
        try:
            torch.ops.load_library(PATH)
        except OSError as error:
            reason = f"{PATH.name} is not in the package: it was not built, or not for this platform"
            if PATH.exists():
                reason = str(error.__cause__ or error)
            problems[PATH.name] = reason
            problems["_C"] = f"not imported: it needs {PATH.name}"
            _define_without_library(reason)
            return
    try:
        compiled = importlib.import_module(f"{__package__}._C")
    except ImportError as error:
        problems["_C"] = str(error)


def _define_without_library(reason: str) -> None:
    """Schemas from here, so that the CPU path, fakes and export work on machines that no kernel was built for."""
    global _definitions
    _definitions = torch.library.Library("gqa_attn", "DEF")

    def no_kernels(*args, **kwargs):
        raise NotImplementedError(f"gqa_attn has no CUDA kernels here: {reason} (python -m gqa_attn info says more)")

    for schema in SCHEMAS:
        _definitions.define(schema)
    for op in ("fwd", "bwd"):
        _definitions.impl(op, no_kernels, "CUDA")


_load()
