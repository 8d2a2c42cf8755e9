//! Disk threads: plain threads that take jobs under the lock and do their I/O outside it.
//!
//! A panic inside the disk tier counts as a failed job. A panic in the books poisons the lock: the threads end and the
//! store misses from then on. Time is only measured here, never decided upon.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Inner;
use super::jobs::{Job, Written};
use super::state::State;
use crate::tier::LocalTier;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::{Error, ErrorKind, Result};

/// Times a write asks for a slot: another thread may take the one that was just freed.
const SLOT_TRIES: u32 = 4;

/// Starts a thread, if there is a disk; `Io` if the system has none left.
pub(super) fn spawn(inner: &Arc<Inner>, nth: u32) -> Result<Option<JoinHandle<()>>> {
    let Some(disk) = &inner.disk else { return Ok(None) };
    let (inner, disk) = (Arc::clone(inner), Arc::clone(disk));
    let thread = std::thread::Builder::new().name(format!("kvloft-disk-{nth}"));
    let thread = thread.spawn(move || while do_next(&inner, &*disk) {});
    thread.map(Some).map_err(|error| Error::io("a disk thread cannot be started", error))
}

/// Waits for threads that were told to stop. One that hangs inside the system is left behind at the timeout.
pub(super) fn join(threads: Vec<JoinHandle<()>>, timeout: Duration) {
    let deadline = Instant::now() + timeout;
    for thread in threads {
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            // A panic was counted where it mattered: as a poisoned lock.
            let _ = thread.join();
        }
    }
}

/// Waits for a job and does it; false when there will be none.
fn do_next(inner: &Inner, disk: &dyn LocalTier) -> bool {
    let Some(job) = wait_for_job(inner, disk) else { return false };
    match job {
        Job::Read { id, slot, key, mut frame } => {
            let (outcome, micros) = timed(|| guarded(|| disk.read(slot, &key, frame.bytes_mut())));
            finish(inner, |state| state.end_read(id, frame, outcome, micros))
        }
        Job::Write { id, meta, frame } => {
            let (outcome, micros) = timed(|| write(inner, disk, &meta, frame.bytes()));
            finish(inner, |state| state.end_write(id, frame, outcome, micros))
        }
        Job::Free(slots) => {
            for slot in slots {
                free(disk, slot);
            }
            finish(inner, State::end_free)
        }
        Job::Clear => {
            // Should this panic, chunks stay on disk that no key leads to; the next open finds them.
            let _ = guarded(|| disk.clear());
            finish(inner, State::end_clear)
        }
    }
}

fn wait_for_job(inner: &Inner, disk: &dyn LocalTier) -> Option<Job> {
    let mut looked = false;
    let mut state = inner.books()?;
    loop {
        if state.disk_books().stopping {
            return None;
        }
        if let Some(job) = state.next_job() {
            return Some(job);
        }
        if looked {
            state = inner.work.wait(state).ok()?;
            looked = false;
        } else {
            // Nothing to do: the time to ask how large the files are, outside the lock.
            drop(state);
            let seen = guarded(|| Ok(disk.stats())).unwrap_or_default();
            state = inner.books()?;
            let books = state.disk_books();
            (books.slots, books.bytes) = (seen.slots, seen.bytes);
            looked = true;
        }
    }
}

/// Enters the outcome of a job; false if the store failed.
fn finish(inner: &Inner, enter: impl FnOnce(&mut State)) -> bool {
    let entered = inner.with_books(|state| {
        enter(state);
        state.end_job();
    });
    inner.idle.notify_all();
    entered.is_some()
}

fn write(inner: &Inner, disk: &dyn LocalTier, meta: &DiskMeta, bytes: &[u8]) -> Written {
    let Some(slot) = find_slot(inner, disk) else { return Written::NoRoom };
    if guarded(|| disk.write(slot, meta, bytes)).is_ok() {
        return Written::In(slot);
    }
    free(disk, slot);
    Written::Failed
}

/// A slot to write to, made free if need be.
fn find_slot(inner: &Inner, disk: &dyn LocalTier) -> Option<SlotId> {
    for _ in 0..SLOT_TRIES {
        if let Some(slot) = guarded(|| Ok(disk.reserve())).ok()? {
            return Some(slot);
        }
        let victim = inner.with_books(State::evict_from_disk)??;
        free(disk, victim);
    }
    None
}

fn free(disk: &dyn LocalTier, slot: SlotId) {
    // A slot that could not be given back is lost until the next open; nothing leads to it.
    let _ = guarded(|| disk.free(slot));
}

/// A panic of the disk tier as an error.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "the disk tier panicked")))
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let start = Instant::now();
    let result = work();
    (result, u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX))
}
