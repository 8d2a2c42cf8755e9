// Computes a chunk's tag on the GPU. docs/design/frames.md defines the tag;
// rust/core/src/tag.rs computes it on the CPU.
//
// tag = sum over (p, j) of mix(w[p, j] ^ (p * A + j * B + C)) mod 2^64, where w[p, j] is the j-th
// little-endian 64-bit word of page p. Pages are zero-padded to whole words. Threads may add terms
// in any order. tests/gpu/test_tag.py checks that the constants match tag.rs.
#pragma once

namespace kvloft {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "the tag is defined for 64-bit words");

constexpr u64 kTagA = 0xb0a12ec3a5fe637dull;
constexpr u64 kTagB = 0xf7c7770cc1790db7ull;
constexpr u64 kTagC = 0x8cedaa8195c75ecdull;
constexpr u64 kTagM1 = 0xaaa3ec2316f39b27ull;
constexpr u64 kTagM2 = 0x6f8b3af112db4f79ull;

// A bijection on 64-bit words, so changing a word always changes its term.
__device__ __forceinline__ u64 mix(u64 x) {
  // Rotate by 17 and 36 using 32-bit halves, because 64-bit shifts cause register spills.
  const u32 low = static_cast<u32>(x);
  const u32 high = static_cast<u32>(x >> 32);
  const u32 mixed_low = low ^ __funnelshift_r(low, high, 17) ^ __funnelshift_r(high, low, 4);
  const u32 mixed_high = high ^ __funnelshift_r(high, low, 17) ^ __funnelshift_r(low, high, 4);
  x = static_cast<u64>(mixed_high) << 32 | mixed_low;
  x *= kTagM1;
  x ^= x >> 29;
  x *= kTagM2;
  return x ^ (x >> 32);
}

// Returns the tag position of word `word` in page `page`. The positions of consecutive words differ
// by kTagB.
__device__ __forceinline__ u64 tag_position(const u64 page, const u64 word) {
  return kTagC + page * kTagA + word * kTagB;
}

}  // namespace kvloft
