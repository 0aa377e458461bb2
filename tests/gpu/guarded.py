"""sanitize.py with no mapped memory around any tensor, so that any access beyond one is an error:

    python tests/gpu/guarded.py first|last

Every tensor gets pages of its own amid addresses that nothing is mapped to, and stands on the first or the last bytes of them.
That finds what compute-sanitizer does not look at: the tensor memory accelerator's own loads and stores.
"""
import ctypes
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import sanitize
import torch

GUARD = 64 << 20  # bytes without memory before and behind
ALIGNMENT = 16  # of a tensor on the last bytes
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_..., CU_MEM_LOCATION_TYPE_..., CU_MEM_ACCESS_FLAGS_...


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", Location), ("metadata", c_void_p), ("flags", c_uint64)]


class Access(ctypes.Structure):
    """CUmemAccessDesc"""
    _fields_ = [("location", Location), ("flags", c_int)]


_KEPT = []  # the callbacks: torch calls them until the process ends


class GuardedMemory:
    """An allocator for torch, by the driver's virtual memory. Not fast: it synchronises before it frees."""

    def __init__(self, last: bool):
        self.last = last
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.blocks = {}  # address of a tensor -> (start and bytes of its pages, their handle)

    def call(self, name: str, *args) -> None:
        if code := getattr(self.driver, name)(*args):
            raise RuntimeError(f"{name} returned {code}")

    def allocate(self, size, device, stream):
        properties = AllocationProperties(type=PINNED, location=Location(DEVICE, device))
        page = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(page), byref(properties), c_int(0))
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        mapped = -(-size // page.value) * page.value
        reserved, handle = c_uint64(), c_uint64()
        self.call("cuMemAddressReserve", byref(reserved), c_size_t(mapped + 2 * GUARD), c_size_t(0), c_uint64(0), c_uint64(0))
        start = reserved.value + GUARD
        self.call("cuMemCreate", byref(handle), c_size_t(mapped), byref(properties), c_uint64(0))
        self.call("cuMemMap", c_uint64(start), c_size_t(mapped), c_size_t(0), handle, c_uint64(0))
        access = Access(Location(DEVICE, device), READ_WRITE)
        self.call("cuMemSetAccess", c_uint64(start), c_size_t(mapped), byref(access), c_size_t(1))
        address = start + mapped - size if self.last else start
        self.blocks[address] = start, mapped, handle
        return address

    def free(self, address, size, device, stream):
        start, mapped, handle = self.blocks.pop(address)
        if self.driver.cuCtxSynchronize():
            return  # the context is lost, and its memory with it
        self.call("cuMemUnmap", c_uint64(start), c_size_t(mapped))
        self.call("cuMemRelease", handle)
        self.call("cuMemAddressFree", c_uint64(start - GUARD), c_size_t(mapped + 2 * GUARD))

    def use(self) -> None:
        """From now on for all CUDA tensors of this process, which must not have any yet."""
        callbacks = (ctypes.CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)(self.allocate),
                     ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)(self.free))
        addresses = [ctypes.cast(callback, c_void_p).value for callback in callbacks]
        _KEPT.append(callbacks)
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(torch._C._cuda_customAllocator(*addresses)))


if __name__ == "__main__":
    GuardedMemory(last={"first": False, "last": True}[sys.argv[1]]).use()
    sanitize.main()
