"""torch.vmap over the ops: one call with the mapped dim folded into the batch, or one call per element where it cannot be.

It cannot for packed sequences, which have no batch dim, and with sinks, which are shared by a batch (and so are their gradients).
"""

import torch

SINKS_IN_FWD, SINKS_IN_BWD = 8, 12  # the place of sinks among the arguments; both cu_seqlens follow


def forward(info, in_dims, *args):
    return _map(torch.ops.gqa_attn.fwd, info.batch_size, in_dims, args, args[SINKS_IN_FWD:SINKS_IN_FWD + 3])


def backward(info, in_dims, *args):
    return _map(torch.ops.gqa_attn.bwd, info.batch_size, in_dims, args, args[SINKS_IN_BWD:SINKS_IN_BWD + 3])


def _map(op, size, in_dims, args, not_foldable):
    def mapped(arg, dim):  # [size, ...]
        return arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)

    args = [mapped(arg, dim) if isinstance(arg, torch.Tensor) else arg for arg, dim in zip(args, in_dims)]
    if all(arg is None for arg in not_foldable):
        outputs = op(*(arg.flatten(0, 1) if isinstance(arg, torch.Tensor) else arg for arg in args))
        # dsinks, of shape [0] here, has no batch dim.
        outputs = tuple(t.unflatten(0, (size, t.shape[0] // size)) if t.dim() > 1 else t.expand(size, *t.shape) for t in outputs)
    else:
        each = [op(*(arg[i] if isinstance(arg, torch.Tensor) else arg for arg in args)) for i in range(size)]
        outputs = tuple(map(torch.stack, zip(*each)))
    return outputs, (0,) * len(outputs)
