//! Counts lookups, loads and saves of one engine, or of every engine that a namespace ever had.

use std::sync::atomic::{AtomicU64, Ordering};

use kvloft_core::store::Lookup;

use crate::protocol::admin::Stats;

/// Names of [`Counters`]'s counters, in order.
const NAMES: [&str; 7] = [
    "lookups",
    "lookup_chunks",
    "lookup_chunks_found",
    "load_chunks",
    "save_chunks",
    "late_calls",
    "late_chunks",
];

/// Lookups, chunks looked up, chunks found in any tier, chunks loaded, chunks saved; and, counted
/// by the engine, calls that got no answer in time and chunks not saved because of that.
#[derive(Debug, Default)]
pub(crate) struct Counters([AtomicU64; 7]);

/// Counts to add for one answer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Increment {
    /// Chunks looked up and chunks found.
    Lookup(u64, u64),
    Loaded(u64),
    Saved(u64),
    /// Calls without an answer in time, and chunks not saved because of them.
    Late(u64, u64),
}

impl Increment {
    /// Counts a lookup of prefixes of `asked` units each.
    pub(crate) fn lookup(asked: impl Iterator<Item = u32>, found: &[Lookup]) -> Self {
        Self::Lookup(
            asked.map(u64::from).sum(),
            found.iter().map(|found| u64::from(found.stored_units)).sum(),
        )
    }
}

impl Counters {
    pub(crate) fn add(&self, increment: Increment) {
        let [lookups, asked, found, loaded, saved, late_calls, late_chunks] = &self.0;
        let add = |to: &AtomicU64, number| _ = to.fetch_add(number, Ordering::Relaxed);
        match increment {
            Increment::Lookup(num_asked, num_found) => {
                add(lookups, 1);
                add(asked, num_asked);
                add(found, num_found);
            }
            Increment::Loaded(num) => add(loaded, num),
            Increment::Saved(num) => add(saved, num),
            Increment::Late(num_calls, num_chunks) => {
                add(late_calls, num_calls);
                add(late_chunks, num_chunks);
            }
        }
    }

    /// Returns the number of chunks saved.
    pub(crate) fn num_saved(&self) -> u64 {
        self.0[4].load(Ordering::Relaxed)
    }

    pub(crate) fn stats(&self) -> Stats {
        NAMES
            .iter()
            .zip(&self.0)
            .map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed)))
            .collect()
    }
}
