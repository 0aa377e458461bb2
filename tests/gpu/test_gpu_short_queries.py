"""Few queries against many keys, forward: heads of a group in one tile, keys split over blocks, alone and with every option."""
from dataclasses import replace

import gqa_attn
import pytest
import torch
from calls import check, forward, poison, run
from gqa_attn import _library
from problems import DTYPES, TUNED, Problem
from reference import Results

GROUPS = [(8, 8), (8, 2), (14, 2), (12, 4), (16, 1), (5, 1), (40, 2), (71, 1)]
LENGTHS = [(1, 3000), (1, 1024), (2, 2049), (5, 1500), (16, 4099), (17, 640), (48, 1111), (64, 2000), (100, 1700), (130, 900)]
OPTIONS = [dict(), dict(causal=True), dict(causal=True, sinks="float32"), dict(window=(700, 3)), dict(softcap=15.0, factor=8.0),
           dict(causal=True, window=(90, 0), sinks="same"), dict(sinks="absent", softcap=20.0, causal=True), dict(scale=-0.1)]
UNPADDED = [(40, 40), (72, 64), (33, 129), (8, 256), (1, 1)]


def choice(x):
    """What the op chose, where the compiled module is there to tell."""
    if _library.compiled is None:
        pytest.skip("needs gqa_attn._C")
    return gqa_attn.explain(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, causal=x.options["causal"],
                            window=x.options["window"], softcap=x.options["softcap"]).forward


def problems():
    found = []
    for dims in TUNED + UNPADDED:
        for dtype in DTYPES:
            for lengths in LENGTHS:
                i = len(found)
                heads, kv_heads = GROUPS[i % len(GROUPS)]
                found.append(Problem(*dims, *lengths, dtype=dtype, heads=heads, kv_heads=kv_heads, batch=1 + i % 3,
                                     **OPTIONS[(i + i // len(LENGTHS)) % len(OPTIONS)]))
    return found


def packed_problems():
    """Short and long sequences together, empty ones, some shorter than there are splits."""
    lengths = {
        "decode": tuple((1, keys) for keys in (3000, 1, 70, 0, 129, 2500)),
        "chunks": ((16, 4000), (5, 5), (0, 9), (64, 900), (3, 0), (7, 3)),
        "one": ((1, 5000),),
        "hidden": ((40, 10), (20, 3000)),
    }
    return [Problem(*dims, dtype=DTYPES[i % 2], heads=heads, kv_heads=kv_heads, lengths=each, tail=i % 3, **options)
            for each in lengths.values() for dims in TUNED
            for i, ((heads, kv_heads), options) in enumerate(zip(GROUPS, OPTIONS))]


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_dense(problem, seed):
    x = problem.inputs(seed)
    check(x, Results(*forward(x)))


@pytest.mark.parametrize("problem", packed_problems(), ids=str)
def test_packed(problem, seed):
    x = problem.inputs(seed)
    check(x, Results(*forward(x)))


@pytest.mark.parametrize("lengths", [(1, 3000), (33, 2000), (200, 64)])
def test_gradients_follow_from_what_the_parts_gave(lengths, seed):
    """Rows that see no key, their sinks, and the backward of split results."""
    x = Problem(128, None, *lengths, heads=8, kv_heads=2, causal=True, sinks="float32", dlse=True).inputs(seed)
    check(x, run(x))


@pytest.mark.parametrize("problem, tile_heads, splits", [
    (Problem(seqlen_q=1, seqlen_k=16384, heads=32, kv_heads=8, batch=16), 4, 1),
    (Problem(seqlen_q=1, seqlen_k=16384, heads=32, kv_heads=8, batch=1, causal=True), 4, 16),
    (Problem(seqlen_q=64, seqlen_k=16384, heads=32, kv_heads=8, batch=1, causal=True), 2, 8),
    (Problem(seqlen_q=4096, seqlen_k=4096, heads=32, kv_heads=8, batch=2, causal=True), 1, 1),
], ids=str)
def test_what_is_chosen(problem, tile_heads, splits):
    chosen = choice(problem.inputs(0))
    assert (chosen.tile_heads, chosen.splits) == (tile_heads, splits)


def test_a_nan_stays_in_its_sequence_and_spoils_all_of_it(seed):
    x = Problem(heads=8, kv_heads=2, lengths=((1, 2000), (1, 3000), (2, 2500))).inputs(seed)
    clean, _ = forward(x)
    k = x.k.clone()
    k[2000 + 2900] = float("nan")
    out, lse = forward(replace(x, k=k))
    assert out[1].isnan().all() and lse[:, 1].isnan().all()
    assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])


def test_a_graph_replays_with_other_lengths(seed):
    """Splits are chosen at capture; lengths are read at replay."""
    x = Problem(heads=8, kv_heads=2, lengths=((1, 3000), (1, 1000))).inputs(seed)
    x.forward()
    torch.cuda.synchronize()
    poison()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = x.forward()
    x.cu_seqlens_k.copy_(torch.tensor([0, 17, 4000]))
    out.fill_(float("nan"))
    graph.replay()
    check(x, Results(out, lse))


def test_the_same_call_gives_the_same_bits(seed):
    x = Problem(seqlen_q=3, seqlen_k=5000, heads=8, kv_heads=2, batch=1, causal=True).inputs(seed)
    (out, lse), again = forward(x), forward(x)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
