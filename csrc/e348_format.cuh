// Defines the e348 format (docs/design/compression.md): table entries, record layouts and exponent
// codes. Also defines a warp's shared memory for encoding or decoding a tile.
#pragma once
#include "piece.cuh"

namespace kvloft {

constexpr int kRows = kTileBytes / 512;  // a row is 512 bytes, 16 per lane
constexpr int kPairs = kRows / 2;  // a pair is 16 words per lane; the low code bits fit in one u32
constexpr int kLaneStride = 17;    // u32s per lane in shared memory; odd to avoid bank conflicts
constexpr u32 kMaxNibbles = 1728;  // a tile with more nibbles is raw, so 16 warps fit in 48 KiB
constexpr u32 kMaxBytes = 255;
constexpr u32 kRawEntry = 0xfff;
constexpr u32 kLowBits = 0x55555555u;  // lower bit of each bit pair

struct WarpMemory {
  u32 exponents[kWarpSize * kLaneStride];
  u32 nibbles[kMaxNibbles / 8];
};

// A table entry. `offset` is relative to the end of the table, in units of 16 bytes. `top` is the
// largest exponent that has a 3-bit code.
struct Entry {
  u32 offset, top, num_nibbles, num_bytes;
  bool is_raw;

  __device__ __forceinline__ u64 packed() const {
    const u64 high = is_raw ? kRawEntry : num_nibbles << 12 | num_bytes << 24;
    return high << 32 | top << 24 | offset;
  }
  __device__ __forceinline__ static Entry of(const u64 packed) {
    const u32 low = static_cast<u32>(packed);
    const u32 high = static_cast<u32>(packed >> 32);
    return {low & 0xffffffu, low >> 24, high >> 12 & 0xfffu, high >> 24,
            (high & 0xfffu) == kRawEntry};
  }
};

// Offsets of a record's sections, which depend only on the tile size.
struct RecordLayout {
  u32 num_pairs, low_codes, high_codes, nibbles;

  __device__ __forceinline__ explicit RecordLayout(const u32 tile_bytes)
      : num_pairs((tile_bytes + 1023) / 1024),
        low_codes(num_pairs * 512),
        high_codes(num_pairs * 640),
        nibbles(num_pairs * 640 + (num_pairs + 1) / 2 * 128) {}

  __device__ __forceinline__ u32 bytes_at(const u32 num_nibbles) const {
    return nibbles + (num_nibbles + 7) / 8 * 4;
  }
  __device__ __forceinline__ u32 size(const Entry& entry) const {
    return (bytes_at(entry.num_nibbles) + entry.num_bytes + 15) & ~15u;
  }
};

// Addresses of a chunk's table and records, in the slot and in host memory.
struct ChunkAt {
  u8* slot;
  u8* host;
  u32 width;
  u32 table_bytes;

  __device__ __forceinline__ ChunkAt(const PieceParams& p, const u32 segment)
      : slot(reinterpret_cast<u8*>(p.base + p.segments[segment].base)),
        host(reinterpret_cast<u8*>(p.parts[segment].address)),
        width(p.parts[segment].width) {
    const u32 next =
        segment + 1 < p.num_segments ? p.segments[segment + 1].first_tile : p.num_tiles;
    table_bytes = ((next - p.segments[segment].first_tile) * 8 + 15) & ~15u;
  }
};

// Returns the number of the tile's rows that contain words of this lane.
__device__ __forceinline__ int rows_of_lane(const u32 tile_bytes, const u32 lane) {
  return tile_bytes > lane * 16 ? static_cast<int>((tile_bytes - lane * 16 + 511) / 512) : 0;
}

// Returns a mask of the code bits of pair `pair` that belong to this lane and to the tile. The mask
// has 2 bits per word, and a lane has 8 words per row.
__device__ __forceinline__ u32 word_mask(const int num_rows, const int pair) {
  const int in_pair = num_rows - 2 * pair;
  return in_pair >= 2 ? 0xffffffffu : in_pair == 1 ? 0xffffu : 0u;
}

// Rotates each of two 16-bit words left by one bit, so that the high byte is the exponent and the
// low byte is the mantissa and the sign.
__device__ __forceinline__ u32 rotated(const u32 words) {
  return (words << 1 & 0xfffefffeu) | (words >> 15 & 0x00010001u);
}
__device__ __forceinline__ u32 rotated_back(const u32 words) {
  return (words >> 1 & 0x7fff7fffu) | (words << 15 & 0x80008000u);
}

// Returns the nibble that encodes an exponent without a 3-bit code.
__device__ __forceinline__ u32 nibble_of(const u32 exponent, const u32 top) {
  const u32 below = (top - exponent) & 255u;
  if (exponent == 0) return 14;          // zeros and denormals
  if (below >= 251) return 255 - below;  // top + 1 .. top + 5
  return below < 16 ? below - 2 : 15;    // top - 7 .. top - 15; 15 means that a byte follows
}
__device__ __forceinline__ u32 exponent_of(const u32 nibble, const u32 top) {
  return nibble == 14 ? 0 : nibble < 5 ? top + 1 + nibble : top - 2 - nibble;
}

// Calls visit(exponent, bit) for each set bit of `escapes`, in order. `half` holds the exponents of
// two pairs. A bit's position is 2 * word, plus 1 for the second pair.
template <typename Visit>
__device__ __forceinline__ void for_each_escape(u32 escapes, u8* const half, const Visit visit) {
  while (escapes != 0) {
    const u32 bit = __ffs(escapes) - 1;
    escapes &= escapes - 1;
    visit(half[(bit & 1) * 16 + bit / 2], bit);
  }
}

// Spreads the low 16 bits of x, so that bit pair i becomes bits 4 * i and 4 * i + 1 of the result.
__device__ __forceinline__ u32 spread(u32 x) {
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  return (x | x << 2) & 0x33333333u;
}

}  // namespace kvloft
