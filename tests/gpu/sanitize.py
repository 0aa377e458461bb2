"""One small odd shape per kernel family, forward and backward, for compute-sanitizer; run.py --sanitizer runs it."""
from itertools import product

import gqa_attn  # noqa: F401  registers the ops
import torch
from problems import DTYPES, TUNED, Inputs, Problem

# Several query and kv tiles, none of them full, with rows that see no key where causal; packed: empty sequences and a tail.
DENSE = dict(seqlen_q=137, seqlen_k=133)
SHORT = dict(seqlen_q=3, seqlen_k=2300)  # in parts
PACKED = dict(lengths=((70, 66), (0, 5), (3, 0), (137, 133)), tail=3)
# q and k or v are far narrower than a tile.
PADDED = [(144, 208), (68, 211), (56, 152), (64, 96), (72, 96), (80, 80), (200, 64)]
MASKS = [{}, {"causal": True}, {"window": (40, 9), "softcap": 20.0, "sinks": "float32"}]


def step(x: Inputs) -> None:
    x.backward(*x.forward())
    torch.cuda.synchronize()


def main() -> None:
    shapes = [*product(TUNED, (DENSE, SHORT, PACKED)), *product(PADDED, (PACKED,))]
    for i, ((dims, shape), mask, deterministic) in enumerate(product(shapes, MASKS, (False, True))):
        problem = Problem(*dims, dtype=DTYPES[i // 2 % 2], batch=1, heads=4, kv_heads=1, dlse=True, deterministic=deterministic,
                          **shape, **mask)
        x = problem.inputs(0)
        step(x)
        if problem.lengths is not None:  # out of order and out of range
            x.cu_seqlens_q.copy_(torch.tensor([-9, 300, 40, 2**31 - 1, 100]))
            step(x)
        print(problem, flush=True)


if __name__ == "__main__":
    main()
