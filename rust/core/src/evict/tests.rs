//! Compares policies with naive ones that count every use for the whole prefix; `aims` tests their
//! purpose.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::ghosts::Ghosts;
use super::*;
use crate::key::ChunkKey;

mod aims;

fn key(number: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

/// A naive policy that records each use for every chunk of the prefix.
#[derive(Default)]
struct Oracle {
    events: u32,
    /// Evicted numbers.
    gone: BTreeSet<u32>,
    chunks: BTreeMap<u32, Uses>,
}

struct Uses {
    number: u32,
    last: u32,
    reused: bool,
}

impl Oracle {
    fn insert(&mut self, id: u32, number: u32) {
        self.events += 1;
        let reused = self.gone.remove(&number);
        self.chunks.insert(id, Uses { number, last: self.events, reused });
    }

    /// `prefix` is the touched chunk and all above it.
    fn touch(&mut self, prefix: &[u32]) {
        self.events += 1;
        for id in prefix {
            let uses = self.chunks.get_mut(id).unwrap();
            (uses.last, uses.reused) = (self.events, true);
        }
    }

    /// A use of a chunk also counts for its parent, including uses before an eviction and the
    /// insertion.
    fn remove(&mut self, id: u32, parent: Option<u32>, removal: Removal) {
        let Uses { number, last, reused } = self.chunks.remove(&id).unwrap();
        if let Some(above) = parent.map(|parent| self.chunks.get_mut(&parent).unwrap()) {
            above.last = above.last.max(last);
            above.reused |= reused;
        }
        if removal == Removal::Evicted {
            self.gone.insert(number);
        }
    }

    fn age(&self, id: u32, credit: f64) -> f64 {
        let Uses { last, reused, .. } = self.chunks[&id];
        f64::from(self.events - last) / if reused { credit } else { 1.0 }
    }
}

/// Drives a policy the way the store does: a forest of chunks with pins, in which unpinned leaves
/// are evictable.
struct Forest<P> {
    policy: P,
    parents: BTreeMap<u32, Option<u32>>,
    numbers: BTreeMap<u32, u32>,
    num_children: BTreeMap<u32, u32>,
    pinned: BTreeSet<u32>,
    told: BTreeMap<u32, bool>,
    /// Victims of each group, requested together with the victim of all groups.
    of_groups: [Option<u32>; NUM_GROUPS as usize],
    oracle: Oracle,
}

const NUM_GROUPS: u32 = 3;

/// A quarter of the chunks of a walk have no group.
fn group_of(number: u32) -> Option<GroupId> {
    Some(GroupId(number % 4)).filter(|group| group.0 < NUM_GROUPS)
}

impl<P: Policy> Forest<P> {
    fn new(policy: P) -> Self {
        Self {
            policy,
            parents: BTreeMap::new(),
            numbers: BTreeMap::new(),
            num_children: BTreeMap::new(),
            pinned: BTreeSet::new(),
            told: BTreeMap::new(),
            of_groups: Default::default(),
            oracle: Oracle::default(),
        }
    }

    fn nth(&self, nth: usize) -> Option<u32> {
        self.parents.keys().nth(nth % self.parents.len().max(1)).copied()
    }

    fn evictable(&self, id: u32) -> bool {
        !self.pinned.contains(&id) && self.num_children.get(&id).is_none_or(|&num| num == 0)
    }

    fn leaves(&self) -> Vec<u32> {
        self.parents.keys().copied().filter(|&id| self.evictable(id)).collect()
    }

    fn leaves_of(&self, group: GroupId) -> Vec<u32> {
        self.leaves().into_iter().filter(|id| group_of(self.numbers[id]) == Some(group)).collect()
    }

    /// Reports changes to the policy. A parent that stops being a leaf must be reported before its
    /// child is inserted.
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

    fn insert(&mut self, parent: Option<u32>, number: u32) -> u32 {
        let id = (0..=u32::MAX).find(|id| !self.parents.contains_key(id)).unwrap();
        self.parents.insert(id, parent);
        if let Some(parent) = parent {
            *self.num_children.entry(parent).or_default() += 1;
        }
        self.numbers.insert(id, number);
        self.sync();
        self.oracle.insert(id, number);
        self.policy.insert(ChunkId(id), parent.map(ChunkId), &key(number));
        if let Some(group) = group_of(number) {
            self.policy.set_group(ChunkId(id), group);
        }
        self.told.insert(id, false);
        self.sync();
        id
    }

    fn touch(&mut self, id: u32) {
        let prefix: Vec<_> = std::iter::successors(Some(id), |id| self.parents[id]).collect();
        self.oracle.touch(&prefix);
        self.policy.touch(ChunkId(id));
    }

    fn mark_reused(&mut self, id: u32) {
        self.oracle.chunks.get_mut(&id).unwrap().reused = true;
        self.policy.mark_reused(ChunkId(id));
    }

    fn remove(&mut self, id: u32, removal: Removal) {
        self.policy.remove(ChunkId(id), removal);
        let parent = self.parents.remove(&id).unwrap();
        self.oracle.remove(id, parent, removal);
        if let Some(parent) = parent {
            *self.num_children.get_mut(&parent).unwrap() -= 1;
        }
        self.numbers.remove(&id);
        self.told.remove(&id);
        self.sync();
    }

    /// Requests the victim twice and checks the contract.
    fn victim(&mut self) -> Option<u32> {
        let victim = self.policy.victim().map(|id| id.0);
        assert_eq!(self.policy.victim().map(|id| id.0), victim);
        assert_eq!(victim.is_some(), !self.leaves().is_empty());
        assert!(victim.is_none_or(|id| self.evictable(id)));
        for group in (0..NUM_GROUPS).map(GroupId) {
            let victim = self.policy.victim_of(group).map(|id| id.0);
            assert_eq!(victim.is_some(), !self.leaves_of(group).is_empty());
            assert!(victim.is_none_or(|id| self.leaves_of(group).contains(&id)));
            self.of_groups[group.0 as usize] = victim;
        }
        victim
    }

    fn evict(&mut self) -> Option<u32> {
        let victim = self.victim()?;
        self.remove(victim, Removal::Evicted);
        Some(victim)
    }

    /// Saves the roots with these numbers, or touches those already saved, in a tier of `capacity`
    /// chunks. Returns hits.
    fn replay(&mut self, capacity: usize, numbers: impl IntoIterator<Item = u32>) -> u32 {
        let mut hits = 0;
        for number in numbers {
            if let Some((&id, _)) = self.numbers.iter().find(|(_, present)| **present == number) {
                self.touch(id);
                hits += 1;
                continue;
            }
            while self.parents.len() >= capacity {
                self.evict().unwrap();
            }
            self.insert(None, number);
        }
        hits
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Insert { parent: Option<usize>, key: usize },
    Touch(usize),
    MarkReused(usize),
    Pin(usize),
    Unpin(usize),
    Drop(usize),
    Evict,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let nth = 0..1000usize;
    let insert = (prop::option::weighted(0.8, nth.clone()), nth.clone());
    let step = prop_oneof![
        6 => insert.prop_map(|(parent, key)| Step::Insert { parent, key }),
        4 => nth.clone().prop_map(Step::Touch),
        1 => nth.clone().prop_map(Step::MarkReused),
        1 => nth.clone().prop_map(Step::Pin),
        1 => nth.clone().prop_map(Step::Unpin),
        1 => nth.prop_map(Step::Drop),
        4 => Just(Step::Evict),
    ];
    prop::collection::vec(step, 1..150)
}

/// Keys of a walk: few, so that they return, and at most as many per set of ghosts as it can hold.
const NUM_KEYS: u32 = 24;

fn walk<P: Policy>(
    forest: &mut Forest<P>,
    steps: &[Step],
    mut check: impl FnMut(&Forest<P>, Option<u32>),
) {
    for &step in steps {
        match step {
            Step::Insert { parent, key } => {
                let parent = parent.and_then(|nth| forest.nth(nth));
                let free: Vec<_> = (0..NUM_KEYS)
                    .filter(|key| !forest.numbers.values().any(|used| used == key))
                    .collect();
                if !free.is_empty() {
                    forest.insert(parent, free[key % free.len()]);
                }
            }
            Step::Touch(nth) => {
                if let Some(id) = forest.nth(nth) {
                    forest.touch(id);
                }
            }
            Step::MarkReused(nth) => {
                if let Some(id) = forest.nth(nth) {
                    forest.mark_reused(id);
                }
            }
            Step::Pin(nth) => forest.pinned.extend(forest.nth(nth)),
            Step::Unpin(nth) => {
                let id = forest.pinned.iter().nth(nth % forest.pinned.len().max(1)).copied();
                id.map(|id| forest.pinned.remove(&id));
            }
            Step::Drop(nth) => {
                let leaves = forest.leaves();
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

/// No evictable chunk is older than the victim, as ages count, but for rounding.
fn oldest(forest: &Forest<Adaptive>, victim: Option<u32>) {
    let age = |id: u32| forest.oracle.age(id, forest.policy.credit());
    if let Some(victim) = victim {
        let most = forest.leaves().into_iter().map(age).fold(0.0, f64::max);
        assert!(age(victim) >= most - 1e-9, "{victim}");
    }
    for group in (0..NUM_GROUPS).map(GroupId) {
        let most = forest.leaves_of(group).into_iter().map(age).fold(0.0, f64::max);
        let victim = forest.of_groups[group.0 as usize];
        assert!(victim.is_none_or(|victim| age(victim) >= most - 1e-9), "{victim:?} of {group:?}");
    }
}

proptest! {
    #[test]
    fn lru_evicts_the_leaf_that_stamping_whole_prefixes_would_evict(steps in steps()) {
        let mut forest = Forest::new(Adaptive::lru());
        walk(&mut forest, &steps, oldest);
        prop_assert!(forest.policy.credit() <= 1.0, "LRU gives no credit");
    }

    // Fewer than 64 chunks, where every touch counts.
    #[test]
    fn adaptive_evicts_the_oldest_leaf_with_slower_aging_of_reused_ones(steps in steps(), capacity in 32..64usize) {
        walk(&mut Forest::new(Adaptive::new(capacity)), &steps, oldest);
    }

    #[test]
    fn every_policy_keeps_the_contract(steps in steps(), capacity in 0..200usize, nth in 0..Eviction::ALL.len()) {
        walk(&mut Forest::new(Boxed(Eviction::ALL[nth].policy(capacity))), &steps, |_, _| ());
    }
}

#[test]
fn the_keys_of_a_walk_fit_into_the_smallest_table_of_ghosts() {
    for capacity in 32..64 {
        let mut ghosts = Ghosts::new(capacity);
        let fingerprints = (0..NUM_KEYS).map(|number| ghosts::fingerprint(&key(number)));
        fingerprints.clone().for_each(|fingerprint| ghosts.put(fingerprint, false));
        assert!(fingerprints.into_iter().all(|fingerprint| ghosts.take(fingerprint).is_some()));
    }
}

#[test]
fn ghosts_are_bounded_and_the_oldest_of_a_set_goes_first() {
    let mut ghosts = Ghosts::new(100);
    let numbers = 0..10_000u32;
    let fingerprints: Vec<_> =
        numbers.clone().map(|number| ghosts::fingerprint(&key(number))).collect();
    for (number, &fingerprint) in numbers.clone().zip(&fingerprints) {
        ghosts.put(fingerprint, number % 2 == 0);
    }
    let found: Vec<_> = numbers
        .zip(&fingerprints)
        .filter_map(|(number, &fingerprint)| Some((number, ghosts.take(fingerprint)?)))
        .collect();
    assert_eq!(found.len(), 800, "eight per chunk");
    assert!(
        found.iter().all(|(number, ghost)| *number > 8000 && ghost.reused == (number % 2 == 0))
    );
    let recent: Vec<_> = found.iter().filter(|(_, ghost)| ghost.recent).collect();
    assert_eq!(recent.len(), 100, "one per chunk");
    assert!(recent.iter().all(|(number, _)| *number > 9600));
    assert!(
        fingerprints.iter().all(|&fingerprint| ghosts.take(fingerprint).is_none()),
        "a ghost is taken once"
    );
}

#[test]
fn a_prefix_is_mostly_reused_if_half_of_it_was_used_again() {
    for (num_chunks, num_used, is_mostly_reused) in [
        (1, 0, false),
        (1, 1, true),
        (2, 1, true),
        (3, 1, false),
        (3, 2, true),
        (8, 3, false),
        (8, 4, true),
        (8, 8, true),
    ] {
        let mut forest = Forest::new(Adaptive::new(60));
        let chain: Vec<_> = (0..num_chunks)
            .scan(None, |parent, number| {
                *parent = Some(forest.insert(*parent, number));
                *parent
            })
            .collect();
        if num_used > 0 {
            forest.touch(chain[num_used - 1]);
        }
        let end = ChunkId(*chain.last().unwrap());
        assert_eq!(
            forest.policy.is_mostly_reused(end, num_chunks),
            is_mostly_reused,
            "{num_used} of {num_chunks}"
        );
    }
    let unknown = Adaptive::new(60);
    assert!(!unknown.is_mostly_reused(ChunkId(7), 3));
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
    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool) {
        self.0.set_unwritten(id, unwritten);
    }
    fn spare_unwritten(&mut self, spare: bool) {
        self.0.spare_unwritten(spare);
    }
    fn set_group(&mut self, id: ChunkId, group: GroupId) {
        self.0.set_group(id, group);
    }
    fn victim(&mut self) -> Option<ChunkId> {
        self.0.victim()
    }
    fn is_mostly_reused(&self, end: ChunkId, num_chunks: u32) -> bool {
        self.0.is_mostly_reused(end, num_chunks)
    }
    fn mark_reused(&mut self, id: ChunkId) {
        self.0.mark_reused(id);
    }
    fn victim_of(&mut self, group: GroupId) -> Option<ChunkId> {
        self.0.victim_of(group)
    }
    fn remove(&mut self, id: ChunkId, removal: Removal) {
        self.0.remove(id, removal);
    }
}

#[test]
fn names_are_checked() {
    assert_eq!(Eviction::parse("adaptive").unwrap(), Eviction::default());
    assert_eq!(Eviction::parse("lru").unwrap(), Eviction::Lru);
    assert_eq!(Eviction::parse("arc").unwrap_err().kind(), ErrorKind::InvalidConfig);
}
