//! Eviction policies: adaptive LRU, in which reused chunks age more slowly, and plain LRU.
//!
//! Evictable chunks wait in two queues sorted by last use: one for chunks used once, and one for
//! reused chunks. A chunk that is saved again after being evicted counts as reused. The victim is
//! the older of the two heads, with the reused chunk's age divided by `credit`. The credit adapts
//! to the workload, so it needs no setting. A credit of 1, the initial value, gives plain LRU. A
//! chunk that returns after being evicted was evicted too early. The credit then grows if the chunk
//! had been reused and shrinks otherwise, until reused chunks and other chunks return equally
//! often. The credit is high if most chunks are never used again, and drops after a few returns
//! when a new working set replaces the old one. ARC (Megiddo and Modha, FAST 2003) balances queue
//! sizes, so it would have to count chunks that are not leaves. Comparing ages requires no counts.
//!
//! Each use of a chunk also counts as a use of its ancestors, but only the deepest chunk is
//! updated. An ancestor cannot be a victim until its descendants have been removed, and a removed
//! chunk passes its last use to its parent. Once a chunk becomes a leaf, it therefore has the same
//! position in its queue as if each use had updated the whole prefix. The cost of a touch does not
//! depend on the chunk's depth.
//!
//! An independent chunk, such as a Mamba state, is new in each turn of a chat, while most of the
//! prefix before it was reused. Without special treatment, the independent chunk would be evicted
//! first, although the prefix cannot be loaded without this chunk. If at least half of the prefix
//! was reused, the store therefore marks the independent chunk and the last chunk of the prefix as
//! reused (`is_mostly_reused`, `mark_reused`).

use std::collections::BTreeSet;

use super::ghosts::{Ghost, Ghosts, fingerprint};
use super::tenants::{NUM_ROWS, TenantQueues};
use super::{ChunkId, Policy, Removal, TenantId};
use crate::key::ChunkKey;
use crate::{Error, Result};

const NO_PARENT: u32 = u32::MAX;
/// A touch does not count as a reuse if fewer than `capacity / TOUCHES_APART` events have passed
/// since the chunk was last used, because a waiting request touches its chunks repeatedly.
const TOUCHES_APART: u32 = 64;
/// Number of returns of one kind, as a fraction of the capacity, that change the credit by a factor
/// of e if half of the evicted chunks were reused.
const RETURNS_PER_E: f64 = 1.0 / 12.0;
/// Upper limit on the credit. With a higher credit, reused chunks would be kept too long after the
/// working set has changed.
const MAX_CREDIT: f64 = 256.0;
/// Number of evictions after which `reused_share` reflects two thirds of a change.
const SHARE_WEIGHT: f64 = 256.0;
/// Maximum number of chunks that `is_mostly_reused` visits.
const MAX_STEPS_UP: u32 = 1024;
const MIN_SHARE: f64 = 1.0 / 50.0;

/// A chunk's state. The state takes up 24 bytes, plus up to 32 bytes in a queue while the chunk is
/// evictable.
#[derive(Debug, Clone, Copy)]
struct Node {
    fingerprint: u64,
    /// Event number of the last use of the chunk or of a removed descendant.
    last: u64,
    parent: u32,
    evictable: bool,
    /// True if the chunk was used more than once, including uses before an eviction.
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

    /// Returns the index of the queue that holds the chunk while it is evictable.
    fn row(&self) -> u8 {
        u8::from(self.reused) + 2 * u8::from(self.unwritten)
    }
}

/// Adaptive LRU or plain LRU. See the module documentation.
#[derive(Debug)]
pub struct Adaptive {
    nodes: Vec<Node>,
    /// The queues, indexed by `Node::row`.
    queues: [BTreeSet<(u64, u32)>; NUM_ROWS],
    spares_unwritten: bool,
    tenants: TenantQueues,
    /// Number of insertions plus the number of touches that counted as reuses.
    events: u64,
    touches_apart: u64,
    pub(super) ghosts: Ghosts,
    /// The age of reused chunks is divided by this number.
    pub(super) credit: f64,
    /// Change in the logarithm of the credit per return, assuming that all evicted chunks are of
    /// the same kind as the returned chunk.
    step: f64,
    /// Fraction of recently evicted chunks that had been reused.
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

    /// Creates a plain LRU policy, without ghosts.
    pub fn lru() -> Self {
        Self {
            nodes: Vec::new(),
            queues: Default::default(),
            spares_unwritten: false,
            tenants: TenantQueues::default(),
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

    /// Updates the credit when a recently evicted chunk returns.
    fn regret(&mut self, reused: bool) {
        // The step is divided by the kind's share of evictions, so that the steps cancel out if
        // both kinds return at the same rate.
        let share = self.reused_share.clamp(MIN_SHARE, 1.0 - MIN_SHARE);
        let step = if reused { self.step / share } else { -self.step / (1.0 - share) };
        self.credit = (self.credit * step.exp()).clamp(1.0, MAX_CREDIT);
    }

    fn update(&mut self, id: ChunkId, change: impl FnOnce(&mut Node)) {
        let node = &mut self.nodes[id.0 as usize];
        if node.evictable {
            self.queues[usize::from(node.row())].remove(&(node.last, id.0));
            self.tenants.leave(id, node.row(), node.last);
        }
        change(node);
        if node.evictable {
            self.queues[usize::from(node.row())].insert((node.last, id.0));
            self.tenants.enter(id, node.row(), node.last);
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

    /// Chooses between the heads of two queues: chunks used once and reused chunks.
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

    fn victim_of(&mut self, tenant: TenantId) -> Option<ChunkId> {
        self.coldest(self.tenants.heads(tenant))
    }

    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool) {
        self.update(id, |node| node.unwritten = unwritten);
    }

    fn spare_unwritten(&mut self, spare: bool) {
        self.spares_unwritten = spare;
    }

    fn set_tenant(&mut self, id: ChunkId, tenant: TenantId) {
        self.tenants.set(id, tenant);
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
        self.tenants.unset(id);
        let node = self.nodes[id.0 as usize];
        if node.parent != NO_PARENT {
            // The parent of a present chunk is not evictable, so it is not in any queue.
            let parent = &mut self.nodes[node.parent as usize];
            debug_assert!(!parent.evictable, "the parent of a present chunk must not be evictable");
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

/// Selects the eviction policy of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Eviction {
    /// LRU in which reused chunks age more slowly, at a rate that depends on which evicted chunks
    /// return.
    #[default]
    Adaptive,
    /// Plain LRU.
    Lru,
}

impl Eviction {
    /// Parses `adaptive` or `lru`. Returns `InvalidConfig` for any other name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "adaptive" => Ok(Eviction::Adaptive),
            "lru" => Ok(Eviction::Lru),
            _ => Err(Error::invalid(format!(
                "eviction = \"{name}\" is unknown; use \"adaptive\" or \"lru\""
            ))),
        }
    }

    /// Creates a policy for a tier of `capacity` chunks.
    pub fn policy(self, capacity: usize) -> Box<dyn Policy> {
        match self {
            Eviction::Adaptive => Box::new(Adaptive::new(capacity)),
            Eviction::Lru => Box::new(Adaptive::lru()),
        }
    }
}
