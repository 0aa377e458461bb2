"""torch.compile and torch.export: one graph for every length, what it hands on, metadata, modules. About 15 s.

B59 (export, AOTInductor), B60 (autocast), B61 (checkpointing) and B68 (subsets of gradients) in test_cases.py compile too.
"""

import copy
import functools
import io
import pickle

import gqa_attn
import pytest
import torch
from cpu import bwd, fwd, int32, random_inputs
from reference import Results, assert_matches, reference
from test_ops import LAYOUTS, SIZES, laid_out, metadata
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()  # recompilations of a function are limited


def step(function, x, **options) -> Results:
    """attention's results and gradients, through `function`."""
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out, lse = function(*leaves, **options, return_lse=True)
    return Results(out, lse, *torch.autograd.grad((out, lse), leaves, (x.dout, x.dlse)))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3), "softcap": 2.0, "scale": 0.3},
    "sinks": {"sinks": torch.linspace(-1, 1, 4), "causal": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_graph_for_every_length(options):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gqa_attn.attention, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for batch, seqlen_q, seqlen_k in ((3, 20, 25), (5, 33, 34), (2, 70, 6), (3, 25, 25), (4, 7, 130)):
        x = random_inputs(batch, seqlen_q, seqlen_k, 4, 2, 8)
        assert_matches(step(compiled, x, **options), *x, **{n: o for n, o in options.items() if n != "deterministic"})
        graphs.add(counter.frame_count)
    assert len(graphs) == 1  # where floats are given, torch's first compilation starts a second time


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_where_nothing_is_recorded(deterministic):
    """One compiled function, first for training and then for evaluation."""
    x = random_inputs(2, 20, 25, 4, 2, 8)
    compiled = torch.compile(gqa_attn.attention, fullgraph=True, backend="aot_eager")
    assert_matches(step(compiled, x, deterministic=deterministic), *x)
    assert_matches(Results(compiled(*x[:3], deterministic=deterministic)), *x[:3])
    with torch.no_grad():
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        assert_matches(Results(compiled(*leaves, deterministic=deterministic)), *x[:3])


def test_deterministic_with_a_tensor_that_is_given_twice():
    cu_seqlens = int32(0, 9, 20)
    x = random_inputs(None, 20, 20, 4, 2, 8)
    compiled = torch.compile(gqa_attn.attention_varlen, fullgraph=True, backend="aot_eager")
    assert_matches(step(compiled, x, cu_seqlens_q=cu_seqlens, deterministic=True), *x, cu_seqlens_q=cu_seqlens,
                   cu_seqlens_k=cu_seqlens)
    y = random_inputs(2, 20, 25, 4, 4, 8)
    q, k = (t.detach().requires_grad_() for t in y[:2])
    out = torch.compile(gqa_attn.attention, fullgraph=True, backend="aot_eager")(q, k, k, deterministic=True)
    dq, dk = torch.autograd.grad(out, (q, k), y.dout)
    expected = reference(y.q, y.k, y.k, y.dout)
    torch.testing.assert_close((dq.double(), dk.double()), (expected.dq, expected.dk + expected.dv), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["cu_seqlens_q alone", "the same tensor twice", "two tensors"])
def test_one_graph_for_every_packing(how):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gqa_attn.attention_varlen, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for cu_seqlens in (int32(0, 9, 20), int32(0, 1, 1, 33), int32(0, 5, 9, 30, 70)):
        x = random_inputs(None, int(cu_seqlens[-1]), int(cu_seqlens[-1]), 4, 2, 8)
        given = {"cu_seqlens_q alone": (cu_seqlens,), "the same tensor twice": (cu_seqlens, cu_seqlens),
                 "two tensors": (cu_seqlens, cu_seqlens.clone())}[how]
        results = step(lambda *qkv, **options: compiled(*qkv, *given, **options), x, causal=True)
        assert_matches(results, *x, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


def test_inductor_between_other_operations():
    def block(q, k, v):
        out, lse = gqa_attn.attention(q * 2, k, v, causal=True, return_lse=True)
        return out.sin(), lse * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for batch, seqlen in ((3, 20), (5, 33)):
        x = random_inputs(batch, seqlen, seqlen + 5, 4, 2, 8)
        results = []
        for function in (block, compiled):
            leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
            out, lse = function(*leaves)
            torch.autograd.backward((out, lse), (x.dout, x.dlse))
            results.append([out, lse, *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_results_have_the_metadata_of_eager_ones(layout, size):
    x = laid_out(layout, size)
    x = x._replace(dlse=torch.randn(x.q.shape[0], x.q.shape[2], x.q.shape[1]))
    compiled = torch.compile(gqa_attn.attention, fullgraph=True, backend="aot_eager")
    eager, got = step(gqa_attn.attention, x, causal=True), step(compiled, x, causal=True)
    assert metadata(got[:5]) == metadata(eager[:5])
    assert all(torch.equal(*pair) for pair in zip(got[:5], eager))


def test_deterministic_reaches_the_compiled_backward():
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(gqa_attn.attention, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    x = random_inputs(1, 9, 9, 2, 1, 8)
    for flag in (False, True):
        torch.use_deterministic_algorithms(flag)
        try:
            step(compiled, x)
        finally:
            torch.use_deterministic_algorithms(False)
        (node,) = graphs[-1].graph.find_nodes(op="call_function", target=bwd.default)
        assert dict(zip([a.name for a in bwd.default._schema.arguments], node.args)).get("deterministic", False) is flag


class Block(torch.nn.Module):
    """A module that holds the function itself, as models with a choice of attention do."""

    def __init__(self, attend=functools.partial(gqa_attn.attention, causal=True)):
        super().__init__()
        self.attend = attend
        self.project = torch.nn.Linear(16, 8 * 8)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (8, 8)).split([4, 2, 2], dim=-2)
        return self.attend(q, k, v)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("when", ["before any call", "after a compiled call"])
def test_copies_of_modules(copied, when):
    module, x = Block(), torch.randn(2, 9, 16)
    if when == "after a compiled call":
        module.compile(backend="aot_eager", fullgraph=True)
        module(x)
    twin = copied(module)
    assert twin.project.weight is not module.project.weight and torch.equal(twin(x), module(x))


def test_export_of_packed_sequences_for_every_length():
    class Packed(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens, sinks):
            return gqa_attn.attention_varlen(q, k, v, cu_seqlens, window=(9, 0), sinks=sinks)

    x = random_inputs(None, 30, 30, 4, 2, 8)
    tokens, entries = torch.export.Dim("tokens"), torch.export.Dim("entries", min=2)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: entries}, None)
    for strict in (False, True):
        inputs = *x[:3], int32(0, 4, 9, 30), torch.zeros(4)
        program = torch.export.export(Packed(), inputs, dynamic_shapes=shapes, strict=strict)
        assert [node.target for node in program.graph.nodes if "gqa_attn" in str(node.target)] == [fwd.default]
        other, cu_seqlens, sinks = random_inputs(None, 41, 41, 4, 2, 8), int32(0, 41), torch.randn(4)
        out = program.module()(*other[:3], cu_seqlens, sinks)
        assert_matches(Results(out), *other[:3], window=(9, 0), sinks=sinks, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
