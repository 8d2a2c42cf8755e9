//! Saves in flight: which ranks have yet to report each ticket, and which blocks are still being read.
//!
//! A ticket is settled once, by the last rank's report (I10); it is committed only if no rank failed it (I3). A save reads
//! its blocks after the step that planned it was launched; by then its request may be gone and a block another's, whose
//! writer has to wait (I2). It must not know the store.

use std::collections::{BTreeMap, HashMap};
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

/// One chunk of a batch: ranks that have yet to report it (0: it is settled), and whether one failed it.
#[derive(Debug, Clone, Copy)]
struct Save {
    num_left: u32,
    failed: bool,
}

/// The saves of one batch.
#[derive(Debug)]
struct Flight {
    batch: Arc<ChunkBatch>,
    saves: Vec<Save>,
    num_open: usize,
}

/// Saves that some rank has not reported yet.
#[derive(Debug)]
pub struct Tickets {
    num_ranks: u32,
    /// By their first tickets: a report names a whole prompt's, so nothing is looked up by hash for each.
    flights: BTreeMap<u64, Flight>,
    supersedes: HashMap<u64, ChunkKey>,
    next_ticket: u64,
    /// Each block's last save. One that was settled stays until nothing is in flight: there are no more than blocks.
    reader_of: HashMap<i32, u64>,
    /// Saves of a block that were in flight when its last was planned: that one may be settled while they wait.
    earlier: Vec<(i32, u64)>,
}

impl Tickets {
    /// Every one of `num_ranks` reports each ticket once.
    pub fn new(num_ranks: u32) -> Self {
        Self {
            num_ranks,
            flights: BTreeMap::new(),
            supersedes: HashMap::new(),
            next_ticket: 0,
            reader_of: HashMap::new(),
            earlier: Vec::new(),
        }
    }

    /// Tickets in flight.
    pub fn len(&self) -> usize {
        self.flights.values().map(|flight| flight.num_open).sum()
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// These saves are planned. False, and they are not, unless their tickets count up from all before them.
    #[must_use]
    pub fn add(&mut self, batch: &Arc<ChunkBatch>) -> bool {
        let Some((&first, &last)) = batch.tickets().first().zip(batch.tickets().last()) else { return true };
        if first < self.next_ticket || !batch.tickets().is_sorted_by(|a, b| a < b) {
            return false;
        }
        if self.is_empty() {
            self.reader_of.clear();
        }
        self.next_ticket = last.saturating_add(1);
        let saves = vec![Save { num_left: self.num_ranks, failed: false }; batch.len()];
        self.flights.insert(first, Flight { num_open: saves.len(), batch: Arc::clone(batch), saves });
        let mut earlier = std::mem::take(&mut self.earlier);
        earlier.retain(|(_, ticket)| self.find(*ticket).is_some());
        for (nth, ticket) in batch.tickets().iter().enumerate() {
            for block in batch.chunk(nth).blocks {
                let before = self.reader_of.insert(*block, *ticket).filter(|before| self.find(*before).is_some());
                earlier.extend(before.map(|before| (*block, before)));
            }
        }
        self.earlier = earlier;
        true
    }

    /// Where a ticket is that is in flight.
    fn find(&self, ticket: u64) -> Option<(u64, usize)> {
        let (first, flight) = self.flights.range(..=ticket).next_back()?;
        let nth = flight.batch.tickets().binary_search(&ticket).ok()?;
        (flight.saves[nth].num_left > 0).then_some((*first, nth))
    }

    fn find_mut(&mut self, ticket: u64) -> Option<&mut Save> {
        let (first, nth) = self.find(ticket)?;
        self.flights.get_mut(&first).map(|flight| &mut flight.saves[nth])
    }

    /// Once `ticket` is committed, `key` is not needed any more.
    pub fn supersede(&mut self, ticket: u64, key: ChunkKey) {
        if self.find(ticket).is_some() {
            self.supersedes.insert(ticket, key);
        }
    }

    /// Nothing that is in flight now may become visible.
    pub fn fail_all(&mut self) {
        self.flights.values_mut().flat_map(|flight| &mut flight.saves).for_each(|save| save.failed = true);
    }

    /// No rank will report these; returns those that were in flight.
    pub fn forget(&mut self, tickets: &[u64]) -> Vec<u64> {
        tickets.iter().copied().filter(|ticket| self.remove(*ticket).is_some()).collect()
    }

    /// No rank will report anything that is in flight; returns it.
    pub fn forget_all(&mut self) -> Vec<u64> {
        let every: Vec<_> = self.flights.values().flat_map(|flight| flight.batch.tickets().iter().copied()).collect();
        self.forget(&every)
    }

    /// Takes in one rank's report. Tickets that are not in flight mean nothing.
    pub fn settle(&mut self, saved: &[u64], failed: &[u64]) -> Settled {
        for ticket in failed {
            if let Some(save) = self.find_mut(*ticket) {
                save.failed = true;
            }
        }
        let mut settled = Settled::default();
        for ticket in saved.iter().chain(failed) {
            let Some(save) = self.find_mut(*ticket) else { continue };
            if save.num_left > 1 {
                save.num_left -= 1;
                continue;
            }
            match self.remove(*ticket) {
                Some((Save { failed: false, .. }, supersedes)) => {
                    settled.committed.push(*ticket);
                    settled.superseded.extend(supersedes);
                }
                _ => settled.aborted.push(*ticket),
            }
        }
        settled
    }

    /// Those of `blocks` that a save in flight reads.
    pub fn read_among(&self, blocks: &[i32]) -> Vec<i32> {
        blocks.iter().copied().filter(|block| self.is_read(*block)).collect()
    }

    /// Every block that a save in flight reads.
    pub fn read_blocks(&self) -> Vec<i32> {
        self.reader_of.keys().copied().filter(|block| self.is_read(*block)).collect()
    }

    fn is_read(&self, block: i32) -> bool {
        let last = self.reader_of.get(&block);
        let mut earlier = self.earlier.iter().filter(|(other, _)| *other == block);
        last.is_some_and(|ticket| self.find(*ticket).is_some())
            || earlier.any(|(_, ticket)| self.find(*ticket).is_some())
    }

    fn remove(&mut self, ticket: u64) -> Option<(Save, Option<ChunkKey>)> {
        let (first, nth) = self.find(ticket)?;
        let flight = self.flights.get_mut(&first)?;
        let save = std::mem::replace(&mut flight.saves[nth], Save { num_left: 0, failed: false });
        flight.num_open -= 1;
        if flight.num_open == 0 {
            self.flights.remove(&first);
        }
        Some((save, if self.supersedes.is_empty() { None } else { self.supersedes.remove(&ticket) }))
    }
}
