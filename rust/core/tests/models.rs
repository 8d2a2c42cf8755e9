//! Model-checks every lock, condition variable and atomic of the store, and of the disk tier's gate
//! and growth, with a scheduler that tries many interleavings (`scripts/models.sh`). Timed waits
//! never time out here, so a lost wakeup shows up as a deadlock.
#![cfg(shuttle)]
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use kvloft_core::io::SizeClass;
use std::path::PathBuf;
use std::sync::Arc;

use kvloft_core::evict::Eviction;
use kvloft_core::store::{Opener, Store, StoreConfig};
use kvloft_core::tier::disk::{DiskConfig, DiskMeta, DiskStats, DiskTier, SlotId};
use kvloft_core::tier::{LocalTier, NoSlot};
use kvloft_core::{ChunkKey, ErrorKind, Result};
use kvloft_testing::memory_tier::MemoryTier;
use kvloft_testing::one_prefix::StoreExt;
use shuttle::scheduler::RandomScheduler;
use shuttle::thread;
use std::time::{Duration, Instant};
use store_common::{arena_of, chain, config, disk_settings, save, stat};

/// A tier whose calls yield to other threads.
#[derive(Debug)]
struct Yielding(Arc<MemoryTier>);

impl LocalTier for Yielding {
    fn reserve(&self, class: SizeClass) -> Result<SlotId, NoSlot> {
        thread::yield_now();
        self.0.reserve(class)
    }
    fn frame_bytes(&self, class: SizeClass) -> u64 {
        self.0.frame_bytes(class)
    }
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        thread::yield_now();
        self.0.write(slot, meta, frame)
    }
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        thread::yield_now();
        self.0.read(slot, key, into)
    }
    fn free(&self, slot: SlotId) -> Result<()> {
        thread::yield_now();
        self.0.free(slot)
    }
    fn is_removable(&self) -> bool {
        self.0.is_removable()
    }
    fn removed(&self) -> Option<PathBuf> {
        self.0.removed()
    }
    fn stats(&self) -> DiskStats {
        self.0.stats()
    }
    fn take_events(&self) -> Vec<String> {
        self.0.take_events()
    }
    fn clear(&self) -> Result<Vec<SlotId>> {
        thread::yield_now();
        self.0.clear()
    }
    fn close(&self) {
        self.0.close();
    }
}

fn in_many_orders(model: impl Fn() + Send + Sync + 'static) {
    // The number is read from an environment variable, because tests take no arguments.
    let orders = std::env::var("KV_ORDERS").map_or(2_000, |text| text.parse().expect("a number"));
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    shuttle::Runner::new(RandomScheduler::new(orders), config).run(model);
}

/// Saves two prompts and loads each of them.
fn call(store: &Store, first: u32) {
    let arena = arena_of(store);
    for nth in 0..2 {
        let chain = chain(&[first, nth, 2]);
        save(store, &arena, &chain, 0..3);
        let lease = store.acquire(&chain);
        while lease.poll().pending_units > 0 {
            thread::yield_now();
        }
        assert!(lease.frames().len() <= 3);
    }
}

fn with_callers(last: impl Fn(&Store) + Send + Sync + 'static) {
    let last = Arc::new(last);
    let model = move || {
        let settings = StoreConfig { disk: Some(disk_settings(6, 2)), ..config(4, Eviction::Lru) };
        let (disk, start) = (Arc::new(Yielding(MemoryTier::new(6))), Instant::now());
        let opener: Opener =
            Box::new(move || Ok((Arc::clone(&disk) as Arc<dyn LocalTier>, Vec::new())));
        let store = Arc::new(
            Store::with_tier(&settings, None, Some(opener), Box::new(move || start.elapsed()))
                .unwrap(),
        );
        let callers: Vec<_> = (0..2)
            .map(|first| {
                let store = Arc::clone(&store);
                thread::spawn(move || call(&store, first))
            })
            .collect();
        last(&store);
        for caller in callers {
            caller.join().unwrap();
        }
        store.check().unwrap();
        for name in ["pins", "read_leases", "write_leases"] {
            assert_eq!(stat(&store, name), 0, "{name}");
        }
        store.close(Duration::ZERO);
        for name in ["frames_reserved", "reads_pending"] {
            assert_eq!(stat(&store, name), 0, "{name}");
        }
    };
    in_many_orders(model);
}

#[test]
fn a_store_becomes_idle_in_every_order_of_calls() {
    with_callers(|store| assert!(store.flush(Duration::from_secs(600))));
}

#[test]
fn a_clear_with_concurrent_calls_ends() {
    with_callers(|store| assert!(store.clear()));
}

#[test]
fn a_close_with_concurrent_calls_ends() {
    with_callers(|store| store.close(Duration::from_secs(600)));
}

fn is_free(dir: &std::path::Path) -> bool {
    std::fs::File::open(dir.join("lock"))
        .or_else(|_| std::fs::File::open(dir))
        .unwrap()
        .try_lock()
        .is_ok()
}

#[test]
fn a_closed_tier_gives_its_directory_up_with_the_last_call() {
    let model = || {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let settings = || DiskConfig {
            dir: dir.path().to_owned(),
            cap_bytes: (64 << 10) + 3 * (4096 + 4096),
            frame_sizes: 4096_u64.into(),
            namespace: [7; 32],
            description: String::new(),
        };
        let tier = Arc::new(DiskTier::open(settings()).unwrap().0);
        let call = |n: u8| {
            let tier = Arc::clone(&tier);
            thread::spawn(move || {
                let slot = tier.reserve(SizeClass(0)).ok()?;
                let meta = DiskMeta {
                    key: ChunkKey([n; 32]),
                    parent: ChunkKey([0; 32]),
                    depth: 0,
                    saved_s: 0,
                };
                let written = tier.write(slot, &meta, &[n; 4096]);
                assert!(
                    written.is_ok()
                        || written.is_err_and(|error| error.kind() == ErrorKind::Closed)
                );
                Some(slot)
            })
        };
        let callers: Vec<_> = (1..4).map(call).collect();
        tier.close();
        let mut slots: Vec<_> =
            callers.into_iter().filter_map(|caller| caller.join().unwrap()).collect();
        let num_slots = slots.len();
        slots.sort();
        slots.dedup();
        assert_eq!(slots.len(), num_slots, "a slot was reserved twice");
        assert!(is_free(dir.path()), "a closed tier must release its directory");
        assert!(tier.reserve(SizeClass(0)).is_err(), "a closed tier must reject calls");
        assert!(tier.stats().bytes <= tier.stats().cap_bytes);
    };
    in_many_orders(model);
}
