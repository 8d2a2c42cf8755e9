//! Compares the store with an independent model: a simple dictionary.
//!
//! Frames are plentiful here, so each result is deterministic and must equal the model's.
//! `store_faults.rs` tests memory pressure and disks.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use std::collections::BTreeMap;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::{Anchors, Lookup, Prefix, ReadLease, Store, WriteLease};
use kvloft_testing::one_prefix::StoreExt;
use proptest::prelude::*;
use store_common::{arena_of, config, fill, prompt_chain, stat, verify};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Chunk {
    Reserved,
    Filled,
    Visible,
}

/// Maps each key to its parent key, its state, and a number that distinguishes the chunk from later
/// chunks with the same key.
#[derive(Debug, Default)]
struct Model {
    chunks: BTreeMap<ChunkKey, (ChunkKey, Chunk, u64)>,
    lives: u64,
}

impl Model {
    fn state(&self, key: &ChunkKey) -> Option<Chunk> {
        self.chunks.get(key).map(|(_, chunk, _)| *chunk)
    }

    fn visible(&self, key: &ChunkKey) -> bool {
        self.state(key) == Some(Chunk::Visible)
    }

    /// Returns the number of units in the longest visible prefix, checking one unit at a time.
    fn lookup(&self, keys: &[ChunkKey]) -> u32 {
        u32::try_from(keys.iter().take_while(|key| self.visible(key)).count()).unwrap()
    }

    fn forget(&mut self, key: ChunkKey) -> u64 {
        let mut forgotten = u64::from(self.chunks.remove(&key).is_some());
        let children: Vec<_> =
            self.chunks.iter().filter(|(_, chunk)| chunk.0 == key).map(|(key, _)| *key).collect();
        for child in children {
            forgotten += self.forget(child);
        }
        forgotten
    }

    fn raise(&mut self) -> u32 {
        let roots_and_visible = |model: &Self, parent: &ChunkKey| {
            !model.chunks.contains_key(parent) || model.visible(parent)
        };
        let mut risen = 0;
        loop {
            let next = self
                .chunks
                .iter()
                .find(|(_, c)| c.1 == Chunk::Filled && roots_and_visible(self, &c.0))
                .map(|c| *c.0);
            let Some(key) = next else { return risen };
            self.chunks.get_mut(&key).unwrap().1 = Chunk::Visible;
            risen += 1;
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Reserve { prompt: usize, start: u32, len: u32 },
    Commit { lease: usize, num: usize },
    Abort { lease: usize },
    Acquire { prompt: usize },
    Release { lease: usize },
    Discard { prompt: usize, block: usize },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..64usize, 0..3u32, 0..10u32).prop_map(|(prompt, start, len)| Step::Reserve { prompt, start, len }),
        6 => (0..64usize, 1..4usize).prop_map(|(lease, num)| Step::Commit { lease, num }),
        2 => (0..64usize).prop_map(|lease| Step::Abort { lease }),
        3 => (0..64usize).prop_map(|prompt| Step::Acquire { prompt }),
        2 => (0..64usize).prop_map(|lease| Step::Release { lease }),
        1 => (0..64usize, 0..9usize).prop_map(|(prompt, block)| Step::Discard { prompt, block }),
        1 => Just(Step::Clear),
    ]
}

struct Run {
    store: Store,
    model: Model,
    writes: Vec<(WriteLease, u64)>,
    reads: Vec<(ReadLease, Vec<ChunkKey>)>,
}

impl Run {
    fn reserve(&mut self, prompt: usize, start: u32, len: u32) {
        let chain = prompt_chain(prompt);
        let keys = chain.keys();
        let stop = (start + len).min(chain.num_blocks());
        let mut expected = Vec::new();
        let mut dropped = 0;
        for unit in start..stop {
            let key = keys[unit as usize];
            let parent = unit.checked_sub(1).map_or(chain.root(), |above| keys[above as usize]);
            if dropped > 0
                || (unit > 0
                    && !self.model.chunks.contains_key(&parent)
                    && !self.model.chunks.contains_key(&key))
            {
                dropped += 1;
            } else if !self.model.chunks.contains_key(&key) {
                self.model.lives += 1;
                self.model.chunks.insert(key, (parent, Chunk::Reserved, self.model.lives));
                expected.push((key, unit, self.model.lives));
            }
        }
        let reserved = self.store.reserve(&chain, start..stop).unwrap();
        assert_eq!(reserved.num_dropped, dropped);
        assert_eq!(reserved.chunks.len(), expected.len());
        let arena = arena_of(&self.store);
        for (lease, (key, unit, life)) in reserved.chunks.into_iter().zip(expected) {
            let got = lease.reservation();
            assert_eq!((got.key, got.unit), (key, unit));
            fill(&arena, got);
            self.writes.push((lease, life));
        }
    }

    fn commit(&mut self, lease: usize, num: usize) {
        if self.writes.is_empty() {
            return;
        }
        let at = lease % self.writes.len();
        let end = (at + num).min(self.writes.len());
        let (leases, lives): (Vec<_>, Vec<_>) = self.writes.drain(at..end).unzip();
        for life in lives {
            if let Some(chunk) = self.model.chunks.values_mut().find(|chunk| chunk.2 == life) {
                chunk.1 = Chunk::Filled;
            }
        }
        assert_eq!(self.store.commit(leases), self.model.raise());
    }

    fn abort(&mut self, lease: usize) {
        if self.writes.is_empty() {
            return;
        }
        let (lease, life) = self.writes.swap_remove(lease % self.writes.len());
        let key = lease.reservation().key;
        if self.model.chunks.get(&key).is_some_and(|chunk| chunk.2 == life) {
            self.model.forget(key);
        }
        drop(lease);
    }

    fn acquire(&mut self, prompt: usize) {
        let chain = prompt_chain(prompt);
        let units = self.model.lookup(chain.keys());
        let lease = self.store.acquire(&chain);
        assert_eq!((lease.poll().ready_units, lease.poll().pending_units), (units, 0));
        let frames = lease.frames();
        assert_eq!(
            frames.iter().map(|f| f.key).collect::<Vec<_>>(),
            chain.keys()[..units as usize]
        );
        self.reads.push((lease, frames.iter().map(|f| f.key).collect()));
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Reserve { prompt, start, len } => self.reserve(prompt, start, len),
            Step::Commit { lease, num } => self.commit(lease, num),
            Step::Abort { lease } => self.abort(lease),
            Step::Acquire { prompt } => self.acquire(prompt),
            Step::Release { lease } if !self.reads.is_empty() => {
                drop(self.reads.swap_remove(lease % self.reads.len()));
            }
            Step::Release { .. } => {}
            Step::Discard { prompt, block } => {
                let chain = prompt_chain(prompt);
                let key = chain.keys()[block % chain.keys().len()];
                assert_eq!(self.store.discard(&[key]), self.model.forget(key));
            }
            Step::Clear => {
                self.store.clear();
                self.model.chunks.clear();
            }
        }
        self.compare();
    }

    /// Checks that a prefix without the keys before a stored chunk gives the same result as the
    /// whole prefix, and that nothing is found if the chunk is not stored.
    fn compare_anchors(&self, chain: &KeyChain, num: u32) {
        let keys = chain.keys();
        let anchors: Vec<_> = (1..).zip(keys.iter().copied()).collect();
        assert_eq!(self.store.anchors(&anchors), Anchors { num_known: num, num_stored: num });
        for end in 2..=chain.num_blocks() {
            let begun =
                Prefix { first: end - 1, keys: &keys[end as usize - 1..], ..Prefix::from(chain) };
            let is_stored = end <= num;
            let units = if is_stored { num } else { 0 };
            assert_eq!(self.store.lookup(begun), Lookup { host_units: units, stored_units: units });
            assert_eq!(
                self.store.acquire(begun).frames(),
                if is_stored { self.store.acquire(chain).frames() } else { vec![] }
            );
        }
    }

    fn compare(&self) {
        self.store.check().unwrap();
        for prompt in 0..64 {
            let chain = prompt_chain(prompt);
            let units = self.model.lookup(chain.keys());
            assert_eq!(
                self.store.lookup(&chain),
                Lookup { host_units: units, stored_units: units }
            );
            self.compare_anchors(&chain, units);
        }
        assert_eq!(stat(&self.store, "entries"), self.model.chunks.len() as u64);
        assert_eq!(stat(&self.store, "write_leases"), self.writes.len() as u64);
        assert_eq!(stat(&self.store, "read_leases"), self.reads.len() as u64);
        let arena = arena_of(&self.store);
        for (lease, keys) in &self.reads {
            // I1, I4: a leased frame never changes.
            let frames = lease.frames();
            assert_eq!(frames.iter().map(|f| f.key).collect::<Vec<_>>(), *keys);
            assert!(frames.iter().all(|f| verify(&arena, f.frame, f.key).is_none()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_equals_the_dictionary(
        steps in prop::collection::vec(step(), 1..60), adaptive in any::<bool>(),
    ) {
        let eviction = if adaptive { Eviction::Adaptive } else { Eviction::Lru };
        let store = Store::open(&config(600, eviction)).unwrap();
        let mut run = Run { store, model: Model::default(), writes: Vec::new(), reads: Vec::new() };
        for step in &steps {
            run.take(step);
        }
        // I5: without owners, nothing is pinned or reserved.
        run.writes.clear();
        run.reads.clear();
        run.store.check().unwrap();
        for name in ["pins", "frames_reserved", "write_leases", "read_leases"] {
            prop_assert_eq!(stat(&run.store, name), 0, "{}", name);
        }
        run.store.clear();
        prop_assert_eq!((stat(&run.store, "frames_free"), stat(&run.store, "entries")), (600, 0));
        prop_assert_eq!(stat(&run.store, "host_evictions"), 0);
    }
}
