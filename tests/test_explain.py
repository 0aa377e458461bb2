"""explain: the copies that a call makes, calls without work, errors that name what the caller gave; about 2 s."""

import re

import gqa_attn
import pytest
import torch
from gqa_attn import _library
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.skipif(bool(_library.problems), reason=f"the compiled parts are not all there: {_library.problems}")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def copies(q, k, v, **options):
    said = gqa_attn.explain(q, k, v, **options)
    return [dict(copies=choice.copies, bytes=choice.copies_bytes) for choice in (said.forward, said.backward)]


NONE = dict(copies=(), bytes=0)
Q, K, V = (2, 90, 6, 64), (2, 70, 3, 64), (2, 70, 3, 64)


def test_tensors_that_kernels_can_read_are_not_copied():
    assert copies(meta(*Q), meta(*K), meta(*V)) == [NONE, NONE]
    heads_first = meta(2, 6, 90, 64).transpose(1, 2)
    packed = meta(2, 70, 10, 80)[:, :, 1:4, 8:72]
    one_row = meta(2, 6 * 64 + 1)[:1, :-1].view(1, 1, 6, 64)  # the strides of dims with one index mean nothing
    assert copies(heads_first, packed, meta(1, 70, 3, 64).expand(*V)) == [NONE, NONE]
    assert copies(one_row, meta(1, 70, 3, 64), meta(1, 70, 3, 64)) == [NONE, NONE]


@pytest.mark.parametrize("bad", [meta(2, 70, 3, 65)[..., :64], meta(2, 70, 3, 65)[..., 1:], meta(2, 70, 3, 128)[..., ::2],
                                 meta(2 * 70 * 3 * 64 + 1)[1:].view(V), meta(2, 70, 64, 3).mT])
def test_a_misaligned_tensor_is_copied_alone(bad):
    bytes = 2 * 70 * 3 * 64 * 2
    assert copies(meta(*Q), meta(*K), bad) == [dict(copies=("v",), bytes=bytes)] * 2
    assert copies(meta(*Q), bad, bad) == [dict(copies=("k", "v"), bytes=2 * bytes)] * 2


def test_head_dims_are_padded_to_multiples_of_8():
    """Both ways: the results too are written with padding and copied."""
    q_bytes, k_bytes = 2 * 90 * 6 * 2 * 48, 2 * 70 * 3 * 2 * 48
    v_bytes, out_bytes = 2 * 70 * 3 * 2 * 24, 2 * 90 * 6 * 2 * 24
    both = copies(meta(2, 90, 6, 41), meta(2, 70, 3, 41), meta(2, 70, 3, 23))
    assert both == [
        dict(copies=("q", "k", "v", "out"), bytes=q_bytes + k_bytes + v_bytes + out_bytes),
        dict(copies=("q", "k", "v", "out", "dout", "dq", "dk", "dv"), bytes=2 * (q_bytes + k_bytes + v_bytes + out_bytes)),
    ]
    only_v = copies(meta(2, 90, 6, 40), meta(2, 70, 3, 40), meta(2, 70, 3, 23))
    assert only_v == [dict(copies=("v", "out"), bytes=v_bytes + out_bytes),
                      dict(copies=("v", "out", "dout", "dv"), bytes=2 * (v_bytes + out_bytes))]


def test_a_negative_scale_moves_into_a_copy_of_q():
    assert copies(meta(*Q), meta(*K), meta(*V), scale=-0.5) == [dict(copies=("q",), bytes=2 * 90 * 6 * 64 * 2)] * 2


def test_copies_are_printed():
    said = str(gqa_attn.explain(meta(2, 90, 6, 64), meta(*K), meta(2, 70, 3, 63)))
    assert f"copies     {2 * 70 * 3 * 64 * 2 + 2 * 90 * 6 * 64 * 2} bytes for v, out\n" in said
    assert "copies" not in str(gqa_attn.explain(meta(*Q), meta(*K), meta(*V)))


@pytest.mark.parametrize("q, k", [((0, 9, 6, 64), (0, 9, 3, 64)), ((2, 0, 6, 64), K), ((2, 9, 0, 64), K), (Q, (2, 0, 3, 64))])
def test_calls_without_work_run_no_kernel(q, k):
    said = gqa_attn.explain(meta(*q), meta(*k), meta(*k), causal=True)
    assert said.forward == said.backward == "none: without queries or without keys, results are only filled"


@pytest.mark.parametrize("change, kind, said", [
    (dict(k=torch.empty(K, dtype=torch.bfloat16)), ValueError, "k must be on the device of q (meta), got cpu"),
    (dict(cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32)), ValueError,
     "cu_seqlens_q must be on the device of q (meta), got cpu"),
    (dict(v=[1, 2]), TypeError, "v must be a strided torch.Tensor, got list"),
    (dict(q=None), TypeError, "q must be a strided torch.Tensor, got NoneType"),
    (dict(q=torch.sparse_coo_tensor(size=(4, 4), device="meta", check_invariants=False)), TypeError,
     "q must be a strided torch.Tensor, got sparse"),
    (dict(v=meta(*V, dtype=torch.float16)), TypeError, "got bfloat16, bfloat16, float16"),
    (dict(window=(1, 2, 3)), TypeError, "window must be two ints (left, right), -1 for no limit, got (1, 2, 3)"),
])
def test_errors_are_those_of_attention(change, kind, said):
    """On the devices that the caller gave, though the answer is for an assumed GPU."""
    with pytest.raises(kind, match=re.escape(said)):
        gqa_attn.explain(**dict(q=meta(*Q), k=meta(*K), v=meta(*V)) | change)


def test_other_devices_have_no_kernels():
    with FakeTensorMode():
        q = torch.empty(1, 4, 2, 8, device="xpu", dtype=torch.bfloat16)
    said = gqa_attn.explain(q, q, q)
    assert said.device == "xpu:0" and said.forward == said.backward == "none: kernels are for CUDA and the CPU"
