//! LRU with slower aging of reused chunks; and plain LRU.
//!
//! Evictable chunks are in two queues by last use: chunks used once, and chunks used more than
//! once, including those that were evicted and saved again. The victim is the older of the two
//! heads, where the age of a reused chunk is divided by `credit`. The credit follows the workload,
//! so there is no setting. It starts at 1, which is LRU. When an evicted chunk returns, chunks of
//! its kind were evicted too soon: the credit grows if the chunk was reused and shrinks otherwise,
//! until evictions of both kinds are regretted equally often. The credit is high where most chunks
//! are never used again, and drops after a few returns when a new working set replaces the old one.
//! Compare ARC (Megiddo and Modha, FAST 2003), which balances sizes; ages need no count of the
//! chunks that are not leaves.
//!
//! A use of a chunk is a use of its ancestors, but only the deepest chunk is updated: an ancestor
//! cannot be a victim before its descendants are removed, and a removed chunk passes its uses to
//! its parent. A chunk that becomes a leaf is therefore at the same place in its queue as if each
//! use had stamped the whole prefix, and a touch costs the same at any depth.
//!
//! A chunk attached to a prefix (Mamba state, a draft model's KV) is new in each turn of a chat,
//! while most of the prefix was reused. On its own it would always be evicted first, and the prefix
//! cannot be loaded without it. If at least half of the prefix was reused, its last chunk and the
//! chunks attached to it therefore count as reused (`is_mostly_reused`, `mark_reused`).

use std::collections::BTreeSet;

use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::groups::{Groups, NUM_ROWS};
use super::{ChunkId, GroupId, Policy, Removal};
use crate::key::ChunkKey;
use crate::{Error, Result};

const NO_PARENT: u32 = u32::MAX;
/// Touches of a chunk within this share of the capacity count as one use: a waiting request is
/// looked up many times.
const TOUCHES_APART: u32 = 64;
/// Returns of one kind that change the credit by e, as a share of the capacity, if half of the
/// evicted chunks were reused.
const RETURNS_PER_E: f64 = 1.0 / 12.0;
/// A higher credit would keep reused chunks too long after their working set has changed.
const MAX_CREDIT: f64 = 256.0;
/// Evictions after which `reused_share` has made two thirds of a change.
const SHARE_WEIGHT: f64 = 256.0;
/// Maximum number of chunks that `is_mostly_reused` visits.
const MAX_STEPS_UP: u32 = 1024;
const MIN_SHARE: f64 = 1.0 / 50.0;

/// State of a chunk: 24 bytes, and at most 32 in a queue while it is evictable.
#[derive(Debug, Clone, Copy)]
struct Node {
    fingerprint: u64,
    /// The last use of the chunk or a removed descendant, in events.
    last: u64,
    parent: u32,
    evictable: bool,
    /// Used more than once, including uses before an eviction.
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

    /// The queue that holds the chunk while it is evictable.
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
    /// Evictable chunks by group.
    groups: Groups,
    /// Inserts, and touches that count.
    events: u64,
    touches_apart: u64,
    pub(super) ghosts: Ghosts,
    /// Divides the age of reused chunks.
    pub(super) credit: f64,
    /// How much a return changes the logarithm of the credit, if all evicted chunks are of its
    /// kind.
    step: f64,
    /// Share of newly evicted chunks that were reused.
    reused_share: f64,
}

impl Adaptive {
    /// Creates a policy for a tier of `capacity` chunks.
    pub fn new(capacity: usize) -> Self {
        let chunks = u32::try_from(capacity).unwrap_or(u32::MAX).max(1);
        Self {
            touches_apart: u64::from(chunks / TOUCHES_APART),
            ghosts: Ghosts::new(capacity),
            step: 0.5 / (RETURNS_PER_E * f64::from(chunks)),
            ..Self::lru()
        }
    }

    /// Least recently used: only the last use counts, and there are no ghosts.
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

    fn age(&self, last: u64) -> f64 {
        f64::from(u32::try_from(self.events - last).unwrap_or(u32::MAX))
    }

    /// Updates the credit: a recently evicted chunk returned.
    fn regret(&mut self, reused: bool) {
        // Per eviction of its kind, so that with equal rates the steps cancel out.
        let share = self.reused_share.clamp(MIN_SHARE, 1.0 - MIN_SHARE);
        let step = if reused { self.step / share } else { -self.step / (1.0 - share) };
        self.credit = (self.credit * step.exp()).clamp(1.0, MAX_CREDIT);
    }

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

    /// Returns the next victim of two heads: one of chunks used once, one of reused chunks.
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

    fn is_mostly_reused(&self, end: ChunkId, num_chunks: u32) -> bool {
        let node = |id: u32| self.nodes.get(id as usize).copied();
        let chunks = std::iter::successors(node(end.0), |last| node(last.parent));
        chunks.take((num_chunks / 2 + 1).min(MAX_STEPS_UP) as usize).any(|node| node.reused)
    }

    fn mark_reused(&mut self, id: ChunkId) {
        self.update(id, |node| node.reused = true);
    }

    fn remove(&mut self, id: ChunkId, removal: Removal) {
        self.update(id, |node| node.evictable = false);
        self.groups.unset(id);
        let node = self.nodes[id.0 as usize];
        if node.parent != NO_PARENT {
            // The parent of a present chunk is not evictable, so it is in no queue.
            let parent = &mut self.nodes[node.parent as usize];
            debug_assert!(!parent.evictable, "the parent of a present chunk is evictable");
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

/// Which policy a tier has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Eviction {
    /// Least recently used, but reused chunks age more slowly; the rate follows from the evicted
    /// chunks that return.
    #[default]
    Adaptive,
    /// Least recently used.
    Lru,
}

impl Eviction {
    /// `adaptive` or `lru`; else `InvalidConfig`.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "adaptive" => Ok(Eviction::Adaptive),
            "lru" => Ok(Eviction::Lru),
            _ => Err(Error::invalid(format!(
                "eviction = \"{name}\" is unknown; use \"adaptive\" or \"lru\""
            ))),
        }
    }

    /// A policy for a tier that holds `capacity` chunks.
    pub fn policy(self, capacity: usize) -> Box<dyn Policy> {
        match self {
            Eviction::Adaptive => Box::new(Adaptive::new(capacity)),
            Eviction::Lru => Box::new(Adaptive::lru()),
        }
    }
}
