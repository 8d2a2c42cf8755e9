// gather_chunks, scatter_chunks: paged KV <-> contiguous chunk payload, as bytes, with the chunk's tag on the way.
//
// In: PieceParams (kv_layout.cuh). Out: the payload (gather) or the pages (scatter), and tags_out[s], the sum of segment s;
// the tag of a chunk is the sum over its segments. Every address and length of a piece is a multiple of kVecBytes
// (16, 8, 4 or 1), which the host checks. Any grid is correct: its warps share the tiles out evenly.
// Expected: 2 bytes of HBM traffic per payload byte; with 66 CTAs of an H200 (132 SMs) about 1.2 TB/s of payload for any page
// size, some 22 times what PCIe takes, so a burst holds half the SMs for a few percent of the copy's time (measured:
// benches/results). The tag costs two 64-bit multiplies per 8 bytes, hidden behind the memory. This file must not know why bytes
// move, nor their dtype.
#include "kv_layout.cuh"

namespace kvloft {

enum class Verb { kGather, kScatter };

template <int kVecBytes>
struct Item {  // what one thread moves at a time: 16 bytes where alignment allows it, else one word
  static constexpr u32 kWords = kVecBytes == 16 ? 2 : 1;
  static constexpr u32 kBytes = 8 * kWords;
  u64 words[kWords];
};

// Streaming accesses: neither side is read again soon. `num_bytes` < kBytes only where a page ends inside a word.
template <int kVecBytes>
__device__ __forceinline__ Item<kVecBytes> load_item(const u8* __restrict__ from, const u32 num_bytes) {
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
__device__ __forceinline__ void store_item(u8* __restrict__ to, const Item<kVecBytes>& item, const u32 num_bytes) {
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

// A word's part of the tag. A bench compiles it away to learn what it costs; nothing else does.
__device__ __forceinline__ u64 term(const u64 word, const u64 position) {
#ifdef KVLOFT_BENCH_WITHOUT_TAG
  return 0;
#else
  return mix(word ^ position);
#endif
}

// One warp moves one tile; returns this lane's part of the sum. `to` null: nothing is written.
template <int kVecBytes>
__device__ __forceinline__ u64 move_tile(const u8* __restrict__ from, u8* __restrict__ to, const u32 num_bytes, u64 position) {
  using It = Item<kVecBytes>;
  constexpr int kUnroll = kVecBytes >= 8 ? 8 : 2;  // loads in flight per lane: a whole tile at 16 bytes
  const u32 lane = threadIdx.x % kWarpSize;
  u64 sum = 0;
  position += lane * It::kWords * kTagB;
  for (u32 begin = lane * It::kBytes; begin < num_bytes; begin += kUnroll * kWarpSize * It::kBytes) {
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

// Adds up what the lanes of a warp have of a segment's sum.
__device__ __forceinline__ void flush_sum(const PieceParams& p, const u32 segment, u64 sum) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % kWarpSize == 0) atomicAdd(&p.sums[segment], sum);
}

// The last CTA hands the sums over and leaves everything zero for the next launch: no memset, no second kernel.
__device__ __forceinline__ void hand_over_sums(const PieceParams& p) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // what every warp of this CTA added, before this CTA is counted as done
    is_last = atomicAdd(p.num_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (u32 s = threadIdx.x; s < p.num_segments; s += kCtaThreads) p.tags_out[s] = atomicExch(&p.sums[s], 0ull);
  if (threadIdx.x == 0) *p.num_done = 0;
}

template <int kVecBytes, Verb kVerb>
__device__ __forceinline__ void run_piece(const PieceParams& p) {
  // Each warp takes neighbouring tiles, so that it has one segment or two to add to: with tiles dealt out in turn every tile is
  // of another segment, and all warps wait for each other's atomics (seen on an H200: 118 us a piece of 4 KiB pages, 26 this way).
  constexpr u32 kWarps = kCtaThreads / kWarpSize;
  const u32 num_each = (p.num_tiles + gridDim.x * kWarps - 1) / (gridDim.x * kWarps);
  const u32 begin = (blockIdx.x * kWarps + threadIdx.x / kWarpSize) * num_each;
  const u32 end = min(begin + num_each, p.num_tiles);
  u32 segment = find_segment(p, begin < end ? begin : 0);
  u64 sum = 0;
  for (u32 tile = begin; tile < end; ++tile) {
    while (segment + 1 < p.num_segments && p.segments[segment + 1].first_tile <= tile) {
      flush_sum(p, segment, sum);
      sum = 0;
      ++segment;
    }
    const Segment& s = p.segments[segment];
    const u32 chunk_tile = s.chunk_tile + (tile - s.first_tile);
    const u32 block = chunk_tile / p.tiles_per_block;  // of the chunk
    const Tile t = p.tiles[chunk_tile - block * p.tiles_per_block];
    const int block_id = p.block_ids[s.block_index + static_cast<int>(block)];
    u8* const page = block_id < 0 ? nullptr : reinterpret_cast<u8*>(t.base + static_cast<u64>(block_id) * t.block_stride);
    u8* const payload = reinterpret_cast<u8*>(p.base + s.base + block * p.block_bytes + t.payload_offset);
    const u64 position = tag_position(static_cast<u64>(block) * p.num_planes + t.plane, t.first_word);
    if constexpr (kVerb == Verb::kGather) {
      if (page != nullptr) sum += move_tile<kVecBytes>(page, payload, t.num_bytes, position);
    } else {
      sum += move_tile<kVecBytes>(payload, page, t.num_bytes, position);
    }
  }
  if (begin < end) flush_sum(p, segment, sum);
  hand_over_sums(p);
}

}  // namespace kvloft

// One vector width a compilation (KVLOFT_VEC_BYTES), so that an engine start compiles no more than it uses.
// 64 registers a thread: two CTAs fit beside each other on an SM.
static_assert(KVLOFT_VEC_BYTES == 16 || KVLOFT_VEC_BYTES == 8 || KVLOFT_VEC_BYTES == 4 || KVLOFT_VEC_BYTES == 1, "no such width");
#define KVLOFT_KERNEL(NAME, VERB)                                                                                       \
  extern "C" __global__ void __launch_bounds__(kvloft::kCtaThreads, 2)                                                  \
      NAME(const __grid_constant__ kvloft::PieceParams params) {                                                        \
    kvloft::run_piece<KVLOFT_VEC_BYTES, kvloft::Verb::VERB>(params);                                                    \
  }

KVLOFT_KERNEL(gather_chunks, kGather)
KVLOFT_KERNEL(scatter_chunks, kScatter)
