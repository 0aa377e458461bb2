"""What the compiler made of each kernel: ptxas's reports in build/native, and the machine code in the library."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from build_tools.native import BUILD, LIBRARY

_C = pytest.importorskip("gqa_attn")._library.compiled
if _C is None or not BUILD.exists():
    pytest.skip("nothing was built in this checkout", allow_module_level=True)

KERNELS = {kernel["name"]: kernel for kernel in _C.kernels()}
MAIN = [name for name, kernel in KERNELS.items() if kernel["phase"] in ("forward", "backward")]
# Kernel, less dtype and softcap -> bytes of spill stores and loads together, at most. Reasons: docs/kernels.md.
SPILLS_ALLOWED = {
    "backward_sm90_d192x128": 84,
}

SM90_REGISTERS = 65536  # of a multiprocessor; a thread's come in steps of 8
SM90_SHARED_MEMORY = 232448  # bytes that a block may have


def without_variant(name):
    return re.sub("_(fp16|bf16|softcap)", "", name)


def cuobjdump():
    """From PATH or the pip package nvidia-cuda-cuobjdump."""
    if found := shutil.which("cuobjdump"):
        return found
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for tool in Path(folder).glob("cu*/bin/cuobjdump"):
            return tool
    pytest.fail("no cuobjdump: pip install --group test")


@pytest.fixture(scope="module")
def opcodes():
    """Kernel name -> the opcodes of its machine code, without modifiers: {"HGMMA", "UTMALDG", ...}."""
    library = Path(_C.__file__).with_name(LIBRARY)
    listing = subprocess.Popen([cuobjdump(), "--dump-sass", library], stdout=subprocess.PIPE, text=True)
    result, function = defaultdict(set), None
    for line in listing.stdout:
        if "Function :" in line:
            function = line.split(":")[1].strip()
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", line):
            result[function].add(instruction[1])
    assert listing.wait() == 0
    return result


@pytest.fixture(scope="module", params=KERNELS)
def report(request):
    return request.param, (BUILD / f"{request.param}.ptxas.log").read_text()


def test_registers_and_shared_memory(report):
    name, log = report
    kernel = KERNELS[name]
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    static = sum(map(int, re.findall(r"(\d+) bytes smem", log)))
    assert -(-registers // 8) * 8 * kernel["threads"] <= SM90_REGISTERS
    assert static + kernel["smem_bytes"] <= SM90_SHARED_MEMORY


def test_no_spills(report):
    name, log = report
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    assert "bytes spill" in log
    assert spilled <= SPILLS_ALLOWED.get(without_variant(name), 0)


def test_wgmma_not_serialized(report):
    """ptxas warns with C7510 to C7519 where it makes wgmma wait after each step, which costs a third of the speed."""
    name, log = report
    assert not re.findall(r"^.*\bC75\d\d\b.*$", log, re.M)


def test_allowed_spills_are_of_kernels():
    if not os.environ.get("GQA_ATTN_KERNELS"):
        assert SPILLS_ALLOWED.keys() <= set(map(without_variant, KERNELS))


def test_library_holds_exactly_the_table(opcodes):
    """And the kernels of csrc/sequences.cu, which know no tiles."""
    assert {name for name in opcodes if not name.startswith("_Z")} == set(KERNELS)
    assert sum(name.startswith("_Z") for name in opcodes) == 5


@pytest.mark.parametrize("name", MAIN)
def test_tensor_cores_and_tma(name, opcodes):
    """Main kernels multiply by wgmma (HGMMA) and load by TMA (UTMALDG)."""
    assert {"HGMMA", "UTMALDG"} <= opcodes[name]
