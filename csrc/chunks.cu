// gather_chunks and scatter_chunks copy bytes between paged KV and contiguous chunk payloads, and
// compute the chunks' tags. The kernels work for any dtype.
//
// In: PieceParams (kv_layout.cuh). Out: the payload (gather) or the pages (scatter), and
// tags_out[s], the sum of segment s. A chunk's tag is the sum over its segments.
//
// Alignment: every address and length in a piece must be a multiple of kVecBytes (16, 8, 4 or 1).
// The host checks this. Grid: any grid size works; tiles are distributed evenly across warps.
//
// Expected: 2 bytes of HBM traffic per payload byte. Measured with 66 CTAs on an H200 (132 SMs):
// 1.2 TB/s of payload for any page size (benches/results). This is 22 times the PCIe bandwidth, so
// half of the SMs are busy for only a few percent of the copy time. The tag's two 64-bit
// multiplications per 8 bytes are hidden by memory latency.
#include "piece.cuh"

namespace kvloft {

enum class Verb { kGather, kScatter };

template <int kVecBytes>
struct Item {  // the data that one thread copies per step: 16 bytes if aligned, otherwise 8
  static constexpr u32 kWords = kVecBytes == 16 ? 2 : 1;
  static constexpr u32 kBytes = 8 * kWords;
  u64 words[kWords];
};

// Uses streaming loads, because the bytes are not reused soon. `num_bytes` is less than kBytes
// only if a page ends in the middle of a word.
template <int kVecBytes>
__device__ __forceinline__ Item<kVecBytes> load_item(const u8* __restrict__ from,
                                                     const u32 num_bytes) {
  Item<kVecBytes> item{};
  if constexpr (kVecBytes == 16) {
    const ulonglong2 both = __ldcs(reinterpret_cast<const ulonglong2*>(from));
    item.words[0] = both.x;
    item.words[1] = both.y;
  } else if constexpr (kVecBytes == 8) {
    item.words[0] = __ldcs(reinterpret_cast<const u64*>(from));
  } else if constexpr (kVecBytes == 4) {
    const u32* const halves = reinterpret_cast<const u32*>(from);
    const u64 low = __ldcs(halves);
    const u64 high = num_bytes > 4 ? __ldcs(halves + 1) : 0u;
    item.words[0] = low | high << 32;
  } else {
    for (u32 i = 0; i < 8; ++i) {
      if (i < num_bytes) item.words[0] |= static_cast<u64>(from[i]) << (8 * i);
    }
  }
  return item;
}

template <int kVecBytes>
__device__ __forceinline__ void store_item(u8* __restrict__ to, const Item<kVecBytes>& item,
                                           const u32 num_bytes) {
  if constexpr (kVecBytes == 16) {
    __stcs(reinterpret_cast<ulonglong2*>(to), make_ulonglong2(item.words[0], item.words[1]));
  } else if constexpr (kVecBytes == 8) {
    __stcs(reinterpret_cast<u64*>(to), item.words[0]);
  } else if constexpr (kVecBytes == 4) {
    u32* const halves = reinterpret_cast<u32*>(to);
    __stcs(halves, static_cast<u32>(item.words[0]));
    if (num_bytes > 4) __stcs(halves + 1, static_cast<u32>(item.words[0] >> 32));
  } else {
    for (u32 i = 0; i < 8; ++i) {
      if (i < num_bytes) to[i] = static_cast<u8>(item.words[0] >> (8 * i));
    }
  }
}

// Copies one tile with one warp and returns this lane's contribution to the sum. If `to` is null,
// computes the sum without copying.
template <int kVecBytes>
__device__ __forceinline__ u64 move_tile(const u8* __restrict__ from, u8* __restrict__ to,
                                         const u32 num_bytes, u64 position) {
  using It = Item<kVecBytes>;
  constexpr int kUnroll = kVecBytes >= 8 ? 8 : 2;  // loads in flight; 8 per lane cover a tile
  const u32 lane = threadIdx.x % kWarpSize;
  u64 sum = 0;
  position += lane * It::kWords * kTagB;
  for (u32 begin = lane * It::kBytes; begin < num_bytes;
       begin += kUnroll * kWarpSize * It::kBytes) {
    It items[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const u32 at = begin + i * kWarpSize * It::kBytes;
      if (at < num_bytes) items[i] = load_item<kVecBytes>(from + at, num_bytes - at);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const u32 at = begin + i * kWarpSize * It::kBytes;
      if (at < num_bytes) {
        if (to != nullptr) store_item<kVecBytes>(to + at, items[i], num_bytes - at);
#pragma unroll
        for (u32 j = 0; j < It::kWords; ++j) sum += term(items[i].words[j], position + j * kTagB);
      }
      position += kWarpSize * It::kWords * kTagB;
    }
  }
  return sum;
}

template <int kVecBytes, Verb kVerb>
__device__ __forceinline__ void run_piece(const PieceParams& p) {
  for_each_tile(p, [&p](const TileAt& at) -> u64 {
    const Tile& t = at.tile;
    u8* const payload = reinterpret_cast<u8*>(p.base + p.segments[at.segment].base +
                                              at.block * p.block_bytes + t.payload_offset);
    if constexpr (kVerb == Verb::kGather) {
      return at.page != nullptr ? move_tile<kVecBytes>(at.page, payload, t.num_bytes, at.position)
                                : 0;
    } else {
      return move_tile<kVecBytes>(payload, at.page, t.num_bytes, at.position);
    }
  });
}

}  // namespace kvloft

// This file is compiled separately for each vector width (KVLOFT_VEC_BYTES), so that an engine
// compiles only the kernels it needs. Threads are limited to 64 registers, so that two CTAs fit on
// an SM.
static_assert(KVLOFT_VEC_BYTES == 16 || KVLOFT_VEC_BYTES == 8 || KVLOFT_VEC_BYTES == 4 ||
                  KVLOFT_VEC_BYTES == 1,
              "KVLOFT_VEC_BYTES must be 16, 8, 4 or 1");
#define KVLOFT_KERNEL(NAME, VERB)                                      \
  extern "C" __global__ void __launch_bounds__(kvloft::kCtaThreads, 2) \
      NAME(const __grid_constant__ kvloft::PieceParams params) {       \
    kvloft::run_piece<KVLOFT_VEC_BYTES, kvloft::Verb::VERB>(params);   \
  }

KVLOFT_KERNEL(gather_chunks, kGather)
KVLOFT_KERNEL(scatter_chunks, kScatter)
