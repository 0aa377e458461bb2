"""Importing the package: fast, without CUDA, compilers or processes; the compiled library missing, broken or there already."""

import shutil
from pathlib import Path

import gqa_attn
import pytest
from cpu import in_new_process
from gqa_attn import _library

PACKAGE = Path(gqa_attn.__file__).parent

STEP = """
    import torch, gqa_attn
    q, k, v = (torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    for options in ({}, {"causal": True, "window": (3, 0), "softcap": 2.0, "deterministic": True}):
        gqa_attn.attention(q, k, v, **options).sum().backward()
    gqa_attn.attention_varlen(q[0], k[0], v[0], torch.tensor([0, 4, 9], dtype=torch.int32)).sum().backward()
    gqa_attn.explain(q, k, v)
    gqa_attn.explain(*(t.to("meta", torch.float16) for t in (q, k, v)))
    assert all(t.grad.isfinite().all() for t in (q, k, v))
"""


def test_import_takes_under_300_ms_on_top_of_torch_and_leaves_cuda_alone():
    """Processor time, since a busy machine must not fail this; the best of three."""
    code = """
        import time, torch
        start = time.process_time()
        import gqa_attn
        print(time.process_time() - start)
        assert not torch.cuda.is_initialized()
    """
    assert min(float(in_new_process(code)) for _ in range(3)) < 0.3


def test_no_compiler_is_imported_and_no_process_started():
    """Imports are refused and events recorded from after `import torch` on; waited-for children would show in the usage too."""
    before = """
        import resource, sys, torch

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                assert name.split(".")[0] not in ("tilelang", "tvm", "triton", "subprocess", "multiprocessing"), name

        for name in [name for name in sys.modules if name.split(".")[0] in ("tilelang", "tvm", "triton")]:
            del sys.modules[name]
        sys.meta_path.insert(0, Refuse())
        started = []
        processes = "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"
        sys.addaudithook(lambda event, args: started.append(event) if event in processes else None)
    """
    after = """
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert not started and usage.ru_minflt == 0, (started, usage)
        print("done")
    """
    assert in_new_process(before, STEP, after) == "done\n"


@pytest.fixture
def python_files(tmp_path):
    """A copy of the package without its compiled parts, alone in a folder."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "gqa_attn", ignore=shutil.ignore_patterns("*.so", "__pycache__")))


LOAD = f"import torch; torch.ops.load_library({str(_library.PATH)!r})"

INFO = """
    import json
    from gqa_attn._info import collect
    print(json.dumps(collect()["missing"]))
"""


@pytest.mark.parametrize("content, said", [(None, "it was not built"), (b"no library" * 100, "invalid ELF header"),
                                           (b"", "file too short")])
def test_without_a_library_that_loads(python_files, content, said):
    if content is not None:
        (python_files / _library.PATH.name).write_bytes(content)
    printed = in_new_process(STEP, INFO, package_parent=python_files.parent)
    assert said in printed and "not imported: it needs libgqa_attn.so" in printed
    refused = """
        import torch, gqa_attn
        from gqa_attn._library import problems
        # No GPU is needed to ask which kernel the dispatcher has for CUDA.
        kernel = torch.library.get_kernel("gqa_attn::fwd", "CUDA")
        try:
            kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *(torch.zeros(1, 1, 1, 1) for _ in "qkv"))
        except NotImplementedError as error:
            print(error)
    """
    assert "gqa_attn has no CUDA kernels here" in in_new_process(refused, package_parent=python_files.parent)


@pytest.mark.skipif(bool(_library.problems), reason=f"the compiled parts are not all there: {_library.problems}")
class TestWithLibrary:
    def test_the_module_missing_alone(self, python_files):
        shutil.copy(_library.PATH, python_files)
        printed = in_new_process(STEP, INFO, package_parent=python_files.parent)
        assert '"_C": ' in printed and "libgqa_attn.so" not in printed

    def test_another_copy_is_loaded_already(self, python_files):
        """Two libraries that define one namespace abort the process."""
        for compiled in PACKAGE.glob("*.so"):
            shutil.copy(compiled, python_files)
        assert "come from another library" in in_new_process(LOAD, STEP, INFO, package_parent=python_files.parent)

    def test_the_same_library_is_loaded_already(self):
        assert '"_C"' not in in_new_process(LOAD, STEP, INFO)

    def test_the_ops_alone_work_without_the_package(self):
        assert in_new_process(LOAD, "print(torch.ops.gqa_attn.fwd.default)") == "gqa_attn.fwd.default\n"


def test_flop_formulas_come_with_the_counter():
    """Importing torch's counter imports triton, so gqa_attn does not."""
    counted = """
        import gqa_attn
        from torch.utils.flop_counter import flop_registry
        print(sum(op in flop_registry for op in (torch.ops.gqa_attn.fwd, torch.ops.gqa_attn.bwd)))
    """
    assert in_new_process("import torch", counted) == "0\n"
    assert in_new_process("import torch, torch.utils.flop_counter", counted) == "2\n"


def test_type_hints_are_shipped():
    assert (PACKAGE / "py.typed").exists()
    assert {"q", "k", "v", "window", "return"} <= set(gqa_attn.explain.__annotations__)
