//! Policies against naive ones: LRU against stamping whole prefixes, S3-FIFO against the contract and by its own aims.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn key(number: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

/// What the store does, with one policy: a forest, pins, and the promise of what is evictable.
struct Forest<P> {
    policy: P,
    parents: BTreeMap<u32, Option<u32>>,
    pinned: BTreeSet<u32>,
    told: BTreeMap<u32, bool>,
    /// Last use with every use stamping the whole prefix.
    stamps: BTreeMap<u32, u64>,
    now: u64,
    keys: u32,
}

impl<P: Policy> Forest<P> {
    fn new(policy: P) -> Self {
        let (parents, told, stamps) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { policy, parents, pinned: BTreeSet::new(), told, stamps, now: 0, keys: 0 }
    }

    fn nth(&self, nth: usize) -> Option<u32> {
        self.parents.keys().nth(nth % self.parents.len().max(1)).copied()
    }

    fn evictable(&self, id: u32) -> bool {
        !self.pinned.contains(&id) && !self.parents.values().any(|parent| *parent == Some(id))
    }

    /// Tells the policy what changed. A parent that ceases to be a leaf must be told before its child comes.
    fn sync(&mut self) {
        let changed: Vec<_> = self
            .told
            .iter()
            .filter(|(id, told)| self.evictable(**id) != **told)
            .map(|(id, told)| (*id, !told))
            .collect();
        for (id, evictable) in changed {
            self.told.insert(id, evictable);
            self.policy.set_evictable(ChunkId(id), evictable);
        }
    }

    fn stamp(&mut self, id: u32) {
        self.now += 1;
        let mut at = Some(id);
        while let Some(id) = at {
            self.stamps.insert(id, self.now);
            at = self.parents[&id];
        }
    }

    fn insert(&mut self, parent: Option<u32>, number: Option<u32>) -> u32 {
        let id = (0..=u32::MAX).find(|id| !self.parents.contains_key(id)).unwrap();
        self.parents.insert(id, parent);
        self.sync();
        self.keys += 1;
        self.policy.insert(ChunkId(id), parent.map(ChunkId), &key(number.unwrap_or(self.keys)));
        self.told.insert(id, false);
        self.stamp(id);
        self.sync();
        id
    }

    fn touch(&mut self, id: u32) {
        self.stamp(id);
        self.policy.touch(ChunkId(id));
    }

    fn remove(&mut self, id: u32, removal: Removal) {
        self.policy.remove(ChunkId(id), removal);
        self.parents.remove(&id);
        self.told.remove(&id);
        self.stamps.remove(&id);
        self.sync();
    }

    /// The victim, asked for twice, with the contract checked.
    fn victim(&mut self) -> Option<u32> {
        let victim = self.policy.victim().map(|id| id.0);
        assert_eq!(self.policy.victim().map(|id| id.0), victim);
        let candidates = self.parents.keys().filter(|id| self.evictable(**id)).count();
        assert_eq!(victim.is_some(), candidates > 0);
        assert!(victim.is_none_or(|id| self.evictable(id)));
        victim
    }

    fn oldest(&self) -> Option<u32> {
        self.parents.keys().filter(|id| self.evictable(**id)).min_by_key(|id| self.stamps[*id]).copied()
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Insert(Option<usize>),
    Touch(usize),
    Pin(usize),
    Unpin(usize),
    Drop(usize),
    Evict,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let nth = 0..1000usize;
    let step = prop_oneof![
        6 => prop::option::weighted(0.8, nth.clone()).prop_map(Step::Insert),
        4 => nth.clone().prop_map(Step::Touch),
        1 => nth.clone().prop_map(Step::Pin),
        1 => nth.clone().prop_map(Step::Unpin),
        1 => nth.prop_map(Step::Drop),
        4 => Just(Step::Evict),
    ];
    prop::collection::vec(step, 1..150)
}

fn walk<P: Policy>(forest: &mut Forest<P>, steps: &[Step], mut check: impl FnMut(&Forest<P>, Option<u32>)) {
    for &step in steps {
        match step {
            Step::Insert(parent) => {
                let parent = parent.and_then(|nth| forest.nth(nth));
                forest.insert(parent, None);
            }
            Step::Touch(nth) => {
                if let Some(id) = forest.nth(nth) {
                    forest.touch(id);
                }
            }
            Step::Pin(nth) => forest.pinned.extend(forest.nth(nth)),
            Step::Unpin(nth) => {
                let id = forest.pinned.iter().nth(nth % forest.pinned.len().max(1)).copied();
                id.map(|id| forest.pinned.remove(&id));
            }
            Step::Drop(nth) => {
                let leaves: Vec<_> = forest.parents.keys().filter(|id| forest.evictable(**id)).copied().collect();
                if !leaves.is_empty() {
                    forest.remove(leaves[nth % leaves.len()], Removal::Dropped);
                }
            }
            Step::Evict => {
                forest.sync();
                let victim = forest.victim();
                check(forest, victim);
                if let Some(id) = victim {
                    forest.remove(id, Removal::Evicted);
                }
            }
        }
        forest.sync();
    }
    forest.pinned.clear();
    forest.sync();
    while let Some(id) = forest.victim() {
        check(forest, Some(id));
        forest.remove(id, Removal::Evicted);
    }
    assert!(forest.parents.is_empty());
}

proptest! {
    #[test]
    fn lru_takes_the_leaf_that_stamping_whole_prefixes_would_take(steps in steps()) {
        walk(&mut Forest::new(Lru::default()), &steps, |forest, victim| assert_eq!(victim, forest.oldest()));
    }

    #[test]
    fn s3fifo_keeps_the_contract(steps in steps(), capacity in 0..40usize) {
        let mut forest = Forest::new(S3Fifo::new(capacity));
        walk(&mut forest, &steps, |_, _| ());
        prop_assert!(forest.policy.num_ghosts() <= 2 * capacity);
    }
}

#[test]
fn s3fifo_keeps_what_is_used_through_a_flood_of_what_is_not() {
    let mut forest = Forest::new(S3Fifo::new(20));
    let used: Vec<_> = (0..5).map(|_| forest.insert(None, None)).collect();
    for number in 0..200 {
        for &id in &used {
            forest.touch(id);
        }
        forest.insert(None, Some(1000 + number));
        if forest.parents.len() > 20 {
            let victim = forest.victim().unwrap();
            assert!(!used.contains(&victim), "{victim}");
            forest.remove(victim, Removal::Evicted);
        }
    }
}

#[test]
fn s3fifo_takes_a_chunk_that_comes_back_for_proven() {
    let mut forest = Forest::new(S3Fifo::new(20));
    let flood = |forest: &mut Forest<S3Fifo>, from: u32| {
        for number in from..from + 100 {
            forest.insert(None, Some(number));
            while forest.parents.len() > 20 {
                let victim = forest.victim().unwrap();
                forest.remove(victim, Removal::Evicted);
            }
        }
    };
    let once = forest.insert(None, Some(7));
    while forest.parents.contains_key(&once) {
        let victim = forest.victim().unwrap();
        forest.remove(victim, Removal::Evicted);
    }
    let again = forest.insert(None, Some(7));
    flood(&mut forest, 1000);
    assert!(forest.parents.contains_key(&again), "a ghost was called back, and then washed away");
}

#[test]
fn using_a_prefix_protects_its_ancestors() {
    for policy in [Eviction::Lru, Eviction::S3Fifo] {
        let mut forest = Forest::new(Boxed(policy.policy(10)));
        let root = forest.insert(None, None);
        let deep = forest.insert(Some(root), None);
        let others: Vec<_> = (0..9).map(|_| forest.insert(None, None)).collect();
        (0..3).for_each(|_| forest.touch(deep));
        forest.remove(deep, Removal::Dropped);
        assert_eq!(forest.victim(), Some(others[0]), "{policy:?}");
    }
}

#[derive(Debug)]
struct Boxed(Box<dyn Policy>);

impl Policy for Boxed {
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey) {
        self.0.insert(id, parent, key);
    }
    fn touch(&mut self, id: ChunkId) {
        self.0.touch(id);
    }
    fn set_evictable(&mut self, id: ChunkId, evictable: bool) {
        self.0.set_evictable(id, evictable);
    }
    fn victim(&mut self) -> Option<ChunkId> {
        self.0.victim()
    }
    fn remove(&mut self, id: ChunkId, removal: Removal) {
        self.0.remove(id, removal);
    }
}

#[test]
fn noop_lets_nobody_go_and_names_are_checked() {
    let mut policy = Noop;
    policy.insert(ChunkId(0), None, &key(0));
    policy.set_evictable(ChunkId(0), true);
    assert_eq!(policy.victim(), None);
    assert_eq!(Eviction::parse("lru").unwrap(), Eviction::Lru);
    assert_eq!(Eviction::parse("s3fifo").unwrap(), Eviction::S3Fifo);
    assert_eq!(Eviction::parse("arc").unwrap_err().kind(), ErrorKind::InvalidConfig);
}
