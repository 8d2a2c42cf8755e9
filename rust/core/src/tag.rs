//! A 64-bit, position-dependent tag of a chunk's pages, computed when the bytes are produced and
//! checked before they are used.
//!
//! `tag = sum over (p, j) of mix(w[p, j] ^ (p * A + j * B + C))` mod 2^64, where w[p, j] is the
//! j-th little-endian 64-bit word of page p. Pages are in payload order and zero-padded to whole
//! words. The function mix is `x ^= rotr(x, 17) ^ rotr(x, 36); x *= M1; x ^= x >> 29; x *= M2; x ^=
//! x >> 32`.
//!
//! The tag is a sum, so threads can add their words in any order. Computing the tag needs only
//! 64-bit multiplies, xors, shifts and adds, so a GPU can do it during the copy. `mix` is a
//! bijection, so damage within a single word is always detected. The tag catches accidental damage
//! (torn, stale, swapped or shifted pages) but not deliberate changes.

use crate::{Error, Result};

// Nothing-up-my-sleeve constants: the first 8 bytes (little endian) of BLAKE3("kvloft tag v1 " +
// name), made odd.
/// Page index multiplier.
pub const A: u64 = 0xb0a1_2ec3_a5fe_637d;
/// Multiplier for a word's index within its page.
pub const B: u64 = 0xf7c7_770c_c179_0db7;
/// Offset added to all positions, so that leading zero words also affect the tag.
pub const C: u64 = 0x8ced_aa81_95c7_5ecd;
/// First multiplier in `mix`.
pub const M1: u64 = 0xaaa3_ec23_16f3_9b27;
/// Second multiplier in `mix`.
pub const M2: u64 = 0x6f8b_3af1_12db_4f79;

/// Returns a payload's tag. The payload holds `num_blocks` blocks without gaps, each with one page
/// of each size in `page_bytes`.
///
/// Returns `InvalidConfig` if the payload length is not the sum of its page sizes.
pub fn chunk_tag(payload: &[u8], page_bytes: &[u32], num_blocks: u32) -> Result<u64> {
    let block_bytes = page_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>();
    if block_bytes.checked_mul(u64::from(num_blocks)) != u64::try_from(payload.len()).ok() {
        return Err(Error::invalid(
            "the payload size must be num_blocks times the sum of page_bytes",
        )
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

/// Returns one page's checksum. `position` is `p * A + C`, where `p` is the page's index.
fn page_sum(page: &[u8], mut position: u64) -> u64 {
    // Use four independent sums, so that the additions can overlap.
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

/// Mixes 64 bits with a bijection in which every input bit affects all output bits.
///
/// Multiplication does not propagate the top bits. A change in only the top bits would therefore
/// change the product by one of just a few values, and the changes in two words could cancel out:
/// with `x >> 32` as the first step, flipping both fp32 signs in two words canceled out in one of
/// 2^20 pairs. The rotations prevent this: after them, a change is confined to the top 16 bits only
/// if at least 10 input bits flip, and to the top 8 bits only if at least 20 do.
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
