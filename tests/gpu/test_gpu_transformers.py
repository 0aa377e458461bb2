"""attn_implementation="gqa_attn" on the GPU: tiny models in bfloat16 against eager attention in float32, and no waits."""
import pytest
import torch

transformers = pytest.importorskip("transformers")

from calls import poison  # noqa: E402
from tiny_models import FAMILIES, build, padded_batch, run_packed, run_padded, run_separately, run_unpadded  # noqa: E402

from gqa_attn.integrations import transformers as adapter  # noqa: E402


def models(family: str) -> list[torch.nn.Module]:
    """Eager in float32 and in bfloat16, ours in bfloat16; the same weights, that bfloat16 holds."""
    ours = build(family, adapter.NAME, torch.bfloat16)
    weights = ours.state_dict()
    others = [build(family, "eager", dtype) for dtype in (torch.float32, torch.bfloat16)]
    for other in others:
        other.load_state_dict(weights)
    return [model.cuda() for model in (*others, ours)]


def results(model, step, weights: list) -> dict[str, torch.Tensor]:
    def run(logits):
        if not weights:
            weights.append(torch.randn(logits.shape, device="cuda"))
        parameters = dict(model.named_parameters())
        poison()
        gradients = torch.autograd.grad(logits.float(), list(parameters.values()), weights[0], allow_unused=True)
        return {"logits": logits.detach()} | dict(zip(parameters, gradients))

    poison()
    return step(model, run)


def check(family: str, step, eager_step=None) -> None:
    """In the norm of every quantity: bfloat16 rounds all over the model, so single elements say little."""
    reference, eager, ours = models(family)
    weights: list = []
    expected, in_bfloat16, got = (results(*each, weights) for each in
                                  ((reference, eager_step or step), (eager, eager_step or step), (ours, step)))
    largest = max(x.norm().item() for name, x in expected.items() if x is not None and name != "logits")
    for name, want in expected.items():
        if want is None:
            continue
        assert torch.isfinite(got[name]).all(), name
        error, allowed = (got[name].float() - want).norm().item(), (in_bfloat16[name].float() - want).norm().item()
        assert error <= 2 * allowed + 2**-9 * want.norm().item() + (0 if name == "logits" else 2**-12 * largest), name


# Not with a router, which picks other experts where its inputs are rounded otherwise.
DENSE = [family for family in FAMILIES if family != "gpt_oss"]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padding(family, side):
    batch = [x.cuda() for x in padded_batch(side)]
    check(family, run_padded(*batch), run_unpadded(*batch))


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("how", ["positions", "cu_seq_lens"])
def test_packed(family, how):
    sequences = [torch.randint(3, 61, (1, length)).cuda() for length in (7, 1, 9, 3)]
    check(family, run_packed(sequences, how), run_separately(sequences))


@pytest.mark.parametrize("family", DENSE)
def test_a_padded_step_never_waits(family):
    model = build(family, adapter.NAME, torch.bfloat16).cuda()
    ids, mask = (x.cuda() for x in padded_batch("both"))

    def step():
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().square().mean().backward()

    step()  # first calls may wait
    waits_are_errors(step)


@pytest.mark.parametrize("options", [dict(), dict(sliding_window=70, s_aux=True), dict(softcap=20.0)], ids=str)
@pytest.mark.parametrize("how", ["padding", "cu_seq_lens"])
def test_attention_never_waits(options, how):
    """transformers itself waits once per forward where a model is packed: it reads position_ids."""
    layer = torch.nn.Linear(1, 1)
    layer.is_causal = True
    inputs = [torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)]
    if "s_aux" in options:
        options = options | dict(s_aux=torch.randn(8, device="cuda", requires_grad=True))
    mask = cu_seqlens = None
    if how == "padding":
        mask = torch.ones(2, 300, dtype=torch.bool, device="cuda")
        mask[0, :31] = mask[1, 222:] = False
    else:
        cu_seqlens = torch.tensor([0, 77, 77, 300, 600], dtype=torch.int32, device="cuda")

    def step():
        out, _ = adapter.attention_function(layer, *inputs, mask, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, **options)
        out.float().square().sum().backward()

    step()
    waits_are_errors(step)


def waits_are_errors(step) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_padded_call_is_replayed_with_other_padding():
    layer = torch.nn.Linear(1, 1)
    layer.is_causal = True
    inputs = [torch.randn(2, heads, 200, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    mask = torch.ones(2, 200, dtype=torch.bool, device="cuda")

    def attend():
        return adapter.attention_function(layer, *inputs, mask)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    mask[0, :50] = mask[1, 100:] = False
    graph.replay()
    assert torch.equal(out, attend()) and not out[0, :50].any() and not out[1, 100:].any() and out[0, 50:].any()
