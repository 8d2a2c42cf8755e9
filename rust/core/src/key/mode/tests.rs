//! Tests that all shortcuts through BLAKE3 internals produce regular keyed hashes.

use super::*;

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut bytes);
    bytes
}

#[test]
fn mode_keys_are_the_plain_hash_of_their_documented_names() {
    assert_eq!(TOKENS.key, *blake3::hash(b"kvloft key v2 tokens").as_bytes());
    let all = [&*NAMESPACE, &*ROOT, &*SALT, &*TOKENS, &*EMBEDS, &*MIXED, &*CHAIN, &*GROUP];
    let keys: std::collections::HashSet<_> = all.iter().map(|mode| mode.key).collect();
    assert_eq!(keys.len(), all.len());
}

#[test]
fn lanes_equal_plain_keyed_hash_for_every_length_and_count() {
    for stride in (4..=1100).step_by(4).chain([2048, 4096, 65536]) {
        for count in [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33] {
            let bytes = noise(stride * count);
            let mut got = vec![[0; 32]; count];
            TOKENS.hash_each(&bytes, stride, &mut got);
            for (got, input) in got.iter().zip(bytes.chunks(stride)) {
                assert_eq!(
                    got,
                    blake3::keyed_hash(&TOKENS.key, input).as_bytes(),
                    "{stride} x {count}"
                );
            }
        }
    }
}

#[test]
fn pairs_equal_plain_keyed_hash() {
    for seed in 0..100u8 {
        let (left, right) = ([seed; 32], *blake3::hash(&[seed]).as_bytes());
        let plain = blake3::keyed_hash(&CHAIN.key, &[left, right].concat());
        assert_eq!(CHAIN.hash_pair(&left, &right), *plain.as_bytes());
    }
}

#[test]
fn threads_do_not_change_a_hash() {
    for len in [PARALLEL_BYTES - 1, PARALLEL_BYTES, PARALLEL_BYTES + 1, 3 * PARALLEL_BYTES + 5] {
        let bytes = noise(len);
        assert_eq!(EMBEDS.hash(&bytes), *blake3::keyed_hash(&EMBEDS.key, &bytes).as_bytes());
    }
}
