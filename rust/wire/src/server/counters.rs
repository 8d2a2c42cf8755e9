//! What engines asked for and got, counted where the answer is given: of each engine, and of all that ever were.

use std::sync::atomic::{AtomicU64, Ordering};

use kvloft_core::store::Lookup;

/// Names of [`Counts`], in order.
const NAMES: [&str; 7] =
    ["lookups", "lookup_chunks", "lookup_chunks_found", "load_chunks", "save_chunks", "late_calls", "late_chunks"];

/// Counters since an engine said hello: lookups, the chunks asked for in them, those found in any tier, the chunks whose frames
/// were asked for to be loaded, and those that became visible; and, by the engine's own count, calls that the server answered too late,
/// and chunks that were not saved for that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts(pub [u64; 7]);

impl Counts {
    /// Each with its name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        NAMES.into_iter().zip(self.0)
    }
}

/// [`Counts`] that grow.
#[derive(Debug, Default)]
pub(crate) struct Tally([AtomicU64; 7]);

/// What one answer adds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answered {
    /// Chunks asked for, and found.
    Lookup(u64, u64),
    Loaded(u64),
    Saved(u64),
    /// Calls and chunks.
    Late(u64, u64),
}

impl Answered {
    /// What was found of prefixes of so many blocks, in chunks that are begun.
    pub(crate) fn lookup(asked: impl Iterator<Item = u32>, found: &[Lookup], per_chunk: u32) -> Self {
        let chunks = |blocks: u32| u64::from(blocks.div_ceil(per_chunk));
        Self::Lookup(asked.map(chunks).sum(), found.iter().map(|found| chunks(found.stored_blocks)).sum())
    }
}

impl Tally {
    pub(crate) fn add(&self, answered: Answered) {
        let [lookups, asked, found, loaded, saved, late_calls, late_chunks] = &self.0;
        let add = |to: &AtomicU64, number| _ = to.fetch_add(number, Ordering::Relaxed);
        match answered {
            Answered::Lookup(num_asked, num_found) => {
                add(lookups, 1);
                add(asked, num_asked);
                add(found, num_found);
            }
            Answered::Loaded(num) => add(loaded, num),
            Answered::Saved(num) => add(saved, num),
            Answered::Late(num_calls, num_chunks) => {
                add(late_calls, num_calls);
                add(late_chunks, num_chunks);
            }
        }
    }

    /// Chunks that became visible.
    pub(crate) fn num_saved(&self) -> u64 {
        self.counts().0[4]
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts(self.0.each_ref().map(|number| number.load(Ordering::Relaxed)))
    }
}
