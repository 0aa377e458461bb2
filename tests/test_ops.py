"""The raw ops in torch's machinery: schemas, opcheck, fakes, autograd, FLOP counts."""

import weakref

import gqa_attn
import pytest
import torch
from cpu import Inputs, OpCalls, bwd, check, fwd, int32, random_inputs, run, same
from gqa_attn import _library, _rules, flops  # noqa: F401  registers the FLOP formulas
from reference import Results, assert_matches
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def transposed(shape):
    b, s, h, d = shape
    return torch.randn(b, h, s, d).transpose(1, 2)


def packed_slice(shape):
    b, s, h, d = shape
    return torch.randn(b, s, 2 * h + 1, d)[:, :, h:2 * h]


def expanded(shape):
    b, s, h, d = shape
    return torch.randn(1, s, 1, d).expand(shape)


def columns(shape):
    b, s, h, d = shape
    return torch.randn(b, s, h, 2 * d)[..., ::2]


LAYOUTS = {f.__name__: f for f in (torch.randn, transposed, packed_slice, expanded, columns)}
SIZES = {  # batch, seqlen, heads, kv heads, head dim
    "plain": (2, 20, 12, 4, 16),
    "one token": (2, 1, 4, 2, 8),
    "one head": (2, 9, 1, 1, 8),
    "one of all": (1, 1, 1, 1, 1),
    "empty": (2, 0, 4, 2, 8),
}


def laid_out(layout, size="plain") -> Inputs:
    batch, seqlen, heads, kv_heads, head_dim = SIZES[size]
    make = LAYOUTS[layout]
    q, k, v, dout = (make((batch, seqlen, h, head_dim)) for h in (heads, kv_heads, kv_heads, heads))
    return Inputs(q, k, v, dout)


def metadata(tensors):
    return [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in tensors]


def test_schemas_without_the_library_are_those_of_the_library():
    for text, op in zip(_library.SCHEMAS, (fwd, bwd)):
        assert torch._C.parse_schema(f"gqa_attn::{text}") == op.default._schema


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout, size):
    x = laid_out(layout, size)
    out, lse = fwd(x.q, x.k, x.v, causal=True)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    torch.library.opcheck(fwd.default, leaves, {"causal": True})
    torch.library.opcheck(bwd.default, (x.dout, x.q, x.k, x.v, out, lse), {"causal": True})


@pytest.mark.parametrize("options", [{"sinks": True, "window_left": 3}, {"softcap": 2.0, "scale": 0.5, "window_right": 2}],
                         ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_with_options(packed, options):
    x = random_inputs(None if packed else 2, 20, 20, 4, 2, 8)
    if options.get("sinks"):
        options = options | {"sinks": torch.randn(4, requires_grad=True)}
    if packed:
        options = options | dict(cu_seqlens_q=int32(0, 7, 20), cu_seqlens_k=int32(0, 9, 20))
    out, lse = fwd(x.q, x.k, x.v, **options)
    torch.library.opcheck(fwd.default, [t.requires_grad_() for t in (x.q, x.k, x.v)], options)
    arguments = (x.dout, *(t.detach() for t in (x.q, x.k, x.v, out, lse)), x.dlse)
    options = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    torch.library.opcheck(bwd.default, arguments, options | {"deterministic": True})


@pytest.mark.parametrize("device, dtype", [("meta", torch.bfloat16), ("meta", torch.float64), ("cuda", torch.float16)])
def test_fakes_of_other_devices(device, dtype):
    x = random_inputs(2, 5, 7, 4, 2, 8, 6, dtype)
    real = run(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = run(Inputs(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in x)))
    assert metadata(fake) == metadata(real) and all(t.device.type == device for t in fake)


def test_meta_tensors_give_shapes():
    x = Inputs(*(t.to("meta") for t in random_inputs(None, 9, 7, 4, 2, 192, 128, torch.bfloat16)))
    r = run(x, cu_seqlens_q=int32(0, 9).to("meta"), cu_seqlens_k=int32(0, 7).to("meta"))
    assert r.out.shape == (9, 4, 128) and r.lse.shape == (4, 9) and r.lse.dtype == torch.float32 and r.dsinks.shape == (0,)


def test_fakes_run_the_rules():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 5, h, 8, dtype=torch.float16, device="cuda") for h in (4, 2, 2))
        with pytest.raises(TypeError, match="float64"):
            fwd(q.double(), k.double(), v.double())
        with pytest.raises(RuntimeError, match="k must have the batch size of q"):
            fwd(q, torch.empty(2, 5, 2, 8, dtype=torch.float16, device="cuda"), v)
        out, lse = fwd(q, k, v)
        with pytest.raises(RuntimeError, match="lse must have shape"):
            bwd(out, q, k, v, out, torch.empty(1, 5, 4, device="cuda"))


@pytest.mark.parametrize("sinks_dtype", [torch.float32, torch.bfloat16])
def test_autograd_gives_what_bwd_gives(sinks_dtype):
    x = random_inputs(2, 9, 7, 4, 2, 8, dtype=torch.bfloat16)
    options = dict(causal=True, softcap=3.0, sinks=torch.randn(4).to(sinks_dtype))
    expected = check(x, **options)
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, options["sinks"])]
    out, lse = fwd(*leaves[:3], **options | {"sinks": leaves[3]})
    torch.autograd.backward((out, lse), (x.dout, x.dlse))
    assert same(Results(out, lse, *(leaf.grad for leaf in leaves)), expected)


def test_only_lse_is_used():
    x = random_inputs(2, 9, 7, 4, 2, 8)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = fwd(*leaves)
    dq, dk, dv = torch.autograd.grad(lse, leaves, x.dlse)
    assert_matches(Results(dq=dq, dk=dk), *x._replace(dout=torch.zeros_like(x.dout)))
    assert not dv.any()


@pytest.mark.parametrize("changed", ["q", "out"])
def test_tensors_that_backward_needs_must_not_change(changed):
    x = random_inputs(1, 5, 5, 2, 1, 4)
    tensors = {"q": x.q * 1, "k": x.k.requires_grad_()}
    tensors["out"] = gqa_attn.attention(tensors["q"], tensors["k"], x.v)
    tensors[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tensors["out"].sum().backward()


def test_saved_tensors_go_with_the_graph():
    x = random_inputs(1, 5, 5, 2, 1, 4)
    q = x.q * 1
    out = gqa_attn.attention(q, x.k.requires_grad_(), x.v)
    alive = weakref.ref(q)
    del q
    assert alive() is not None and "GqaAttention" in out.grad_fn.name()
    out.sum().backward()
    assert alive() is None


def test_gradient_of_sinks_alone():
    x = random_inputs(2, 9, 7, 4, 2, 8)
    sinks = torch.randn(4, requires_grad=True)
    out, lse = fwd(x.q, x.k, x.v, sinks=sinks)
    torch.autograd.backward((out, lse), (x.dout, x.dlse))
    assert_matches(Results(dsinks=sinks.grad), *x, sinks=sinks)


def test_gradients_of_dlse_by_finite_differences():
    x = random_inputs(1, 3, 4, 2, 1, 2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    assert torch.autograd.gradcheck(lambda q, k, v: fwd(q, k, v, causal=True)[1].sin(), leaves)


def test_flops_are_counted_as_torch_counts_its_attention():
    x = random_inputs(2, 9, 9, 4, 4, 8)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    with FlopCounterMode(display=False) as ours:
        fwd(*leaves, causal=True)[0].sum().backward()
    shapes = [t.transpose(1, 2).shape for t in leaves]
    expected = {fwd: sdpa_flop_count(*shapes), bwd: sdpa_backward_flop_count(shapes[0], *shapes)}
    assert ours.get_flop_counts()["Global"] == expected


def counted(x, **options):
    """(FLOPs of fwd, FLOPs of bwd) / 2"""
    with FlopCounterMode(display=False) as counter:
        run(x, **options)
    return tuple(counter.get_flop_counts()["Global"][op] // 2 for op in (fwd, bwd))


@pytest.mark.parametrize("options, keys", [({}, 70), ({"causal": True}, 70), ({"window": (6, 2)}, 9), ({"window": (-1, 2)}, 70),
                                           ({"window": (6, 2), "causal": True}, 7), ({"window": (60, 60)}, 70)], ids=str)
def test_flops_of_a_window_are_those_of_the_keys_in_it(options, keys):
    x = random_inputs(2, 50, 70, 4, 2, 8, 6)
    pairs = 2 * 4 * 50 * keys
    assert counted(x, **options) == (pairs * (8 + 6), pairs * (3 * 8 + 2 * 6))


def test_flops_of_packed_sequences_are_those_of_each():
    x = random_inputs(None, 60, 40, 4, 2, 8, 6)
    cu_seqlens = dict(cu_seqlens_q=int32(0, 9, 9, 54), cu_seqlens_k=int32(0, 30, 35, 40))
    for options, pairs in (({}, 9 * 30 + 45 * 5), ({"window": (6, 2)}, 9 * 9 + 45 * 5)):
        assert counted(x, **options, **cu_seqlens) == (4 * pairs * (8 + 6), 4 * pairs * (3 * 8 + 2 * 6))
    with FakeTensorMode() as mode:  # nothing to read: the mean length
        fakes = Inputs(*map(mode.from_tensor, x))
        cu_seqlens = {name: mode.from_tensor(t) for name, t in cu_seqlens.items()}
        assert counted(fakes, **cu_seqlens)[0] == 4 * (60 * 40 // 3) * 14
        assert counted(fakes, window=(6, 2), **cu_seqlens)[0] == 4 * 60 * 9 * 14


def test_no_dispatch_below_the_ops():
    """Modes see one call of each op and nothing of what the CPU path does inside."""
    x = random_inputs(1, 5, 5, 2, 1, 4)
    with OpCalls() as seen:
        fwd(x.q.requires_grad_(), x.k, x.v)[0].sum().backward()
    assert [func for func, _ in seen.calls] == [fwd.default, bwd.default]


def test_rules_take_the_arguments_of_the_schemas():
    x = random_inputs(1, 5, 5, 2, 1, 4)
    forward_defaults, backward_defaults = ([a.default_value for a in op.default._schema.arguments if a.has_default_value()]
                                           for op in (fwd, bwd))
    _rules.check_forward(x.q, x.k, x.v, *forward_defaults)
    out, lse = fwd(x.q, x.k, x.v)
    _rules.check_backward(x.dout, x.q, x.k, x.v, out, lse, *backward_defaults)
