//! Policies against naive ones that count every use for the whole prefix, and by their own aims.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::ghosts::Ghosts;
use super::*;

fn key(number: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

/// What chunks are worth to a policy that writes every use down for every chunk of the prefix, and sums them up when asked.
#[derive(Default)]
struct Oracle {
    clock: f64,
    /// LRU: only the last use counts, and nothing is remembered.
    last_only: bool,
    gone: BTreeMap<u32, f64>,
    chunks: BTreeMap<u32, Uses>,
}

#[derive(Default)]
struct Uses {
    number: u32,
    times: Vec<f64>,
    floor: f64,
}

impl Oracle {
    fn insert(&mut self, id: u32, number: u32, event: f64) {
        self.clock += event;
        let times = self.gone.remove(&number).into_iter().chain([self.clock]).collect();
        self.chunks.insert(id, Uses { number, times, floor: 0.0 });
    }

    /// `prefix` is the touched chunk and all above it.
    fn touch(&mut self, prefix: &[u32], event: f64) {
        self.clock += event;
        for id in prefix {
            self.chunks.get_mut(id).unwrap().times.push(self.clock);
        }
    }

    fn remove(&mut self, id: u32, parent: Option<u32>, removal: Removal) {
        let worth = self.worth(id);
        let number = self.chunks.remove(&id).unwrap().number;
        if let Some(parent) = parent {
            let above = self.chunks.get_mut(&parent).unwrap();
            above.floor = above.floor.max(worth);
        }
        if removal == Removal::Evicted && !self.last_only {
            self.gone.insert(number, worth);
        }
    }

    fn worth(&self, id: u32) -> f64 {
        let Uses { times, floor, .. } = &self.chunks[&id];
        let newest = times.iter().copied().fold(0.0, f64::max);
        let sum: f64 = times.iter().map(|time| (time - newest).exp2()).sum();
        floor.max(if self.last_only { newest } else { newest + sum.log2() })
    }
}

/// What the store does, with one policy: a forest, pins, and the promise of what is evictable.
struct Forest<P> {
    policy: P,
    parents: BTreeMap<u32, Option<u32>>,
    numbers: BTreeMap<u32, u32>,
    num_children: BTreeMap<u32, u32>,
    pinned: BTreeSet<u32>,
    told: BTreeMap<u32, bool>,
    oracle: Oracle,
    /// Half-lives per event, as the policy has learned them.
    event: fn(&P) -> f64,
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
            oracle: Oracle::default(),
            event: |_| 1.0,
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

    fn insert(&mut self, parent: Option<u32>, number: u32) -> u32 {
        let id = (0..=u32::MAX).find(|id| !self.parents.contains_key(id)).unwrap();
        self.parents.insert(id, parent);
        if let Some(parent) = parent {
            *self.num_children.entry(parent).or_default() += 1;
        }
        self.numbers.insert(id, number);
        self.sync();
        self.oracle.insert(id, number, (self.event)(&self.policy));
        self.policy.insert(ChunkId(id), parent.map(ChunkId), &key(number));
        self.told.insert(id, false);
        self.sync();
        id
    }

    fn touch(&mut self, id: u32) {
        let prefix: Vec<_> = std::iter::successors(Some(id), |id| self.parents[id]).collect();
        self.oracle.touch(&prefix, (self.event)(&self.policy));
        self.policy.touch(ChunkId(id));
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

    /// The victim, asked for twice, with the contract checked.
    fn victim(&mut self) -> Option<u32> {
        let victim = self.policy.victim().map(|id| id.0);
        assert_eq!(self.policy.victim().map(|id| id.0), victim);
        assert_eq!(victim.is_some(), !self.leaves().is_empty());
        assert!(victim.is_none_or(|id| self.evictable(id)));
        victim
    }

    fn evict(&mut self) -> Option<u32> {
        let victim = self.victim()?;
        self.remove(victim, Removal::Evicted);
        Some(victim)
    }

    /// Roots with these numbers, each saved where it is missing and else touched, with room for `capacity`. Returns hits.
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
        1 => nth.clone().prop_map(Step::Pin),
        1 => nth.clone().prop_map(Step::Unpin),
        1 => nth.prop_map(Step::Drop),
        4 => Just(Step::Evict),
    ];
    prop::collection::vec(step, 1..150)
}

/// Keys of a walk: few, so that they come back, and no more of a set than it has room for.
const NUM_KEYS: u32 = 24;

fn walk<P: Policy>(forest: &mut Forest<P>, steps: &[Step], mut check: impl FnMut(&Forest<P>, Option<u32>)) {
    for &step in steps {
        match step {
            Step::Insert { parent, key } => {
                let parent = parent.and_then(|nth| forest.nth(nth));
                let free: Vec<_> =
                    (0..NUM_KEYS).filter(|key| !forest.numbers.values().any(|used| used == key)).collect();
                if !free.is_empty() {
                    forest.insert(parent, free[key % free.len()]);
                }
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

/// No evictable chunk is worth less than the victim, but for the rounding of sums in another order.
fn least_worth(forest: &Forest<Lrfu>, victim: Option<u32>) {
    let least = forest.leaves().into_iter().map(|id| forest.oracle.worth(id)).fold(f64::INFINITY, f64::min);
    if let Some(victim) = victim {
        assert!(forest.oracle.worth(victim) <= least + 1e-9, "{victim}");
    }
}

proptest! {
    #[test]
    fn lru_takes_the_leaf_that_stamping_whole_prefixes_would_take(steps in steps()) {
        let mut forest = Forest::new(Lrfu::lru());
        forest.oracle.last_only = true;
        walk(&mut forest, &steps, least_worth);
    }

    // Fewer than 64 chunks, where every touch counts.
    #[test]
    fn lrfu_takes_the_leaf_with_the_least_decayed_count_of_uses(steps in steps(), capacity in 32..64usize) {
        let mut forest = Forest::new(Lrfu::new(capacity));
        forest.event = |policy| 1.0 / policy.half_life;
        walk(&mut forest, &steps, least_worth);
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
        (0..NUM_KEYS).for_each(|number| ghosts.put(ghosts::fingerprint(&key(number)), 1.0, number, false));
        for number in 0..NUM_KEYS {
            assert_eq!(ghosts.take(ghosts::fingerprint(&key(number))).unwrap().last, number);
        }
    }
}

#[test]
fn ghosts_are_bounded_and_the_oldest_of_a_set_goes_first() {
    let mut ghosts = Ghosts::new(100);
    let numbers = 0..10_000u32;
    let fingerprints: Vec<_> = numbers.clone().map(|number| ghosts::fingerprint(&key(number))).collect();
    for (number, &fingerprint) in numbers.zip(&fingerprints) {
        ghosts.put(fingerprint, f64::from(number), number, number % 2 == 0);
    }
    let found: Vec<_> = fingerprints.iter().filter_map(|&fingerprint| ghosts.take(fingerprint)).collect();
    assert_eq!(found.len(), 400, "four per chunk");
    assert!(found.iter().all(|ghost| ghost.last > 8000), "the newest of each set");
    assert!(
        found
            .iter()
            .all(|ghost| ghost.reused == (ghost.last % 2 == 0)
                && ghost.worth.to_bits() == f64::from(ghost.last).to_bits())
    );
    let recent: Vec<_> = found.iter().filter(|ghost| ghost.recent).collect();
    assert_eq!(recent.len(), 100, "one per chunk");
    assert!(recent.iter().all(|ghost| ghost.last > 9600));
    assert!(fingerprints.iter().all(|&fingerprint| ghosts.take(fingerprint).is_none()), "a ghost is taken once");
}

/// Documents that come back after three times the capacity, amid prompts that never do.
fn regulars_in_a_flood(capacity: u32) -> impl Iterator<Item = u32> {
    let (regulars, flood) = (capacity / 2, 1_000_000);
    (0..20).flat_map(move |round| {
        (0..regulars).flat_map(move |nth| {
            let fresh = flood + (round * regulars + nth) * 5;
            std::iter::once(nth).chain(fresh..fresh + 5)
        })
    })
}

#[test]
fn lrfu_finds_what_comes_back_after_it_was_evicted_and_needs_its_ghosts_for_that() {
    const CAPACITY: u32 = 60;
    let hits = |policy: Lrfu| Forest::new(policy).replay(CAPACITY as usize, regulars_in_a_flood(CAPACITY));
    let possible = 19 * CAPACITY / 2;
    assert_eq!(hits(Lrfu::lru()), 0);
    let mut without_ghosts = Lrfu::new(CAPACITY as usize);
    without_ghosts.ghosts = Ghosts::default();
    assert_eq!(hits(without_ghosts), 0);
    let found = hits(Lrfu::new(CAPACITY as usize));
    assert!(found * 10 >= possible * 8, "{found} of {possible}");
}

#[test]
fn what_is_used_stays_through_a_flood_of_what_is_not() {
    let mut forest = Forest::new(Lrfu::new(20));
    let used: Vec<_> = (0..5).map(|number| forest.insert(None, number)).collect();
    for number in 100..300 {
        for &id in &used {
            forest.touch(id);
        }
        forest.insert(None, number);
        if forest.parents.len() > 20 {
            assert!(!used.contains(&forest.evict().unwrap()));
        }
    }
}

#[test]
fn the_half_life_follows_the_time_of_return() {
    let half_life = |num_keys: u32| {
        let mut forest = Forest::new(Lrfu::new(100));
        forest.replay(100, (0..5000).map(|nth| nth % num_keys));
        forest.policy.half_life
    };
    // A loop finds some of its keys, and touches do not count within 1/64 of the capacity, so 10 % either way.
    for num_keys in [150, 300] {
        let wanted = 2.5 * f64::from(num_keys);
        assert!((half_life(num_keys) / wanted - 1.0).abs() < 0.1, "{} for {wanted}", half_life(num_keys));
    }
}

#[test]
fn the_half_life_gets_short_where_old_uses_say_nothing() {
    let mut forest = Forest::new(Lrfu::new(30));
    // Each key comes back once, after twice the capacity, and never again.
    forest.replay(30, (0..12_000).flat_map(|nth: u32| [nth, (nth + 12_000 - 30) % 12_000]));
    let short = forest.policy.half_life;
    assert!(short < 75.0, "{short} where 2.5 times the return is 150");
}

#[test]
fn polls_are_one_use() {
    let mut forest = Forest::new(Lrfu::new(6400));
    let [polled, used] = [1, 2].map(|number| forest.insert(None, number));
    let flood =
        |forest: &mut Forest<Lrfu>, from: u32| (from..from + 200).for_each(|number| _ = forest.insert(None, number));
    for turn in 0..3 {
        flood(&mut forest, 1000 + turn * 1000);
        forest.touch(used);
    }
    flood(&mut forest, 5000);
    (0..50).for_each(|_| forest.touch(polled));
    forest.touch(used);
    let ids: Vec<_> = forest.parents.keys().copied().filter(|&id| id != polled && id != used).collect();
    for id in ids {
        forest.remove(id, Removal::Dropped);
    }
    assert_eq!(forest.victim(), Some(polled), "50 looks in one moment are less than 4 uses");
}

#[test]
fn dropped_chunks_are_not_remembered() {
    let half_life = |removal| {
        let mut forest = Forest::new(Lrfu::new(10));
        for _ in 0..50 {
            let id = forest.insert(None, 1);
            forest.remove(id, removal);
        }
        forest.policy.half_life
    };
    assert!(half_life(Removal::Evicted) < 20.0);
    assert!((half_life(Removal::Dropped) - 25.0).abs() < 1e-9, "nothing came back");
}

#[test]
fn using_a_prefix_protects_its_ancestors() {
    for policy in Eviction::ALL {
        let mut forest = Forest::new(Boxed(policy.policy(10)));
        let root = forest.insert(None, 0);
        let deep = forest.insert(Some(root), 1);
        let others: Vec<_> = (2..11).map(|number| forest.insert(None, number)).collect();
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
fn names_are_checked() {
    assert_eq!(Eviction::parse("lrfu").unwrap(), Eviction::default());
    assert_eq!(Eviction::parse("lru").unwrap(), Eviction::Lru);
    assert_eq!(Eviction::parse("arc").unwrap_err().kind(), ErrorKind::InvalidConfig);
}
