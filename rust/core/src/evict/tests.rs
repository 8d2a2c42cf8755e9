//! Compares eviction policies with naive policies that record each use for every chunk in the
//! prefix.

mod aims;
mod forest;

use proptest::prelude::*;

use self::forest::{Boxed, Forest, NUM_TENANTS, key};
use super::ghosts::{self, Ghosts};
use super::*;
use crate::ErrorKind;

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

/// Number of keys in a walk, chosen so that keys recur and all keys fit into the ghost table.
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

/// Checks that no evictable chunk is older than the victim, up to rounding. Measures ages the way
/// the policy does.
fn oldest(forest: &Forest<Adaptive>, victim: Option<u32>) {
    let age = |id: u32| forest.oracle.age(id, forest.policy.credit);
    if let Some(victim) = victim {
        let most = forest.leaves().into_iter().map(age).fold(0.0, f64::max);
        assert!(age(victim) >= most - 1e-9, "{victim}");
    }
    for tenant in (0..NUM_TENANTS).map(TenantId) {
        let most = forest.leaves_of(tenant).into_iter().map(age).fold(0.0, f64::max);
        let victim = forest.of_tenants[tenant.0 as usize];
        assert!(victim.is_none_or(|victim| age(victim) >= most - 1e-9), "{victim:?} of {tenant:?}");
    }
}

proptest! {
    #[test]
    fn lru_evicts_the_leaf_that_stamping_whole_prefixes_would_evict(steps in steps()) {
        let mut forest = Forest::new(Adaptive::lru());
        walk(&mut forest, &steps, oldest);
        prop_assert!(forest.policy.credit <= 1.0, "LRU must not give credit");
    }

    // The capacity is below 64 chunks, so every touch is recorded.
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
    assert_eq!(found.len(), 800, "there are eight ghosts per chunk");
    assert!(
        found.iter().all(|(number, ghost)| *number > 8000 && ghost.reused == (number % 2 == 0))
    );
    let recent: Vec<_> = found.iter().filter(|(_, ghost)| ghost.recent).collect();
    assert_eq!(recent.len(), 100, "there is one recent ghost per chunk");
    assert!(recent.iter().all(|(number, _)| *number > 9600));
    assert!(
        fingerprints.iter().all(|&fingerprint| ghosts.take(fingerprint).is_none()),
        "a ghost must be used only once"
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

#[test]
fn names_are_checked() {
    assert_eq!(Eviction::parse("adaptive").unwrap(), Eviction::default());
    assert_eq!(Eviction::parse("lru").unwrap(), Eviction::Lru);
    assert_eq!(Eviction::parse("arc").unwrap_err().kind(), ErrorKind::InvalidConfig);
}
