//! Least recently used, where chunks that were used again age more slowly; and LRU, where they do
//! not.
//!
//! There are two queues in order of the last use: chunks that were used once, and chunks that were
//! used again, also those that came back after an eviction. The victim is the older of their two
//! heads, where the age of a reused chunk is divided by `credit`. The credit follows the workload,
//! so there is no setting. It begins with 1, which is LRU. When an evicted chunk comes back, its
//! kind was evicted too soon: the credit grows if it was reused, and else shrinks, until evictions
//! of both kinds are regretted equally often. So it grows where most chunks are never used again,
//! and is gone after few returns where a new working set replaces the old. Compare ARC (Megiddo and
//! Modha, FAST 2003), which balances sizes; ages need no count of the chunks that are not leaves.
//!
//! Using a chunk uses its ancestors too, yet only the deepest is written: an ancestor cannot be a
//! victim before its descendants are gone, and a leaving chunk hands its uses up. So a chunk that
//! becomes a leaf stands where stamping each use on its whole prefix would have put it, and a touch
//! costs the same at any depth.
//!
//! What is kept beside a prefix and of no use without it (the state behind it) is new at each turn
//! of a chat, while most of the prefix was used again: alone it would always go first, and the
//! prefix is of no use without it either. So where at least half of the prefix was used again, its
//! end and what is kept beside it count as used again (`goes_on`, `mark_reused`).

use std::collections::BTreeSet;

use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::groups::{Groups, NUM_ROWS};
use super::policy::{ChunkId, GroupId, Policy, Removal};
use crate::key::ChunkKey;

const NO_PARENT: u32 = u32::MAX;
/// Touches of a chunk within this share of the capacity are one use: a waiting request is looked up
/// many times.
const TOUCHES_APART: u32 = 64;
/// This share of the capacity in returns of one kind changes the credit by e, where half of the
/// evicted chunks were reused.
const RETURNS_PER_E: f64 = 1.0 / 12.0;
/// With more, a reused chunk would take too long to leave when its working set is gone.
const MAX_CREDIT: f64 = 256.0;
/// Evictions after which the share of reused chunks has followed by two thirds.
const SHARE_WEIGHT: f64 = 256.0;
/// So many chunks are looked at, from the end up, for one that was reused.
const MAX_STEPS_UP: u32 = 1024;
const MIN_SHARE: f64 = 1.0 / 50.0;

/// What is known of a chunk: 24 bytes, and at most 32 in a queue while it is evictable.
#[derive(Debug, Clone, Copy)]
struct Node {
    fingerprint: u64,
    /// Its last use, or a descendant's, in events.
    last: u64,
    parent: u32,
    evictable: bool,
    /// It was used more than once, counting uses before an eviction.
    reused: bool,
    unwritten: bool,
}

impl Node {
    const VACANT: Self = Self {
        fingerprint: 0,
        last: 0,
        parent: NO_PARENT,
        evictable: false,
        reused: false,
        unwritten: false,
    };

    /// The row it is in while it is evictable.
    fn row(&self) -> u8 {
        u8::from(self.reused) + 2 * u8::from(self.unwritten)
    }
}

/// Evictable chunks in order of their last use.
#[derive(Debug)]
pub struct Adaptive {
    nodes: Vec<Node>,
    /// By `Node::row`.
    queues: [BTreeSet<(u64, u32)>; NUM_ROWS],
    spares_unwritten: bool,
    /// The same of each group.
    groups: Groups,
    /// Inserts, and touches that count.
    events: u64,
    touches_apart: u64,
    pub(super) ghosts: Ghosts,
    /// A reused chunk ages so many times more slowly.
    credit: f64,
    /// How much a return changes the logarithm of the credit, where all evicted chunks are of its
    /// kind.
    step: f64,
    /// Share of newly evicted chunks that were reused.
    reused_share: f64,
}

impl Adaptive {
    /// For a tier of `capacity` chunks.
    pub fn new(capacity: usize) -> Self {
        let chunks = u32::try_from(capacity).unwrap_or(u32::MAX).max(1);
        Self {
            touches_apart: u64::from(chunks / TOUCHES_APART),
            ghosts: Ghosts::new(capacity),
            step: 0.5 / (RETURNS_PER_E * f64::from(chunks)),
            ..Self::lru()
        }
    }

    /// Least recently used: only the last use counts, and nothing is remembered.
    pub fn lru() -> Self {
        Self {
            nodes: Vec::new(),
            queues: Default::default(),
            spares_unwritten: false,
            groups: Groups::default(),
            events: 0,
            touches_apart: 0,
            ghosts: Ghosts::default(),
            credit: 1.0,
            step: 0.0,
            reused_share: 0.5,
        }
    }

    #[cfg(test)]
    pub(super) fn credit(&self) -> f64 {
        self.credit
    }

    /// Events since a use.
    fn age(&self, last: u64) -> f64 {
        f64::from(u32::try_from(self.events - last).unwrap_or(u32::MAX))
    }

    /// A chunk is back that was evicted not long ago.
    fn regret(&mut self, reused: bool) {
        // Per eviction of its kind, so that with equal rates the steps cancel out.
        let share = self.reused_share.clamp(MIN_SHARE, 1.0 - MIN_SHARE);
        let step = if reused { self.step / share } else { -self.step / (1.0 - share) };
        self.credit = (self.credit * step.exp()).clamp(1.0, MAX_CREDIT);
    }

    /// Changes a node, whose place in its queue may change with that.
    fn update(&mut self, id: ChunkId, change: impl FnOnce(&mut Node)) {
        let node = &mut self.nodes[id.0 as usize];
        if node.evictable {
            self.queues[usize::from(node.row())].remove(&(node.last, id.0));
            self.groups.leave(id, node.row(), node.last);
        }
        change(node);
        if node.evictable {
            self.queues[usize::from(node.row())].insert((node.last, id.0));
            self.groups.enter(id, node.row(), node.last);
        }
    }

    /// Which goes first of the heads of all rows.
    fn coldest(
        &self,
        [once, reused, new, new_reused]: [Option<(u64, u32)>; NUM_ROWS],
    ) -> Option<ChunkId> {
        if self.spares_unwritten {
            return self.colder(once, reused).or_else(|| self.colder(new, new_reused));
        }
        let older = |one: Option<_>, other: Option<_>| one.into_iter().chain(other).min();
        self.colder(older(once, new), older(reused, new_reused))
    }

    /// Which goes first of the heads of a queue of chunks that were used once and one of those used
    /// again.
    fn colder(&self, once: Option<(u64, u32)>, reused: Option<(u64, u32)>) -> Option<ChunkId> {
        let id = match (once, reused) {
            (Some(once), Some(reused)) if self.age(reused.0) > self.age(once.0) * self.credit => {
                reused.1
            }
            (once, reused) => once.or(reused)?.1,
        };
        Some(ChunkId(id))
    }
}

impl Policy for Adaptive {
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey) {
        self.events += 1;
        let fingerprint = fingerprint(key);
        let ghost = self.ghosts.take(fingerprint);
        if let Some(Ghost { reused, recent: true }) = ghost {
            self.regret(reused);
        }
        let at = id.0 as usize;
        if at >= self.nodes.len() {
            self.nodes.resize(at + 1, Node::VACANT);
        }
        let parent = parent.map_or(NO_PARENT, |parent| parent.0);
        self.nodes[at] = Node {
            fingerprint,
            last: self.events,
            parent,
            reused: ghost.is_some(),
            ..Node::VACANT
        };
    }

    fn touch(&mut self, id: ChunkId) {
        let counts = self.events - self.nodes[id.0 as usize].last >= self.touches_apart;
        self.events += u64::from(counts);
        let last = self.events;
        self.update(id, |node| {
            node.last = last;
            node.reused |= counts;
        });
    }

    fn set_evictable(&mut self, id: ChunkId, evictable: bool) {
        self.update(id, |node| node.evictable = evictable);
    }

    fn victim(&mut self) -> Option<ChunkId> {
        self.coldest([0, 1, 2, 3].map(|row: usize| self.queues[row].first().copied()))
    }

    fn victim_of(&mut self, group: GroupId) -> Option<ChunkId> {
        self.coldest(self.groups.heads(group))
    }

    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool) {
        self.update(id, |node| node.unwritten = unwritten);
    }

    fn spare_unwritten(&mut self, spare: bool) {
        self.spares_unwritten = spare;
    }

    fn set_group(&mut self, id: ChunkId, group: GroupId) {
        self.groups.set(id, group);
    }

    fn goes_on(&self, end: ChunkId, num_chunks: u32) -> bool {
        let node = |id: u32| self.nodes.get(id as usize).copied();
        let chunks = std::iter::successors(node(end.0), |last| node(last.parent));
        chunks.take((num_chunks / 2 + 1).min(MAX_STEPS_UP) as usize).any(|node| node.reused)
    }

    fn mark_reused(&mut self, id: ChunkId) {
        self.update(id, |node| node.reused = true);
    }

    fn remove(&mut self, id: ChunkId, removal: Removal) {
        self.update(id, |node| node.evictable = false);
        self.groups.forget(id);
        let node = self.nodes[id.0 as usize];
        if node.parent != NO_PARENT {
            // A parent with a child present is not evictable, so it has no place in a queue that
            // would have to move.
            let parent = &mut self.nodes[node.parent as usize];
            debug_assert!(
                !parent.evictable,
                "a parent is never evictable before its children left"
            );
            parent.last = parent.last.max(node.last);
            parent.reused |= node.reused;
        }
        if removal == Removal::Evicted {
            self.reused_share +=
                (f64::from(u8::from(node.reused)) - self.reused_share) / SHARE_WEIGHT;
            self.ghosts.put(node.fingerprint, node.reused);
        }
    }
}
