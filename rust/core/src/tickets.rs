//! Saves in flight: which ranks have yet to report each ticket, and which blocks are still being read.
//!
//! A ticket is settled once, by the last rank's report (I10); it is committed only if no rank failed it (I3). A save reads
//! its blocks after the step that planned it was launched; by then its request may be gone and a block another's, whose
//! writer has to wait (I2). It must not know the store.

use std::collections::HashMap;
use std::sync::Arc;

use crate::batch::ChunkBatch;
use crate::key::ChunkKey;

/// What reports settled, in the order of arrival.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settled {
    /// Every rank has written its part.
    pub committed: Vec<u64>,
    /// Some rank has not.
    pub aborted: Vec<u64>,
    /// Chunks that the committed ones replace.
    pub superseded: Vec<ChunkKey>,
}

#[derive(Debug)]
struct Save {
    num_left: u32,
    failed: bool,
    supersedes: Option<ChunkKey>,
    saves: Arc<ChunkBatch>,
    nth: usize,
}

/// Saves that some rank has not reported yet.
#[derive(Debug)]
pub struct Tickets {
    num_ranks: u32,
    in_flight: HashMap<u64, Save>,
    /// Saves in flight that read each block.
    readers: HashMap<i32, u32>,
}

impl Tickets {
    /// Every one of `num_ranks` reports each ticket once.
    pub fn new(num_ranks: u32) -> Self {
        Self { num_ranks, in_flight: HashMap::new(), readers: HashMap::new() }
    }

    /// Tickets in flight.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// These saves are planned.
    pub fn add(&mut self, saves: &Arc<ChunkBatch>) {
        self.in_flight.reserve(saves.len());
        for (nth, ticket) in saves.tickets().iter().enumerate() {
            let save =
                Save { num_left: self.num_ranks, failed: false, supersedes: None, saves: Arc::clone(saves), nth };
            self.in_flight.insert(*ticket, save);
        }
        for block in saves.wanted_blocks() {
            *self.readers.entry(block).or_default() += 1;
        }
    }

    /// Once `ticket` is committed, `key` is not needed any more.
    pub fn supersede(&mut self, ticket: u64, key: ChunkKey) {
        if let Some(save) = self.in_flight.get_mut(&ticket) {
            save.supersedes = Some(key);
        }
    }

    /// Nothing that is in flight now may become visible.
    pub fn fail_all(&mut self) {
        self.in_flight.values_mut().for_each(|save| save.failed = true);
    }

    /// No rank will report these; returns those that were in flight.
    pub fn forget(&mut self, tickets: &[u64]) -> Vec<u64> {
        tickets.iter().copied().filter(|ticket| self.remove(*ticket).is_some()).collect()
    }

    /// No rank will report anything that is in flight; returns it.
    pub fn forget_all(&mut self) -> Vec<u64> {
        self.readers.clear();
        self.in_flight.drain().map(|(ticket, _)| ticket).collect()
    }

    /// Takes in one rank's report. Tickets that are not in flight mean nothing.
    pub fn settle(&mut self, saved: &[u64], failed: &[u64]) -> Settled {
        for ticket in failed {
            if let Some(save) = self.in_flight.get_mut(ticket) {
                save.failed = true;
            }
        }
        let mut settled = Settled::default();
        for ticket in saved.iter().chain(failed) {
            let Some(save) = self.in_flight.get_mut(ticket) else { continue };
            save.num_left -= 1;
            if save.num_left > 0 {
                continue;
            }
            match self.remove(*ticket) {
                Some(save) if !save.failed => {
                    settled.committed.push(*ticket);
                    settled.superseded.extend(save.supersedes);
                }
                _ => settled.aborted.push(*ticket),
            }
        }
        settled
    }

    /// Those of `blocks` that a save in flight reads.
    pub fn read_among(&self, blocks: &[i32]) -> Vec<i32> {
        blocks.iter().copied().filter(|block| self.readers.contains_key(block)).collect()
    }

    /// Every block that a save in flight reads.
    pub fn read_blocks(&self) -> Vec<i32> {
        self.readers.keys().copied().collect()
    }

    fn remove(&mut self, ticket: u64) -> Option<Save> {
        let save = self.in_flight.remove(&ticket)?;
        for block in save.saves.chunk(save.nth).blocks {
            if let Some(count) = self.readers.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    self.readers.remove(block);
                }
            }
        }
        Some(save)
    }
}
