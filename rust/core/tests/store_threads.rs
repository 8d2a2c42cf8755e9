//! Tests many threads on one store with a disk: no deadlocks occur, no frame is wrong, and
//! everything is released at the end.

#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::store::{Store, StoreConfig};
use kvloft_testing::one_prefix::StoreExt;
use store_common::{MemoryDisk, arena_of, config, disk_settings, fill, prompt_chain, stat, verify};

const THREADS: usize = 4;
const TURNS: usize = 400;
const LONG: Duration = Duration::from_secs(60);

/// Runs one thread: saves, loads and removes prompts in random order.
fn live(store: &Store, seed: usize) {
    let arena = arena_of(store);
    let mut random = seed;
    for turn in 0..TURNS {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let chain = prompt_chain(random >> 40 & 63);
        let lease = store.acquire(&chain);
        let reserved = store.reserve(&chain, 0..chain.num_blocks()).unwrap();
        reserved.chunks.iter().for_each(|lease| fill(&arena, lease.reservation()));
        for frame in lease.frames() {
            assert_eq!(verify(&arena, frame.frame, frame.key), None);
        }
        match random >> 50 & 7 {
            0 => drop(reserved),
            1 => {
                store.commit(reserved.chunks);
                store.discard(&chain.keys()[1..2]);
            }
            _ => {
                store.commit(reserved.chunks);
            }
        }
        if turn % 97 == 0 {
            store.clear();
        }
        for frame in lease.frames() {
            assert_eq!(verify(&arena, frame.frame, frame.key), None);
        }
    }
}

#[test]
fn threads_share_a_store() {
    for eviction in [Eviction::Lru, Eviction::Adaptive] {
        let disk = MemoryDisk::new(40);
        let settings = StoreConfig { disk: Some(disk_settings(40, 3)), ..config(48, eviction) };
        let store = disk.open(&settings, &[]);
        std::thread::scope(|scope| {
            for seed in 0..THREADS {
                let store = &store;
                scope.spawn(move || live(store, seed));
            }
        });
        assert!(store.flush(LONG));
        store.clear();
        store.check().unwrap();
        assert_eq!(disk.violations(), [""; 0]);
        for name in [
            "pins",
            "frames_reserved",
            "frames_visible",
            "entries",
            "write_leases",
            "read_leases",
            "disk_used",
        ] {
            assert_eq!(stat(&store, name), 0, "{name}");
        }
        store.close(LONG);
    }
}
