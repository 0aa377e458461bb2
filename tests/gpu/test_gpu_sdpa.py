"""torch's attention with gqa_attn activated as its flash attention: values against float64, and that no call falls back."""

import pytest
import torch
import torch.nn.functional as F
from gqa_attn import _ops
from gqa_attn.integrations import sdpa
from problems import Problem, column_slice, contiguous, every_other_row, head_slice, heads_first
from reference import Results, assert_matches
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel, varlen
from torch.nn.attention.bias import causal_lower_right


@pytest.fixture
def active(monkeypatch):
    """gqa_attn as torch's flash attention, the only backend that torch may choose: the names of its ops, as they are called."""
    calls = []
    for name in ("fwd", "bwd"):
        op = getattr(_ops, name)
        monkeypatch.setattr(_ops, name, lambda *args, name=name, op=op: calls.append(name) or op(*args))
    sdpa.register()
    activate_flash_attention_impl(sdpa.NAME)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield calls
    restore_flash_attention_impl()


def check(x, attend, ops):
    """attend(q, k, v) -> out on tokens-first tensors, forward and backward, by one call of each op."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, x.dout)
    assert ops == ["fwd", "bwd"]
    assert_matches(Results(out, None, *gradients), x.q, x.k, x.v, x.dout, **x.options)


def through_sdpa(x, **options):
    """F.scaled_dot_product_attention, which takes heads first."""
    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=x.scale, enable_gqa=True, **options).transpose(1, 2)
    return attend


@pytest.mark.parametrize("layout", [contiguous, heads_first, head_slice, column_slice, every_other_row],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sdpa(dtype, causal, layout, active, seed):
    x = Problem(128, seqlen_q=301, heads=8, kv_heads=2, causal=causal, dtype=dtype).inputs(seed, layout)
    check(x, through_sdpa(x, is_causal=causal), active)


@pytest.mark.parametrize("head_dim", [40, 64, 65, 96, 192, 256])  # torch pads 65 to 72, and keeps its scale
@pytest.mark.parametrize("scale", [None, 0.2])
def test_sdpa_head_dims(head_dim, scale, active, seed):
    x = Problem(head_dim, seqlen_q=150, causal=True, scale=scale).inputs(seed)
    check(x, through_sdpa(x, is_causal=True), active)


@pytest.mark.parametrize("seqlens", [(65, 200), (200, 65)])
def test_lower_right_bias(seqlens, active, seed):
    x = Problem(64, seqlen_q=seqlens[0], seqlen_k=seqlens[1], heads=4, kv_heads=4, causal=True).inputs(seed)
    check(x, through_sdpa(x, attn_mask=causal_lower_right(*seqlens)), active)


def test_top_left_causal_masks_do_not_come_here(active, seed):
    x = Problem(64, seqlen_q=65, seqlen_k=200, heads=2, kv_heads=2).inputs(seed)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = through_sdpa(x, is_causal=True)(x.q, x.k, x.v)
    assert not active
    assert_matches(Results(out), x.q, x.k[:, :65], x.v[:, :65], causal=True)


def test_compiled_equals_eager(active, seed):
    x = Problem(64, seqlen_q=130, heads=8, kv_heads=4).inputs(seed)  # dK and dV of two blocks at most, equal in either order
    attend = through_sdpa(x, is_causal=True)
    results = []
    for call in (attend, torch.compile(attend, fullgraph=True)):
        for layout in (lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
            leaves = [layout(t.detach()).requires_grad_() for t in (x.q, x.k, x.v)]
            out = call(*leaves)
            results.append((out, *torch.autograd.grad(out, leaves, x.dout)[1:]))
    assert active.count("fwd") == active.count("bwd") == 4
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other))


def packed(x, **options):
    return lambda q, k, v: varlen.varlen_attn(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, 57, 41, **options)


LENGTHS = ((5, 7), (0, 13), (35, 41), (57, 29))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (11, 0), (20, 4)])
def test_varlen_attn(window, active, seed):
    x = Problem(64, lengths=LENGTHS, heads=4, kv_heads=4, window=window).inputs(seed)
    check(x, packed(x, window_size=window), active)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="new in torch 2.12")
def test_varlen_attn_out(active, seed):
    x = Problem(64, lengths=LENGTHS, heads=8, kv_heads=2, causal=True).inputs(seed)
    out = torch.full_like(x.q, float("nan"))
    varlen.varlen_attn_out(out, x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, 57, 41, window_size=(-1, 0), enable_gqa=True)
    assert active == ["fwd"]
    assert_matches(Results(out), x.q, x.k, x.v, **x.options)


def test_nested_tensors(active, seed):
    x = Problem(64, lengths=((70, 70), (1, 1), (129, 129)), heads=4, kv_heads=4, causal=True).inputs(seed)

    def attend(q, k, v):
        q, k, v = (torch.nested.nested_tensor_from_jagged(t, x.cu_seqlens_q.long()).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()

    check(x, attend, active)


def test_dropout_is_left_to_torch(active, seed):
    x = Problem(64, seqlen_q=130, heads=4, kv_heads=4).inputs(seed)

    def with_dropout():
        torch.manual_seed(seed)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out = through_sdpa(x, dropout_p=0.3)(*leaves)
        return out, *torch.autograd.grad(out, leaves, x.dout)[1:]  # dq is added up in no fixed order

    with pytest.warns(UserWarning, match=r"dropout_p=0\.3"):
        got = with_dropout()
    restore_flash_attention_impl()
    assert all(torch.equal(*pair) for pair in zip(got, with_dropout()))
    assert not active
    activate_flash_attention_impl(sdpa.NAME)  # for the fixture to restore


def test_restored(active, seed):
    x = Problem(64, seqlen_q=130).inputs(seed)
    restore_flash_attention_impl()
    out = through_sdpa(x)(x.q, x.k, x.v)
    assert not active
    assert_matches(Results(out), x.q, x.k, x.v)
    activate_flash_attention_impl(sdpa.NAME)  # for the fixture to restore
