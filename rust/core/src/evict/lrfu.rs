//! Least recently and frequently used (LRFU; Lee et al., IEEE Transactions on Computers, 2001), over prefixes, with a
//! memory of evicted chunks.
//!
//! A use counts 1, and half of that after each half-life. The clock counts half-lives, so a chunk is worth
//! `log2(sum of 2^(time of use))`, which does not change between uses: a queue in order of worth stays in order. LRU is
//! the same with a half-life so short that only the last use counts.
//!
//! The half-life follows the workload, so there is no setting. It is a multiple of the mean time after which evicted
//! chunks come back, in events (inserts, and touches that count). Where chunks that were used once come back sooner than
//! those used again, earlier uses say little, and `trust` shortens it until both kinds come back at the same rate.
//!
//! Using a chunk uses its ancestors too, yet only the deepest is written: an ancestor cannot be a victim before its
//! descendants are gone, and a leaving chunk hands its touches up. So a chunk that becomes a leaf has the worth that
//! counting every use of its prefix would have given it, and a touch costs the same at any depth.

use std::collections::BTreeSet;

use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::{ChunkId, Policy, Removal};
use crate::key::ChunkKey;

const NO_PARENT: u32 = u32::MAX;
const NEVER: f64 = f64::NEG_INFINITY;
/// In events. An event then takes 64 half-lives, and 1 + 2^-64 is 1: an older use adds nothing to a newer one.
const LRU_HALF_LIFE: f64 = 1.0 / 64.0;
/// Half-life per mean time of return. On the conversation trace 2 and 3 find as much within 3 % at every size.
const HALF_LIFE_PER_RETURN: f64 = 2.5;
/// Touches of a chunk within this share of the capacity are one use: a waiting request is looked up many times.
const TOUCHES_APART: u32 = 64;
/// The mean time of return begins with the capacity, which weighs as much as so many returns.
const FIRST_WEIGHT: f64 = 64.0;
/// What the mean has seen before weighs at most as much as so many returns.
const MAX_WEIGHT: f64 = 1024.0;
/// How much one return changes `trust`, where half of the evicted chunks were used again.
const TRUST_STEP: f64 = 1.0 / 1024.0;
const MIN_TRUST: f64 = 1.0 / 16.0;
/// Evictions after which the share of chunks that were used again has followed by two thirds.
const SHARE_WEIGHT: f64 = 256.0;
const MIN_SHARE: f64 = 1.0 / 50.0;

/// What is known of a chunk: 48 bytes, and at most 32 in the queue while it is evictable.
#[derive(Debug, Clone, Copy)]
struct Node {
    /// Its insert, and what was remembered of earlier stays.
    own: f64,
    /// Touches of prefixes that end here, and those that descendants handed up.
    touches: f64,
    /// The most a descendant was worth when it left: one request's saves come in steps, and each goes on with one use.
    floor: f64,
    fingerprint: u64,
    /// Its last use, in events, which wrap.
    last: u32,
    parent: u32,
    evictable: bool,
    /// It was evicted before.
    returned: bool,
}

impl Node {
    const VACANT: Self = Self {
        own: NEVER,
        touches: NEVER,
        floor: NEVER,
        fingerprint: 0,
        last: 0,
        parent: NO_PARENT,
        evictable: false,
        returned: false,
    };

    fn worth(&self) -> f64 {
        sum(self.own, self.touches).max(self.floor)
    }
}

/// `log2(2^a + 2^b)`.
fn sum(a: f64, b: f64) -> f64 {
    let (less, more) = if a < b { (a, b) } else { (b, a) };
    if less == NEVER { more } else { more + (1.0 + (less - more).exp2()).log2() }
}

/// Evictable chunks in order of worth.
#[derive(Debug)]
pub struct Lrfu {
    nodes: Vec<Node>,
    /// Floats that are not negative have the order of their bits.
    queue: BTreeSet<(u64, u32)>,
    clock: f64,
    pub(super) half_life: f64,
    events: u32,
    touches_apart: u32,
    pub(super) ghosts: Ghosts,
    mean_return: f64,
    num_returns: f64,
    trust: f64,
    /// Share of newly evicted chunks that were used again.
    reused_share: f64,
}

impl Lrfu {
    /// For a tier of `capacity` chunks.
    pub fn new(capacity: usize) -> Self {
        let chunks = u32::try_from(capacity).unwrap_or(u32::MAX).max(1);
        Self {
            half_life: HALF_LIFE_PER_RETURN * f64::from(chunks),
            touches_apart: chunks / TOUCHES_APART,
            ghosts: Ghosts::new(capacity),
            mean_return: f64::from(chunks),
            ..Self::lru()
        }
    }

    /// Least recently used: only the last use counts, and nothing is remembered.
    pub fn lru() -> Self {
        Self {
            nodes: Vec::new(),
            queue: BTreeSet::new(),
            clock: 0.0,
            half_life: LRU_HALF_LIFE,
            events: 0,
            touches_apart: 0,
            ghosts: Ghosts::default(),
            mean_return: 0.0,
            num_returns: FIRST_WEIGHT,
            trust: 1.0,
            reused_share: 0.5,
        }
    }

    fn tick(&mut self) {
        self.events = self.events.wrapping_add(1);
        self.clock += 1.0 / self.half_life;
    }

    /// An evicted chunk is back.
    fn learn(&mut self, ghost: Ghost) {
        let return_time = f64::from(self.events.wrapping_sub(ghost.last));
        self.num_returns = (self.num_returns + 1.0).min(MAX_WEIGHT);
        self.mean_return += (return_time - self.mean_return) / self.num_returns;
        if ghost.recent {
            // Per eviction of its kind, so that with equal rates the steps cancel out.
            let share = self.reused_share.clamp(MIN_SHARE, 1.0 - MIN_SHARE);
            let step = if ghost.reused { 0.5 / share } else { -0.5 / (1.0 - share) };
            self.trust = (self.trust * (1.0 + TRUST_STEP * step)).clamp(MIN_TRUST, 1.0);
        }
        self.half_life = HALF_LIFE_PER_RETURN * self.mean_return.max(1.0) * self.trust;
    }

    /// Its place in the queue, if it has one.
    fn place(&self, id: ChunkId) -> Option<(u64, u32)> {
        let node = &self.nodes[id.0 as usize];
        node.evictable.then(|| (node.worth().to_bits(), id.0))
    }

    fn dequeue(&mut self, id: ChunkId) {
        self.place(id).map(|place| self.queue.remove(&place));
    }
}

impl Policy for Lrfu {
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey) {
        self.tick();
        let fingerprint = fingerprint(key);
        let mut own = self.clock;
        let ghost = self.ghosts.take(fingerprint);
        if let Some(ghost) = ghost {
            own = sum(ghost.worth, self.clock);
            self.learn(ghost);
        }
        let at = id.0 as usize;
        if at >= self.nodes.len() {
            self.nodes.resize(at + 1, Node::VACANT);
        }
        let parent = parent.map_or(NO_PARENT, |parent| parent.0);
        self.nodes[at] =
            Node { own, fingerprint, last: self.events, parent, returned: ghost.is_some(), ..Node::VACANT };
    }

    fn touch(&mut self, id: ChunkId) {
        self.dequeue(id);
        let again = self.events.wrapping_sub(self.nodes[id.0 as usize].last) < self.touches_apart;
        if !again {
            self.tick();
        }
        let node = &mut self.nodes[id.0 as usize];
        node.touches = if again { node.touches.max(self.clock) } else { sum(node.touches, self.clock) };
        node.last = self.events;
        self.queue.extend(self.place(id));
    }

    fn set_evictable(&mut self, id: ChunkId, evictable: bool) {
        self.dequeue(id);
        self.nodes[id.0 as usize].evictable = evictable;
        self.queue.extend(self.place(id));
    }

    fn victim(&mut self) -> Option<ChunkId> {
        self.queue.first().map(|&(_, id)| ChunkId(id))
    }

    fn remove(&mut self, id: ChunkId, removal: Removal) {
        self.dequeue(id);
        let node = self.nodes[id.0 as usize];
        if node.parent != NO_PARENT {
            // A parent with a child present is not evictable, so it has no place in the queue that would have to move.
            let parent = &mut self.nodes[node.parent as usize];
            debug_assert!(!parent.evictable, "a parent is never evictable before its children left");
            parent.touches = sum(parent.touches, node.touches);
            parent.floor = parent.floor.max(node.worth());
            if self.events.wrapping_sub(node.last) < self.events.wrapping_sub(parent.last) {
                parent.last = node.last;
            }
        }
        if removal == Removal::Evicted {
            let reused = node.returned || node.touches > NEVER;
            self.reused_share += (f64::from(u8::from(reused)) - self.reused_share) / SHARE_WEIGHT;
            self.ghosts.put(node.fingerprint, node.worth(), node.last, reused);
        }
    }
}
