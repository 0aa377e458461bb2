"""gqa_attn._C: selection is total over what the contract promises, and says why where it refuses."""

import os
from itertools import product

import pytest

_C = pytest.importorskip("gqa_attn._C", reason="needs the compiled part")

PROBLEM = dict(dtype="bfloat16", causal=True, batch=2, seqlen_q=1000, seqlen_k=1030, heads=12, kv_heads=4,
               head_dim=128, head_dim_v=128)
ROWS = {row["name"]: row for row in _C.kernels()}

needs_all_kernels = pytest.mark.skipif(bool(os.environ.get("GQA_ATTN_KERNELS")), reason="a part of the kernels was built")


@needs_all_kernels
@pytest.mark.parametrize("mask", ["full", "causal", "general"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_every_head_dim_has_kernels(phase, dtype, mask):
    """With the least padding: no other kernel of its kind that serves these head dims is smaller."""
    masks = {"full": dict(causal=False), "causal": {}, "general": dict(window_left=5)}
    for head_dim in range(1, 257):
        for head_dim_v in {1, head_dim, 257 - head_dim, 256}:
            choice = _C.select(phase, **PROBLEM | masks[mask] | dict(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v))
            fitting = [row["head_dim"] + row["head_dim_v"] for row in ROWS.values()
                       if (row["phase"], row["dtype"]) == (phase, dtype)
                       and row["head_dim"] >= head_dim and row["head_dim_v"] >= head_dim_v]
            assert choice["head_dim"] >= head_dim and choice["head_dim_v"] >= head_dim_v
            assert choice["head_dim"] + choice["head_dim_v"] == min(fitting)
            assert choice["mask"] == (mask if phase == "forward" else "general")


GENERAL = [dict(window_left=3), dict(window_right=1, causal=False), dict(softcap=True), dict(batch=1, sequences=4)]


@needs_all_kernels
@pytest.mark.parametrize("options, mask", [
    *((options, "general") for options in GENERAL),
    ({}, "causal"), (dict(causal=False), "full"), (dict(causal=False, window_right=0), "causal"),
    (dict(window_left=1029), "causal"), (dict(window_left=1028), "general"),  # 1,030 keys: the first one sees them all
    (dict(causal=False, window_left=1029, window_right=999), "full"), (dict(causal=False, window_right=998), "general"),
], ids=str)
def test_forward_masks(options, mask):
    assert _C.select("forward", **PROBLEM | options)["mask"] == mask


SHORT = dict(batch=16, seqlen_q=1, seqlen_k=16384, heads=32, kv_heads=8)


@needs_all_kernels
@pytest.mark.parametrize("change, tile_heads, splits", [
    ({}, 4, 1),                                       # 128 tiles for 132 SMs
    (dict(batch=1), 4, 16),                           # 8 tiles: 16 parts of 8 kv tiles each fill the GPU
    (dict(batch=1, seqlen_k=2048), 4, 4),             # no fewer than 4 kv tiles in a part
    (dict(batch=1, seqlen_k=1024), 4, 1),             # adding two parts would cost more
    (dict(batch=1, window_left=2047), 4, 4),          # of the window's keys
    (dict(batch=1, sequences=16, seqlen_q=16, seqlen_k=16 * 16384), 4, 1),
    (dict(batch=1, sequences=1, seqlen_q=1), 4, 16),
    (dict(batch=1, seqlen_q=64), 2, 8),               # 2 tiles a group either way
    (dict(batch=1, kv_heads=1, seqlen_k=2**20), 32, 32),  # as many parts as are added at once
    (dict(kv_heads=32), 1, 1),
    (dict(heads=40, kv_heads=8, batch=1), 8, 16),     # 5 heads in the room of 8
    (dict(batch=64, seqlen_q=130, heads=8, kv_heads=2), 4, 1),   # 5 tiles of 32 rows instead of 8 of 128
    (dict(batch=2, seqlen_q=4096), 1, 1),
    (dict(batch=2, seqlen_q=4096, softcap=True), 1, 1),
    (dict(batch=2, seqlen_q=4096, head_dim=64, head_dim_v=64), 1, 1),
], ids=str)
def test_short_queries_share_tiles_and_keys(change, tile_heads, splits):
    """Where that makes fewer tiles, and where too few would fill the GPU."""
    choice = _C.select("forward", **PROBLEM | SHORT | change)
    assert (choice["tile_heads"], choice["splits"]) == (tile_heads, splits), choice["reason"]
    assert choice["mask"] == "general" or (tile_heads, splits) == (1, 1)


@needs_all_kernels
def test_parts_take_room_for_the_queries_only():
    """float32 of out and lse for each split, whatever the number of keys."""
    choice = _C.select("forward", **PROBLEM | SHORT | dict(batch=1))
    rows = choice["splits"] * 32
    assert rows * 129 * 4 <= choice["workspace_bytes"] <= rows * 129 * 4 + 256


@needs_all_kernels
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_tuned_head_dims(head_dim, head_dim_v):
    for phase in ("forward", "backward"):
        choice = _C.select(phase, **PROBLEM | dict(head_dim=head_dim, head_dim_v=head_dim_v))
        assert (choice["head_dim"], choice["head_dim_v"]) == (head_dim, head_dim_v)
        assert choice["dtype"] == "bfloat16"


@needs_all_kernels
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_with_a_softcap_are_taken_where_there_is_one(dtype, softcap):
    """And nowhere else, since it costs time."""
    for phase, head_dim, head_dim_v in product(("forward", "backward"), range(8, 257, 8), range(8, 257, 8)):
        problem = PROBLEM | dict(dtype=dtype, softcap=softcap, head_dim=head_dim, head_dim_v=head_dim_v)
        assert ROWS[_C.select(phase, **problem)["name"]]["softcap"] is softcap, (phase, head_dim, head_dim_v)


@needs_all_kernels
def test_softcap_at_192_and_128_is_padded():
    """The kernel of these head dims keeps P in 16 bits only."""
    capped = _C.select("backward", **PROBLEM | dict(head_dim=192, head_dim_v=128), softcap=True)
    assert (capped["head_dim"], capped["head_dim_v"]) == (192, 192)


@needs_all_kernels
def test_backward_choice():
    choice = _C.select("backward", **PROBLEM)
    assert {ROWS[choice[helper]]["phase"] for helper in ("prepare", "finish_dq")} == {"backward_prepare", "backward_finish"}
    assert PROBLEM["heads"] // PROBLEM["kv_heads"] % choice["splits"] == 0
    assert all((choice[helper] is not None) == (choice["splits"] > 1) for helper in ("finish_dk", "finish_dv"))
    assert choice["reason"]


SQUARE = dict(batch=2, seqlen_q=4096, seqlen_k=4096, heads=32, kv_heads=8)
SEED = dict(batch=8, seqlen_q=1024, seqlen_k=1024, heads=32, kv_heads=2, head_dim=192)


@needs_all_kernels
@pytest.mark.parametrize("change, splits", [
    ({}, 1), (dict(causal=False), 1),
    (SEED | dict(causal=False), 1),
    (SEED, 8),                                                # dQ of more heads falls out of L2
    (dict(kv_heads=1), 8), (dict(batch=1, seqlen_q=8192, seqlen_k=8192, heads=64), 2),
    (dict(batch=1, seqlen_q=1024, seqlen_k=1024), 4),         # 8 tiles of 8 kv heads do not fill the GPU
    (dict(batch=1, seqlen_q=1024, seqlen_k=1024, causal=False), 2),
    (dict(batch=9, seqlen_q=1024, seqlen_k=1024), 1),         # 2,592 steps: 20 for each SM, and a short one
    (dict(batch=5, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64), 1),
    (dict(batch=1, sequences=9, seqlen_q=9 * 1024, seqlen_k=9 * 1024), 1),
    (dict(batch=1, sequences=1, seqlen_q=1024, seqlen_k=1024), 4),
], ids=str)
def test_blocks_share_a_kv_tile_where_the_gpu_would_idle_or_dq_leave_the_cache(change, splits):
    assert _C.select("backward", **PROBLEM | SQUARE | change)["splits"] == splits


@needs_all_kernels
def test_workspace_is_linear_in_the_lengths():
    """It never holds Sq x Sk: twice both lengths, at most twice the bytes and a tile."""
    def bytes_at(length):
        return _C.select("backward", **PROBLEM | dict(batch=1, heads=4, seqlen_q=length, seqlen_k=length))["workspace_bytes"]

    assert 0 < bytes_at(16384) <= 2.1 * bytes_at(8192)


@pytest.mark.parametrize("shape", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(heads=0)])
def test_empty_problems(shape):
    for phase in {row["phase"] for row in ROWS.values()} & {"forward", "backward"}:
        row = next(row for row in ROWS.values() if row["phase"] == phase)
        taken = {name: row[name] for name in ("dtype", "head_dim", "head_dim_v")}
        assert _C.select(phase, **PROBLEM | taken | shape)["name"]


def test_refusal_lists_required_supported_missing():
    required = r"(?s)Required: bfloat16, head dims 128/128, causal mask, sm_80\. Supported: .*Missing: kernels for this GPU"
    with pytest.raises(NotImplementedError, match=required):
        _C.select("forward", **PROBLEM, arch=80)
    with pytest.raises(NotImplementedError, match="Missing: these head dims"):
        _C.select("forward", **PROBLEM | dict(head_dim=264))


@pytest.mark.parametrize("change", [
    dict(kv_heads=0), dict(kv_heads=5), dict(batch=-1), dict(head_dim=-8), dict(batch=1, sequences=-1), dict(num_sms=0),
    dict(window_left=-2),
], ids=str)
def test_impossible_sizes(change):
    with pytest.raises(ValueError, match="sizes must be >= 0, windows >= -1, num_sms >= 1 and heads a multiple of kv_heads"):
        _C.select("backward", **PROBLEM | change)


def test_names():
    with pytest.raises(ValueError, match='phase must be "forward" or "backward", got "sideways"'):
        _C.select("sideways", **PROBLEM)
    with pytest.raises(TypeError, match='dtype must be "float16" or "bfloat16", got "float32"'):
        _C.select("forward", **PROBLEM | dict(dtype="float32"))


def test_build_info():
    info = _C.build_info()
    assert info.keys() == {"version", "commit", "torch", "tilelang", "nvcc", "archs"}
    assert info["archs"] == sorted({row["arch"] for row in ROWS.values()})


@needs_all_kernels
def test_head_dims_are_padded_as_the_op_pads_them():
    """D = 41 runs as 48: with 41 the rule on heads times head dim would choose other splits."""
    problem = PROBLEM | dict(causal=True, batch=4, seqlen_q=4096, seqlen_k=4096, heads=48, kv_heads=4, head_dim_v=41)
    assert _C.select("backward", **problem | dict(head_dim=41)) == _C.select("backward", **problem | dict(head_dim=48))


@pytest.mark.parametrize("sizes", [dict(seqlen_q=2**31), dict(seqlen_k=2**40), dict(batch=2**19, heads=2**12, kv_heads=2**12)])
def test_problems_beyond_32_bits_are_refused(sizes):
    for phase in ("forward", "backward"):
        with pytest.raises(ValueError, match=r"must be below 2\*\*31"):
            _C.select(phase, **PROBLEM | sizes)


@needs_all_kernels
@pytest.mark.parametrize("head_dim, head_dim_v, forward, backward", [
    (144, 208, "256/208", "256/208"),  # tiles of 256 columns in boxes of 64: those from 192 on would be empty
    (200, 64, "200/256", "200/256"),
    (136, 136, "136/136", "192/192"),  # the backward's have 32 columns at 192
    (136, 128, "136/128", "192/128"),
    (64, 96, "96/96", "96/96"),
    (72, 96, "72/96", "96/96"),  # 32 in the forward, 16 of K in the backward
    (88, 88, "88/88", "88/88"),
    (128, 192, "192/192", "192/192"),
    (8, 8, "8/8", "8/8"),
])
def test_packed_head_dims_leave_no_box_empty(head_dim, head_dim_v, forward, backward):
    """TMA would look up memory before the tensor (select.h); a batch's tensor maps start at the tensor."""
    for phase, padded in dict(forward=forward, backward=backward).items():
        problem = PROBLEM | dict(batch=1, head_dim=head_dim, head_dim_v=head_dim_v)
        assert f"head dims {padded};" in _C.select(phase, **problem, sequences=1)["reason"]
        assert f"head dims {head_dim}/{head_dim_v}" in _C.select(phase, **problem)["reason"]


@needs_all_kernels
@pytest.mark.parametrize("change, order", [
    (dict(kv_heads=32), "long kv tiles last"),  # 2,048 kv tiles
    (dict(kv_heads=32, deterministic=False), "long kv tiles first"),
    (dict(), "the long half of the kv tiles first"),  # 512 kv tiles, less than seven for each SM
    (dict(batch=1, sequences=50, seqlen_q=32768, seqlen_k=32768, kv_heads=32), "long kv tiles last"),
    # Blocks walk four heads.
    (dict(batch=1, sequences=50, seqlen_q=32768, seqlen_k=32768), "the long half of the kv tiles first"),
])
def test_deterministic_order_of_kv_tiles(change, order):
    """Long ones last where enough others follow: blocks then do not wait for each other."""
    problem = PROBLEM | dict(heads=32, kv_heads=8, seqlen_q=4096, seqlen_k=4096, deterministic=True) | change
    assert f"; {order}" in _C.select("backward", **problem)["reason"]
