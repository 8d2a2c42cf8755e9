//! Tests the change log of a store: once the store is idle, a replay of the log matches lookups.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::Arena;
use kvloft_core::key::ChunkKey;
use kvloft_core::store::{
    Changes, Listener, Lookup, ReadLease, Store, StoreConfig, Tiers, WriteLease,
};
use kvloft_testing::one_prefix::StoreExt;
use proptest::prelude::*;
use store_common::{
    MemoryDisk, arena_of, chain, config, disk_settings, fill, prompt_chain, save, stat,
};

const NOWHERE: Tiers = Tiers { host: false, disk: false, pending: false };
const HOST: Tiers = Tiers { host: true, ..NOWHERE };
const PENDING: Tiers = Tiers { pending: true, ..NOWHERE };

fn open(num_frames: u32, disk: &Arc<MemoryDisk>) -> Store {
    let settings = disk_settings(u64::from(disk.capacity), 2);
    let config = StoreConfig { disk: Some(settings), ..config(num_frames, Eviction::Lru) };
    disk.open(&config, &disk.entries())
}

/// A listener, and the tiers of each chunk according to the log.
#[derive(Debug)]
struct Hearer {
    listener: Listener,
    known: HashMap<ChunkKey, Tiers>,
    num_lost: u32,
}

impl Hearer {
    fn join(store: &Store, universe: &[ChunkKey], capacity: usize) -> Self {
        let listener = store.watch(capacity);
        let known = listener.changes(universe, 0).rows.into_iter().collect();
        Self { listener, known, num_lost: 0 }
    }

    /// Takes some changes, and returns true if there may be more.
    fn take(&mut self, universe: &[ChunkKey], limit: usize) -> bool {
        let changes = self.listener.changes(&[], limit);
        let is_full = changes.rows.len() == limit;
        if changes.lost {
            self.num_lost += 1;
            self.known.extend(self.listener.changes(universe, 0).rows);
        }
        self.known.extend(changes.rows);
        is_full || changes.lost
    }

    fn has(&self, key: ChunkKey, on_disk_too: bool) -> bool {
        self.known.get(&key).is_some_and(|tiers| tiers.host || on_disk_too && tiers.disk)
    }

    /// Returns the number of leading units stored according to the log.
    fn units(&self, keys: &[ChunkKey], on_disk_too: bool) -> u32 {
        u32::try_from(keys.iter().take_while(|key| self.has(**key, on_disk_too)).count()).unwrap()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Save { prompt: usize, len: u32, later: bool },
    Settle { lease: usize, commit: bool },
    Acquire { prompt: usize },
    Release { lease: usize },
    Discard { prompt: usize, block: usize },
    Clear,
    Take { who: usize, limit: usize },
    Join { capacity: usize },
    Leave { who: usize },
    Rest,
    Fault { writes: bool, corrupt: bool, frees: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        9 => (0..64usize, 1..10u32, prop::bool::weighted(0.2))
            .prop_map(|(prompt, len, later)| Step::Save { prompt, len, later }),
        2 => (0..64usize, any::<bool>()).prop_map(|(lease, commit)| Step::Settle { lease, commit }),
        5 => (0..64usize).prop_map(|prompt| Step::Acquire { prompt }),
        4 => (0..64usize).prop_map(|lease| Step::Release { lease }),
        2 => (0..64usize, 0..9usize).prop_map(|(prompt, block)| Step::Discard { prompt, block }),
        1 => Just(Step::Clear),
        6 => (0..4usize, 1..6usize).prop_map(|(who, limit)| Step::Take { who, limit }),
        1 => (1..12usize).prop_map(|capacity| Step::Join { capacity }),
        1 => (0..4usize).prop_map(|who| Step::Leave { who }),
        2 => Just(Step::Rest),
        2 => (any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(writes, corrupt, frees)| Step::Fault { writes, corrupt, frees }),
    ]
}

struct Run {
    store: Store,
    arena: Arena,
    disk: Arc<MemoryDisk>,
    universe: Vec<ChunkKey>,
    hearers: Vec<Hearer>,
    writes: Vec<WriteLease>,
    reads: Vec<ReadLease>,
}

impl Run {
    fn new(num_frames: u32, num_slots: u32, capacity: usize) -> Self {
        let disk = MemoryDisk::new(num_slots);
        let store = open(num_frames, &disk);
        let keys: HashSet<_> =
            (0..64).flat_map(|prompt| prompt_chain(prompt).keys().to_vec()).collect();
        let (universe, arena) = (keys.into_iter().collect::<Vec<_>>(), arena_of(&store));
        let hearers = vec![Hearer::join(&store, &universe, capacity)];
        Self { store, arena, disk, universe, hearers, writes: Vec::new(), reads: Vec::new() }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Save { prompt, len, later } => {
                let chain = prompt_chain(prompt);
                let reserved = self.store.reserve(&chain, 0..len.min(chain.num_blocks())).unwrap();
                reserved.chunks.iter().for_each(|lease| fill(&self.arena, lease.reservation()));
                self.writes.extend(reserved.chunks);
                if !later {
                    self.store.commit(std::mem::take(&mut self.writes));
                }
            }
            Step::Settle { lease, commit } if !self.writes.is_empty() => {
                let lease = self.writes.swap_remove(lease % self.writes.len());
                if commit {
                    self.store.commit([lease]);
                }
            }
            Step::Acquire { prompt } => self.reads.push(self.store.acquire(&prompt_chain(prompt))),
            Step::Release { lease } if !self.reads.is_empty() => {
                drop(self.reads.swap_remove(lease % self.reads.len()));
            }
            Step::Discard { prompt, block } => {
                let chain = prompt_chain(prompt);
                self.store.discard(&[chain.keys()[block % chain.keys().len()]]);
            }
            Step::Clear => {
                self.heal();
                self.store.clear();
            }
            Step::Take { who, limit } if !self.hearers.is_empty() => {
                let who = who % self.hearers.len();
                self.hearers[who].take(&self.universe, limit);
            }
            Step::Join { capacity } => {
                self.hearers.push(Hearer::join(&self.store, &self.universe, capacity));
            }
            Step::Leave { who } if !self.hearers.is_empty() => {
                drop(self.hearers.swap_remove(who % self.hearers.len()));
            }
            Step::Settle { .. } | Step::Release { .. } | Step::Take { .. } | Step::Leave { .. } => {
            }
            Step::Rest => self.rest(),
            Step::Fault { writes, corrupt, frees } => {
                self.disk.fail_writes.store(writes, Ordering::SeqCst);
                self.disk.corrupt_reads.store(corrupt, Ordering::SeqCst);
                self.disk.fail_frees.store(frees, Ordering::SeqCst);
            }
        }
    }

    fn heal(&self) {
        for fault in [&self.disk.fail_writes, &self.disk.corrupt_reads, &self.disk.fail_frees] {
            fault.store(false, Ordering::SeqCst);
        }
        self.disk.wait(61);
    }

    /// Waits until the store is idle, then compares the replay with lookups.
    fn rest(&mut self) {
        self.heal();
        self.writes.clear();
        self.reads.clear();
        // A read that no request waits for still completes and makes its chunk visible to lookups.
        let deadline = Instant::now() + Duration::from_secs(60);
        while stat(&self.store, "frames_reserved") > 0 {
            assert!(Instant::now() < deadline, "reads never completed");
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(self.disk.flush(&self.store));
        self.disk.wait(600); // paused disks are probed again, so lookups find chunks on disk
        self.store.check().unwrap();
        let on_disk = self.disk.chunks();
        let found: Vec<_> =
            (0..64).map(|prompt| self.store.lookup(&prompt_chain(prompt))).collect();
        for hearer in &mut self.hearers {
            assert!((0..1000).any(|_| !hearer.take(&self.universe, 7)), "the log never ends");
            for key in &self.universe {
                let told = hearer.known.get(key).copied().unwrap_or_default();
                assert_eq!(told.disk, on_disk.contains_key(key), "{key}");
                assert!(
                    told.disk || !told.pending,
                    "{key} was never reported, and `lost` was not set"
                );
            }
            for (prompt, found) in found.iter().enumerate() {
                let chain = prompt_chain(prompt);
                let units = |too| hearer.units(chain.keys(), too);
                let replayed = Lookup { host_units: units(false), stored_units: units(true) };
                assert_eq!(*found, replayed, "prompt {prompt}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn replayed_changes_match_lookups(
        steps in prop::collection::vec(step(), 1..60), num_frames in 3..12u32, num_slots in 2..20u32,
        capacity in prop_oneof![1..12usize, Just(4096)],
    ) {
        let mut run = Run::new(num_frames, num_slots, capacity);
        for step in &steps {
            run.take(step);
        }
        run.rest();
    }
}

#[test]
fn a_row_has_the_tiers_at_the_time_of_the_call() {
    let store = Store::open(&config(8, Eviction::Lru)).unwrap();
    let (chain, arena) = (prompt_chain(0), arena_of(&store));
    assert_eq!(save(&store, &arena, &chain, 0..1), 1);
    let listener = store.watch(100);
    assert!(listener.changes(&[], 100).rows.is_empty(), "earlier changes must not be reported");
    assert_eq!(
        listener.changes(&chain.keys()[..2], 0).rows,
        [(chain.keys()[0], HOST), (chain.keys()[1], NOWHERE)]
    );
    save(&store, &arena, &chain, 0..3);
    store.discard(&[chain.keys()[2]]);
    let Changes { rows, lost } = listener.changes(&[], 2);
    assert_eq!(rows, [(chain.keys()[1], HOST), (chain.keys()[2], NOWHERE)]);
    assert!(
        !lost
            && listener.changes(&[], 100).rows.iter().all(|row| *row == (chain.keys()[2], NOWHERE))
    );
}

#[test]
fn a_save_that_fails_is_reported() {
    let store = Store::open(&config(8, Eviction::Lru)).unwrap();
    let (chain, listener) = (prompt_chain(0), store.watch(100));
    let key = chain.keys()[0];
    let reserved = store.reserve(&chain, 0..1).unwrap();
    assert_eq!(listener.changes(&[key], 100).rows, [(key, PENDING)]);
    drop(reserved);
    assert!(listener.changes(&[], 100).rows.contains(&(key, NOWHERE)));
}

#[test]
fn unread_keys_are_dropped_and_the_loss_is_reported_once() {
    let store = Store::open(&config(8, Eviction::Lru)).unwrap();
    let (chain, arena) = (prompt_chain(0), arena_of(&store));
    let listener = store.watch(4);
    for _ in 0..10 {
        save(&store, &arena, &chain, 0..3);
        store.discard(chain.keys());
    }
    save(&store, &arena, &chain, 0..1);
    let Changes { rows, lost } = listener.changes(&chain.keys()[..2], 100);
    assert!(lost);
    assert_eq!(rows, [(chain.keys()[0], HOST), (chain.keys()[1], NOWHERE)]);
    assert!(!listener.changes(&[], 100).lost);
    save(&store, &arena, &chain, 0..2);
    assert_eq!(
        listener.changes(&[], 100).rows,
        [(chain.keys()[1], HOST)],
        "later changes must be reported"
    );
}

/// Lookups do not find a chunk while its slot is being freed, but find it again if freeing fails.
#[test]
fn a_chunk_whose_slot_cannot_be_freed_is_reported() {
    let disk = MemoryDisk::new(1);
    let store = open(8, &disk);
    let (old, new, arena) = (chain(&[1]), chain(&[2]), arena_of(&store));
    let listener = store.watch(100);
    save(&store, &arena, &old, 0..1);
    assert!(disk.flush(&store));
    disk.fail_frees.store(true, Ordering::SeqCst);
    let gate = disk.free_gate.lock().unwrap();
    save(&store, &arena, &new, 0..1);
    let old_is = |expected: Tiers| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !listener.changes(&[], 100).rows.contains(&(old.keys()[0], expected)) {
            assert!(Instant::now() < deadline, "never reported: {expected:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    old_is(HOST);
    drop(gate);
    old_is(Tiers { disk: true, ..HOST });
}

/// Each listener receives all changes at its own pace. Only listeners that read too slowly lose
/// changes.
#[test]
fn each_listener_has_a_separate_position() {
    let store = Store::open(&config(8, Eviction::Lru)).unwrap();
    let (one, other, arena) = (chain(&[1, 2, 3]), chain(&[4, 5, 6]), arena_of(&store));
    let (quick, slow, idle) = (store.watch(4), store.watch(3), store.watch(4));
    let keys = |listener: &Listener, limit| {
        let Changes { rows, lost } = listener.changes(&[], limit);
        assert!(!lost);
        rows.into_iter().map(|(key, _)| key).collect::<Vec<_>>()
    };
    save(&store, &arena, &one, 0..3);
    assert_eq!(keys(&quick, 100), one.keys());
    assert_eq!(keys(&slow, 2), one.keys()[..2]);
    let late = store.watch(4);
    save(&store, &arena, &other, 0..3);
    assert_eq!(
        (keys(&quick, 100), keys(&late, 100)),
        (other.keys().to_vec(), other.keys().to_vec())
    );
    assert_eq!(keys(&slow, 100), [&one.keys()[2..], other.keys()].concat());
    assert_eq!(idle.changes(&[], 100), Changes { rows: Vec::new(), lost: true });
    drop((quick, late));
    store.clear();
    assert!(
        slow.changes(&[], 100).lost && idle.changes(&[], 100).lost,
        "a clear must reach all listeners"
    );
    save(&store, &arena, &one, 0..1);
    assert_eq!(
        (keys(&slow, 100), keys(&idle, 100)),
        (one.keys()[..1].to_vec(), one.keys()[..1].to_vec())
    );
}

/// A large tree is removed in slices, with the root last. The log reports immediately that lookups
/// miss the tree's chunks.
#[test]
fn a_tree_removed_in_slices_is_reported_at_once() {
    let store = Store::open(&config(2000, Eviction::Lru)).unwrap();
    let tokens: Vec<u32> = (0..2000).collect();
    let (long, arena) = (chain(&tokens), arena_of(&store));
    save(&store, &arena, &long, 0..2000);
    let listener = store.watch(10_000);
    store.discard(&long.keys()[..1]);
    let Changes { rows, lost } = listener.changes(&[], 10_000);
    assert!(rows.contains(&(long.keys()[0], NOWHERE)) && rows.len() < 1000 && !lost);
    while !listener.changes(&[], 10_000).rows.is_empty() {}
    save(&store, &arena, &long, 0..2000);
    listener.changes(&[], 10_000);
    store.clear();
    assert!(listener.changes(&[], 10_000).lost);
}
