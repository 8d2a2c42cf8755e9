//! A forest of chunks that drives a policy as the store does, and an oracle that records each use
//! of a prefix for every chunk in it.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use crate::key::ChunkKey;

pub(super) fn key(number: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

#[derive(Default)]
pub(super) struct Oracle {
    events: u32,
    /// Numbers (not ids) of evicted chunks.
    gone: BTreeSet<u32>,
    chunks: BTreeMap<u32, Uses>,
}

pub(super) struct Uses {
    number: u32,
    last: u32,
    reused: bool,
}

impl Oracle {
    pub(super) fn insert(&mut self, id: u32, number: u32) {
        self.events += 1;
        let reused = self.gone.remove(&number);
        self.chunks.insert(id, Uses { number, last: self.events, reused });
    }

    /// Records a use of `prefix`, which contains the touched chunk and all its ancestors.
    pub(super) fn touch(&mut self, prefix: &[u32]) {
        self.events += 1;
        for id in prefix {
            let uses = self.chunks.get_mut(id).unwrap();
            (uses.last, uses.reused) = (self.events, true);
        }
    }

    /// Removes a chunk. The chunk's parent inherits the time of the last use or insertion, and
    /// whether the chunk was reused.
    pub(super) fn remove(&mut self, id: u32, parent: Option<u32>, removal: Removal) {
        let Uses { number, last, reused } = self.chunks.remove(&id).unwrap();
        if let Some(above) = parent.map(|parent| self.chunks.get_mut(&parent).unwrap()) {
            above.last = above.last.max(last);
            above.reused |= reused;
        }
        if removal == Removal::Evicted {
            self.gone.insert(number);
        }
    }

    pub(super) fn age(&self, id: u32, credit: f64) -> f64 {
        let Uses { last, reused, .. } = self.chunks[&id];
        f64::from(self.events - last) / if reused { credit } else { 1.0 }
    }
}

/// A forest of chunks in which unpinned leaves are evictable.
pub(super) struct Forest<P> {
    pub(super) policy: P,
    pub(super) parents: BTreeMap<u32, Option<u32>>,
    pub(super) numbers: BTreeMap<u32, u32>,
    pub(super) num_children: BTreeMap<u32, u32>,
    pub(super) pinned: BTreeSet<u32>,
    pub(super) told: BTreeMap<u32, bool>,
    /// Each tenant's victim when the overall victim was last requested.
    pub(super) of_tenants: [Option<u32>; NUM_TENANTS as usize],
    pub(super) oracle: Oracle,
}

pub(super) const NUM_TENANTS: u32 = 3;

/// Returns the tenant of a chunk. A quarter of the chunks in a walk have no tenant.
pub(super) fn tenant_of(number: u32) -> Option<TenantId> {
    Some(TenantId(number % 4)).filter(|tenant| tenant.0 < NUM_TENANTS)
}

impl<P: Policy> Forest<P> {
    pub(super) fn new(policy: P) -> Self {
        Self {
            policy,
            parents: BTreeMap::new(),
            numbers: BTreeMap::new(),
            num_children: BTreeMap::new(),
            pinned: BTreeSet::new(),
            told: BTreeMap::new(),
            of_tenants: Default::default(),
            oracle: Oracle::default(),
        }
    }

    pub(super) fn nth(&self, nth: usize) -> Option<u32> {
        self.parents.keys().nth(nth % self.parents.len().max(1)).copied()
    }

    pub(super) fn evictable(&self, id: u32) -> bool {
        !self.pinned.contains(&id) && self.num_children.get(&id).is_none_or(|&num| num == 0)
    }

    pub(super) fn leaves(&self) -> Vec<u32> {
        self.parents.keys().copied().filter(|&id| self.evictable(id)).collect()
    }

    pub(super) fn leaves_of(&self, tenant: TenantId) -> Vec<u32> {
        self.leaves().into_iter().filter(|id| tenant_of(self.numbers[id]) == Some(tenant)).collect()
    }

    /// Reports evictability changes to the policy. A parent must be reported as not evictable
    /// before its child is inserted.
    pub(super) fn sync(&mut self) {
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

    pub(super) fn insert(&mut self, parent: Option<u32>, number: u32) -> u32 {
        let id = (0..=u32::MAX).find(|id| !self.parents.contains_key(id)).unwrap();
        self.parents.insert(id, parent);
        if let Some(parent) = parent {
            *self.num_children.entry(parent).or_default() += 1;
        }
        self.numbers.insert(id, number);
        self.sync();
        self.oracle.insert(id, number);
        self.policy.insert(ChunkId(id), parent.map(ChunkId), &key(number));
        if let Some(tenant) = tenant_of(number) {
            self.policy.set_tenant(ChunkId(id), tenant);
        }
        self.told.insert(id, false);
        self.sync();
        id
    }

    pub(super) fn touch(&mut self, id: u32) {
        let prefix: Vec<_> = std::iter::successors(Some(id), |id| self.parents[id]).collect();
        self.oracle.touch(&prefix);
        self.policy.touch(ChunkId(id));
    }

    pub(super) fn mark_reused(&mut self, id: u32) {
        self.oracle.chunks.get_mut(&id).unwrap().reused = true;
        self.policy.mark_reused(ChunkId(id));
    }

    pub(super) fn remove(&mut self, id: u32, removal: Removal) {
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

    /// Requests the victim twice, checks the contract, and returns the victim.
    pub(super) fn victim(&mut self) -> Option<u32> {
        let victim = self.policy.victim().map(|id| id.0);
        assert_eq!(self.policy.victim().map(|id| id.0), victim);
        assert_eq!(victim.is_some(), !self.leaves().is_empty());
        assert!(victim.is_none_or(|id| self.evictable(id)));
        for tenant in (0..NUM_TENANTS).map(TenantId) {
            let victim = self.policy.victim_of(tenant).map(|id| id.0);
            assert_eq!(victim.is_some(), !self.leaves_of(tenant).is_empty());
            assert!(victim.is_none_or(|id| self.leaves_of(tenant).contains(&id)));
            self.of_tenants[tenant.0 as usize] = victim;
        }
        victim
    }

    pub(super) fn evict(&mut self) -> Option<u32> {
        let victim = self.victim()?;
        self.remove(victim, Removal::Evicted);
        Some(victim)
    }

    /// Replays uses of root chunks in a tier of `capacity` chunks: touches present roots and
    /// inserts missing roots. Returns the number of hits.
    pub(super) fn replay(
        &mut self,
        capacity: usize,
        numbers: impl IntoIterator<Item = u32>,
    ) -> u32 {
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

#[derive(Debug)]
pub(super) struct Boxed(pub(super) Box<dyn Policy>);

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
    fn set_tenant(&mut self, id: ChunkId, tenant: TenantId) {
        self.0.set_tenant(id, tenant);
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
    fn victim_of(&mut self, tenant: TenantId) -> Option<ChunkId> {
        self.0.victim_of(tenant)
    }
    fn remove(&mut self, id: ChunkId, removal: Removal) {
        self.0.remove(id, removal);
    }
}
