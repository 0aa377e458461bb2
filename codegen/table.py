"""The one table of kernels: every compiled kernel is a row here, and everything else is derived from it.

The CUDA files, the C++ kernel table that selection searches, `gqa_attn.explain` and `python -m gqa_attn info` all come from
KERNELS. Designs and measurements stand in docs/kernels.md.
"""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One kernel. Head dims are the largest it serves; smaller ones are filled up with zeros by TMA."""

    family: str  # module of codegen/kernels
    phase: str
    dtype: str
    head_dim: int = 0
    head_dim_v: int = 0
    mask: str = "general"        # "full", "causal" or "general": windows, softcap, packed sequences
    softcap: bool = False        # serves problems with one, and no others
    arch: int = 90
    block_q: int = 0
    block_kv: int = 0
    stages_q: int = 1            # query tiles in flight (backward: dout tiles too)
    stages_kv: int = 1
    threads: int = 128           # of kernels without warp roles
    registers: int = 0           # of a compute thread, by setmaxnreg; 0: the compiler's choice
    producer_registers: int = 24
    # forward
    output: str = ""             # how O leaves: "registers", "own_tile" or "q_tile" of shared memory
    lazy_rescale: int = 0        # O is rescaled when exp2 of the maximum grew more than 2 ** this times; 0: always
    # backward
    p_16bit: bool = False        # dS from the 16-bit P: saves the registers of the float32 one
    dk_steps_with_dq: int = 0    # 16-row steps of dK's product issued before dQ is drained
    stages_ds: int = 1
    drain_dv: bool = False       # dV's product ends before dS is published
    zeroed_dq: bool = False      # adds to a zeroed dQ workspace instead of storing the first tile
    dq_by_rows: bool = False     # warpgroups split dQ by rows, not by columns

    @property
    def accumulated_tiles(self):
        """(rows, head dim) of the float32 tiles that a backward kernel leaves: of dQ, and of dK and dV in parts."""
        if self.phase != "backward":
            return ()
        return (self.block_q, self.head_dim), (self.block_kv, self.head_dim), (self.block_kv, self.head_dim_v)

    @property
    def name(self):
        dims = "x".join(str(d) for d in (self.head_dim, self.head_dim_v) if d)
        rows = f"r{self.block_q}" if self.phase == "backward_finish" else ""
        dtype = {"float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        mask = self.mask if self.phase == "forward" and self.mask != "full" else ""
        softcap = "softcap" if self.softcap else ""
        return "_".join(part for part in (self.family, f"d{dims}", rows, dtype, mask, softcap) if part)


DTYPES = ("float16", "bfloat16")
MASKS = ("full", "causal", "general")

# (head_dim, head_dim_v) -> settings, of all masks or of each. A second Q tile hides its load; general kernels of 64 and 96
# would spill.
FORWARD = {
    (64, 64): tuple(
        dict(block_q=192, block_kv=128, stages_q=stages, output="own_tile", registers=160, producer_registers=32)
        for stages in (2, 2, 1)
    ),
    (96, 96): tuple(
        dict(
            block_q=192, block_kv=96, stages_q=stages, output="own_tile", lazy_rescale=8, registers=160, producer_registers=32
        )
        for stages in (2, 2, 1)
    ),
    (128, 128): (
        dict(block_q=128, block_kv=160, stages_q=2, output="q_tile", lazy_rescale=8),
        dict(block_q=128, block_kv=128, stages_q=2, output="own_tile", lazy_rescale=8),
        dict(block_q=128, block_kv=128, stages_q=2, output="own_tile", lazy_rescale=8),
    ),
    (192, 128): (
        dict(block_q=128, block_kv=128, output="registers", lazy_rescale=8),
        dict(block_q=128, block_kv=128, output="q_tile", lazy_rescale=8),
        dict(block_q=128, block_kv=128, output="q_tile", lazy_rescale=8, registers=232, producer_registers=40),
    ),
    (192, 192): dict(block_q=128, block_kv=96, output="q_tile", lazy_rescale=8),
    (256, 256): dict(block_q=128, block_kv=80, output="q_tile", lazy_rescale=8),
}
BACKWARD = {
    (64, 64): dict(
        block_q=128, dk_steps_with_dq=8, stages_ds=2, drain_dv=True, dq_by_rows=True, registers=232, producer_registers=40
    ),
    (96, 96): dict(block_q=64, dk_steps_with_dq=4, stages_ds=2, registers=232, producer_registers=40),
    (128, 128): dict(block_q=64, dk_steps_with_dq=4, stages_ds=2, registers=232, producer_registers=40),
    (192, 128): dict(block_q=64, dk_steps_with_dq=2, p_16bit=True, drain_dv=True, registers=240),
}
BACKWARD_WIDE = {
    (192, 192): dict(block_q=64, block_kv=64, registers=232, producer_registers=40),
    (256, 256): dict(block_q=64, block_kv=64, registers=232, producer_registers=40),
}


def _main_kernels():
    families = (
        ("forward_sm90", "forward", FORWARD, dict(stages_kv=2, registers=240)),
        ("backward_sm90", "backward", BACKWARD, dict(stages_q=2, block_kv=128)),
        ("backward_wide_sm90", "backward", BACKWARD_WIDE, dict(stages_q=2, zeroed_dq=True)),
    )
    for family, phase, configurations, shared in families:
        for (head_dim, head_dim_v), settings in configurations.items():
            masks = MASKS if phase == "forward" else ("general",)
            by_mask = settings if isinstance(settings, tuple) else (settings,) * len(masks)
            for mask, chosen in zip(masks, by_mask):
                # A softcap's code in the main loop costs the others time; its backward needs the float32 P.
                softcaps = (False, True) if mask == "general" and not chosen.get("p_16bit") else (False,)
                for softcap, dtype in itertools.product(softcaps, DTYPES):
                    yield Kernel(
                        family, phase, dtype, head_dim=head_dim, head_dim_v=head_dim_v, mask=mask, softcap=softcap,
                        **{**shared, **chosen},
                    )


def _backward_helpers():
    for dtype in DTYPES:
        for head_dim_v in (64, 128, 256):
            yield Kernel("prepare_sm90", "backward_prepare", dtype, head_dim_v=head_dim_v, block_q=64)
        for rows, head_dim in sorted({tile for kernel in _main_kernels() for tile in kernel.accumulated_tiles}):
            yield Kernel("finish_sm90", "backward_finish", dtype, head_dim=head_dim, block_q=rows, threads=256)


KERNELS = (*_main_kernels(), *_backward_helpers())
