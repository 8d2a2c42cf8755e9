//! A 64-bit position-dependent tag over a chunk's pages: made where bytes are produced, checked where they are used.
//!
//! `tag = sum over (p, j) of mix(w[p, j] ^ (p * A + j * B + C))` mod 2^64, with w[p, j] the j-th little-endian 64-bit word of
//! page p (pages in payload order, each padded with zeros to whole words) and
//! `mix(x): x ^= x >> 32; x *= M1; x ^= x >> 29; x *= M2; x ^= x >> 32`. It is a sum, so any number of threads may take part in any
//! order, and only 64-bit multiply, xor, shift and add, so a GPU does it while it copies. `mix` is a bijection: damage
//! inside one word always shows. It finds accidents (torn, stale, swapped, shifted pages), not adversaries.
//! This file must not know what a page holds.

use crate::{Error, ErrorKind, Result};

// Nothing up the sleeve: the first 8 bytes (little endian) of BLAKE3("kvloft tag v1 " + name), made odd.
/// Factor of the page number.
pub const A: u64 = 0xb0a1_2ec3_a5fe_637d;
/// Factor of the word number inside its page.
pub const B: u64 = 0xf7c7_770c_c179_0db7;
/// Offset of all positions, so that zeros at the start count too.
pub const C: u64 = 0x8ced_aa81_95c7_5ecd;
/// First factor of `mix`.
pub const M1: u64 = 0xaaa3_ec23_16f3_9b27;
/// Second factor of `mix`.
pub const M2: u64 = 0x6f8b_3af1_12db_4f79;

/// The tag of a payload: for each of `num_blocks` blocks, one page of each of `page_bytes`, back to back.
///
/// `InvalidConfig` if the payload is not as long as its pages.
pub fn chunk_tag(payload: &[u8], page_bytes: &[u32], num_blocks: u32) -> Result<u64> {
    let block_bytes = page_bytes.iter().map(|&bytes| u64::from(bytes)).sum::<u64>();
    if block_bytes.checked_mul(u64::from(num_blocks)) != u64::try_from(payload.len()).ok() {
        return Err(Error::new(ErrorKind::InvalidConfig, "a payload must be num_blocks blocks of all page_bytes")
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

/// The sum over one page, whose word 0 stands at `position`.
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
/// It begins with a shift because a product moves a top bit nowhere: without it, the same top bit flipped in two words
/// cancelled out in one of 2^24 pairs.
#[inline]
fn mix(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(M1);
    x ^= x >> 29;
    x = x.wrapping_mul(M2);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, word by word, in 128-bit arithmetic with its constants made again from their names.
    fn slow_tag(payload: &[u8], page_bytes: &[u32], num_blocks: u32) -> u64 {
        let constant = |name: &str| {
            let hash = blake3::hash(format!("kvloft tag v1 {name}").as_bytes());
            u128::from(u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap()) | 1)
        };
        let (a, b, c, m1, m2) = (constant("A"), constant("B"), constant("C"), constant("M1"), constant("M2"));
        let wrap = |x: u128| x % (1 << 64);
        let (mut sum, mut at) = (0, 0);
        let pages = (0..num_blocks).flat_map(|_| page_bytes.iter().map(|&bytes| bytes as usize));
        for (p, bytes) in (0u128..).zip(pages) {
            let mut page = payload[at..at + bytes].to_vec();
            at += bytes;
            page.resize(bytes.div_ceil(8) * 8, 0);
            for j in 0..page.len() / 8 {
                let word = (0..8).map(|k| u128::from(page[8 * j + k]) << (8 * k)).sum::<u128>();
                let mut x = word ^ wrap(wrap(p * a) + wrap(j as u128 * b) + c);
                x ^= x >> 32;
                x = wrap(x * m1);
                x ^= x >> 29;
                x = wrap(x * m2);
                sum = wrap(sum + (x ^ (x >> 32)));
            }
        }
        assert_eq!(at, payload.len());
        u64::try_from(sum).unwrap()
    }

    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    }

    /// A payload and its shape; at least one byte.
    fn chunk() -> impl Strategy<Value = (Vec<u8>, Vec<u32>, u32)> {
        (prop::collection::vec(1u32..90, 1..5), 1u32..5, any::<u64>()).prop_map(|(pages, blocks, seed)| {
            let len = pages.iter().sum::<u32>() * blocks;
            (noise(len as usize, seed), pages, blocks)
        })
    }

    /// A payload of equal pages, at least two.
    fn equal_pages() -> impl Strategy<Value = (Vec<u8>, u32, u32)> {
        (1u32..90, 2u32..9, any::<u64>())
            .prop_map(|(page, blocks, seed)| (noise(page as usize * blocks as usize, seed), page, blocks))
    }

    proptest! {
        #[test]
        fn equals_the_definition((payload, pages, blocks) in chunk()) {
            prop_assert_eq!(chunk_tag(&payload, &pages, blocks).unwrap(), slow_tag(&payload, &pages, blocks));
        }

        #[test]
        fn any_flipped_bit_shows((payload, pages, blocks) in chunk(), at in any::<prop::sample::Index>(), bit in 0..8u32) {
            let mut damaged = payload.clone();
            damaged[at.index(payload.len())] ^= 1u8 << bit;
            prop_assert_ne!(chunk_tag(&payload, &pages, blocks).unwrap(), chunk_tag(&damaged, &pages, blocks).unwrap());
        }

        #[test]
        fn a_swapped_zeroed_stale_or_shifted_page_shows(
            (payload, page, blocks) in equal_pages(), one in any::<prop::sample::Index>(), two in any::<prop::sample::Index>(),
            seed in any::<u64>(),
        ) {
            let tag = chunk_tag(&payload, &[page], blocks).unwrap();
            let (size, num) = (page as usize, blocks as usize);
            let (one, two) = (one.index(num) * size, two.index(num) * size);
            let mut damaged = [(); 4].map(|()| payload.clone());
            damaged[0].copy_within(one..one + size, two);
            damaged[0][one..one + size].copy_from_slice(&payload[two..two + size]);
            damaged[1][one..one + size].fill(0);
            damaged[2][one..one + size].copy_from_slice(&noise(size, seed));
            damaged[3].rotate_left(size);
            for (kind, damaged) in damaged.iter().enumerate() {
                let same = *damaged == payload;
                prop_assert_eq!(chunk_tag(damaged, &[page], blocks).unwrap() == tag, same, "damage {}", kind);
            }
        }

        #[test]
        fn the_cut_into_pages_shows(seed in any::<u64>(), words in 2u32..20) {
            let payload = noise(words as usize * 16, seed);
            let tags = [(words * 16, 1), (words * 8, 2), (16, words), (8, 2 * words)]
                .map(|(page, blocks)| chunk_tag(&payload, &[page], blocks).unwrap());
            let unique: std::collections::HashSet<_> = tags.iter().collect();
            prop_assert!(unique.len() >= 3, "{:?}", tags);
        }
    }

    #[test]
    fn equals_the_definition_at_every_page_length() {
        for bytes in (0..200).chain([4095, 4096, 4097]) {
            let payload = noise(bytes as usize * 3, 1);
            assert_eq!(chunk_tag(&payload, &[bytes], 3).unwrap(), slow_tag(&payload, &[bytes], 3), "{bytes}");
        }
    }

    /// Pinned, so that a file or a GPU written against this version stays readable.
    #[test]
    fn golden_tags() {
        let payload: Vec<u8> = (0..=255).collect();
        assert_eq!(chunk_tag(&[], &[], 0).unwrap(), 0);
        assert_eq!(chunk_tag(&[0; 8], &[8], 1).unwrap(), mix(C));
        assert_eq!(chunk_tag(&payload, &[256], 1).unwrap(), GOLDEN[0]);
        assert_eq!(chunk_tag(&payload, &[64], 4).unwrap(), GOLDEN[1]);
        assert_eq!(chunk_tag(&payload, &[100, 28], 2).unwrap(), GOLDEN[2]);
    }

    const GOLDEN: [u64; 3] = [0xfbdc_8c44_c240_fde6, 0xb42f_c555_211f_20b3, 0xab1f_09ef_5473_4709];

    #[test]
    fn a_payload_of_another_length_is_refused() {
        for len in [0, 15, 17, 32] {
            assert_eq!(chunk_tag(&vec![0; len], &[8], 2).unwrap_err().kind(), ErrorKind::InvalidConfig);
        }
        assert!(chunk_tag(&[], &[u32::MAX; 3], u32::MAX).is_err());
    }
}
