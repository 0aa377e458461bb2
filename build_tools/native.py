"""Builds libgqa_attn.so and gqa_attn._C with ninja, in build/native: what setup.py and its build_ext --inplace call.

Objects, dependencies and ptxas's report of each kernel (<kernel>.ptxas.log) stay there, so that only what changed is rebuilt.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from shlex import quote

from .toolchain import ROOT, find_cuda, jobs, require_build_packages, tilelang_pin

GENERATED = ROOT / "csrc" / "generated"
BUILD = ROOT / "build" / "native"
LIBRARY = "libgqa_attn.so"
EXPORTS = ROOT / "csrc" / "exports.map"
MODULE = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
_STAMP = GENERATED / "generated_from"


def build(destination):
    """Brings csrc/generated and both libraries up to date and puts the libraries into `destination`."""
    require_build_packages()
    generate()
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "build.ninja").write_text(_ninja_file())
    if subprocess.run([sys.executable, "-m", "ninja", "-C", BUILD, f"-j{jobs()}"]).returncode:
        raise SystemExit("gqa_attn: the build failed; the compiler's messages stand above")
    for name in (LIBRARY, MODULE):
        _replace(BUILD / name, Path(destination) / name)


def generate():
    """Runs `python -m codegen` unless csrc/generated is what it would write, by a fingerprint kept there.

    Codegen takes seconds per kernel. An sdist carries csrc/generated with that fingerprint: a wheel from it lowers nothing.
    """
    if is_generated():
        return
    require_build_packages()
    subprocess.run([sys.executable, "-m", "codegen"], cwd=ROOT, check=True)


def mark_generated():
    """Says that csrc/generated is what codegen wrote from the files as they are now."""
    _STAMP.write_text(_fingerprint())


def is_generated():
    return _STAMP.exists() and _STAMP.read_text() == _fingerprint()


def _fingerprint():
    """Of everything that codegen's result depends on, and of what stands in csrc/generated."""
    codegen = (path for path in ROOT.glob("codegen/**/*.py") if not path.name.startswith("tune"))
    inputs = [*codegen, ROOT / "python" / "gqa_attn" / "_rules.py",
              *(path for path in GENERATED.glob("*") if path != _STAMP)]
    digest = hashlib.sha256(f"tilelang {tilelang_pin()}, GQA_ATTN_KERNELS={os.environ.get('GQA_ATTN_KERNELS', '')}".encode())
    for path in sorted(inputs):
        digest.update(f"\n{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _replace(source, target):
    """A new file in the target's place: a process that has the old one loaded keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    shutil.copyfile(source, fresh)
    os.replace(fresh, target)


def _ninja_file():
    """Whole commands stand in the file, so that a changed flag or toolkit rebuilds what it concerns."""
    from ninja.ninja_syntax import Writer  # here: setup.py imports this file before it knows that ninja is there

    cuda, pybind11 = find_cuda(), _package("pybind11")
    text = io.StringIO()
    ninja = Writer(text, width=130)
    write_rules(ninja, cuda)
    kernels = sorted(GENERATED.glob("*.cu"))
    write_library(ninja, LIBRARY, [
        *(write_kernel(ninja, source) for source in kernels), *write_common(ninja, kernels),
        *(write_source(ninja, source) for source in sorted(GENERATED.glob("*.cpp")))])

    versions = {"VERSION": _version(), "COMMIT": _commit(), "TORCH": importlib.metadata.version("torch"),
                "TILELANG": importlib.metadata.version("tilelang"), "NVCC": cuda.version}
    write_source(ninja, ROOT / "csrc" / "module.cpp", flags=" ".join((
        "-fvisibility=hidden", *(f"-DGQA_ATTN_{name}='\"{value}\"'" for name, value in versions.items()),
        _flag("-isystem ", pybind11 / "include"), _flag("-isystem ", sysconfig.get_paths()["include"]))))
    # Python's symbols come with the interpreter.
    ninja.build(MODULE, "link", ["module.o", LIBRARY], variables={
        "flags": "-Wl,-rpath,'$$ORIGIN' -Wl,--unresolved-symbols=ignore-all"})
    return text.getvalue()


def write_rules(ninja, cuda):
    cxx = os.environ.get("CXX", "g++")
    torch, tilelang = _package("torch"), _package("tilelang")
    includes = f"{_flag('-I', ROOT / 'csrc')} {_flag('-isystem ', cuda.include)}"
    kernel_includes = " ".join(_flag("-isystem ", folder) for folder in (
        tilelang / "src", tilelang / "3rdparty" / "cutlass" / "include", cuda.include / "cccl"))
    # The prefix maps keep this machine's paths out of the libraries.
    maps = f"{_flag('-ffile-prefix-map=', f'{ROOT}=.')} {_flag('-ffile-prefix-map=', f'{torch.parent}=.')}"
    # libtorch.so is needed by name although no symbol comes from it: through it the weak ones of libtorch_cuda are found.
    library = " ".join((
        f"-Wl,-soname,{LIBRARY} -Wl,--version-script,{quote(str(EXPORTS))}",
        _flag("-L", torch / "lib"), "-Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu",
        _flag("-L", cuda.libraries), "-lcudart_static -ldl -lrt -lpthread",
        "-Wl,--no-undefined -Wl,--unresolved-symbols=ignore-in-shared-libs", _flag("-Wl,-rpath-link,", torch / "lib")))
    ninja.rule("kernel", f"{_flag('', cuda.nvcc)} -ccbin {cxx} -std=c++20 -O3 --use_fast_math --ptxas-options=-v $arch "
               f"{includes} {kernel_includes} -Xcompiler -fPIC "
               "-MD -MF $out.d -c $in -o $out > $log 2>&1 || { cat $log; exit 1; }",
               description="nvcc $in", depfile="$out.d", deps="gcc")
    ninja.rule("cxx", f"{cxx} -std=c++20 -O2 -DNDEBUG -fPIC -Wall -Wextra {maps} {includes} $flags "
               "-MD -MF $out.d -c $in -o $out",
               description="c++ $in", depfile="$out.d", deps="gcc")
    ninja.rule("link", f"{cxx} -shared -Wl,-s $in $flags -o $out", description="link $out")
    ninja.rule("library", f"{cxx} -shared -Wl,-s $in {library} -o $out", description="link $out")


def write_common(ninja, kernels):
    """The objects of csrc itself, which a library has besides its kernels and their table."""
    archs = sorted(set(map(_arch, kernels)))
    torch_flags = f"-DTORCH_TARGET_VERSION=0x020a000000000000 {_flag('-isystem ', _package('torch') / 'include')}"
    for source in sorted((ROOT / "csrc").glob("*.cu")):
        yield write_kernel(ninja, source, archs=archs)
    for source in sorted((ROOT / "csrc").glob("*.cpp")):
        if source.name != "module.cpp":
            yield write_source(ninja, source, flags=torch_flags if source.name == "ops.cpp" else "")  # no other may know torch


def write_library(ninja, library, objects):
    ninja.build(library, "library", objects, implicit=[str(EXPORTS)])


def write_kernel(ninja, source, folder="", archs=None):
    """The object of a CUDA file, in `folder` of the build; beside it, as <name>.ptxas.log, what the compiler said."""
    log = f"{folder}{source.stem}.ptxas.log"
    flags = " ".join(f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs or [_arch(source)])
    target = f"{folder}{source.stem}.o"
    ninja.build(target, "kernel", str(source), implicit_outputs=[log], variables={"arch": flags, "log": log})
    return target


def write_source(ninja, source, folder="", flags=""):
    ninja.build(f"{folder}{source.stem}.o", "cxx", str(source), variables={"flags": flags})
    return f"{folder}{source.stem}.o"


def _arch(kernel):
    return re.search(r"_sm(\d+)", kernel.stem)[1] + "a"  # a: with the instructions that only this architecture has


def _package(name):
    return Path(importlib.util.find_spec(name).origin).parent


def _flag(option, value):
    """For commands in the ninja file; paths in its lists of files are quoted by ninja."""
    return (option + quote(str(value))).replace("$", "$$")


def _version():
    (version,) = re.findall(r'__version__ = "(.*)"', (ROOT / "python" / "gqa_attn" / "_version.py").read_text())
    return version


def _commit():
    """Empty where this is no git checkout."""
    if not (ROOT / ".git").exists():
        return ""
    return subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
