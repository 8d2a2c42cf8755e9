// Structs that describe a piece: tiles of pages in paged KV, and segments of chunk payloads in a
// staging slot.
//
// A tile is up to kTileBytes of one page; a warp copies one tile at a time. The tile table lists
// the tiles of one block, across all planes, in payload order. In block b, a tile's address is its
// base plus b times its stride. A segment is a run of tiles from one chunk.
// python/kvloft/transfer/cuda/kernels.py mirrors the structs and checks their sizes.
#pragma once
#include "tag.cuh"

namespace kvloft {

constexpr int kWarpSize = 32;
constexpr int kCtaThreads = 512;
constexpr u32 kTileBytes = 4096;
constexpr int kMaxSegments = 128;
constexpr int kMaxBlocks = 1024;

// One tile of a block: `num_bytes` bytes at `base + block_id * block_stride` in paged KV, and at
// `payload_offset` in the block's payload.
struct Tile {
  u64 base;
  u64 block_stride;
  u32 payload_offset;
  unsigned short num_bytes;
  unsigned short is_bf16;  // nonzero if e348 can encode the tile
  u32 plane;
  u32 first_word;  // offset of the tile in its page, in 8-byte words
};
static_assert(sizeof(Tile) == 32, "mirrored in kernels.py");

// A segment covers tiles [chunk_tile, chunk_tile + n) of one chunk. The next segment's first_tile
// determines n.
struct Segment {
  // Offset of the chunk's payload from PieceParams::base, even if the segment starts in the middle
  // of the chunk.
  u64 base;
  u32 first_tile;   // index of the first tile in the piece
  u32 chunk_tile;   // index of the first tile in the chunk
  int block_index;  // block_ids[block_index + i] is the paged block of the chunk's block i
  u32 reserved;
};
static_assert(sizeof(Segment) == 24, "mirrored in kernels.py");

// An encoded part in host memory, used by the kernels in e348.cu. Each segment has one part.
struct Part {
  u64 address;  // start of the part in registered memory; 0 if the GPU has no access (loads only)
  u32 width;    // bytes copied by the copy engine; kernels access later records in place
  u32 is_raw;   // nonzero if the payload is not encoded (loads only)
};
static_assert(sizeof(Part) == 16, "mirrored in kernels.py");

struct PieceParams {
  const Tile* tiles;  // [tiles_per_block]
  u64* sums;          // [kMaxSegments]; zero between launches
  u32* num_done;      // number of CTAs that have added their sums; zero between launches
  u64* tags_out;      // [num_segments]: final sums, in device or host memory
  u64 block_bytes;    // payload size of one block
  u64 base;           // address of the slot; segment bases are relative to it
  // Only e348.cu uses the next three fields. Record sizes are in units of 16 bytes.
  u32* num_used;  // [kMaxSegments]: total record size so far; zero between launches
  u64* used_out;  // [num_segments]: final sizes, in device or host memory; null for other kernels
  u64 part_room;  // part size in bytes, excluding the trailer
  u32 tiles_per_block;
  u32 num_planes;
  u32 num_tiles;
  u32 num_segments;
  Segment segments[kMaxSegments];
  int block_ids[kMaxBlocks];  // if negative, only compute the tag of the payload; write no pages
  Part parts[kMaxSegments];
};
static_assert(sizeof(PieceParams) == 88 + (24 + 16) * kMaxSegments + 4 * kMaxBlocks,
              "mirrored in kernels.py");

// Returns the index of the segment that holds tile `tile` of the piece.
__device__ __forceinline__ u32 find_segment(const PieceParams& p, const u32 tile) {
  u32 low = 0;
  u32 high = p.num_segments;
  while (high - low > 1) {
    const u32 mid = (low + high) / 2;
    if (p.segments[mid].first_tile <= tile) low = mid;
    else high = mid;
  }
  return low;
}

}  // namespace kvloft
