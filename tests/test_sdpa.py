"""torch's flash attention ops on gqa_attn, float64 values (about 5 s).

They exist for CUDA only; here the same kernels are put in under the key CPU, over stand-ins for torch's own.
"""

import warnings

import pytest
import torch
from cpu import int32, random_inputs
from gqa_attn import _ops
from gqa_attn.integrations import sdpa
from reference import Results, assert_matches
from torch.nn.attention import varlen

aten = torch.ops.aten
CU_Q, CU_K = int32(0, 5, 5, 40, 97), int32(0, 7, 20, 61, 90)
OPS = [name for name in sdpa._KERNELS if hasattr(aten, name)]


@pytest.fixture
def fallback():
    """gqa_attn under the key CPU: the calls that reached torch's own kernels."""
    calls = []
    library = torch.library.Library("aten", "IMPL", "CPU")

    def stand_in(name):
        def kernel(*args, **kwargs):
            calls.append((name, kwargs))
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if name.endswith("backward"):
                return tuple(torch.zeros_like(x) for x in tensors[1:4])
            if name.endswith("inplace"):
                return torch.zeros(1)
            state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.zeros(0)
            sizes = (None, None, 0, 0) if name.startswith("_scaled") else ()
            return torch.zeros_like(tensors[0]), torch.zeros(1), *sizes, *state
        return kernel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # that a kernel is replaced
        for name in OPS:
            library.impl(name, stand_in(name))
        override = sdpa.Override("CPU")
    yield calls
    override.remove()
    library._destroy()


@pytest.fixture
def ours(fallback, monkeypatch):
    """The same: the calls of gqa_attn's ops. The test fails where a call fell back, or none came."""
    calls = []
    for name in ("fwd", "bwd"):
        op = getattr(_ops, name)
        monkeypatch.setattr(_ops, name, lambda *args, name=name, op=op: calls.append((name, args)) or op(*args))
    yield calls
    assert calls and not fallback


def heads_first(x):
    return x.transpose(1, 2).contiguous()


LAYOUTS = {
    "heads first": heads_first,
    "view of tokens first": lambda x: x.transpose(1, 2),
    "slice": lambda x: torch.cat([x, x], -1).transpose(1, 2)[..., :x.shape[-1]],
    "strided heads": lambda x: torch.stack([x, x], 3).flatten(2, 3).transpose(1, 2)[:, ::2],
}


def check_sdpa(x, layout=heads_first, op=aten._scaled_dot_product_flash_attention, scale=None, causal=False):
    """The op and its derivative on x [B, S, H, D]; strides are those that torch's fakes promise."""
    leaves = [layout(t).detach().requires_grad_() for t in x[:3]]
    out, lse = op(*leaves, 0.0, causal, scale=scale)[:2]
    gradients = torch.autograd.grad(out, leaves, layout(x.dout))
    for got, like in zip((out, *gradients), (leaves[0], *leaves)):
        assert got.stride() == torch.empty_like(like).stride()
    got = Results(out.transpose(1, 2), lse, *(t.transpose(1, 2) for t in gradients))
    assert_matches(got, *x[:4], scale=scale, causal=causal)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(layout, causal, ours):
    check_sdpa(random_inputs(2, 67, 67, 6, 2, 40, dtype=torch.bfloat16), layout, causal=causal)


@pytest.mark.parametrize("seqlens", [(33, 70), (70, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_as_many_queries_as_keys_or_not(seqlens, causal, ours):
    """Bottom-right for these ops: torch.nn.attention.bias.causal_lower_right calls them with is_causal."""
    check_sdpa(random_inputs(1, *seqlens, 4, 2, 32), causal=causal, scale=0.3)


def test_out_is_not_copied_where_query_is_a_view_of_tokens_first(ours):
    q, k, v = (t.transpose(1, 2) for t in random_inputs(1, 20, 20, 4, 2, 32)[:3])
    out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert out.transpose(1, 2).is_contiguous()


def test_results_are_those_of_torchs_fakes(ours):
    q, k, v = (torch.randn(2, heads, 9, 16).transpose(1, 2).contiguous().transpose(1, 2) for heads in (4, 2, 2))
    real = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    fake = aten._scaled_dot_product_flash_attention(*(t.to("meta") for t in (q, k, v)), 0.0, True)
    for got, expected in zip(real, fake):
        if isinstance(expected, torch.Tensor):
            assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
        else:
            assert got == expected


def check_packed(x, call, **options):
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out, lse = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, x.dout)
    assert_matches(Results(out, lse, *gradients), *x[:4], cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (11, 0), (20, 4)])
def test_packed(window, ours):
    x = random_inputs(None, 97, 90, 6, 2, 40)
    check_packed(x, lambda q, k, v: aten._flash_attention_forward(
        q, k, v, CU_Q, CU_K, 57, 41, 0.0, window == (-1, 0), False, scale=0.2, window_size_left=window[0],
        window_size_right=window[1])[:2], scale=0.2, window=window)


def test_dense_forward_op(ours):
    x = random_inputs(2, 50, 50, 4, 2, 32)
    check_sdpa(x, lambda t: t.transpose(1, 2), causal=True, op=lambda q, k, v, *_, scale: tuple(
        t.transpose(1, 2) if t.dim() == 4 else t for t in aten._flash_attention_forward(
            *(t.transpose(1, 2) for t in (q, k, v)), None, None, 50, 50, 0.0, True, False, scale=scale)[:2]))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (11, 0)])
def test_varlen_attn(window, ours):
    x = random_inputs(None, 97, 90, 4, 4, 32)
    check_packed(x, lambda q, k, v: varlen.varlen_attn(q, k, v, CU_Q, CU_K, 57, 41, window_size=window,
                                                       return_aux=varlen.AuxRequest(lse=True)), window=window)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="new in torch 2.12")
def test_varlen_attn_out(ours):
    x = random_inputs(None, 97, 90, 4, 2, 32)
    out = torch.full_like(x.q, float("nan"))
    _, lse = varlen.varlen_attn_out(out, *x[:3], CU_Q, CU_K, 57, 41, window_size=(-1, 0), enable_gqa=True, num_splits=1,
                                    return_aux=varlen.AuxRequest(lse=True))
    assert_matches(Results(out, lse), *x[:3], causal=True, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)


def test_B67_parts_merge_as_in_context_parallel(ours):
    """Two parts of the keys: outputs merged by lse; gradients of each part from the out and lse of the whole."""
    x = random_inputs(2, 40, 60, 4, 2, 32, dtype=torch.float64)
    q, k, v, dout = map(heads_first, x[:4])
    parts = [(k[:, :, :25], v[:, :, :25]), (k[:, :, 25:], v[:, :, 25:])]
    outs, lses = zip(*(aten._scaled_dot_product_flash_attention(q, *part)[:2] for part in parts))
    lse = torch.logaddexp(*lses)
    out = sum(part * (part_lse - lse).exp()[..., None] for part, part_lse in zip(outs, lses))
    empty = torch.empty(0)
    gradients = [aten._scaled_dot_product_flash_attention_backward(
        dout, q, *part, out, lse, None, None, 40, part[0].shape[2], 0.0, False, empty, empty) for part in parts]
    dq, dk, dv = gradients[0][0] + gradients[1][0], *(torch.cat(pair, 2) for pair in zip(*(g[1:] for g in gradients)))
    assert_matches(Results(out.transpose(1, 2), lse, *(t.transpose(1, 2) for t in (dq, dk, dv))), *x[:4])


def test_compiles_without_a_graph_break(ours):
    q, k, v, dout = map(heads_first, random_inputs(2, 37, 37, 4, 2, 32)[:4])

    def attend(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0] * 2

    results = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("deterministic", [False, True])
def test_B48_deterministic_reaches_the_op(deterministic, ours):
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in random_inputs(1, 20, 20, 4, 2, 32)[:3])
    out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    torch.use_deterministic_algorithms(deterministic)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    name, args = ours[-1]
    assert name == "bwd" and args[-1] is deterministic


SEQUSED = dict(seqused_k=int32(3, 4, 5, 6))
UNSUPPORTED = [("dropout_p", dict(), 0.1, False), ("return_debug_mask", dict(), 0.0, True),
               ("seqused_k", SEQUSED, 0.0, False), ("alibi_slopes", dict(alibi_slopes=torch.ones(4)), 0.0, False)]
if "num_splits" in str(aten._flash_attention_forward.default._schema):  # torch 2.12
    UNSUPPORTED += [("block_table", dict(block_table=int32(0)[None]), 0.0, False),
                    ("more_than_one_split", dict(num_splits=2), 0.0, False)]


@pytest.mark.parametrize("named,options,dropout_p,debug", UNSUPPORTED, ids=[each[0] for each in UNSUPPORTED])
def test_what_gqa_attn_cannot_do_is_left_to_torch(named, options, dropout_p, debug, fallback):
    q, k, v, _, _ = random_inputs(None, 97, 90, 4, 2, 32)
    with pytest.warns(UserWarning, match=f"torch's own kernel runs aten::_flash_attention_forward.* {named}"):
        aten._flash_attention_forward(q, k, v, CU_Q, CU_K, 57, 41, dropout_p, True, debug, **options)
    ((name, kwargs),) = fallback
    assert name == "_flash_attention_forward" and kwargs.keys() == options.keys()


def test_dropout_falls_back_in_both_directions(fallback):
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    with pytest.warns(UserWarning, match=r"dropout_p=0\.5"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0].sum().backward()
    assert [name for name, _ in fallback] == ["_scaled_dot_product_flash_attention",
                                              "_scaled_dot_product_flash_attention_backward"]


def test_another_head_dim_of_value_falls_back(fallback):
    with pytest.warns(UserWarning, match="other_head_dim_of_value"):
        aten._scaled_dot_product_flash_attention(*(torch.randn(1, 2, 8, dim) for dim in (16, 16, 24)))
    assert len(fallback) == 1


def test_wrong_arguments_raise(fallback):
    with pytest.raises(ValueError, match="must be a multiple"):
        aten._scaled_dot_product_flash_attention(*(torch.randn(1, heads, 8, 16) for heads in (3, 2, 2)))


def test_remove_gives_torchs_kernels_back():
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name in OPS:
        library.impl(name, lambda *args, **kwargs: args[0])
    override = sdpa.Override("CPU")
    names = [f"aten::{name}" for name in OPS]
    override.remove()
    library._destroy()
    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in names)


def test_register_offers_the_name_and_activates_nothing():
    sdpa.register()
    assert sdpa.NAME in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has these ops on CUDA")
def test_activation_without_cuda_raises():
    sdpa.register()
    with pytest.raises(RuntimeError, match="no kernel for CUDA for aten::_flash_attention_forward"):
        torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    assert torch.nn.attention.current_flash_attention_impl() is None
