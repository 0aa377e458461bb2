"""torch.vmap over the ops: one call with the mapped dim folded into another one.

That is the batch, or the heads where a batch shares sinks or cu_seqlens: elements come one after the other there, so each
query head still finds its kv head. Elements with cu_seqlens of their own get a call each.
"""

import torch

SINKS_IN_FWD, SINKS_IN_BWD = 8, 12  # the place of sinks among the arguments; both cu_seqlens follow


def forward(info, in_dims, *args):
    return _map(torch.ops.gqa_attn.fwd, SINKS_IN_FWD, info.batch_size, in_dims, args)


def backward(info, in_dims, *args):
    return _map(torch.ops.gqa_attn.bwd, SINKS_IN_BWD, info.batch_size, in_dims, args)


def _map(op, sinks_at, size, in_dims, args):
    """Outputs and where the mapped dim stands in them."""
    calls = max(size, 1)  # without elements, one of zeros tells the shapes

    def elements(arg, dim):  # [calls, ...]
        if dim is None:
            return arg.expand(calls, *arg.shape)
        arg = arg.movedim(dim, 0)
        return arg if size else arg.new_zeros(1, *arg.shape[1:])

    cu_seqlens = slice(sinks_at + 1, sinks_at + 3)
    if any(dim is not None for dim in in_dims[cu_seqlens]):
        args = [elements(arg, dim) if isinstance(arg, torch.Tensor) else arg for arg, dim in zip(args, in_dims)]
        each = [op(*(arg[i] if isinstance(arg, torch.Tensor) else arg for arg in args)) for i in range(calls)]
        outputs, out_dims = map(torch.stack, zip(*each)), [0] * len(each[0])
    else:
        into_batch = all(arg is None for arg in args[sinks_at:cu_seqlens.stop])

        def place(dims):  # of the batch, or of the heads in [..., H, D], [..., H, S] and [H]
            return 0 if into_batch else max(dims - 2, 0)

        def fold(arg, dim):
            arg = elements(arg, dim)
            at = place(arg.dim() - 1)
            return arg.movedim(0, at).flatten(at, at + 1)

        folded = [fold(arg, dim) if isinstance(arg, torch.Tensor) else arg for arg, dim in zip(args, in_dims)]
        folded[cu_seqlens] = args[cu_seqlens]
        results = op(*folded)
        out_dims = [place(t.dim()) for t in results]
        outputs = (t.unflatten(at, (calls, t.shape[at] // calls)) for t, at in zip(results, out_dims))
    if size == 0:
        outputs = (t.narrow(at, 0, 0) for t, at in zip(outputs, out_dims))
    return tuple(outputs), tuple(out_dims)
