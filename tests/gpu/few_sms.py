"""A kernel that leaves only a few SMs to others, for blocks that must not wait for blocks that cannot start."""
import functools
import time
from unittest import mock

import torch
from calls import poison, step
from problems import Inputs
from reference import Results

SPIN = """
extern "C" __global__ void spin(int* arrived, volatile int* stop) {
  if (threadIdx.x) return;
  atomicAdd(arrived, 1);
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (!*stop && now - begin < 10000000000ll);
}
"""
SPIN_SMEM = 200 << 10  # bytes: no other block that needs much shared memory fits beside it


@functools.cache
def spin_kernel():
    with mock.patch("torch.utils.cpp_extension.include_paths", return_value=[]):  # asks for a toolkit; SPIN includes nothing
        kernel = torch.cuda._compile_kernel(SPIN, "spin")  # by NVRTC, which comes with torch
    kernel.set_shared_memory_config(SPIN_SMEM)
    return kernel


def hold_all_sms_but(free: int):
    """Takes the shared memory of the SMs from a stream of its own. Returns the function that ends it; ten seconds do, too."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count - free
    arrived, stop = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    spin_kernel()(grid=(blocks, 1, 1), block=(32, 1, 1), args=[arrived, stop], shared_mem=SPIN_SMEM, stream=torch.cuda.Stream())
    beside = torch.cuda.Stream()

    def release():
        with torch.cuda.stream(beside):
            stop.fill_(1)
        torch.cuda.synchronize()

    limit = time.monotonic() + 5
    with torch.cuda.stream(beside):
        while arrived.item() < blocks:
            assert time.monotonic() < limit, "the spinning blocks do not get onto the GPU"
    return release


def step_on_few_sms(x: Inputs, free_sms: int) -> Results:
    """Results of a step whose blocks come a few at a time; AssertionError where it waits for the SMs that are taken."""
    step(x)  # to load a kernel may wait for those that run
    poison()
    release = hold_all_sms_but(free_sms)
    try:
        got = step(x)
        done = torch.cuda.current_stream().record_event()
        limit = time.monotonic() + 5
        while not done.query():
            assert time.monotonic() < limit, "not finished while another kernel holds the other SMs"
    finally:
        release()
    return got
