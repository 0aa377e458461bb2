"""Tiny random models of transformers' families, and how two attention implementations of one model are compared.

The rule is that of reference.py, for logits and the gradient of every parameter, against eager attention in float64:

    max|x - reference| <= 2 * max|eager - reference| + 1e-5 * max|reference|

where x and eager are float32. Some gradients are sums that cancel (of a key bias): 1e-6 of the largest gradient of all
parameters is allowed besides. The models take their norms and softmax in float32, whatever their dtype.
"""

import copy
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from gqa_attn.integrations import transformers as adapter

adapter.register()

VOCABULARY = 61
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_BOTH_KINDS = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])

FAMILIES = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "qwen3": transformers.Qwen3Config(**_SIZES, use_sliding_window=True, **_BOTH_KINDS),
    "gemma2": transformers.Gemma2Config(**_SIZES, **_BOTH_KINDS, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3": transformers.Gemma3TextConfig(**_SIZES, **_BOTH_KINDS, query_pre_attn_scalar=16),
    "gpt_oss": transformers.GptOssConfig(**_SIZES, **_BOTH_KINDS, num_local_experts=4, num_experts_per_tok=2,
                                         rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
}
_OTHERS = {
    "llama4": transformers.Llama4TextConfig(**_SIZES, attention_chunk_size=4, intermediate_size_mlp=48, num_local_experts=2,
                                            interleave_moe_layer_step=3, layer_types=["chunked_attention", "full_attention"]),
}


def build(family: str, implementation: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    # Grouped matrix products, which compile, are not there for float64.
    experts = dict(experts_implementation="eager") if family == "gpt_oss" and dtype == torch.float64 else {}
    config = copy.deepcopy((FAMILIES | _OTHERS)[family])  # a model writes its implementations into it
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype, **experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and "gemma" not in family else 0.0
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape))
    return model.eval()


def same_weights(family: str, dtype: torch.dtype, *implementations: str) -> list[torch.nn.Module]:
    models = [build(family, implementation, dtype) for implementation in implementations]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


def padded_batch(side: str) -> tuple[Tensor, Tensor]:
    """ids and attention_mask [3, 11], the first row without padding."""
    tokens = {"right": [(0, 11), (0, 4), (0, 8)], "left": [(0, 11), (7, 11), (2, 11)], "both": [(0, 11), (3, 6), (1, 10)]}[side]
    mask = torch.zeros(3, 11, dtype=torch.long)
    for row, (start, end) in enumerate(tokens):
        mask[row, start:end] = 1
    return torch.randint(3, VOCABULARY, (3, 11)) * mask, mask


def run_padded(ids: Tensor, mask: Tensor) -> Callable:
    """A step as `check` takes them, with the logits of all tokens."""
    return lambda model, run: run(model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()])


def run_unpadded(ids: Tensor, mask: Tensor) -> Callable:
    """The same row by row without padding: rows of padding are NaN in eager attention of float64."""
    def step(model, run):
        logits = []
        for row, tokens in zip(ids, mask):
            at = tokens.nonzero().T
            logits.append(model(input_ids=row[at], position_ids=at, use_cache=False).logits[0])
        return run(torch.cat(logits))

    return step


def run_packed(sequences: list[Tensor], how: str) -> Callable:
    """One call for all. Boundaries by positions alone, or by cu_seq_lens beside them."""
    lengths, ids = [ids.shape[1] for ids in sequences], torch.cat(sequences, 1)
    inputs = dict(input_ids=ids, position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(ids.device))
    if how == "cu_seq_lens":
        cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).int().to(ids.device)
        inputs |= dict(cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens)
        inputs |= dict(max_length_q=max(lengths), max_length_k=max(lengths))
    return lambda model, run: run(model(**inputs, use_cache=False).logits)


def run_separately(sequences: list[Tensor]) -> Callable:
    return lambda model, run: run(torch.cat([model(input_ids=ids, use_cache=False).logits for ids in sequences], 1))


def check(family: str, step: Callable, eager_step: Callable | None = None) -> None:
    """step(model, run) returns run(logits), eager_step for eager models, where another one must give the same logits."""
    reference, eager, ours = (build(family, each, dtype) for each, dtype in
                              (("eager", torch.float64), ("eager", torch.float32), (adapter.NAME, torch.float32)))
    eager.load_state_dict(reference.state_dict())  # rounded to float32
    reference.load_state_dict(eager.state_dict())
    ours.load_state_dict(eager.state_dict())
    assert [model.config._attn_implementation for model in (reference, eager, ours)] == ["eager", "eager", adapter.NAME]
    weights = None

    def evaluate(model, step):
        def run(logits):
            nonlocal weights
            weights = torch.randn(logits.shape) if weights is None else weights
            parameters = dict(model.named_parameters())
            gradients = torch.autograd.grad(logits, parameters.values(), weights.to(logits.dtype), allow_unused=True)
            return {"logits": logits.detach()} | dict(zip(parameters, gradients))

        return step(model, run)

    expected, in_float32 = (evaluate(model, eager_step or step) for model in (reference, eager))
    got = evaluate(ours, step)
    largest = max(x.abs().max().item() for name, x in expected.items() if x is not None and name != "logits")
    failures = []
    for name, want in expected.items():
        if want is None:  # a parameter that nothing uses
            assert got[name] is None, name
            continue
        error = (got[name] - want).abs().max().item()
        limit = 2 * (in_float32[name] - want).abs().max().item() + 1e-5 * want.abs().max().item()
        limit += 0 if name == "logits" else 1e-6 * largest
        if not error <= limit:
            failures.append(f"{name}: error {error:.3e} is over {limit:.3e}, largest value {want.abs().max().item():.3e}")
    assert not failures, "\n".join(failures)
