//! Tests the goals of eviction policies: reused chunks are kept, recurring prompts are hits, and a
//! new working set replaces the old one.

use super::*;

/// Returns documents that recur after `3 * capacity` uses, mixed with prompts that never recur.
fn regulars_in_a_flood(capacity: u32) -> impl Iterator<Item = u32> {
    let (regulars, flood) = (capacity / 2, 1_000_000);
    (0..20).flat_map(move |round| {
        (0..regulars).flat_map(move |nth| {
            let fresh = flood + (round * regulars + nth) * 5;
            std::iter::once(nth).chain(fresh..fresh + 5)
        })
    })
}

/// Returns one pass over a working set, in an order that depends on `round`.
fn round_of(first: u32, round: u32, size: u32) -> impl Iterator<Item = u32> {
    (0..size).map(move |nth| first + (nth * 7 + round * 13) % size)
}

#[test]
fn adaptive_hits_returning_chunks_with_ghosts_only() {
    const CAPACITY: u32 = 60;
    let hits = |policy: Adaptive| {
        Forest::new(policy).replay(CAPACITY as usize, regulars_in_a_flood(CAPACITY))
    };
    let possible = 19 * CAPACITY / 2;
    assert_eq!(hits(Adaptive::lru()), 0);
    let mut without_ghosts = Adaptive::new(CAPACITY as usize);
    without_ghosts.ghosts = Ghosts::default();
    assert_eq!(hits(without_ghosts), 0);
    let found = hits(Adaptive::new(CAPACITY as usize));
    assert!(found * 10 >= possible * 8, "{found} of {possible}");
}

#[test]
fn used_chunks_survive_a_flood_of_unused_ones() {
    let mut forest = Forest::new(Adaptive::new(20));
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

/// A new working set replaces the old one. The new chunks return after a single use, which lowers
/// the credit that the old set raised.
#[test]
fn a_new_working_set_takes_over_after_few_returns() {
    const CAPACITY: u32 = 60;
    let mut forest = Forest::new(Adaptive::new(CAPACITY as usize));
    forest.replay(CAPACITY as usize, regulars_in_a_flood(CAPACITY));
    let before = forest.policy.credit;
    assert!(before > 4.0, "{before}");
    let new = |round: u32| round_of(2_000_000, round, CAPACITY - 10);
    forest.replay(CAPACITY as usize, (0..3).flat_map(new));
    let hits = forest.replay(CAPACITY as usize, (3..6).flat_map(new));
    assert_eq!(hits, 3 * (CAPACITY - 10));
    assert!(forest.policy.credit < before / 2.0, "{} after {before}", forest.policy.credit);
}

#[test]
fn a_second_working_set_finds_as_much_as_the_first() {
    for policy in Eviction::ALL {
        let mut forest = Forest::new(Boxed(policy.policy(120)));
        for set in 0..4 {
            let rounds = (0..5).flat_map(|round| round_of(set * 1000, round, 100));
            assert_eq!(forest.replay(120, rounds), 400, "{policy:?}, set {set}");
        }
    }
}

#[test]
fn polls_are_one_use() {
    let credit = |num_between: u32| {
        let mut forest = Forest::new(Adaptive::new(640));
        let polled = forest.insert(None, 1);
        (0..num_between).for_each(|nth| _ = forest.insert(None, 1000 + nth));
        (0..50).for_each(|_| forest.touch(polled));
        forest.remove(polled, Removal::Evicted);
        forest.insert(None, 1);
        forest.policy.credit
    };
    assert!(credit(9) <= 1.0, "concurrent lookups must not count as a second use");
    assert!(credit(10) > 1.0, "a lookup after a 64th of the capacity must count as a second use");
}

#[test]
fn dropped_chunks_are_not_remembered() {
    let credit = |removal| {
        let mut forest = Forest::new(Adaptive::new(10));
        let used = forest.insert(None, 1);
        forest.touch(used);
        forest.remove(used, removal);
        forest.insert(None, 1);
        forest.policy.credit
    };
    assert!(credit(Removal::Evicted) > 1.0);
    assert!(credit(Removal::Dropped) <= 1.0, "dropped chunks must not be remembered");
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
