// The loop over a piece's tiles, which all kernel families share.
//
// A kernel family passes a function that copies one tile (`TileAt`) with one warp and returns the
// lane's contribution to the tile's sum.
#pragma once
#include "kv_layout.cuh"

namespace kvloft {

constexpr u32 kAllLanes = 0xffffffffu;

// A tile of a piece, and its location.
struct TileAt {
  u32 segment;
  u32 chunk_tile;  // index of the tile in the chunk
  u32 block;       // index of the block in the chunk
  Tile tile;
  u8* page;      // address of the tile in paged KV; null if the kernel must not write it
  u64 position;  // tag position of the first word
};

// Returns a word's term in the tag. A benchmark compiles this computation out to measure its cost.
__device__ __forceinline__ u64 term(const u64 word, const u64 position) {
#ifdef KVLOFT_BENCH_WITHOUT_TAG
  return 0;
#else
  return mix(word ^ position);
#endif
}

// Returns the sum of `mine` over the preceding lanes, and sets `total` to the sum over all lanes.
__device__ __forceinline__ u32 sum_before(const u32 mine, const u32 lane, u32& total) {
  u32 sum = mine;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  total = __shfl_sync(kAllLanes, sum, kWarpSize - 1);
  return sum - mine;
}

// Adds the sums of the warp's lanes to the segment's sum.
__device__ __forceinline__ void flush_sum(const PieceParams& p, const u32 segment, u64 sum) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    sum += __shfl_down_sync(kAllLanes, sum, distance);
  if (threadIdx.x % kWarpSize == 0) atomicAdd(&p.sums[segment], sum);
}

// If this CTA is the last to finish, writes the final sums and zeroes the state for the next
// launch. This avoids a memset and a second kernel.
__device__ __forceinline__ void hand_over_sums(const PieceParams& p) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // make this CTA's additions visible before counting it as done
    is_last = atomicAdd(p.num_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (u32 s = threadIdx.x; s < p.num_segments; s += kCtaThreads) {
    p.tags_out[s] = atomicExch(&p.sums[s], 0ull);
    if (p.used_out != nullptr) p.used_out[s] = atomicExch(&p.num_used[s], 0u);
  }
  if (threadIdx.x == 0) *p.num_done = 0;
}

template <typename Move>
__device__ __forceinline__ void for_each_tile(const PieceParams& p, const Move move) {
  // Each warp processes consecutive tiles, so it adds to only a few segments' sums. With
  // interleaved tiles, atomics from different warps contend (H200, 4 KiB pages: 118 us per piece
  // instead of 26 us).
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
    const u32 block = chunk_tile / p.tiles_per_block;
    const Tile t = p.tiles[chunk_tile - block * p.tiles_per_block];
    const int block_id = p.block_ids[s.block_index + static_cast<int>(block)];
    u8* const page =
        block_id < 0 ? nullptr
                     : reinterpret_cast<u8*>(t.base + static_cast<u64>(block_id) * t.block_stride);
    const u64 position =
        tag_position(static_cast<u64>(block) * p.num_planes + t.plane, t.first_word);
    sum += move(TileAt{segment, chunk_tile, block, t, page, position});
  }
  if (begin < end) flush_sum(p, segment, sum);
  hand_over_sums(p);
}

}  // namespace kvloft
