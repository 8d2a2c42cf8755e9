//! Tests that a listener's queue is bounded.

use kvloft_core::ChunkKey;
use kvloft_core::evict::Eviction;
use kvloft_core::key::KeyChain;
use kvloft_core::store::{StoreConfig, TenantLimits};
use kvloft_testing::one_prefix::StoreExt;

use super::*;

fn store() -> Store {
    let config = StoreConfig {
        frame_sizes: 4096_u64.into(),
        host_bytes: 2 * 4096,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
        now_s: 0,
        limits: TenantLimits::default(),
    };
    Store::open(&config).expect("a store")
}

#[test]
fn queue_of_a_listener_is_bounded() {
    let (store, mut listener) = (store(), None);
    let sent = SentChanges { capacity: 8 * MAX_CHANGES, limit: 1, asked: Keys::Own(&[]) };
    let mut is_lost = || changes(&sent, &store, &mut listener).expect("few keys").lost;
    assert!(is_lost(), "the first response must report lost changes");
    assert!(!is_lost());
    for token in 0..=MAX_CHANGES {
        let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
        chain.append_tokens(&[token]).expect("tokens");
        let range = 0..1;
        let reserved = store.reserve(&chain, range).expect("in range");
        assert_eq!(store.commit(reserved.chunks), 1);
    }
    assert!(is_lost(), "the queue must not exceed its bound");
}
