// Problem -> kernels: a pure function over printable structs.
#pragma once

#include <string>

#include "kernels.h"

namespace gqa_attn {

struct Selection {
  const Kernel* main = nullptr;
  const Kernel* prepare = nullptr;  // backward only, as the three below
  const Kernel* finish_dq = nullptr;
  const Kernel* finish_dk = nullptr;  // where several blocks share a kv tile
  const Kernel* finish_dv = nullptr;
  int tile_heads = 1;             // forward: query heads of a group in a tile, each with its part of the tile's rows
  int head_tiles = 1;             // tiles for the same rows of all heads
  int64_t section = 1;            // head tiles walked together
  int64_t together_keys = 0;      // the same of packed sequences: all heads of one of that many keys, else a group's
  int splits = 1;                 // blocks that share the keys of a query tile; backward: a kv tile, each for some query heads
  int parts = 1;                  // backward: float32 buffers for dK and dV of a kv tile, where several blocks share it: one that
                                  // all add to, or, deterministic, one for each
  ItemOrder order = kHeadByHead;  // backward
  int64_t workspace_bytes = 0;
};

// The problem with head dims that its kernels can take. TMA fills columns behind the head dim with zeros, but looks up the map's
// start for a box of them, which need not be memory where sequences are packed (device/sequences.cuh): such a head dim is padded,
// by a copy, to the kernel's. `phase` is forward or backward; throws as selection does.
Problem with_padding(Problem problem, Phase phase);

// Throws std::runtime_error with required, supported and missing where this build has no kernel.
Selection select_forward(const Problem& problem);
Selection select_backward(const Problem& problem);

// Why, in one line, for explain.
std::string reason(const Problem& problem, const Selection& selection);

}  // namespace gqa_attn
