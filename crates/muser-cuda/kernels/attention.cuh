// The tiles of attention: which rows of which sequence, which blocks they see, where results go. Written by step_data.rs.
#pragma once
#include "common.cuh"

struct Tile {
  u32 row, count;        // first row and tokens (at most 16 / group)
  u32 pos;               // of the first token
  u32 table;             // index of first_block's entry in `tables`
  u32 first_block, blocks;
  u32 part;              // first partial result; KV head j's come after blocks * j (split) or j (many)
  u32 parts;             // partial results per KV head
};

DEVICE Tile load_tile(const Tile* t) {
  const u32* w = (const u32*)t;
  return {__ldcg(w), __ldcg(w + 1), __ldcg(w + 2), __ldcg(w + 3), __ldcg(w + 4), __ldcg(w + 5), __ldcg(w + 6), __ldcg(w + 7)};
}

// Number of the tile of partial result `part`: the last one whose first partial result is not beyond it. For a whole warp;
// `first_part` gives a tile's.
template <class F> DEVICE u32 find_tile(F first_part, u32 count, u32 part, int lane) {
  u32 index = 0;
  for (u32 base = 0; base < count; base += 32) {
    const bool before = base + lane < count && first_part(base + lane) <= part;
    index += __popc(__ballot_sync(~0u, before));
  }
  return index - 1;
}
