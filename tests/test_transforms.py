"""torch.vmap and torch.func over the ops and the Python front. About 5 s."""

import gqa_attn
import pytest
import torch
from cpu import Inputs, OpCalls, bwd, fwd, int32, random_inputs, run
from reference import Results, assert_matches
from torch.autograd import forward_ad


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- vmap ----

# Which of q, k, v, sinks, cu_seqlens (dout and dlse always are) are mapped, and where; with how many calls of the op.
MAPPED = {
    "all": (dict(q=0, k=0, v=0), 1),
    "q alone": (dict(q=0), 1),
    "other dims": (dict(q=2, k=1, v=-1), 1),
    "beside sinks": (dict(q=0, k=0, v=0, sinks=None), 1),
    "with sinks": (dict(q=1, v=0, sinks=0), 1),
    "sinks alone": (dict(sinks=1), 1),
    "packed": (dict(q=0, k=2, v=0, cu_seqlens=None), 1),
    "packed with sinks": (dict(k=0, sinks=0, cu_seqlens=None), 1),
    "own cu_seqlens": (dict(q=0, cu_seqlens=0), 3),
    "own cu_seqlens and sinks": (dict(k=1, sinks=0, cu_seqlens=1), 3),
}


def mapped_problem(dims, count):
    """The arguments of `count` calls by name, and the function that runs one."""
    packed = "cu_seqlens" in dims
    each = []
    for i in range(max(count, 1)):
        arguments = random_inputs(None if packed else 2, 9, 7, 4, 2, 8)._asdict()
        if "sinks" in dims:
            arguments["sinks"] = torch.randn(4)
        if packed:
            arguments["cu_seqlens"] = int32(0, 1 + i, 6)
        each.append(arguments)
    for name in each[0]:
        if dims.get(name) is None:
            each = [arguments | {name: each[0][name]} for arguments in each]

    def call(q, k, v, dout, dlse, sinks=None, cu_seqlens=None):
        return run(Inputs(q, k, v, dout, dlse), window=(4, 1), sinks=sinks, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)

    return each, call


@pytest.mark.parametrize("dims, calls", MAPPED.values(), ids=MAPPED)
def test_vmap_equals_a_loop(dims, calls):
    each, call = mapped_problem(dims, 3)
    stacked = {n: t if dims.get(n) is None else torch.stack([x[n] for x in each], dims[n]) for n, t in each[0].items()}
    in_dims = tuple(dims.get(name) for name in stacked)
    with OpCalls() as seen:
        together = torch.vmap(lambda *args: call(**dict(zip(stacked, args))), in_dims=in_dims)(*stacked.values())
    assert (seen.count(fwd), seen.count(bwd)) == (calls, calls)
    close(together, Results(*map(torch.stack, zip(*(call(**x) for x in each)))))


@pytest.mark.parametrize("dims", [dims for dims, _ in MAPPED.values()], ids=MAPPED)
def test_vmap_over_nothing(dims):
    each, call = mapped_problem(dims, 0)
    given = {n: t if dims.get(n) is None else torch.stack([t], dims[n]).narrow(dims[n], 0, 0) for n, t in each[0].items()}
    in_dims = tuple(dims.get(name) for name in given)
    got = torch.vmap(lambda *args: call(**dict(zip(given, args))), in_dims=in_dims)(*given.values())
    assert [(t.shape, t.dtype) for t in got] == [((0, *t.shape), t.dtype) for t in call(**each[0])]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("attend", [fwd, lambda *args, sinks: gqa_attn.attention(*args, sinks=sinks, return_lse=True)],
                         ids=["op", "front"])
def test_nested_vmap(attend, with_sinks):
    """Pairs of 3 queries and 2 key sets; an attention without randomness goes with every `randomness`."""
    queries, keys = ([random_inputs(2, 9, 7, 4, 2, 8) for _ in range(n)] for n in (3, 2))
    sinks = torch.randn(4) if with_sinks else None
    q, k, v = (torch.stack([getattr(x, name) for x in of]) for name, of in (("q", queries), ("k", keys), ("v", keys)))
    inner = torch.vmap(lambda q, k, v: attend(q, k, v, sinks=sinks), (None, 0, 0), randomness="error")
    out, lse = torch.vmap(inner, (0, None, None), randomness="different")(q, k, v)
    for i in range(3):
        for j in range(2):
            assert_matches(Results(out[i, j], lse[i, j]), q[i], k[j], v[j], sinks=sinks)


# ---- torch.func ----

ATTEND = {
    "op": lambda q, k, v, **options: fwd(q, k, v, **options)[0],
    "front": gqa_attn.attention,
    "front, deterministic given": lambda q, k, v, **options: gqa_attn.attention(q, k, v, **options, deterministic=True),
}


@pytest.fixture(params=ATTEND.values(), ids=ATTEND)
def attend(request):
    return request.param


def test_gradients_by_torch_func(attend):
    x = random_inputs(2, 9, 7, 4, 2, 8)
    sinks = torch.randn(4)

    def loss(q, k, v, sinks):
        return (attend(q, k, v, causal=True, sinks=sinks) * x.dout).sum()

    dq, dk, dv, dsinks = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*x[:3], sinks)
    assert_matches(Results(None, None, dq, dk, dv, dsinks), *x[:4], causal=True, sinks=sinks)
    out, pull_back = torch.func.vjp(lambda k: attend(x.q, k, x.v, causal=True, sinks=sinks), x.k)
    assert_matches(Results(out, None, None, *pull_back(x.dout)), *x[:4], causal=True, sinks=sinks)


def test_gradients_of_each_sample(attend):
    each = [random_inputs(2, 9, 7, 4, 2, 8) for _ in range(3)]

    def loss(q, k, v, dout):
        return (attend(q, k, v) * dout).sum()

    stacked = [torch.stack([x[i] for x in each]) for i in range(4)]
    gradients = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for i, x in enumerate(each):
        assert_matches(Results(None, None, *(gradient[i] for gradient in gradients)), *x[:4])
    shared = torch.func.grad(lambda k: torch.vmap(loss, (0, None, 0, 0))(stacked[0], k, *stacked[2:]).sum())(each[0].k)
    close(shared, sum(run(x._replace(k=each[0].k, dlse=None)).dk for x in each))


def test_jacobian(attend):
    x = random_inputs(1, 3, 4, 2, 1, 2, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda k: attend(x.q, k, x.v))(x.k)
    for row in ((0, 0, 0, 0), (0, 2, 1, 1)):
        dout = torch.zeros_like(x.dout)
        dout[row] = 1
        assert_matches(Results(dk=jacobian[row]), *x[:3], dout)


def test_gradients_inside_compiled_functions():
    x = random_inputs(2, 9, 7, 4, 2, 8)
    for name in ("op", "front"):
        gradient = torch.func.grad(lambda q: (ATTEND[name](q, x.k, x.v, causal=True) * x.dout).sum())
        assert_matches(Results(dq=torch.compile(gradient, backend="aot_eager", fullgraph=True)(x.q)), *x[:4], causal=True)


def test_second_derivatives_are_refused_at_every_level(attend):
    x = random_inputs(1, 5, 5, 2, 1, 4)

    def gradient(q):
        return torch.func.grad(lambda q: attend(q, x.k, x.v).sin().sum())(q)

    with pytest.raises(NotImplementedError, match="double backward"):
        torch.func.grad(lambda q: gradient(q).sum())(x.q)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient(x.q.requires_grad_()).sum().backward()


def test_forward_mode_is_refused(attend):
    x = random_inputs(1, 3, 3, 2, 1, 4)
    for transform in (lambda f: torch.func.jvp(f, (x.q,), (x.q,)), lambda f: torch.func.jacfwd(f)(x.q),
                      lambda f: torch.func.hessian(lambda q: f(q).sum())(x.q)):
        with pytest.raises(NotImplementedError, match="forward.mode"):
            transform(lambda q: attend(q, x.k, x.v))
    with forward_ad.dual_level():
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode(), pytest.raises(NotImplementedError, match="gqa_attn.*forward-mode"):
                attend(x.q, forward_ad.make_dual(x.k, x.k), x.v)
        assert torch.equal(attend(*x[:3]), fwd(*x[:3])[0])
    scale = torch.ones(())
    _, tangent = torch.func.jvp(lambda scale: scale * attend(*x[:3]), (scale,), (scale,))
    assert torch.equal(tangent, fwd(*x[:3])[0])
