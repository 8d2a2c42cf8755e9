//! Tracks saves in flight: how many ranks have yet to report each save, which blocks it reads, and
//! its outcome.
//!
//! One prefix's saves have consecutive tickets and share one entry, because a prompt with multiple
//! KV cache groups has thousands of saves. The store assigns the reservation numbers. This module
//! compares the numbers only to detect that the store was replaced.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::chunk_batch::ChunkBatch;
use crate::io::SizeClass;
use crate::key::ChunkKey;
use crate::numbered::Numbered;

/// Chunks being saved, with consecutive tickets.
#[derive(Debug)]
struct Plan {
    batch: Arc<ChunkBatch>,
    /// One save per chunk in the batch.
    saves: Vec<Save>,
    /// Number of unsettled saves.
    num_left: usize,
}

#[derive(Debug, Clone, Copy)]
struct Save {
    /// The store's reservation number, or None if the store has been replaced.
    reservation: Option<u64>,
    /// Number of ranks that have yet to report the save, or 0 once the save is settled.
    num_ranks_left: u32,
    failed: bool,
    /// True if the chunk did not fit its frame.
    is_misfit: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settled {
    /// The store's reservation number, or None if the store has been replaced.
    pub(crate) reservation: Option<u64>,
    /// True if any rank failed to save the chunk or the store was cleared.
    pub(crate) failed: bool,
    /// Index of the chunk's KV cache group.
    pub(crate) group: usize,
    /// Size class of the chunk's frame.
    pub(crate) class: SizeClass,
    /// The chunk's key, if the chunk did not fit its frame.
    pub(crate) misfit: Option<ChunkKey>,
}

/// Saves that at least one rank has yet to report.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// All plans in flight, keyed by first ticket.
    all: Numbered<Plan>,
    num_saves: usize,
    next_ticket: u64,
    /// The highest reservation number seen so far.
    last_reservation: u64,
    /// Number of in-flight saves that read each block.
    readers: FxHashMap<i32, u32>,
}

impl InFlight {
    pub(crate) fn new() -> Self {
        let (all, readers) = (Numbered::default(), FxHashMap::default());
        Self { all, num_saves: 0, next_ticket: 1, last_reservation: 0, readers }
    }

    pub(crate) fn len(&self) -> usize {
        self.num_saves
    }

    /// Assigns tickets to planned saves. Each of the `num_ranks` ranks must report every ticket
    /// once.
    pub(crate) fn add(&mut self, mut batch: ChunkBatch, num_ranks: u32) -> Arc<ChunkBatch> {
        let first = self.next_ticket;
        let reservations = batch.number(first);
        let (Some(lowest), Some(highest)) = (reservations.first(), reservations.last()) else {
            return Arc::new(batch);
        };
        if *lowest <= self.last_reservation {
            // The store was replaced and its numbering restarted, so old numbers must not be passed
            // to the new store.
            self.saves_mut().for_each(|save| save.reservation = None);
        }
        self.last_reservation = *highest;
        self.readers.reserve(reservations.len());
        for block in batch.wanted_blocks() {
            *self.readers.entry(block).or_default() += 1;
        }
        let batch = Arc::new(batch);
        let save = |reservation| Save {
            reservation: Some(reservation),
            num_ranks_left: num_ranks.max(1),
            failed: false,
            is_misfit: false,
        };
        let saves: Vec<_> = reservations.into_iter().map(save).collect();
        let num_left = saves.len();
        self.num_saves += num_left;
        self.next_ticket += num_left as u64;
        self.all.insert(first, Plan { batch: Arc::clone(&batch), saves, num_left });
        batch
    }

    fn saves_mut(&mut self) -> impl Iterator<Item = &mut Save> {
        self.all.values_mut().flat_map(|plan| &mut plan.saves)
    }

    /// Marks all saves in flight as failed, so that none is committed.
    pub(crate) fn fail_all(&mut self) {
        self.saves_mut().for_each(|save| save.failed = true);
    }

    /// Returns the blocks that in-flight saves read. If `blocks` is given, checks only these
    /// blocks.
    pub(crate) fn being_read(&self, blocks: Option<&[i32]>) -> Vec<i32> {
        let among = |blocks: &[i32]| {
            blocks.iter().copied().filter(|block| self.readers.contains_key(block)).collect()
        };
        blocks.map_or_else(|| self.readers.keys().copied().collect(), among)
    }

    pub(crate) fn tickets(&self) -> Vec<u64> {
        let of = |(first, plan): (u64, &Plan)| {
            let is_left = |&(_, save): &(u64, &Save)| save.num_ranks_left > 0;
            (first..).zip(&plan.saves).filter(is_left).map(|(ticket, _)| ticket).collect::<Vec<_>>()
        };
        self.all.iter().flat_map(of).collect()
    }

    /// Records that a save failed because the chunk did not fit its frame on at least one rank.
    pub(crate) fn mark_misfit(&mut self, ticket: u64) {
        if let Some((_, plan, nth)) = find(&mut self.all, ticket) {
            (plan.saves[nth].failed, plan.saves[nth].is_misfit) = (true, true);
        }
    }

    pub(crate) fn fail(&mut self, ticket: u64) {
        if let Some((_, plan, nth)) = find(&mut self.all, ticket) {
            plan.saves[nth].failed = true;
        }
    }

    /// Records a rank's report. Returns the settled save if this was the last rank to report.
    pub(crate) fn report(&mut self, ticket: u64) -> Option<Settled> {
        let (_, plan, nth) = find(&mut self.all, ticket)?;
        let save = &mut plan.saves[nth];
        if save.num_ranks_left > 1 {
            save.num_ranks_left -= 1;
            return None;
        }
        self.remove(ticket)
    }

    pub(crate) fn remove(&mut self, ticket: u64) -> Option<Settled> {
        let (first, plan, nth) = find(&mut self.all, ticket)?;
        let Save { reservation, failed, is_misfit, .. } = plan.saves[nth];
        let chunk = plan.batch.chunk(nth);
        let (group, class) = (chunk.group as usize, chunk.frame.class());
        let misfit = is_misfit.then_some(chunk.key);
        plan.saves[nth].num_ranks_left = 0;
        plan.num_left -= 1;
        self.num_saves -= 1;
        for block in chunk.blocks {
            if let Entry::Occupied(mut num) = self.readers.entry(*block) {
                *num.get_mut() -= 1;
                if *num.get() == 0 {
                    num.remove();
                }
            }
        }
        if plan.num_left == 0 {
            self.all.remove(first);
        }
        Some(Settled { reservation, failed, group, class, misfit })
    }
}

/// Finds a save in flight. Returns its plan's first ticket, the plan, and the save's index in the
/// plan.
fn find(all: &mut Numbered<Plan>, ticket: u64) -> Option<(u64, &mut Plan, usize)> {
    let (first, plan) = all.up_to(ticket)?;
    let nth = usize::try_from(ticket - first).ok()?;
    plan.saves.get(nth).is_some_and(|save| save.num_ranks_left > 0).then_some((first, plan, nth))
}

#[cfg(test)]
mod tests;
