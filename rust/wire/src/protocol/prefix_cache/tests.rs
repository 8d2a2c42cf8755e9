//! Tests how many units a prefix shares with the cached prefix.

use super::*;

fn keys(num: u8) -> Vec<ChunkKey> {
    (0..num).map(|at| ChunkKey([at; 32])).collect()
}

#[test]
fn prefix_before_the_anchor_shares_no_block() {
    let keys = keys(6);
    let mut cache = PrefixCache::default();
    cache.reset(Some((4, keys[3])));
    for end in 0..=3 {
        assert_eq!(cache.num_same(&keys[..end]), 0, "{end} blocks");
    }
    assert_eq!((cache.num_same(&keys[..4]), cache.num_same(&keys)), (4, 4));
    assert!(cache.extend(4, keys[4..].iter().copied()));
    assert_eq!(
        (cache.num_same(&keys[..3]), cache.num_same(&keys[..5]), cache.num_same(&keys)),
        (0, 5, 6)
    );
}
