// Addresses of a piece: tiles of pages in paged KV, and segments of chunk payload in a staging slot
// or a frame.
//
// A tile is up to kTileBytes of one page, and a warp moves one tile at a time. The tile table has
// the tiles of one block in payload order, for all planes; other blocks are at multiples of the
// stride. A segment is a run of tiles of one chunk. All 64-bit address arithmetic of the kernels is
// here. python/kvloft/transfer/cuda/kernels.py mirrors the structs and compares their sizes. Must
// not depend on layers or streams, or on dtypes other than bf16.
#pragma once
#include "tag.cuh"

namespace kvloft {

constexpr int kWarpSize = 32;
constexpr int kCtaThreads = 512;
constexpr u32 kTileBytes = 4096;
constexpr int kMaxSegments = 128;
constexpr int kMaxBlocks = 1024;

// One tile of a block: `num_bytes` at `base + block_id * block_stride` and at `payload_offset` of
// the block's payload.
struct Tile {
  u64 base;
  u64 block_stride;
  u32 payload_offset;
  unsigned short num_bytes;
  unsigned short is_bf16;  // its 16-bit words have an 8-bit exponent that e348 can encode
  u32 plane;
  u32 first_word;  // offset of the tile in its page, in 8 bytes
};
static_assert(sizeof(Tile) == 32, "mirrored in kernels.py");

// Tiles [chunk_tile, chunk_tile + n) of one chunk; the next segment's first_tile determines n.
struct Segment {
  // Offset of the chunk's payload from PieceParams' base, even if the segment starts later.
  u64 base;
  u32 first_tile;   // number of its first tile in the piece
  u32 chunk_tile;   // number of its first tile in the chunk
  int block_index;  // block_ids[block_index + i] is the paged block of the chunk's block i
  u32 reserved;
};
static_assert(sizeof(Segment) == 24, "mirrored in kernels.py");

// Address of an encoded part in host memory, for the kernels of e348.cu; one per segment.
struct Part {
  u64 address;  // of its first byte, in registered memory; 0: not accessible (loads only)
  u32 width;    // bytes that the copy engine moves; later records are accessed in place
  u32 is_raw;   // its payload is not encoded (loads only)
};
static_assert(sizeof(Part) == 16, "mirrored in kernels.py");

struct PieceParams {
  const Tile* tiles;  // [tiles_per_block]
  u64* sums;          // [kMaxSegments]; zero between launches
  u32* num_done;      // number of CTAs that have added their sums; zero between launches
  u64* tags_out;      // [num_segments]: the final sums; may be host memory
  u64 block_bytes;    // payload of one block
  u64 base;           // address of a slot or of the frames, to which segments' bases are added
  // For e348.cu: [kMaxSegments] sizes of records in 16 bytes, zero between launches; [num_segments]
  // the final sizes, maybe in host memory (null for other kernels); bytes of a part before its
  // trailer.
  u32* num_used;
  u64* used_out;
  u64 part_room;
  u32 tiles_per_block;
  u32 num_planes;
  u32 num_tiles;
  u32 num_segments;
  Segment segments[kMaxSegments];
  int block_ids[kMaxBlocks];  // < 0: read and tag the payload without writing pages
  Part parts[kMaxSegments];
};
static_assert(sizeof(PieceParams) == 88 + (24 + 16) * kMaxSegments + 4 * kMaxBlocks,
              "mirrored in kernels.py");

// Returns the segment of tile `tile` of the piece.
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
