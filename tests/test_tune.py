"""The tuner: what it tries, what it drops, who wins. No candidate is built or timed here: that takes minutes and a GPU."""

import json
import shutil
import sys
from dataclasses import replace

import pytest

from codegen import tune, tune_time
from codegen.table import KERNELS
from codegen.tune_space import (
    BARRIERS, SERVED, SHARED_MEMORY, TARGETS, Target, candidates, label, settings, shared_memory, target_of
)

gqa_attn = pytest.importorskip("gqa_attn")
compiled = gqa_attn._library.compiled
BACKWARD = Target("backward", 192, 128, "general")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_space_holds_the_table_and_more(target):
    """So that running the tuner again can confirm its winners, and can find others."""
    kernels = candidates(target)
    families = {row.family for row in KERNELS if target_of(row) == target}
    assert kernels[0] == target.kernel() and len(kernels) > 1
    assert kernels.count(kernels[0]) == 1
    assert families <= {kernel.family for kernel in kernels}
    assert {target_of(kernel) for kernel in kernels} == {target}
    assert len(set(map(label, kernels))) == len(kernels)
    assert all(shared_memory(kernel) + BARRIERS <= SHARED_MEMORY for kernel in kernels)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_table_is_one_of_the_enumerated(target, monkeypatch):
    """The table's own kernel comes first anyway: here without that."""
    current = target.kernel()
    monkeypatch.setattr(Target, "kernel", lambda self: replace(current, registers=8))
    assert current in candidates(target)[1:]


def test_estimated_shared_memory():
    """Against what lowering found: rows of lse and delta end at whole 1,024 bytes."""
    if compiled is None:
        pytest.skip("nothing was built")
    specs = {spec.name: spec for spec in KERNELS}
    found = [(row["smem_bytes"], shared_memory(specs[row["name"]])) for row in compiled.kernels()
             if row["phase"] in ("forward", "backward") and row["name"] in specs]
    assert found and all(estimate <= true <= estimate + 1024 for true, estimate in found)


def test_settings_make_the_kernel_again():
    for kernel in KERNELS:
        bare = {name: getattr(kernel, name) for name in SERVED}
        assert type(kernel)(**bare, **settings(kernel)) == kernel


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_is_one_configuration(target):
    """With softcap or without, in every dtype: what is timed without one holds for all."""
    rows = [row for row in KERNELS if target_of(row) == target]
    assert all(settings(row) == settings(target.kernel()) for row in rows)
    assert target.kernel().softcap == all(row.softcap for row in rows)


def test_helpers_are_those_of_the_table():
    pytest.importorskip("tilelang")
    from codegen.tune_build import _helpers

    main = [kernel for kernel in KERNELS if kernel.phase == "backward"]
    helpers = {helper for kernel in main for helper in _helpers(kernel)}
    assert helpers <= set(KERNELS)
    assert {row for row in KERNELS if row.phase == "backward_finish"} <= helpers


@pytest.mark.parametrize("log, reason", [
    ("0 bytes spill stores, 0 bytes spill loads", None),
    ("4 bytes spill stores, 4 bytes spill loads", None),
    ("8 bytes spill stores, 4 bytes spill loads", "12 bytes of spills, the table's 8"),
    ("(C7512) wgmma is serialized\n0 bytes spill stores", "serialized wgmma (C7512)"),
])
def test_what_the_compiler_may_say(log, reason, tmp_path):
    pytest.importorskip("tilelang")
    from codegen.tune_build import _miscompiled

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "kernel.ptxas.log").write_text(log)
    assert _miscompiled(tmp_path, "one", 8) == "not compiled: no library"
    (tmp_path / "one.so").touch()
    assert _miscompiled(tmp_path, "one", 8) == reason


def test_cases_of_a_target():
    names = {case.name: case for case in tune.cases(BACKWARD)}
    assert {"seed_full", "seed_causal", "mla_8k_full", "mla_8k_causal"} <= names.keys()
    assert all(case.causal == name.endswith("_causal") for name, case in names.items())
    assert all((case.head_dim, case.head_dim_v) == (192, 128) for case in names.values())
    assert {case.causal for case in tune.cases(Target("forward", 64, 64, "full"))} == {False}
    assert all(tune.cases(target) for target in TARGETS)


class FakeProcess:
    """Answers as a library would whose time is a number in its name."""

    def __init__(self, phase, library=None):
        self.name = library and library.rsplit("/", 1)[1].removesuffix(".so")

    def ask(self, case, action, argument):
        if action == "save":
            return None
        if action == "check":
            return float("nan") if "wrong" in self.name else 0.0
        if "hung" in self.name:
            raise tune_time.Failed("no answer for 60 s")
        return [float(self.name.split("_")[0])] * 3

    def end(self):
        pass


def measured(folder, monkeypatch, table, *others):
    names = (table, *others)
    (folder / "candidates.json").write_text(json.dumps({
        "nvcc": "13", "tilelang": "0", "table": table, "candidates": {name: {"family": name} for name in names},
        "dropped": {"9_spilled": "8 bytes of spills"}}))
    monkeypatch.setattr(tune_time, "Process", FakeProcess)
    return tune_time.measure("backward", tune.cases(BACKWARD), folder)


def test_the_fastest_right_one_wins(tmp_path, monkeypatch):
    slow = [f"{3 + i}_slow" for i in range(tune_time.SCREENED_AT_ONCE)]
    record = measured(tmp_path, monkeypatch, "2_table", *slow, "1_wrong", "1_hung", "1.5_fast")
    assert record["settings"] == {"family": "1.5_fast"} and not record["confirms_the_table"]
    assert record["times_the_table"] == pytest.approx(0.75)
    assert record["cases"]["seed_full"]["ms"] == 1.5 and record["cases"]["seed_full"]["table_ms"] == 2
    flops = 2 * 8 * 32 * 1024**2 * (3 * 192 + 2 * 128)
    assert record["cases"]["seed_full"]["tflops"] == pytest.approx(flops / 1.5e-3 * 1e-12)
    assert set(record["screened"]) == {*slow, "1.5_fast"}
    assert set(record["finalists"]) == {"2_table", "1.5_fast", *slow[: tune_time.FINALISTS - 1]}
    assert set(record["dropped"]) == {"9_spilled", "1_wrong", "1_hung"}
    assert "off the values" in record["dropped"]["1_wrong"] and "no answer" in record["dropped"]["1_hung"]


def test_the_table_stays_where_the_difference_is_noise(tmp_path, monkeypatch):
    record = measured(tmp_path, monkeypatch, "2_table", "1.99_fast")
    assert record["confirms_the_table"] and record["times_the_table"] == 1


def test_process_loads_its_own_library(tmp_path):
    """A copy of the package's: where that could not be loaded beside it, the process would have died, not found no GPU."""
    if compiled is None:
        pytest.skip("nothing was built")
    if tune_time.torch.cuda.is_available():
        pytest.skip("what it answers here is what it answers without a GPU")
    library = tmp_path / "candidate.so"
    shutil.copyfile(gqa_attn._library.PATH, library)
    process = tune_time.Process("fwd", str(library))
    with pytest.raises(tune_time.Failed, match="CUDA"):
        process.ask(tune.cases(BACKWARD)[0], "check", "nowhere")
    process.end()
    with pytest.raises(tune_time.Failed, match="its process died"):
        process.ask(tune.cases(BACKWARD)[0], "check", "nowhere")


def test_no_such_kernel(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune", "--phase", "backward", "--head-dims", "80x80"])
    with pytest.raises(SystemExit):
        tune.parse_arguments()
    assert "backward_192x128_general" in capsys.readouterr().err


def test_table_has_the_winners():
    """benchmarks/results/tune.json is written by the tuner alone; the table follows it."""
    records = json.loads(tune.RESULTS.read_text()) if tune.RESULTS.exists() else {}
    targets = {target.name: target for target in TARGETS}
    for name, record in records.items():
        assert settings(targets[name].kernel()) == record["settings"], name
