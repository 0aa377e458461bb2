// Where the rows of a sequence stand: in a batch of equal lengths, or packed one after the other (cu_seqlens).
//
// Packed, sequence s has the rows begins[s] ... ends[s] - 1 of all tokens. csrc/sequences.cu writes both arrays, in order and in
// bounds whatever cu_seqlens holds; query rows that see no key, and keys of a sequence without queries, are cut off. TMA fills
// and clips tiles at a sequence's end by the shape of the tensor map alone: it sees a token at [outer, inner] with outer + inner
// - kRaggedRows = token and inner < kRaggedRows, so that a tile whose n-th row is the last of its sequence is taken at inner =
// kRaggedRows - n. A box that lies wholly outside in any dim must not be asked for: TMA then looks up the map's start (seen on an
// H200), which may not be memory, being kRaggedRows before the tensor. So no tile starts behind its sequence, and head dims that
// leave a box of columns empty are padded (with_padding of select.h).
#pragma once

#include "common.cuh"
#include "problem.h"

namespace gqa_attn::device {

__device__ __forceinline__ int tile_outer(bool packed, int batch, int begin, int length, int row) {
  return packed ? begin + min(row + kRaggedRows, length) : batch;
}

__device__ __forceinline__ int tile_inner(bool packed, int length, int row) {
  return packed ? kRaggedRows - max(min(length - row, kRaggedRows), 0) : row;
}

// Packed workspaces are padded to whole tiles per sequence: those of sequence s start at this tile. It needs no sum over lengths,
// and no two sequences meet.
__device__ __forceinline__ int first_tile(int begin, int sequence, int tile_rows) { return divide(begin, tile_rows) + sequence; }

}  // namespace gqa_attn::device
