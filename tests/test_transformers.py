"""attn_implementation="gqa_attn": tiny random models of each family against transformers' own eager attention; about 35 s."""

import copy
import warnings

import pytest
import torch
from cpu import OpCalls, fwd, in_new_process, int32
from reference import Results, assert_matches
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    FAMILIES, build, check, padded_batch, run_packed, run_padded, run_separately, run_unpadded, same_weights,
)
from transformers.masking_utils import causal_mask_function, create_causal_mask  # noqa: E402

from gqa_attn.integrations import transformers as adapter  # noqa: E402

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item", "aten::equal", "aten::masked_select"}


class Reads(TorchDispatchMode):
    """Collects the names of ops for whose results the host would have to wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().split(".")[0] in READS:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


class Layer(torch.nn.Module):
    """What an attention function sees of a layer."""

    def __init__(self, is_causal=True, dtype=torch.float32):
        super().__init__()
        self.is_causal = is_causal
        self.proj = torch.nn.Linear(1, 1, dtype=dtype)


CAUSAL_LAYER = Layer()


def heads_first(batch, seqlen, heads, kv_heads, head_dim=16, dtype=torch.float32, seqlen_k=None):
    shapes = [(heads, seqlen), (kv_heads, seqlen_k or seqlen), (kv_heads, seqlen_k or seqlen)]
    return [torch.randn(batch, *shape, head_dim).to(dtype).requires_grad_() for shape in shapes]


def attend(inputs, mask=None, layer=None, **options):
    return adapter.attention_function(layer or CAUSAL_LAYER, *inputs, mask, **options)[0]


def check_attend(inputs, cu_seqlens=None, mask=None, layer=None, expected=None, **options):
    """attention_function, forward and backward, against float64; `expected` has reference.py's names of the options."""
    out = attend(inputs, mask, layer, **options)
    dout = torch.randn_like(out)
    sinks = options.get("s_aux")
    gradients = torch.autograd.grad(out, inputs + ([] if sinks is None else [sinks]), dout)
    tokens = [x.detach().transpose(1, 2) for x in inputs]
    results = [out, *(gradient.transpose(1, 2) for gradient in gradients[:3])]
    if cu_seqlens is not None:
        tokens, results, dout = [x.flatten(0, 1) for x in tokens], [x.flatten(0, 1) for x in results], dout.flatten(0, 1)
    out, dq, dk, dv = results
    assert_matches(Results(out, None, dq, dk, dv, *gradients[3:]), *tokens, dout, sinks=sinks, cu_seqlens_q=cu_seqlens,
                   **(expected or dict(causal=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain(family):
    ids = torch.randint(3, 61, (2, 13))
    check(family, lambda model, run: run(model(input_ids=ids, use_cache=False).logits))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padding(family, side):
    batch = padded_batch(side)
    check(family, run_padded(*batch), run_unpadded(*batch))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["positions", "cu_seq_lens"])
def test_packed(family, how):
    """Held against one call per sequence: eager GPT-OSS lets packed sequences see each other."""
    sequences = [torch.randint(3, 61, (1, length)) for length in (7, 1, 9, 3)]
    check(family, run_packed(sequences, how), run_separately(sequences))


def test_rows_that_are_packed():
    ids = torch.randint(3, 61, (2, 10))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])
    check("llama", lambda model, run: run(model(input_ids=ids, position_ids=positions, use_cache=False).logits))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family):
    batch = padded_batch("both")

    def step(model, run):
        with warnings.catch_warnings(action="ignore"):  # 5.23 has a new name for it, 5.17 does not know that
            model.gradient_checkpointing_enable()
        return run_padded(*batch)(model.train(), run)

    check(family, step, run_unpadded(*batch))


@pytest.mark.parametrize("collator", ["padding", "positions", "cu_seq_lens"])
def test_trainer(collator, tmp_path):
    """Three steps of transformers' Trainer, which adds arguments of its own, end where eager attention and padding end."""
    pytest.importorskip("accelerate")
    samples = [dict(input_ids=ids, labels=ids) for ids in (torch.randint(3, 61, (n,)).tolist() for n in (7, 5, 9, 4, 6, 8))]

    def pad(batch):
        longest = max(len(sample["input_ids"]) for sample in batch)
        rows = [torch.tensor(sample["input_ids"]) for sample in batch]
        ids, labels = (torch.stack([F.pad(row, (0, longest - len(row)), value=value) for row in rows]) for value in (0, -100))
        return dict(input_ids=ids, labels=labels, attention_mask=(labels != -100).long())

    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=collator == "cu_seq_lens")
    models = same_weights("llama", torch.float32, "eager", adapter.NAME, "eager")
    for model, collate in zip(models[:2], (pad, pad if collator == "padding" else flatten)):
        arguments = transformers.TrainingArguments(
            tmp_path, per_device_train_batch_size=2, max_steps=3, learning_rate=0.1, seed=0, optim="sgd", report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True)
        transformers.Trainer(model, arguments, train_dataset=samples, data_collator=collate).train()
    for eager, ours, before in zip(*(model.parameters() for model in models)):
        moved = (eager - before).abs().max()
        assert moved > 0 and (ours - eager).abs().max() <= 1e-3 * moved + 1e-6


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family, cache):
    """Greedy tokens, beyond the sliding window."""
    ids, mask = padded_batch("left")
    tokens = [model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, do_sample=False, cache_implementation=cache,
                             disable_compile=True)
              for model in same_weights(family, torch.float32, "eager", adapter.NAME)]
    assert tokens[0].shape == (ids.shape[0], ids.shape[1] + 9) and torch.equal(*tokens)


@pytest.mark.parametrize("family, what", [("llama", "positions"), ("gpt_oss", "cu_seq_lens"), ("gemma2", "padding")])
def test_compiled_without_graph_breaks(family, what):
    model = build(family, adapter.NAME)
    if what == "padding":
        call = run_padded(*padded_batch("both"))
    else:
        call = run_packed([torch.randint(3, 61, (1, length)) for length in (5, 2, 6)], what)

    def gradients(logits):
        return logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, expected in zip(call(compiled, gradients), call(model, gradients)):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_padded_step_reads_nothing_back():
    ids, mask = padded_batch("both")
    model = build("llama", adapter.NAME)
    with Reads() as reads:
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    assert reads.found == []


def test_packed_by_cu_seq_lens_reads_nothing_back():
    with Reads() as reads:
        attend(heads_first(1, 9, 4, 2), cu_seq_lens_q=int32(0, 3, 9), cu_seq_lens_k=int32(0, 3, 9), sliding_window=2,
               position_ids=torch.arange(9)[None]).sum().backward()
    assert reads.found == []


def test_packed_by_positions_reads_once_per_forward():
    """And not once per layer."""
    inputs, positions = heads_first(1, 9, 4, 2), torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
    with Reads() as reads:
        first, second = (attend(inputs, position_ids=positions) for _ in range(2))
    assert reads.found == ["aten::nonzero"] and torch.equal(first, second)
    positions[0, 3:] = torch.arange(3, 9)  # in place: what was kept is not used
    assert torch.equal(attend(inputs, position_ids=positions), attend(inputs))


def test_a_row_of_padding():
    """Its outputs are 0, and nothing of it, NaN included, reaches a gradient."""
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    inputs = heads_first(3, 5, 4, 2)
    hidden = ~mask.bool()[:, None, :, None]
    poisoned = [x.detach().masked_fill(hidden, float("nan")).requires_grad_() for x in inputs]
    results = []
    for each in (inputs, poisoned):
        out = attend(each, mask, sliding_window=2)
        results.append([out.transpose(1, 2), *torch.autograd.grad(out, each, torch.ones_like(out))])
    for clean, result in zip(*results):
        assert torch.equal(result, clean) and (result.masked_select(hidden) == 0).all() and result.abs().sum() > 0


def test_padding_between_tokens_is_refused():
    with pytest.raises(RuntimeError, match="attention_mask has padding between the tokens of a row"):
        attend(heads_first(1, 4, 2, 2), torch.tensor([[1, 0, 1, 1]]))


def test_a_cache_with_padding():
    """3 new queries, 7 keys; the tokens of the first row begin within the queries."""
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1] * 7])
    inputs = heads_first(3, 3, 4, 2, seqlen_k=7)
    out = attend(inputs, mask, sliding_window=4)
    assert (out[0, 0] == 0).all()
    for row, start in enumerate((5, 2, 0)):
        q, k, v = (x.detach()[row:row + 1].transpose(1, 2) for x in inputs)
        first = max(start - 4, 0)
        results = Results(out[row:row + 1, first:])
        assert_matches(results, q[:, first:], k[:, start:], v[:, start:], causal=True, window=(3, -1))


def test_cross_attention_with_padding():
    """Not aligned to the keys: every query counts, and sees the tokens among the keys."""
    inputs = heads_first(2, 6, 4, 2, seqlen_k=4)
    out = attend(inputs, torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]), is_causal=False)
    for row, tokens in enumerate((slice(1, 3), slice(0, 4))):
        q, k, v = (x.detach()[row:row + 1].transpose(1, 2) for x in inputs)
        assert_matches(Results(out[row:row + 1]), q, k[:, tokens], v[:, tokens])


def test_static_cache_has_room_behind_the_tokens():
    inputs = heads_first(2, 3, 4, 2, seqlen_k=10)
    with torch.no_grad():
        for x in inputs[1:]:
            x[:, :, 7:] = float("nan")
    out = attend(inputs, torch.ones(2, 7, dtype=torch.bool))
    q, k, v = (x.detach().transpose(1, 2) for x in inputs)
    assert_matches(Results(out), q, k[:, :7], v[:, :7], causal=True)


def test_sinks_softcap_scale_and_window_together():
    inputs = heads_first(2, 11, 4, 2)
    sinks = torch.randn(4, requires_grad=True)
    check_attend(inputs, s_aux=sinks, softcap=2.0, scaling=0.7, sliding_window=4,
                 expected=dict(causal=True, window=(3, -1), softcap=2.0, scale=0.7))


def test_float32_from_layer_norms_is_cast_to_the_dtype_of_the_weights():
    inputs = heads_first(1, 9, 4, 2)
    inputs[2] = inputs[2].detach().bfloat16()
    out = attend(inputs, layer=Layer(dtype=torch.bfloat16), s_aux=torch.randn(4))
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert attend(inputs).dtype == torch.float16
    with pytest.raises(TypeError, match="float32, float32, bfloat16"):
        attend(inputs)


def test_B25_a_window_of_four_tokens():
    q = torch.zeros(1, 1, 8, 16)
    v = torch.eye(8, 16)[None, None]
    weights = attend([q, q, v], sliding_window=4)[0, :, 0, :8]
    for row, count in enumerate((1, 2, 3, 4, 4, 4, 4, 4)):
        expected = torch.zeros(8)
        expected[row + 1 - count:row + 1] = 1 / count
        assert torch.allclose(weights[row], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("batch, seqlen, heads, kv_heads, head_dim", [(2, 16, 16, 16, 64), (2, 8, 8, 8, 64), (2, 8, 8, 2, 64)])
def test_B40_as_many_heads_as_tokens(batch, seqlen, heads, kv_heads, head_dim):
    check_attend(heads_first(batch, seqlen, heads, kv_heads, head_dim, torch.bfloat16), layer=Layer(dtype=torch.bfloat16))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_B93_a_padding_mask_does_not_switch_causality_off(masked, is_causal):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]]) if masked else None
    inputs = heads_first(2, 8, 4, 2)
    before = attend(inputs, mask, is_causal=is_causal)
    with torch.no_grad():
        for x in inputs:
            x[:, :, 5] += 1
    after = attend(inputs, mask, is_causal=is_causal)
    assert torch.equal(before[:, :5], after[:, :5]) == (is_causal is not False)
    encoder = attend(inputs, mask, layer=Layer(is_causal=False))
    assert torch.equal(encoder, after) == (is_causal is False)


def test_B93_one_query_sees_the_whole_cache():
    inputs = heads_first(2, 1, 4, 2, seqlen_k=9)
    q, k, v = (x.detach().transpose(1, 2) for x in inputs)
    for mask in (None, torch.ones(2, 9, dtype=torch.bool)):
        assert_matches(Results(attend(inputs, mask, position_ids=torch.tensor([[8]]))), q, k, v)


@pytest.mark.parametrize("positions, cu_seqlens", [
    ([[0, 1, 2, 0, 1, 0, 1, 2, 3]], (0, 3, 5, 9)),
    ([[7, 8, 9, 10, 11, 12, 13, 14, 15]], (0, 9)),
    ([[2, 3, 4, 2, 3, 4, 5, 6, 7]], (0, 3, 9)),
    ([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 1]], (0, 3, 5, 9, 16, 18)),
])
def test_B95_packed_positions(positions, cu_seqlens):
    positions = torch.tensor(positions)
    inputs = heads_first(positions.shape[0], 9, 4, 2)
    check_attend(inputs, int32(*cu_seqlens), position_ids=positions)
    strided = torch.stack([positions, positions], -1)[..., 0]
    check_attend(inputs, int32(*cu_seqlens), position_ids=strided)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)  # where the number of sequences cannot be read
    assert torch.equal(compiled(inputs, position_ids=positions), attend(inputs, position_ids=positions))


def test_B95_positions_with_a_cache_are_no_boundaries():
    inputs = heads_first(1, 3, 4, 2, seqlen_k=7)
    assert torch.equal(attend(inputs, position_ids=torch.tensor([[0, 0, 0]])), attend(inputs))


def test_B95_multimodal_positions_are_refused():
    with pytest.raises(ValueError, match=r"position_ids must have shape \[B, S\] = \[1, 9\].*got \[3, 1, 9\]"):
        attend(heads_first(1, 9, 4, 2), position_ids=torch.zeros(3, 1, 9, dtype=torch.long))


def test_restarts_shared_by_a_batch_are_never_missed():
    """[1, S] for two rows: taken into account in eager mode, refused under torch.compile, where models make up such ones."""
    inputs, positions = heads_first(2, 5, 4, 2), torch.tensor([[0, 1, 0, 1, 2]])
    check_attend(inputs, int32(0, 2, 5, 7, 10), position_ids=positions)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs, position_ids=torch.arange(5)[None]), attend(inputs))
    with pytest.raises(RuntimeError, match=r"pass them as \[B, S\]"):
        compiled(inputs, position_ids=positions)


@pytest.mark.parametrize("options", [
    dict(dropout=0.1), dict(output_attentions=True), dict(head_mask=torch.ones(4)), dict(position_bias=torch.zeros(1, 4, 5, 5)),
    dict(sinks=torch.zeros(4)), dict(indices=torch.zeros(1, 5)), dict(cache=object()), dict(something=1),
], ids=lambda options: next(iter(options)))
def test_B96_what_is_not_supported_is_refused(options):
    (name,) = options
    with pytest.raises(NotImplementedError, match=name):
        attend(heads_first(1, 5, 4, 2), **options)


def test_B96_what_changes_nothing_passes():
    inputs = heads_first(1, 5, 4, 2)
    harmless = dict(dropout=0.0, softcap=None, s_aux=None, head_mask=None, output_attentions=False, use_cache=True,
                    num_items_in_batch=torch.tensor(5), max_length_q=5, max_length_k=5, output_router_logits=True)
    assert torch.equal(attend(inputs, **harmless), attend(inputs))


@pytest.mark.parametrize("options, text", [
    (dict(sliding_window=0), "sliding_window must be at least 1"),
    (dict(cu_seq_lens_q=int32(0, 5)), "both or neither"),
    (dict(cu_seq_lens_q=int32(0, 5), cu_seq_lens_k=int32(0, 5), mask=torch.ones(1, 5)), "cannot be combined"),
    (dict(mask=torch.ones(1, 6)), r"\[B, Sk\] = \[1, 5\].*got \[1, 6\]"),
    (dict(mask=torch.ones(2, 5)), r"attention_mask must have shape"),
    (dict(mask=torch.ones(1, 1, 5)), r"attention_mask must have shape"),
])
def test_wrong_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        attend(heads_first(1, 5, 4, 2), **options)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_B96_a_mask_without_a_kernel_runs_in_sdpa(family, caplog):
    """A prefix that sees itself in both directions; warned of once."""
    adapter.logger.warning_once.cache_clear()
    ids, seen = torch.randint(3, 61, (2, 9)), torch.ones(9, 9, dtype=torch.bool).tril()
    seen[:4, :4] = True
    mask = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(~seen, -1e30)

    def step(model, run):
        return run(model(input_ids=ids, attention_mask=mask.clamp_min(torch.finfo(model.dtype).min), use_cache=False).logits)

    check(family, step)
    assert sum("scaled_dot_product_attention runs instead" in record.message for record in caplog.records) == 1
    out = attend(heads_first(2, 9, 4, 2), seen[None, None])
    assert out.shape == (2, 9, 4, 16)


def test_B96_softcap_with_such_a_mask_is_refused():
    with pytest.raises(NotImplementedError, match="softcap together with a mask"):
        attend(heads_first(1, 5, 4, 2), torch.ones(1, 1, 5, 5, dtype=torch.bool), softcap=2.0)


def test_chunked_attention():
    batch = padded_batch("left")
    check("llama4", run_padded(*batch), run_unpadded(*batch))


@pytest.mark.parametrize("overlay", [
    dict(block_sequence_ids=torch.tensor([[-1, 0, 0, -1, 1, 1, 1, -1]])),
    dict(or_mask_function=lambda batch, head, q, k: (q < 3) & (k < 3)),
    dict(and_mask_function=lambda batch, head, q, k: k != 2),
    dict(allow_is_causal_skip=False),
], ids=lambda overlay: next(iter(overlay)))
def test_masks_of_other_functions_are_made_in_full(overlay):
    config = copy.deepcopy(FAMILIES["llama"])
    masks = []
    for implementation in ("sdpa", adapter.NAME):
        config._attn_implementation = implementation
        masks.append(create_causal_mask(config, torch.zeros(1, 8, 4), None, None, **overlay))
    assert masks[1].shape == (1, 1, 8, 8) and torch.equal(*masks)


def test_a_cache_whose_end_nobody_tells_gets_a_full_mask():
    mask = adapter.mask_function(2, 3, 10, q_offset=4, mask_function=causal_mask_function)
    expected = torch.arange(10) <= torch.arange(4, 7)[:, None]
    assert torch.equal(mask, expected.expand(2, 1, 3, 10))
    assert adapter.mask_function(2, 3, 7, q_offset=4, mask_function=causal_mask_function) is None


def test_import():
    assert in_new_process("import gqa_attn, sys; print('transformers' in sys.modules)") == "False\n"
    for there, got in (("None", "got None"), ("type('', (), dict(__version__='4.57.6'))()", "got 4.57.6")):
        text = in_new_process(f"""
            import sys
            sys.modules["transformers"] = {there}
            try:
                import gqa_attn.integrations.transformers
            except ImportError as error:
                print(error)
        """)
        assert "needs transformers 5.17 or later" in text and got in text and "pip install" in text


def test_registered_calls_reach_the_op():
    ids, _ = padded_batch("right")
    with OpCalls() as calls:
        build("gemma3", adapter.NAME)(input_ids=ids, use_cache=False)
    assert calls.count(fwd) == FAMILIES["gemma3"].num_hidden_layers
