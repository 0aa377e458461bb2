"""The raw ops in torch's machinery: schemas, opcheck, fakes, autograd, compile, vmap, FLOP counts."""

import pytest
import torch
from cpu import Inputs, OpCalls, bwd, check, fwd, int32, random_inputs, run, same
from gqa_attn import _library, _rules, flops  # noqa: F401  registers the FLOP formulas
from reference import Results, assert_matches
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode


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


MISSING_ON_CUDA = {"window": {"window_left": 3}, "softcap": {"softcap": 1.0}, "sinks": {"sinks": (4,)}}


@pytest.mark.parametrize("name", MISSING_ON_CUDA)
def test_fakes_run_the_rules(name):
    options = MISSING_ON_CUDA[name]
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 5, h, 8, dtype=torch.float16, device="cuda") for h in (4, 2, 2))
        options = {n: torch.empty(o, device="cuda") if isinstance(o, tuple) else o for n, o in options.items()}
        with pytest.raises(NotImplementedError, match=name):
            fwd(q, k, v, **options)
        with pytest.raises(TypeError, match="float64"):
            fwd(q.double(), k.double(), v.double())
        with pytest.raises(RuntimeError, match="k must have the batch size of q"):
            fwd(q, torch.empty(2, 5, 2, 8, dtype=torch.float16, device="cuda"), v)
        out, lse = fwd(q, k, v)
        with pytest.raises(NotImplementedError, match="deterministic"):
            bwd(out, q, k, v, out, lse, deterministic=True)
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_shapes(backend):
    def step(q, k, v):
        out, lse = fwd(q * 2, k, v, causal=True)
        return out.sin(), lse * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for batch, seqlen in ((2, 20), (3, 33)):
        x = random_inputs(batch, seqlen, seqlen + 5, 4, 2, 8)
        results = []
        for function in (step, compiled):
            leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
            out, lse = function(*leaves)
            torch.autograd.backward((out, lse), (x.dout, x.dlse))
            results.append([out, lse, *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (2, 1, None)], ids=str)
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"packed": True}], ids=str)
def test_vmap_equals_a_loop(options, mapped):
    packed = options.get("packed")
    each = [random_inputs(None if packed else 2, 9, 7, 4, 2, 8) for _ in range(3)]
    given = {"sinks": torch.randn(4)} if options.get("sinks") else {}
    if packed:
        given = dict(cu_seqlens_q=int32(0, 4, 9), cu_seqlens_k=int32(0, 3, 6))
    shared = {name: getattr(each[0], name) for name, dim in zip("qkv", mapped) if dim is None}
    each = [x._replace(**shared) for x in each]
    stacked = [torch.stack([x[i] for x in each], dim) if dim is not None else each[0][i] for i, dim in enumerate((*mapped, 0, 0))]

    def step(q, k, v, dout, dlse):
        return run(Inputs(q, k, v, dout, dlse), **given)

    folded = torch.vmap(step, in_dims=(*mapped, 0, 0))(*stacked)
    expected = [run(x, **given) for x in each]
    for together, alone in zip(folded, zip(*expected)):
        torch.testing.assert_close(together, torch.stack(alone))


def test_flops_are_counted_as_torch_counts_its_attention():
    x = random_inputs(2, 9, 7, 4, 2, 8)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    with FlopCounterMode(display=False) as ours:
        fwd(*leaves)[0].sum().backward()
    pairs = 2 * 4 * 9 * 7
    assert ours.get_flop_counts()["Global"] == {fwd: 2 * pairs * 16, bwd: 2 * pairs * 40}
    with FlopCounterMode(display=False) as packed:
        fwd(*(t.detach().flatten(0, 1) for t in leaves), cu_seqlens_q=int32(0, 9, 18), cu_seqlens_k=int32(0, 7, 14))
    assert packed.get_total_flops() == 2 * pairs * 16


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
