// encode_chunks and decode_chunks convert losslessly between paged bf16 KV and encoded parts of
// frames, and compute the tags of the raw pages.
//
// In: PieceParams (kv_layout.cuh). Out: the same as in chunks.cu, plus used_out[s], the total size
// of segment s's records in units of 16 bytes. Each segment is a whole chunk. The e348 format
// (docs/design/compression.md) is a table with an 8-byte entry per tile, followed by the tiles'
// records in any order.
//
// Alignment: every address and length in a piece must be a multiple of 16.
//
// Width: the copy engine copies the first `width` bytes of a part. If a record extends past the
// width, encode_chunks writes the record to the part in host memory, and decode_chunks reads it
// from host memory. The host can therefore submit copies before the record sizes are known.
//
// Damaged parts: every offset is checked before use, so reads are always in bounds. The sum omits
// undecodable tiles, so the tag does not match.
//
// Expected: 1.7 bytes of HBM traffic per payload byte and about 1,300 instructions per tile.
// Measured with 66 CTAs on an H100: 550 (encode) and 650 (decode) GB/s of payload, eight times the
// PCIe bandwidth.
#include "e348_format.cuh"

namespace kvloft {

__device__ __forceinline__ u64 terms(const uint4& words, const u64 position) {
  return term(static_cast<u64>(words.y) << 32 | words.x, position) +
         term(static_cast<u64>(words.w) << 32 | words.z, position + kTagB);
}

// Copies a tile unchanged and returns this lane's contribution to the sum. If `to` is null,
// computes the sum without copying.
__device__ __forceinline__ u64 move_raw(const u8* __restrict__ from, u8* __restrict__ to,
                                        const int num_rows, const u64 position) {
  const u32 lane_byte = threadIdx.x % kWarpSize * 16;
  u64 sum = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row < num_rows) {
      const uint4 words = *reinterpret_cast<const uint4*>(from + row * 512 + lane_byte);
      if (to != nullptr) __stcs(reinterpret_cast<uint4*>(to + row * 512 + lane_byte), words);
      sum += terms(words, position + row * 64 * kTagB);
    }
  }
  return sum;
}

// One lane's data while its warp encodes a tile.
struct LaneCodes {
  uint4 low_bytes[kPairs];
  u32 low_codes[kPairs];
  u32 high_codes[kPairs / 2];
  u32 escapes[kPairs / 2];  // after encode_nibbles, only the escapes that need a byte

  // Splits words into low bytes (registers) and exponents (shared memory). Returns this lane's
  // contribution to the tag. `stats` packs the sum of the exponents and the number of nonzero
  // exponents.
  __device__ __forceinline__ u64 read(const u8* page, const int num_rows, const u64 position,
                                      u32* mine, u32& stats) {
    const u32 lane_byte = threadIdx.x % kWarpSize * 16;
    u64 sum = 0;
    u32 total = 0, nonzero = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (row < num_rows) {
        words = __ldcs(reinterpret_cast<const uint4*>(page + row * 512 + lane_byte));
        sum += terms(words, position + row * 64 * kTagB);
      }
      const u32 r0 = rotated(words.x), r1 = rotated(words.y), r2 = rotated(words.z),
                r3 = rotated(words.w);
      const u32 low = __byte_perm(r0, r1, 0x6420), high = __byte_perm(r2, r3, 0x6420);
      if (row % 2 == 0) {
        low_bytes[row / 2].x = low, low_bytes[row / 2].y = high;
      } else {
        low_bytes[row / 2].z = low, low_bytes[row / 2].w = high;
      }
      const u32 exponents[2] = {__byte_perm(r0, r1, 0x7531), __byte_perm(r2, r3, 0x7531)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 four = exponents[i];
        total = __dp4a(four, 0x01010101u, total);
        nonzero += ((((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four) & 0x80808080u) >> 7;
        mine[2 * row + i] = four;
      }
    }
    stats = total | __dp4a(nonzero, 0x01010101u, 0u)
                        << 20;  // a warp's totals (at most 2048 * 255 and 2048) also fit
    return sum;
  }

  // Computes the codes of all words and returns the number of escapes (words with code 7).
  __device__ __forceinline__ u32 encode(const u32* mine, const u32 top, const int num_rows) {
    const u32 tops = top * 0x01010101u;
    u32 num_escapes = 0;
#pragma unroll
    for (int half = 0; half < kPairs / 2; ++half) high_codes[half] = escapes[half] = 0;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      u32 low = 0, high = 0;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const u32 codes = __vminu4(__vsub4(tops, mine[4 * pair + q]), 0x07070707u);
        low |= ((codes & 0x03030303u) * 0x01041040u >> 24) << (8 * q);
        high |= ((codes >> 2 & 0x01010101u) * 0x01041040u >> 24) << (8 * q);
      }
      low &= word_mask(num_rows, pair);
      high &= word_mask(num_rows, pair);
      low_codes[pair] = low;
      high_codes[pair / 2] |= high << (pair % 2);
      const u32 all_ones = low & low >> 1 & high;
      escapes[pair / 2] |= all_ones << (pair % 2);
      num_escapes += __popc(all_ones);
    }
    return num_escapes;
  }

  // Writes the nibbles of this lane's escapes to shared memory, starting at index `at`. Returns the
  // number of escapes that also need a byte.
  __device__ __forceinline__ u32 encode_nibbles(WarpMemory& memory, u8* row, const u32 top,
                                                u32 at) {
    u32 num_bytes = 0;
#pragma unroll
    for (int half = 0; half < kPairs / 2; ++half) {
      u32 with_byte = 0;
      for_each_escape(escapes[half], row + 32 * half, [&](const u32 exponent, const u32 bit) {
        const u32 nibble = nibble_of(exponent, top);
        atomicOr(&memory.nibbles[at / 8], nibble << (4 * (at % 8)));
        if (nibble == 15) with_byte |= 1u << bit;
        ++at;
      });
      escapes[half] = with_byte;
      num_bytes += __popc(with_byte);
    }
    return num_bytes;
  }

  __device__ __forceinline__ void write(u8* record, const RecordLayout& layout, const Entry& entry,
                                        const WarpMemory& memory, u8* row, const u32 byte_at) {
    const u32 lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (u32 pair = 0; pair < kPairs; ++pair) {
      if (pair < layout.num_pairs) {
        __stcs(reinterpret_cast<uint4*>(record + pair * 512 + lane * 16), low_bytes[pair]);
        __stcs(reinterpret_cast<u32*>(record + layout.low_codes + pair * 128 + lane * 4),
               low_codes[pair]);
        if (pair % 2 == 0)
          __stcs(reinterpret_cast<u32*>(record + layout.high_codes + pair * 64 + lane * 4),
                 high_codes[pair / 2]);
      }
    }
    u32* const nibbles = reinterpret_cast<u32*>(record + layout.nibbles);
    for (u32 i = lane; i < (entry.num_nibbles + 7) / 8; i += kWarpSize)
      nibbles[i] = memory.nibbles[i];
    if (entry.num_bytes == 0) return;
    u8* bytes = record + layout.bytes_at(entry.num_nibbles) + byte_at;
#pragma unroll
    for (int half = 0; half < kPairs / 2; ++half) {
      for_each_escape(escapes[half], row + 32 * half,
                      [&](const u32 exponent, u32) { *bytes++ = static_cast<u8>(exponent); });
    }
  }
};

// Encodes one tile with one warp. Writes the record to the slot, to the part in host memory, or to
// both if the record straddles the end of the width.
__device__ __forceinline__ u64 encode_tile(const PieceParams& p, const TileAt& at,
                                           WarpMemory& memory) {
  if (at.page == nullptr) return 0;
  const u32 lane = threadIdx.x % kWarpSize;
  const u32 tile_bytes = at.tile.num_bytes;
  const int num_rows = rows_of_lane(tile_bytes, lane);
  const u64 position = at.position + lane * 2 * kTagB;
  u32* const mine = memory.exponents + lane * kLaneStride;
  u8* const row = reinterpret_cast<u8*>(mine);
  const RecordLayout layout(tile_bytes);
  LaneCodes codes;
  u32 stats, byte_at = 0;
  __syncwarp();  // wait until all lanes are done with the previous tile's shared memory
  const u64 sum = codes.read(at.page, num_rows, position, mine, stats);
  Entry entry{0, 0, 0, 0, true};
  if (at.tile.is_bf16) {
    for (u32 i = lane; i < kMaxNibbles / 8; i += kWarpSize) memory.nibbles[i] = 0;
    stats = __reduce_add_sync(kAllLanes, stats);
    const u32 nonzero = stats >> 20;
    entry.top = nonzero != 0 ? ((stats & 0xfffffu) / nonzero + 3) & 255u : 0;
    const u32 nibble_at =
        sum_before(codes.encode(mine, entry.top, num_rows), lane, entry.num_nibbles);
    __syncwarp();
    if (entry.num_nibbles <= kMaxNibbles) {
      const u32 num_bytes = codes.encode_nibbles(memory, row, entry.top, nibble_at);
      if (__any_sync(kAllLanes, num_bytes != 0))
        byte_at = sum_before(num_bytes, lane, entry.num_bytes);
      entry.is_raw = entry.num_bytes > kMaxBytes || layout.size(entry) >= tile_bytes;
      __syncwarp();
    }
  }
  const u32 size = entry.is_raw ? tile_bytes : layout.size(entry);
  if (lane == 0) entry.offset = atomicAdd(&p.num_used[at.segment], size / 16);
  entry.offset = __shfl_sync(kAllLanes, entry.offset, 0);
  const ChunkAt chunk(p, at.segment);
  if (lane == 0) reinterpret_cast<u64*>(chunk.slot)[at.chunk_tile] = entry.packed();
  const u32 begin = chunk.table_bytes + entry.offset * 16;
  if (begin + size > p.part_room) return sum;  // the host checks used_out and aborts the save
  const auto write = [&](u8* const record) {
    if (entry.is_raw) {
      move_raw(at.page, record, num_rows, position);
    } else {
      codes.write(record, layout, entry, memory, row, byte_at);
    }
  };
  if (begin < chunk.width) write(chunk.slot + begin);
  if (begin + size > chunk.width) write(chunk.host + begin);
  return sum;
}

// Decodes one tile with one warp. If the tile has no page, only computes its sum.
__device__ __forceinline__ u64 decode_tile(const PieceParams& p, const TileAt& at,
                                           WarpMemory& memory) {
  const u32 lane = threadIdx.x % kWarpSize;
  const u32 tile_bytes = at.tile.num_bytes;
  const int num_rows = rows_of_lane(tile_bytes, lane);
  u64 position = at.position + lane * 2 * kTagB;
  const ChunkAt chunk(p, at.segment);
  const RecordLayout layout(tile_bytes);
  Entry entry{0, 0, 0, 0, true};
  u32 begin = static_cast<u32>(at.block * p.block_bytes) +
              at.tile.payload_offset;  // a raw part starts with the payload
  if (!p.parts[at.segment].is_raw) {
    entry = Entry::of(reinterpret_cast<const u64*>(chunk.slot)[at.chunk_tile]);
    begin = chunk.table_bytes + entry.offset * 16;
  }
  const u32 end = begin + (entry.is_raw ? tile_bytes : layout.size(entry));
  if (end > p.part_room || (end > chunk.width && chunk.host == nullptr))
    return 0;  // the part is damaged, so its tag will not match
  const u8* const record = (end <= chunk.width ? chunk.slot : chunk.host) + begin;
  if (entry.is_raw) return move_raw(record, at.page, num_rows, position);

  uint4 low_bytes[kPairs];
  u32 low_codes[kPairs], high_codes[kPairs / 2] = {0, 0}, escapes[kPairs / 2] = {0, 0};
#pragma unroll
  for (u32 pair = 0; pair < kPairs; ++pair) {
    low_bytes[pair] = make_uint4(0, 0, 0, 0);
    low_codes[pair] = 0;
    if (pair < layout.num_pairs) {
      low_bytes[pair] = __ldcs(reinterpret_cast<const uint4*>(record + pair * 512 + lane * 16));
      low_codes[pair] =
          __ldcs(reinterpret_cast<const u32*>(record + layout.low_codes + pair * 128 + lane * 4));
      if (pair % 2 == 0)
        high_codes[pair / 2] =
            __ldcs(reinterpret_cast<const u32*>(record + layout.high_codes + pair * 64 + lane * 4));
    }
  }
  const u32 top = entry.top;
  const u32 window0 = top | (top - 1 & 255u) << 8 | (top - 2 & 255u) << 16 | (top - 3) << 24;
  const u32 window1 = (top - 4 & 255u) | (top - 5 & 255u) << 8 | (top - 6 & 255u) << 16;
  u32* const mine = memory.exponents + lane * kLaneStride;
  u8* const row = reinterpret_cast<u8*>(mine);
  u32 num_escapes = 0, total;
  __syncwarp();
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const u32 high = high_codes[pair / 2] >> (pair % 2) & kLowBits;
    const u32 all_ones = low_codes[pair] & low_codes[pair] >> 1 & high;
    escapes[pair / 2] |= all_ones << (pair % 2);
    num_escapes += __popc(all_ones);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 codes = spread(low_codes[pair] >> (16 * half) & 0xffffu) |
                        spread(high >> (16 * half) & 0xffffu) << 2;
      mine[4 * pair + 2 * half] = __byte_perm(window0, window1, codes);
      mine[4 * pair + 2 * half + 1] = __byte_perm(window0, window1, codes >> 16);
    }
  }
  // If a record is damaged, reads extend at most one word past its nibbles or one byte past its
  // bytes, and stay inside the slot or the part.
  const u32* const nibbles = reinterpret_cast<const u32*>(record + layout.nibbles);
  const u32 last_word = (entry.num_nibbles + 7) / 8;
  u32 nibble_at = sum_before(num_escapes, lane, total), num_bytes = 0;
#pragma unroll
  for (int half = 0; half < kPairs / 2; ++half) {
    u32 with_byte = 0;
    for_each_escape(escapes[half], row + 32 * half, [&](u8& exponent, const u32 bit) {
      const u32 nibble = nibbles[min(nibble_at / 8, last_word)] >> (4 * (nibble_at % 8)) & 15u;
      exponent = static_cast<u8>(exponent_of(nibble, top));
      if (nibble == 15) with_byte |= 1u << bit;
      ++nibble_at;
    });
    escapes[half] = with_byte;
    num_bytes += __popc(with_byte);
  }
  if (__any_sync(kAllLanes, num_bytes != 0)) {
    const u8* const bytes = record + layout.bytes_at(entry.num_nibbles);
    u32 byte_at = sum_before(num_bytes, lane, total);
#pragma unroll
    for (int half = 0; half < kPairs / 2; ++half) {
      for_each_escape(escapes[half], row + 32 * half, [&](u8& exponent, u32) {
        exponent = bytes[min(byte_at++, entry.num_bytes)];
      });
    }
  }
  u64 sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const u32 low = r % 2 == 0 ? low_bytes[r / 2].x : low_bytes[r / 2].z;
    const u32 high = r % 2 == 0 ? low_bytes[r / 2].y : low_bytes[r / 2].w;
    const u32 e0 = mine[2 * r], e1 = mine[2 * r + 1];
    const uint4 words = make_uint4(
        rotated_back(__byte_perm(low, e0, 0x5140)), rotated_back(__byte_perm(low, e0, 0x7362)),
        rotated_back(__byte_perm(high, e1, 0x5140)), rotated_back(__byte_perm(high, e1, 0x7362)));
    if (r < num_rows) {
      if (at.page != nullptr)
        __stcs(reinterpret_cast<uint4*>(at.page + r * 512 + lane * 16), words);
      sum += terms(words, position + r * 64 * kTagB);
    }
  }
  return sum;
}

}  // namespace kvloft

// Threads are limited to 64 registers, so that two CTAs fit on an SM.
#define KVLOFT_KERNEL(NAME, FUNCTION)                                                          \
  extern "C" __global__ void __launch_bounds__(kvloft::kCtaThreads, 2)                         \
      NAME(const __grid_constant__ kvloft::PieceParams params) {                               \
    __shared__ kvloft::WarpMemory memory[kvloft::kCtaThreads / kvloft::kWarpSize];             \
    kvloft::WarpMemory& mine = memory[threadIdx.x / kvloft::kWarpSize];                        \
    kvloft::for_each_tile(                                                                     \
        params, [&](const kvloft::TileAt& at) { return kvloft::FUNCTION(params, at, mine); }); \
  }

KVLOFT_KERNEL(encode_chunks, encode_tile)
KVLOFT_KERNEL(decode_chunks, decode_tile)
