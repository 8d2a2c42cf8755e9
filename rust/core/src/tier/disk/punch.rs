//! Moves space between size classes: punches free slots, which frees their blocks, and allocates
//! blocks for punched slots.
//!
//! Slots are punched and refilled only by the thread that grows the files (see `growth`), so these
//! operations never run concurrently. Only free slots with an empty record are punched (I3).

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::tier::DiskTier;
use super::types::SlotId;
use crate::io::SizeClass;

/// Delay before retrying a failed punch.
const RETRY_AFTER: Duration = Duration::from_secs(2);

impl DiskTier {
    /// Punches holes in free slots of other classes to free at least `bytes` bytes. Returns false
    /// if punching fails, or if there are too few free slots, in which case no slot is punched.
    ///
    /// If `is_full` is set, punches only slots known to have blocks.
    pub(super) fn punch_spare(&self, class: SizeClass, bytes: u64, is_full: bool) -> bool {
        let is_recent = |at: Instant| at.elapsed() < RETRY_AFTER;
        if self.growth().punch_refused_at.is_some_and(is_recent) {
            return false;
        }
        let mut given = 0;
        for (other, slots) in self.take_spare(class, bytes, is_full) {
            for run in runs(&slots) {
                given += self.punch(other, &run);
            }
            self.cut(other);
        }
        given >= bytes
    }

    /// Takes free slots that total at least `bytes` bytes from other classes, or none if there are
    /// too few.
    fn take_spare(
        &self,
        class: SizeClass,
        bytes: u64,
        is_full: bool,
    ) -> Vec<(SizeClass, Vec<u32>)> {
        let mut state = self.state();
        let others = self.files.iter().filter(|files| files.class != class);
        let (mut plan, mut missing) = (Vec::new(), bytes);
        for files in others {
            let (other, frame_bytes) = (files.class, files.frame_bytes);
            let spare = state.of(other).map_or(0, |slots| slots.num_spare(!is_full));
            let most = missing.div_ceil(frame_bytes).min(spare.into());
            missing = missing.saturating_sub(most * frame_bytes);
            plan.push((other, u32::try_from(most).unwrap_or(u32::MAX)));
        }
        if missing > 0 {
            return Vec::new();
        }
        let mut take = |(other, most): (SizeClass, u32)| {
            Some((other, state.of(other)?.take_for_punch(most, !is_full)))
        };
        plan.into_iter().filter_map(&mut take).collect()
    }

    /// Punches slots taken by `take_spare` and returns their size in bytes. If punching fails,
    /// marks the slots as free again and returns 0.
    fn punch(&self, class: SizeClass, run: &Range<u32>) -> u64 {
        let Ok(files) = self.files_of(class) else { return 0 };
        match files.punch(run) {
            Ok(()) => {
                self.growth().is_punch_refused = false;
                self.state().with(class, |slots| slots.punched(run.clone()));
                u64::from(run.end - run.start) * files.frame_bytes
            }
            Err(error) => {
                self.state().with(class, |slots| {
                    run.clone().for_each(|slot| slots.left(SlotId::new(class, slot)));
                });
                self.note_refused_punch(&error);
                0
            }
        }
    }

    fn note_refused_punch(&self, error: &io::Error) {
        let mut growth = self.growth();
        growth.punch_refused_at = Some(Instant::now());
        let is_news = !std::mem::replace(&mut growth.is_punch_refused, true);
        drop(growth);
        let what = "reuse evicted chunks' space for chunks of a different size";
        self.count_refusal(is_news.then(|| format!("{what}: {error}")));
    }

    /// Truncates the files to remove the punched slots at the end.
    fn cut(&self, class: SizeClass) {
        let mut state = self.state();
        let (Ok(files), Some(slots)) = (self.files_of(class), state.of(class)) else { return };
        let (len, end) = (slots.len(), slots.end());
        drop(state);
        if end < len && files.set_slots(end).is_ok() {
            self.state().with(class, |slots| slots.cut(end));
        }
    }

    /// Allocates blocks for up to `num` punched slots, as long as the file system has space.
    pub(super) fn refill(&self, class: SizeClass, num: u32) {
        let punched = self.state().of(class).map_or_else(Vec::new, |slots| {
            slots.punched.iter().copied().take(num as usize).collect()
        });
        let Ok(files) = self.files_of(class) else { return };
        for run in runs(&punched) {
            let mut part = run.clone();
            while !part.is_empty() {
                match files.refill(&part) {
                    Ok(have_blocks) => {
                        self.growth().is_refused = false;
                        self.state().with(class, |slots| slots.refill(part.clone(), have_blocks));
                        break;
                    }
                    Err(error) => {
                        let _ = files.punch(&part); // some of the slots may have blocks
                        self.note_refusal(part.end - part.start, &error);
                        part.end = part.start + (part.end - part.start) / 2;
                    }
                }
            }
            if part.end < run.end {
                return self.skip_growth(true);
            }
        }
    }
}

/// Splits ascending numbers into ranges of consecutive numbers.
pub(super) fn runs(slots: &[u32]) -> impl Iterator<Item = Range<u32>> {
    slots.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1)
}
