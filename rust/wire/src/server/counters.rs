//! Counts lookups, loads and saves of one engine, or of every engine that a namespace ever had.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::admin::Stats;

/// One of the counters. The engine counts the last two.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Count {
    Lookups,
    LookupChunks,
    /// In any tier.
    LookupChunksFound,
    LoadChunks,
    SaveChunks,
    /// Calls without an answer in time.
    LateCalls,
    /// Chunks not saved because of them.
    LateChunks,
}

/// Names in the status, in the order of [`Count`].
const NAMES: [&str; 7] = [
    "lookups",
    "lookup_chunks",
    "lookup_chunks_found",
    "load_chunks",
    "save_chunks",
    "late_calls",
    "late_chunks",
];

#[derive(Debug, Default)]
pub(crate) struct Counters([AtomicU64; NAMES.len()]);

impl Counters {
    pub(crate) fn add(&self, count: Count, num: u64) {
        self.0[count as usize].fetch_add(num, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, count: Count) -> u64 {
        self.0[count as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn stats(&self) -> Stats {
        let value = |number: &AtomicU64| number.load(Ordering::Relaxed);
        NAMES.iter().zip(&self.0).map(|(name, number)| ((*name).into(), value(number))).collect()
    }
}
