"""One small odd shape per kernel family, forward and backward, for compute-sanitizer; run.py --sanitizer runs it."""
import gqa_attn  # noqa: F401  registers the ops
import torch
from problems import DTYPES, TUNED, Problem


def main() -> None:
    for dims in TUNED:
        for dtype in DTYPES:
            for causal in (False, True):
                # Several query and kv tiles, none of them full, with rows that see no key where causal.
                x = Problem(*dims, 137, 133, causal, dtype, batch=1, heads=4, kv_heads=1, dlse=True).inputs(0)
                out, lse = torch.ops.gqa_attn.fwd(x.q, x.k, x.v, None, causal)
                torch.ops.gqa_attn.bwd(x.dout, x.q, x.k, x.v, out, lse, x.dlse, None, causal)
                torch.cuda.synchronize()
                print(dims, dtype, "causal" if causal else "full", flush=True)


if __name__ == "__main__":
    main()
