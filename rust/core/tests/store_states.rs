//! Tests Mamba states in chats. Each turn creates a new state, which is useless without its prefix.
//! If states are linked to their prefixes, each tier keeps both for chats that continue.

#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use kvloft_core::io::SizeClass;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::KeyChain;
use kvloft_core::store::{Prefix, SaveRequest, Store, StoreConfig};
use kvloft_testing::one_prefix::StoreExt;
use store_common::*;

const GROUP: u32 = 5;
const TURN: u32 = 3;
const NUM_CHATS: u32 = 20;

fn prompt(number: u32, num_blocks: u32) -> KeyChain {
    chain(&(0..num_blocks).map(|at| number * 100 + at).collect::<Vec<_>>())
}

/// Saves a prompt of `num_blocks` blocks and the state at its end, with or without a link to the
/// prompt.
fn save_turn(store: &Store, number: u32, num_blocks: u32, has_prefix: bool, after: impl Fn()) {
    let own = prompt(number, num_blocks);
    let (root, mut keys) = own.independent_keys(GROUP, num_blocks - 1..num_blocks).unwrap();
    keys.extend(own.keys().last().filter(|_| has_prefix));
    let kv = SaveRequest {
        prefix: Prefix::from(&own),
        units: 0..num_blocks,
        class: SizeClass(0),
        is_independent: false,
    };
    let state = SaveRequest {
        prefix: Prefix::new(root, &keys),
        units: 0..1,
        class: SizeClass(0),
        is_independent: true,
    };
    for asked in [kv, state] {
        let leases = store.reserve_many(None, &[asked]).unwrap().remove(0).chunks;
        let arena = arena_of(store);
        for lease in &leases {
            fill(&arena, lease.reservation());
        }
        store.commit(leases);
        after();
    }
}

/// Returns true if a whole prompt and its state are found in any tier. In that case, also acquires
/// both.
fn finds(store: &Store, number: u32, num_blocks: u32) -> bool {
    let own = prompt(number, num_blocks);
    let (root, keys) = own.independent_keys(GROUP, num_blocks - 1..num_blocks).unwrap();
    let needs = [Prefix::from(&own), Prefix::new(root, &keys)];
    let has = needs.map(|prefix| store.lookup(prefix).stored_units) == [num_blocks, 1];
    for prefix in needs.into_iter().filter(|_| has) {
        let lease = store.acquire(prefix);
        let deadline = Instant::now() + Duration::from_secs(60);
        while lease.poll().pending_units > 0 {
            assert!(Instant::now() < deadline, "the chunk is never read");
            std::thread::yield_now();
        }
    }
    has
}

/// Runs chats interleaved with prompts that never repeat, and returns the number of blocks that the
/// chats find. Calls `after` after each save.
fn found_by_chats(store: &Store, has_prefix: bool, after: impl Fn()) -> u32 {
    let mut num_found = 0;
    for turn in 1..10 {
        for chat in 0..NUM_CHATS {
            let before = (turn - 1) * TURN;
            if before > 0 && finds(store, chat, before) {
                num_found += before;
            }
            save_turn(store, chat, turn * TURN, has_prefix, &after);
            save_turn(store, 1000 + turn * NUM_CHATS + chat, 2 * TURN, has_prefix, &after);
        }
    }
    num_found
}

#[test]
fn states_with_their_prefix_get_more_hits_in_host_memory() {
    let [with, without] = [true, false].map(|has_prefix| {
        let store = Store::open(&config(300, Eviction::Adaptive)).unwrap();
        found_by_chats(&store, has_prefix, || ())
    });
    assert!(with > without * 5 / 4, "{with} blocks, and {without} without");
}

#[test]
fn a_quota_holds_on_disk() {
    let [with, without] = [true, false].map(|has_prefix| {
        let disk = MemoryDisk::new(300);
        let settings =
            StoreConfig { disk: Some(disk_settings(300, 1)), ..config(40, Eviction::Adaptive) };
        let store = disk.open(&settings, &[]);
        found_by_chats(&store, has_prefix, || assert!(disk.flush(&store)))
    });
    assert!(with > without * 5 / 4, "{with} blocks, and {without} without");
}
