//! States of chats: new at each turn, of no use without the prefix before them, and the prefix of
//! none without them. Where a store is told what they are kept beside, both tiers keep what goes
//! on.

#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use kvloft_core::io::SizeClass;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::KeyChain;
use kvloft_core::store::{Prefix, Store, StoreConfig, ToSave};
use store_common::*;

const GROUP: u32 = 5;
const TURN: u32 = 3;
const NUM_CHATS: u32 = 20;

fn prompt(number: u32, num_blocks: u32) -> KeyChain {
    chain(&(0..num_blocks).map(|at| number * 100 + at).collect::<Vec<_>>())
}

/// Saves a prompt of so many blocks and the state behind it, which says what it is kept beside, or
/// does not. ``after`` each.
fn save_turn(store: &Store, number: u32, num_blocks: u32, says_beside: bool, after: impl Fn()) {
    let own = prompt(number, num_blocks);
    let (root, mut keys) = own.attached(GROUP, num_blocks - 1..num_blocks).unwrap();
    keys.extend(own.keys().last().filter(|_| says_beside));
    let kv = ToSave {
        prefix: Prefix::from(&own),
        units: 0..num_blocks,
        class: SizeClass(0),
        is_attached: false,
    };
    let state = ToSave {
        prefix: Prefix::new(root, &keys),
        units: 0..1,
        class: SizeClass(0),
        is_attached: true,
    };
    for asked in [kv, state] {
        let (leases, _) = store.reserve_many(None, &[asked]).unwrap();
        let arena = arena_of(store);
        for lease in &leases {
            fill(&arena, lease.reservation());
        }
        store.commit(leases);
        after();
    }
}

/// Whether all of a prompt and the state behind it are found in any tier; they are used then.
fn finds(store: &Store, number: u32, num_blocks: u32) -> bool {
    let own = prompt(number, num_blocks);
    let (root, keys) = own.attached(GROUP, num_blocks - 1..num_blocks).unwrap();
    let needs = [Prefix::from(&own), Prefix::new(root, &keys)];
    let has = needs.map(|prefix| store.lookup(prefix).stored_units) == [num_blocks, 1];
    for prefix in needs.into_iter().filter(|_| has) {
        let lease = store.acquire(prefix);
        let deadline = Instant::now() + Duration::from_secs(60);
        while lease.poll().pending_units > 0 {
            assert!(Instant::now() < deadline, "it is never read");
            std::thread::yield_now();
        }
    }
    has
}

/// Blocks that chats find of themselves, while prompts come that never do again. ``after`` each
/// save.
fn found_by_chats(store: &Store, says_beside: bool, after: impl Fn()) -> u32 {
    let mut num_found = 0;
    for turn in 1..10 {
        for chat in 0..NUM_CHATS {
            let before = (turn - 1) * TURN;
            if before > 0 && finds(store, chat, before) {
                num_found += before;
            }
            save_turn(store, chat, turn * TURN, says_beside, &after);
            save_turn(store, 1000 + turn * NUM_CHATS + chat, 2 * TURN, says_beside, &after);
        }
    }
    num_found
}

#[test]
fn chats_find_more_in_host_where_states_say_what_they_are_kept_beside() {
    let [told, not_told] = [true, false].map(|says_beside| {
        let store = Store::open(&config(300, Eviction::Adaptive)).unwrap();
        found_by_chats(&store, says_beside, || ())
    });
    assert!(told > not_told * 5 / 4, "{told} blocks, and {not_told} without");
}

#[test]
fn and_on_disk() {
    let [told, not_told] = [true, false].map(|says_beside| {
        let disk = MemoryDisk::new(300);
        let settings =
            StoreConfig { disk: Some(disk_settings(300, 1)), ..config(40, Eviction::Adaptive) };
        let store = disk.open(&settings, &[]);
        found_by_chats(&store, says_beside, || assert!(disk.flush(&store)))
    });
    assert!(told > not_told * 5 / 4, "{told} blocks, and {not_told} without");
}
