//! A 64-bit position-dependent tag of a chunk's pages: computed where bytes are produced, checked
//! where they are used.
//!
//! `tag = sum over (p, j) of mix(w[p, j] ^ (p * A + j * B + C))` mod 2^64, with w[p, j] the j-th
//! little-endian 64-bit word of page p (pages in payload order, each padded with zeros to whole
//! words) and `mix(x): x ^= rotr(x, 17) ^ rotr(x, 36); x *= M1; x ^= x >> 29; x *= M2; x ^= x >>
//! 32`. It is a sum, so threads can add their words in any order, and it needs only 64-bit
//! multiplication, xor, shifts and addition, so a GPU computes it while it copies. `mix` is a
//! bijection: damage inside one word is always detected. The tag detects accidents (torn, stale,
//! swapped or shifted pages), not adversaries. Must not depend on the contents of a page.

use crate::{Error, Result};

// Constants without hidden structure: the first 8 bytes (little endian) of BLAKE3("kvloft tag v1 "
// + name), made odd.
/// Factor of the page number.
pub const A: u64 = 0xb0a1_2ec3_a5fe_637d;
/// Factor of the word number inside its page.
pub const B: u64 = 0xf7c7_770c_c179_0db7;
/// Offset of all positions, so that zeros at the start also count.
pub const C: u64 = 0x8ced_aa81_95c7_5ecd;
/// First factor of `mix`.
pub const M1: u64 = 0xaaa3_ec23_16f3_9b27;
/// Second factor of `mix`.
pub const M2: u64 = 0x6f8b_3af1_12db_4f79;

/// The tag of a payload: for each of `num_blocks` blocks, one page of each of `page_bytes`, back to
/// back.
///
/// `InvalidConfig` if the payload is not as long as its pages.
pub fn chunk_tag(payload: &[u8], page_bytes: &[u32], num_blocks: u32) -> Result<u64> {
    let block_bytes = page_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>();
    if block_bytes.checked_mul(u64::from(num_blocks)) != u64::try_from(payload.len()).ok() {
        return Err(Error::invalid("a payload must be num_blocks blocks of all page_bytes")
            .with_context("payload_bytes", payload.len())
            .with_context("block_bytes", block_bytes)
            .with_context("num_blocks", num_blocks));
    }
    let mut rest = payload;
    let mut position = C;
    let mut tag = 0u64;
    for _ in 0..num_blocks {
        for &bytes in page_bytes {
            let (page, after) = rest.split_at(bytes as usize);
            tag = tag.wrapping_add(page_sum(page, position));
            position = position.wrapping_add(A);
            rest = after;
        }
    }
    Ok(tag)
}

/// Returns the sum of one page, whose word 0 has the weight of `position`.
fn page_sum(page: &[u8], mut position: u64) -> u64 {
    // Four sums, so that the additions do not wait for each other.
    let mut sums = [0u64; 4];
    let (quads, rest) = page.as_chunks::<32>();
    for quad in quads {
        let (words, _) = quad.as_chunks::<8>();
        for (lane, (sum, word)) in (0u64..).zip(sums.iter_mut().zip(words)) {
            let here = position.wrapping_add(B.wrapping_mul(lane));
            *sum = sum.wrapping_add(mix(u64::from_le_bytes(*word) ^ here));
        }
        position = position.wrapping_add(B.wrapping_mul(4));
    }
    let mut sum = sums.into_iter().fold(0, u64::wrapping_add);
    for bytes in rest.chunks(8) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        sum = sum.wrapping_add(mix(u64::from_le_bytes(word) ^ position));
        position = position.wrapping_add(B);
    }
    sum
}

/// A bijection of 64 bits whose every input bit reaches every output bit.
///
/// Multiplication does not spread the top bits, so a flip that changes only top bits changes the
/// product by one of few values, and two such words can cancel out: with `x >> 32` as the first
/// step, sign flips of both fp32 values of two words canceled out in one of 2^20 pairs. The two
/// rotations lose no bit, and only a mask of 10 bits or more (20 or more) leaves nothing below the
/// top 16 (top 8) bits.
#[inline]
fn mix(mut x: u64) -> u64 {
    x ^= x.rotate_right(17) ^ x.rotate_right(36);
    x = x.wrapping_mul(M1);
    x ^= x >> 29;
    x = x.wrapping_mul(M2);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests;
