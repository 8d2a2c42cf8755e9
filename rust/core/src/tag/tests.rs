//! Tests the tag against its definition, golden vectors, and the kinds of corruption it must
//! detect.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::ErrorKind;

const VECTORS: &str = include_str!("../../../../tests/vectors/tag.json");

/// Computes the tag from its definition, word by word, in 128-bit arithmetic. Derives the constants
/// from their names.
fn slow_tag(payload: &[u8], page_bytes: &[u32], num_blocks: u32) -> u64 {
    let constant = |name: &str| {
        let hash = blake3::hash(format!("kvloft tag v1 {name}").as_bytes());
        u128::from(u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap()) | 1)
    };
    let (a, b, c, m1, m2) =
        (constant("A"), constant("B"), constant("C"), constant("M1"), constant("M2"));
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
            let turned = |by: u32| (x >> by) | wrap(x << (64 - by));
            x = x ^ turned(17) ^ turned(36);
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

/// Generates a payload of at least one byte, along with its shape.
fn chunk() -> impl Strategy<Value = (Vec<u8>, Vec<u32>, u32)> {
    (prop::collection::vec(1u32..90, 1..5), 1u32..5, any::<u64>()).prop_map(
        |(pages, blocks, seed)| {
            let len = pages.iter().sum::<u32>() * blocks;
            (noise(len as usize, seed), pages, blocks)
        },
    )
}

/// Generates a payload of at least two equal pages.
fn equal_pages() -> impl Strategy<Value = (Vec<u8>, u32, u32)> {
    (1u32..90, 2u32..9, any::<u64>()).prop_map(|(page, blocks, seed)| {
        (noise(page as usize * blocks as usize, seed), page, blocks)
    })
}

proptest! {
    #[test]
    fn equals_the_definition((payload, pages, blocks) in chunk()) {
        prop_assert_eq!(chunk_tag(&payload, &pages, blocks).unwrap(), slow_tag(&payload, &pages, blocks));
    }

    #[test]
    fn any_flipped_bit_changes_the_tag((payload, pages, blocks) in chunk(), at in any::<prop::sample::Index>(), bit in 0..8u32) {
        let mut damaged = payload.clone();
        damaged[at.index(payload.len())] ^= 1u8 << bit;
        prop_assert_ne!(chunk_tag(&payload, &pages, blocks).unwrap(), chunk_tag(&damaged, &pages, blocks).unwrap());
    }

    #[test]
    fn a_swapped_zeroed_stale_or_shifted_page_changes_the_tag(
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
    fn the_division_into_pages_changes_the_tag(seed in any::<u64>(), words in 2u32..20) {
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
        assert_eq!(
            chunk_tag(&payload, &[bytes], 3).unwrap(),
            slow_tag(&payload, &[bytes], 3),
            "{bytes}"
        );
    }
}

/// The vectors must not change, because files and GPU kernels of this version depend on the tag.
#[test]
fn golden_vectors() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let hex = |value: &Value| u64::from_str_radix(value.as_str().unwrap(), 16).unwrap();
    let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    for (name, ours) in [("A", A), ("B", B), ("C", C), ("M1", M1), ("M2", M2)] {
        assert_eq!(hex(&vectors["constants"][name]), ours, "{name}");
    }
    let cases = vectors["cases"].as_array().unwrap();
    assert!(cases.len() >= 12);
    for case in cases {
        let text = case["payload"].as_str().unwrap();
        let payload: Vec<u8> = (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect();
        let pages: Vec<u32> = case["page_bytes"].as_array().unwrap().iter().map(number).collect();
        let tag = chunk_tag(&payload, &pages, number(&case["num_blocks"])).unwrap();
        assert_eq!(tag, hex(&case["tag"]), "{}", case["name"]);
    }
}

/// Returns, for 2^18 words, how much a word's term changes when the bits in `mask` are flipped.
/// Omits the sign, which is opposite for a word and its flipped counterpart.
fn changes(mix: fn(u64) -> u64, mask: u64) -> Vec<u64> {
    let noise = noise(8 << 18, mask);
    let words = noise.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    words.map(|x| mix(x ^ mask).wrapping_sub(mix(x)).cast_signed().unsigned_abs()).collect()
}

/// Returns the number of equal neighbors after sorting. Equal changes in two
/// words can cancel out.
fn num_equal(mut changes: Vec<u64>) -> usize {
    changes.sort_unstable();
    changes.windows(2).filter(|pair| pair[0] == pair[1]).count()
}

/// The first definition of `mix`, under which sign flips in two words could cancel out. The test
/// below detects this.
fn first_mix(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(M1);
    x ^= x >> 29;
    x = x.wrapping_mul(M2);
    x ^ (x >> 32)
}

const FP32_SIGNS: u64 = 0x8000_0000_8000_0000;
const BF16_SIGNS: u64 = 0x8000_8000_8000_8000;

#[test]
fn the_measure_of_cancelling_sees_the_weak_masks_of_the_first_definition() {
    assert!(num_equal(changes(first_mix, FP32_SIGNS)) > 1000);
    assert!(num_equal(changes(first_mix, BF16_SIGNS)) > 0);
    assert_eq!(num_equal(changes(first_mix, 1)), 0);
}

/// Compares about 2^43 pairs of words in which the same or different bits are flipped. In no pair
/// do the changes cancel out.
#[test]
fn flipped_signs_and_lanes_of_two_words_change_the_tag() {
    let mut masks = vec![u64::MAX, u64::MAX << 32, 0xffff_0000_ffff_0000, 0x00ff_00ff_00ff_00ff];
    for (lanes, width) in
        [(1, 64), (0x1_0000_0001, 32), (0x0001_0001_0001_0001, 16), (0x0101_0101_0101_0101, 8)]
    {
        let sign: u64 = lanes << (width - 1);
        masks.extend([sign, sign >> 1, sign | sign >> 1, lanes]);
    }
    assert!(masks.contains(&FP32_SIGNS) && masks.contains(&BF16_SIGNS));
    assert_eq!(num_equal(masks.into_iter().flat_map(|mask| changes(mix, mask)).collect()), 0);
}

#[test]
fn a_payload_of_another_length_is_refused() {
    for len in [0, 15, 17, 32] {
        assert_eq!(chunk_tag(&vec![0; len], &[8], 2).unwrap_err().kind(), ErrorKind::InvalidConfig);
    }
    assert!(chunk_tag(&[], &[u32::MAX; 3], u32::MAX).is_err());
}
