//! What one engine has in flight in a store: a session's answers joined to the block table, and what ranks have yet to report.
//!
//! A ticket is settled once, by the last rank's report (I10); it is committed only if no rank failed it (I3). A save reads
//! its blocks after the step that planned it was launched; by then its request may be gone and a block another's, whose
//! writer has to wait (I2). Tickets are the engine's own and count up for as long as it lives, whatever numbers the store
//! gives its reservations: so a late report never settles another save.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::batch::{BlocksByTier, ChunkBatch, NULL_BLOCK};
use crate::flights::Flights;
use crate::key::ChunkKey;
use crate::session::{LeaseId, Session};
use crate::store::{LeasedFrame, ToSave};

/// Chunks of one prefix to be saved.
#[derive(Debug, Clone, Copy)]
pub struct SaveRow<'a> {
    /// What of which prefix.
    pub what: ToSave<'a>,
    /// The blocks that hold it, the range's first one first.
    pub table: &'a [i32],
    /// Where in the prefix the table begins.
    pub first: u32,
    /// How many of them hold one block of the store.
    pub each: u32,
    /// Discarded once the chunk with the table's last block is committed.
    pub replaced: Option<ChunkKey>,
}

/// How many blocks of a group's table are in one block of the store, and how many of those, the last ones, it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// At least one.
    pub each: u32,
    /// At least one, and at most as many.
    pub kept: u32,
}

/// Blocks of one group that a lease has.
#[derive(Debug, Clone)]
pub struct LoadRow<'a> {
    /// All of them, as the store counts.
    pub blocks: Range<u32>,
    /// Where the last of them go to, in blocks of the group; those before are not loaded.
    pub table: &'a [i32],
    /// What of the table is in one of the store's.
    pub cut: Cut,
}

impl LoadRow<'_> {
    /// The first block of the group's table that is loaded; None if the row begins before that.
    fn begin(&self) -> Option<u32> {
        self.blocks.end.checked_mul(self.cut.each)?.checked_sub(u32::try_from(self.table.len()).ok()?)
    }

    /// What `leased` chunks hold of the row; None unless that is the whole table. And how many of them are loaded, by tier.
    fn batch(&self, leased: &mut [LeasedFrame]) -> Result<Option<(ChunkBatch, BlocksByTier)>> {
        let Cut { each, kept } = self.cut;
        let Some(begin) = self.begin() else { return Ok(None) };
        let mut by_tier = BlocksByTier::default();
        for (chunk, block) in leased.iter_mut().zip(self.blocks.clone()) {
            let end = (block + 1) * each; // no overflow: the row's last one has none
            (chunk.first_block, chunk.num_blocks) = (end - kept, kept);
            by_tier.add(chunk.tier, u32::from(end > begin));
        }
        let (batch, loaded) = ChunkBatch::of_loads(leased, self.table, begin)?;
        Ok((loaded.total() as usize == self.table.len()).then_some((batch, by_tier)))
    }
}

/// A session, and what one engine has in flight in it.
#[derive(Debug)]
pub struct EngineSession {
    session: Box<dyn Session>,
    num_ranks: u32,
    flights: Mutex<Flights>,
}

impl EngineSession {
    /// Each of `num_ranks` reports every ticket once.
    pub fn new(session: Box<dyn Session>, num_ranks: u32) -> Self {
        Self { session, num_ranks, flights: Mutex::new(Flights::new()) }
    }

    /// The store behind it.
    pub fn session(&self) -> &dyn Session {
        &*self.session
    }

    fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a lease covers of blocks `begin` and on, into those that `table` names from there. `InvalidConfig` for a negative
    /// number among them.
    pub fn load(&self, lease: LeaseId, table: &[i32], begin: u32) -> Result<(ChunkBatch, BlocksByTier)> {
        ChunkBatch::of_loads(&self.session.frames(lease), table, begin)
    }

    /// What a lease on several prefixes covers: its chunks in their order are those of each row, one a block. None if one of them is
    /// not there, or has no block to go to. The tiers count chunks. `InvalidConfig` for a negative number in a table.
    pub fn load_rows(&self, lease: LeaseId, rows: &[LoadRow<'_>]) -> Result<Option<Vec<(ChunkBatch, BlocksByTier)>>> {
        let mut leased = self.session.frames(lease);
        let num_blocks: usize = rows.iter().map(|row| row.blocks.len()).sum();
        let is_whole = leased.len() == num_blocks && leased.iter().all(|chunk| chunk.num_blocks == 1);
        if !is_whole || rows.iter().any(|row| row.table.contains(&NULL_BLOCK)) {
            return Ok(None);
        }
        let mut rest = leased.as_mut_slice();
        let mut batch = |row: &LoadRow<'_>| {
            let (own, behind) = std::mem::take(&mut rest).split_at_mut(row.blocks.len());
            rest = behind;
            row.batch(own)
        };
        rows.iter().map(&mut batch).collect()
    }

    /// Reserves frames for what is missing of each row's range, to be filled from its table; and how many chunks could not be had.
    /// They are in flight from here on. On an error for one, none is.
    pub fn reserve(&self, rows: &[SaveRow<'_>]) -> Result<Vec<(Arc<ChunkBatch>, u32)>> {
        // Before the store is asked, so that its numbers come in their order.
        let mut flights = self.flights();
        let asked: Vec<_> = rows.iter().map(|row| row.what).collect();
        let (reserved, got) = self.session.reserve_many(&asked)?;
        let (mut rest, mut batches) = (reserved.as_slice(), Vec::with_capacity(rows.len()));
        for (row, got) in rows.iter().zip(&got) {
            let (own, behind) = rest.split_at(got.num_reserved.min(rest.len()));
            rest = behind;
            let batch = ChunkBatch::of_saves(own, row.table, row.first, row.each);
            batches.push(batch.inspect_err(|_| self.give_back(reserved.iter().map(|chunk| chunk.ticket)))?);
        }
        let mut added = Vec::with_capacity(rows.len());
        for ((row, got), (batch, without_kv)) in rows.iter().zip(got).zip(batches) {
            self.give_back(without_kv);
            let supersedes = row.replaced.filter(|_| batch.wanted_blocks().last() == row.table.last().copied());
            added.push((flights.add(batch, self.num_ranks, supersedes), got.num_dropped));
        }
        Ok(added)
    }

    /// Takes in one rank's report; returns how many chunks became visible, and how many some rank could not write. Tickets that
    /// are not in flight mean nothing.
    pub fn settle(&self, saved: &[u64], failed: &[u64]) -> (u32, usize) {
        let mut flights = self.flights();
        for ticket in failed {
            flights.fail(*ticket);
        }
        let (mut written, mut aborted) = (Vec::with_capacity(saved.len()), Vec::new());
        for save in saved.iter().chain(failed).filter_map(|ticket| flights.report(*ticket)) {
            (if save.failed || save.reservation.is_none() { &mut aborted } else { &mut written }).push(save);
        }
        drop(flights);
        self.give_back(aborted.iter().filter_map(|save| save.reservation));
        let (mut superseded, mut reservations) = (Vec::with_capacity(written.len()), Vec::with_capacity(written.len()));
        for save in &written {
            superseded.extend(save.supersedes);
            reservations.extend(save.reservation);
        }
        if !superseded.is_empty() {
            self.session.discard(&superseded);
        }
        let num_visible = if reservations.is_empty() { 0 } else { self.session.commit(&reservations) };
        (num_visible, aborted.len())
    }

    /// Gives reservations back that no rank will report.
    pub fn abort(&self, tickets: &[u64]) {
        let mut flights = self.flights();
        let known: Vec<_> = tickets.iter().filter_map(|ticket| flights.remove(*ticket)?.reservation).collect();
        drop(flights);
        self.give_back(known);
    }

    /// Gives back everything that is in flight.
    pub fn abort_all(&self) {
        let every = self.flights().tickets();
        self.abort(&every);
    }

    fn give_back(&self, reservations: impl IntoIterator<Item = u64>) {
        let reservations: Vec<_> = reservations.into_iter().collect();
        if !reservations.is_empty() {
            self.session.abort(&reservations);
        }
    }

    /// Forgets everything, also what is being saved.
    pub fn clear(&self) {
        self.flights().fail_all();
        self.session.clear();
    }

    /// Saves that some rank has not reported.
    pub fn num_in_flight(&self) -> usize {
        self.flights().len()
    }

    /// Those of `blocks` that a save in flight reads; every such block for None.
    pub fn being_read(&self, blocks: Option<&[i32]>) -> Vec<i32> {
        self.flights().being_read(blocks)
    }
}
