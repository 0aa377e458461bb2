"""gqa_attn.compat.flash_attn: flash_attn's signatures, float64 values (7 s)."""

import inspect

import numpy as np
import pytest
import torch
from cpu import OpCalls, int32, random_inputs
from gqa_attn.compat import flash_attn
from reference import Results, assert_matches, visible

SHARED = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
              deterministic=False, return_attn_probs=False)
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], SHARED),
    "flash_attn_kvpacked_func": (["q", "kv"], SHARED),
    "flash_attn_qkvpacked_func": (["qkv"], SHARED),
    "flash_attn_varlen_func": (["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
                               SHARED | dict(block_table=None)),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"], SHARED),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], SHARED),
}
CU_Q, CU_K = int32(0, 5, 5, 40, 97), int32(0, 7, 20, 61, 90)


def check(x, call, leaves, split=lambda gradients: gradients, **options):
    """call(*leaves, return_attn_probs=True) forward and backward against float64; dlse is not dropped."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out, lse, probs = call(*leaves, return_attn_probs=True)
    assert probs.shape == (0,)
    assert torch.equal(call(*leaves), out)
    gradients = torch.autograd.grad((out, lse), leaves, (x.dout, x.dlse))
    assert_matches(Results(out, lse, *split(gradients)), *x, **options)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_flash_attn_2(name):
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*required, *defaults]
    assert {p.name: p.default for p in positional if p.default is not p.empty} == defaults
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in parameters if p not in positional)
    assert name in flash_attn.__all__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    dict(), dict(causal=True), dict(window_size=(20, 3), softmax_scale=0.2), dict(causal=True, softcap=15.0),
    dict(causal=True, window_size=(17, -1), deterministic=True),
], ids=str)
def test_dense(options, dtype):
    x = random_inputs(2, 61, 83, 6, 2, 40, dtype=dtype)
    of_reference = dict(causal=options.get("causal", False), window=options.get("window_size", (-1, -1)),
                        softcap=options.get("softcap", 0.0), scale=options.get("softmax_scale"))
    check(x, lambda *qkv, **more: flash_attn.flash_attn_func(*qkv, **options, **more), x[:3], **of_reference)


def test_positional_options():
    x = random_inputs(1, 50, 50, 2, 1, 32)
    out, lse, _ = flash_attn.flash_attn_func(*x[:3], 0.0, 0.3, True, (9, -1), 20.0, None, True, True)
    assert_matches(Results(out, lse), *x[:3], scale=0.3, causal=True, window=(9, -1), softcap=20.0)


def test_learnable_sink():
    x = random_inputs(2, 45, 45, 4, 2, 32)
    sinks = torch.randn(4)
    check(x, lambda q, k, v, s, **more: flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=s, **more),
          [*x[:3], sinks], causal=True, sinks=sinks)


@pytest.mark.parametrize("window", [(-1, -1), (11, 2)])
def test_varlen(window):
    x = random_inputs(None, 97, 90, 6, 3, 48)
    check(x, lambda q, k, v, **more: flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 57, 41, causal=True,
                                                                      window_size=window, **more),
          x[:3], causal=True, window=window, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)


def test_qkvpacked():
    x = random_inputs(2, 70, 70, 3, 3, 32)
    check(x, lambda qkv, **more: flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, **more), [torch.stack(x[:3], 2)],
          split=lambda gradients: gradients[0].unbind(2), causal=True)


def test_kvpacked():
    x = random_inputs(2, 33, 70, 4, 2, 32)
    check(x, lambda q, kv, **more: flash_attn.flash_attn_kvpacked_func(q, kv, window_size=(30, 5), **more),
          [x.q, torch.stack((x.k, x.v), 2)], split=lambda gradients: (gradients[0], *gradients[1].unbind(2)), window=(30, 5))


def test_varlen_packed():
    x = random_inputs(None, 97, 97, 3, 3, 32)
    check(x, lambda qkv, **more: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 57, causal=True, **more),
          [torch.stack(x[:3], 1)], split=lambda gradients: gradients[0].unbind(1), causal=True, cu_seqlens_q=CU_Q)
    x = random_inputs(None, 97, 90, 4, 2, 32)
    check(x, lambda q, kv, **more: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 57, 41, softcap=8.0, **more),
          [x.q, torch.stack((x.k, x.v), 1)], split=lambda gradients: (gradients[0], *gradients[1].unbind(1)), softcap=8.0,
          cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)


def test_B01_varlen_causal_with_queries_longer_than_keys():
    cu_q, cu_k = int32(0, 70, 101, 230), int32(0, 2, 3, 5)
    x = random_inputs(None, 230, 5, 2, 1, 64, dtype=torch.float16)
    x = x._replace(q=3 * x.q, k=3 * x.k, v=3 * x.v, dout=torch.ones_like(x.dout))
    check(x, lambda q, k, v, **more: flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 129, 2, causal=True, **more),
          x[:3], causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_B09_max_seqlen_of_1_with_empty_sequences():
    cu_q, cu_k = int32(0, 0, 1, 1, 2), int32(0, 0, 3, 3, 8)
    x = random_inputs(None, 2, 8, 9, 3, 64, dtype=torch.bfloat16)
    check(x, lambda q, k, v, **more: flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1, 5, softmax_scale=1.0,
                                                                      causal=True, **more),
          x[:3], causal=True, scale=1.0, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


@pytest.mark.parametrize("max_seqlen", [40, np.int64(40), torch.tensor(40), 10**6, 1, None], ids=repr)
def test_B57_no_max_seqlen_changes_a_result(max_seqlen):
    cu = int32(0, 40, 64)
    x = random_inputs(None, 64, 64, 4, 2, 32)
    out = flash_attn.flash_attn_varlen_func(*x[:3], cu, cu, max_seqlen, max_seqlen, causal=True)
    assert_matches(Results(out), *x[:3], causal=True, cu_seqlens_q=cu)


@pytest.mark.parametrize("options,named", [
    (dict(dropout_p=0.1), r"dropout_p=0\.1"), (dict(alibi_slopes=torch.zeros(2)), r"alibi_slopes \(Tensor\)")])
def test_B96_what_is_not_there_is_refused(options, named):
    q = torch.randn(10, 2, 16)
    cu = int32(0, 10)
    qkv, kv = torch.stack((q, q, q), 1), torch.stack((q, q), 1)
    for call in (lambda: flash_attn.flash_attn_func(q[None], q[None], q[None], **options),
                 lambda: flash_attn.flash_attn_qkvpacked_func(qkv[None], **options),
                 lambda: flash_attn.flash_attn_kvpacked_func(q[None], kv[None], **options),
                 lambda: flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 10, 10, **options),
                 lambda: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 10, **options),
                 lambda: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 10, 10, **options)):
        with pytest.raises(NotImplementedError, match=named):
            call()


@pytest.mark.parametrize("deterministic", [False, True])
def test_B48_deterministic_reaches_the_op(deterministic):
    q, cu = torch.randn(20, 2, 16, requires_grad=True), int32(0, 20)
    kv, option = torch.stack((q, q), 1), dict(deterministic=deterministic)
    for out in (flash_attn.flash_attn_func(q[None], q[None], q[None], **option),
                flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 20, 20, **option)):
        with OpCalls() as calls:
            out.sum().backward()
        ((_, args),) = calls.calls
        assert any(args[15:]) is deterministic  # the last of 16 arguments, left out where it is the default


def test_paged_keys_are_refused():
    q, cu = torch.randn(10, 2, 16), int32(0, 10)
    with pytest.raises(NotImplementedError, match=r"block_table \(Tensor\)"):
        flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 10, 10, block_table=int32(0)[None])


def test_B26_negative_windows_are_refused_and_a_negative_softcap_is_none():
    x = random_inputs(1, 20, 20, 2, 2, 16)
    with pytest.raises(ValueError, match=r"got \(-64, 0\)"):
        flash_attn.flash_attn_func(*x[:3], window_size=(-64, 0))
    assert torch.equal(flash_attn.flash_attn_func(*x[:3], softcap=-1.0), flash_attn.flash_attn_func(*x[:3]))


def test_B25_a_window_of_3_sees_4_keys():
    q, v = torch.zeros(1, 8, 1, 16), torch.eye(8, 16)[None, :, None]
    out = flash_attn.flash_attn_func(q, q, v, causal=True, window_size=(3, 0))
    seen = visible(8, 8, True, (3, 0)).float()
    torch.testing.assert_close(out[0, :, 0, :8], seen / seen.sum(1, keepdim=True))


@pytest.mark.parametrize("call,shape", [
    (lambda t: flash_attn.flash_attn_qkvpacked_func(t), r"\[B, S, 3, H, D\], got \[2, 5, 2, 4, 16\]"),
    (lambda t: flash_attn.flash_attn_varlen_qkvpacked_func(t, int32(0, 5), 5), r"\[T, 3, H, D\], got \[2, 5, 2, 4, 16\]"),
])
def test_packed_shapes_are_checked(call, shape):
    with pytest.raises(ValueError, match=shape):
        call(torch.randn(2, 5, 2, 4, 16))


def test_compiles_without_a_graph_break():
    x = random_inputs(2, 37, 37, 4, 2, 32)
    cu = int32(0, 20, 37)

    def both(q, k, v):
        return (flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, 0)),
                flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 20, 20, causal=True))

    results = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        outs = call(*leaves)
        results.append((*outs, *torch.autograd.grad(outs, leaves, (x.dout, x.dout[0]))))
    assert all(torch.equal(*pair) for pair in zip(*results))
