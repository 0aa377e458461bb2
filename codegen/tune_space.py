"""What the tuner tries: for one main kernel all configurations that its designs allow and that may fit a multiprocessor.

Estimates here only save lowering and compiling what cannot fit: shared memory and registers are known afterwards.
"""

from dataclasses import dataclass, fields, replace
from itertools import product

from .table import KERNELS, Kernel

SHARED_MEMORY = 232448  # bytes that a block may have
BARRIERS = 1024         # of them, of every main kernel's
OTHER_REGISTERS = 8     # of a compute thread, at least, besides accumulators and operands
SERVED = ("phase", "dtype", "head_dim", "head_dim_v", "mask", "softcap", "arch")  # fields that say what a kernel is for


@dataclass(frozen=True)
class Target:
    """The kernels of the table that one run of the tuner is about: one for each dtype, of one configuration.

    A backward with softcap has the configuration of the one without, which is the one that is timed.
    """

    phase: str
    head_dim: int
    head_dim_v: int
    mask: str

    @property
    def name(self):
        return f"{self.phase}_{self.head_dim}x{self.head_dim_v}_{self.mask}"

    def kernel(self):
        """The table's, of one dtype."""
        return min((kernel for kernel in KERNELS if target_of(kernel) == self), key=lambda kernel: kernel.softcap)


def target_of(kernel):
    return Target(kernel.phase, kernel.head_dim, kernel.head_dim_v, kernel.mask)


TARGETS = tuple(dict.fromkeys(target_of(kernel) for kernel in KERNELS if kernel.phase in ("forward", "backward")))


def settings(kernel):
    """What a kernel is apart from what it serves: its family, and what is not as by default."""
    return {f.name: getattr(kernel, f.name) for f in fields(Kernel)
            if f.name not in SERVED and (f.name == "family" or getattr(kernel, f.name) != f.default)}


def label(kernel):
    family, *others = settings(kernel).items()
    return "_".join((family[1], *(f"{key}{int(value) if isinstance(value, bool) else value}" for key, value in others)))


def candidates(target):
    """The kernels to try, of the dtype of target.kernel(), which comes first."""
    current = target.kernel()
    found = {current: None}
    for family, configurations in FAMILIES[target.phase].items():
        bare = Kernel(family, **{name: getattr(current, name) for name in SERVED})
        for chosen in configurations(current):
            kernel = replace(bare, **chosen)
            if (shared_memory(kernel) + BARRIERS <= SHARED_MEMORY
                    and accumulators(kernel) + OTHER_REGISTERS <= kernel.registers):
                found[kernel] = None
    return list(found)


def _forward(current):
    # One stage of K and V would leave nothing to overlap.
    for (block_q, registers, producer_registers), block_kv, (stages_q, stages_kv), output, lazy_rescale in product(
            (*((128, *split) for split in _SPLITS), (192, 160, 32)), (80, 96, 112, 128, 160, 192), ((1, 2), (2, 2), (1, 3)),
            ("registers", "own_tile", "q_tile"), (0, 8)):
        if output == "q_tile" and current.head_dim_v > current.head_dim:
            continue  # O leaves through a Q tile
        if output == "registers" and current.mask == "general":
            continue  # only TMA clips at the end of a packed sequence
        yield dict(block_q=block_q, block_kv=block_kv, stages_q=stages_q, stages_kv=stages_kv, output=output,
                   lazy_rescale=lazy_rescale, registers=registers, producer_registers=producer_registers)


def _backward(current):
    # Two stages of Q at least: the scores of the next tile are issued before this one's Q is free. p_16bit gives up softcap and
    # accuracy, which speed does not decide.
    for block_q, stages_q, stages_ds, steps, drain_dv, p_16bit, (registers, producer_registers) in product(
            (64, 128), (2, 3), (1, 2), (2, 4, 8), (False, True), sorted({False, current.p_16bit}), _SPLITS):
        if steps * 16 <= block_q:
            yield dict(block_q=block_q, block_kv=128, stages_q=stages_q, stages_ds=stages_ds, dk_steps_with_dq=steps,
                       drain_dv=drain_dv, p_16bit=p_16bit, dq_by_rows=block_q == 128, registers=registers,
                       producer_registers=producer_registers)


def _backward_wide(current):
    for stages_q, (registers, producer_registers) in product((2, 3), _SPLITS):
        yield dict(block_q=64, block_kv=64, stages_q=stages_q, zeroed_dq=True, registers=registers,
                   producer_registers=producer_registers)


_SPLITS = ((240, 24), (232, 40))  # registers of compute and of producer threads, which the kernel's 168 a thread add up to
FAMILIES = {
    "forward": {"forward_sm90": _forward},
    "backward": {"backward_sm90": _backward, "backward_wide_sm90": _backward_wide},
}


def shared_memory(kernel):
    """Bytes of the tiles."""
    q, kv, dims = kernel.block_q, kernel.block_kv, kernel.head_dim + kernel.head_dim_v
    if kernel.phase == "forward":
        own_tile = q * kernel.head_dim_v if kernel.output == "own_tile" else 0
        return 2 * (kernel.stages_q * q * kernel.head_dim + kernel.stages_kv * kv * dims + own_tile)
    score_tiles = kernel.stages_ds * kv * q
    if kernel.family == "backward_wide_sm90":
        rest = (2 + 4) * score_tiles  # P too
    else:
        rest = 2 * score_tiles + 4 * q * kernel.head_dim  # dQ
    return 2 * kv * dims + kernel.stages_q * q * (2 * dims + 2 * 4) + rest


def accumulators(kernel):
    """Registers of a compute thread for accumulators and 16-bit operands, where most of them live at once."""
    q, kv, head_dim, head_dim_v = kernel.block_q, kernel.block_kv, kernel.head_dim, kernel.head_dim_v
    if kernel.phase == "forward":
        return (head_dim_v + kv + kv // 2) // 2  # O, S, P
    score, sums, dq = q * kv // 256, kv * (head_dim + head_dim_v) // 256, q * head_dim // 256  # sums: dK, dV
    if kernel.family == "backward_wide_sm90":
        return sums + 2 * score + max(score, dq // 2 if head_dim == 256 else dq)  # S or dP; P or dS in 16 bit, or dQ
    return sums + max(score * 3 // 2 if kernel.p_16bit else score * 5 // 2, dq)  # P, dP, 16-bit P
