// Which rows a tile of the backward's workspace belongs to, for the kernels that go over all of them.
#pragma once

#include "sequences.cuh"

namespace gqa_attn::device {

// The sequence that tile `tile` of such a workspace belongs to.
__device__ __forceinline__ int sequence_of_tile(const int* begins, int sequences, int tile_rows, int tile) {
  int low = 0, high = sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(begins[middle], middle, tile_rows) <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

// {batch, begin, length, tile} of workspace tile `at`: the rows of its sequence, and which of its tiles it is (there may be one
// too many for the length). Of a batch of equal lengths, every `batch` has its own workspace.
__device__ __forceinline__ void find_tile(int* found, int at, int batch, int seqlen, const int* begins, const int* ends,
                                          int sequences, int tile_rows) {
  if (sequences == 0) {
    found[0] = batch, found[1] = 0, found[2] = seqlen, found[3] = at;
    return;
  }
  const int s = sequence_of_tile(begins, sequences, tile_rows, at);
  const int begin = begins[s], tile = at - first_tile(begin, s, tile_rows);
  found[0] = 0, found[1] = begin, found[2] = tile < 0 ? 0 : ends[s] - begin,
  found[3] = max(tile, 0);  // < 0: before all sequences
}

}  // namespace gqa_attn::device
