"""The build and what it makes: the wheel and its limits, the sdist, and what an isolated build is told."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from build_tools import native, toolchain

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("tilelang", reason="a build environment is needed")

# Of libtorch's stable C interface, as target 2.10 has it. A new name here needs a look at the first torch that has it.
TORCH_SYMBOLS = re.compile(
    r"aoti_torch_(abi_version|aten_narrow|aten_zero_|copy_|create_device_guard|delete_device_guard|delete_library_object"
    r"|delete_tensor_object|device_type_\w+|dtype_\w+|empty_strided|get_data_ptr|get_device_index|get_device_type|get_dim"
    r"|get_dtype|get_sizes?|get_strides?|is_contiguous|is_defined|library_def|library_init_def|library_init_impl"
    r"|new_tensor_handle|get_current_cuda_stream)|torch_call_dispatcher|torch_library_impl")
# Debian 12, Ubuntu 22.04, RHEL 9: manylinux_2_34.
NEWEST = {"GLIBC": Version("2.34"), "GLIBCXX": Version("3.4.29"), "CXXABI": Version("1.3.13")}


def run(*command, **kwargs):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def libraries(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder / "gqa_attn" / native.LIBRARY, folder / "gqa_attn" / native.MODULE


def distributions(*names):
    """The installed distributions of these names and of what they require."""
    found, wanted = {}, list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        requirements = map(Requirement, found[name].requires or ())
        wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found.values()


def bare_environment(folder, *names):
    """A new virtual environment in which only these installed packages, and what they require, can be imported."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    for distribution in distributions(*names):
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return python, packages


def test_wheel_holds_compiled_kernels_only(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python" / "gqa_attn").rglob("*.py")}
    assert names == sources | {"gqa_attn/py.typed", f"gqa_attn/{native.LIBRARY}", f"gqa_attn/{native.MODULE}"}
    assert wheel.stat().st_size < 40e6


def test_fresh_environment(wheel, tmp_path):
    """The wheel with torch alone: no tilelang, no nvcc, no process, no CUDA context at import; the kernel table is there."""
    python, packages = bare_environment(tmp_path / "venv", "torch", "numpy")
    zipfile.ZipFile(wheel).extractall(packages)
    program = """
import sys, importlib.util, time
import torch
processes = []
starts = ("subprocess.Popen", "os.posix_spawn", "os.fork")
sys.addaudithook(lambda event, _: processes.append(event) if event in starts else None)
assert importlib.util.find_spec("tilelang") is None and importlib.util.find_spec("pybind11") is None
before = time.process_time()
import gqa_attn
seconds = time.process_time() - before
from gqa_attn import _C
assert _C.kernels(), _C.build_info()
assert gqa_attn.__version__ == _C.build_info()["version"]
assert not torch.cuda.is_initialized()
q, k = torch.ones(1, 3, 4, 8, dtype=torch.float64), torch.ones(1, 5, 2, 8, dtype=torch.float64)
assert torch.equal(gqa_attn.attention(q, k, k, causal=True), q)
assert not processes, processes
assert seconds < 0.3, seconds
print(len(_C.kernels()))
"""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    printed = run(python, "-c", program, env=environment, cwd=tmp_path)
    assert int(printed) == len(list(native.GENERATED.glob("*.cu")))


def test_module_imports_before_or_after_the_ops(wheel, tmp_path):
    """gqa_attn._C and torch.ops.load_library name one library: neither order loads it twice."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    load = "import torch; torch.ops.load_library('gqa_attn/libgqa_attn.so')"
    for program in (f"{load}; import gqa_attn._C; {load}", f"import torch, gqa_attn._C; {load}"):
        run(sys.executable, "-c", f"{program}; torch.ops.gqa_attn.fwd.default", cwd=tmp_path)


def test_torch_symbols(libraries):
    """The ops need nothing but the stable interface, and torch's CUDA part only where there is one."""
    lines = [line.split() for line in run("nm", "-D", "--undefined-only", libraries[0]).splitlines()]
    needed = {name: kind for kind, name in lines if "@" not in name}
    torch_names = {name for name in needed if "torch" in name}
    assert {name for name in torch_names if not TORCH_SYMBOLS.fullmatch(name)} == set()
    assert needed["aoti_torch_get_current_cuda_stream"] == "w"
    assert {name for name in needed if re.match(r"cuda?[A-Z]|Py|_Py|_ZN2at|_ZN3c10|_ZN5torch", name)} == set()
    assert "[libtorch.so]" in run("readelf", "-d", libraries[0])
    assert "torch" not in run("nm", "-D", "--undefined-only", libraries[1])


def test_exported_symbols(libraries):
    exported = run("nm", "-D", "-C", "--defined-only", libraries[0]).splitlines()
    assert sorted(line.split(maxsplit=2)[2].split("(")[0] for line in exported) == [
        "gqa_attn::kernel_table", "gqa_attn::reason[abi:cxx11]", "gqa_attn::select_backward", "gqa_attn::select_forward",
        "gqa_attn::with_padding"]


def test_oldest_system(libraries):
    """B73."""
    for library in libraries:
        for family, version in set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", run("objdump", "-T", library))):
            assert Version(version) <= NEWEST[family], (library.name, family, version)


def test_no_path_of_the_build_machine(libraries):
    for library in libraries:
        content = library.read_bytes()
        for folder in {ROOT, Path(sys.prefix), Path(sysconfig.get_paths()["include"])}:
            assert bytes(folder) not in content


def test_isolated_build_says_what_to_run(tmp_path):
    """B75. What pip asks first in an isolated environment, before it fetches dependencies."""
    python, _ = bare_environment(tmp_path / "venv", "setuptools")
    hook = f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    result = subprocess.run([python, "-c", hook], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert toolchain.INSTALL in result.stderr
    assert "torch, pybind11, ninja, tilelang" in result.stderr


def test_sdist_carries_generated_sources(wheel, tmp_path):
    """So that a wheel can be made from it without lowering a kernel: the fingerprint there is the one codegen left."""
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path)
    (root,) = (path for path in tmp_path.iterdir() if path.is_dir())
    generated = {path.name for path in (root / "csrc" / "generated").iterdir()}
    assert generated == {path.name for path in native.GENERATED.iterdir()}
    assert not [*root.rglob("*.so"), *root.rglob("*.pyc")]
    run(sys.executable, "-c", "from build_tools import native; assert native.is_generated()", cwd=root)


def test_build_of_nothing_new(wheel, tmp_path):
    """A second build compiles nothing."""
    assert "no work to do" in run(sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, cwd=ROOT)


@pytest.mark.parametrize("membership, file, expected", [
    ("0::/job/step", "job/step/memory.max", 8 << 30),
    ("0::/job/step", "job/memory.max", 8 << 30),  # a parent's limit
    ("4:memory:/outside\n0::/", "memory/memory.limit_in_bytes", 8 << 30),  # version 1, the container's own mount
    ("0::/", "memory.max", 8 << 30),
])
def test_memory_limit(tmp_path, membership, file, expected):
    """B77: the least limit of the process's cgroups."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"{expected}\n")
    (tmp_path / "membership").write_text(membership + "\n")
    assert toolchain.memory_limit(tmp_path, tmp_path / "membership") == expected
    (tmp_path / file).write_text("max\n" if "max" in file else f"{2**63 - 4096}\n")
    assert toolchain.memory_limit(tmp_path, tmp_path / "membership") > 0


def test_jobs(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(toolchain, "memory_limit", lambda: 8 << 30)
    assert toolchain.jobs() == 8
    monkeypatch.setattr(toolchain, "memory_limit", lambda: 1 << 29)
    assert toolchain.jobs() == 1
    monkeypatch.setenv("MAX_JOBS", "7")
    assert toolchain.jobs() == 7


def test_missing_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=f"no nvcc in CUDA_HOME={tmp_path}.*pip install --group toolchain"):
        toolchain.find_cuda()
