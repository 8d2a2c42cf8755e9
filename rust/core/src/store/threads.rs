//! Disk threads: plain threads that take jobs under the lock and do their I/O outside it.
//!
//! A panic inside the disk tier counts as a failed job. A panic in the books poisons the lock: the threads end and the
//! store misses from then on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::inner::Inner;
use super::jobs::{Job, ReadEnd, Written};
use super::state::State;
use crate::sync::has_ended;
use crate::sync::thread::{self, JoinHandle};
use crate::tier::LocalTier;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::{Error, ErrorKind, Result};

/// Times a write asks for a slot: another thread may take the one that was just freed.
const SLOT_TRIES: u32 = 4;
/// Longest sleep of a thread: the time may bring work (a probe, a tier to open) that nothing announces.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Time until a tier that could not be opened is tried again; each time doubles it.
const FIRST_REOPEN: Duration = Duration::from_secs(1);
const LONGEST_REOPEN: Duration = Duration::from_secs(60);

/// Starts a thread; `Io` if the system has none left.
pub(super) fn spawn(inner: &Arc<Inner>, nth: u32) -> Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    let thread = thread::Builder::new().name(format!("kvloft-disk-{nth}"));
    let work = move || while inner.disk.get().map_or_else(|| open(&inner), |disk| do_next(&inner, &**disk)) {};
    thread.spawn(work).map_err(|error| Error::io("a disk thread cannot be started", error))
}

/// Waits for threads that were told to stop. One that hangs inside the system is left behind at the timeout.
pub(super) fn join(threads: Vec<JoinHandle<()>>, timeout: Duration) {
    let deadline = Instant::now() + timeout;
    for thread in threads {
        while !has_ended(&thread) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if has_ended(&thread) {
            // A panic was counted where it mattered: as a poisoned lock.
            let _ = thread.join();
        }
    }
}

/// Waits until the tier may be opened, and tries; false when the store ends.
fn open(inner: &Inner) -> bool {
    let Some(opener) = &inner.opener else { return false };
    let mut wait = FIRST_REOPEN;
    loop {
        let Some(mut state) = inner.books() else { return false };
        if state.disk_books().stopping {
            return false;
        }
        if inner.disk.get().is_some() {
            return true;
        }
        if !state.must_open() {
            if inner.work.wait_timeout(state, LOOK_AGAIN).is_err() {
                return false;
            }
            continue;
        }
        drop(state);
        match guarded(opener) {
            Ok((disk, found)) => {
                let disk = inner.disk.get_or_init(|| disk);
                let is_wanted = inner.with_books(|state| state.attach(found));
                if is_wanted != Some(true) {
                    disk.close();
                }
                return is_wanted == Some(true);
            }
            Err(error) => {
                wait = (wait * 2).min(LONGEST_REOPEN);
                inner.with_books(|state| state.postpone(wait, &error.to_string()));
            }
        }
    }
}

/// Waits for a job and does it; false when there will be none.
fn do_next(inner: &Inner, disk: &dyn LocalTier) -> bool {
    let Some((ticket, job)) = wait_for_job(inner, disk) else { return false };
    match job {
        Job::Read { id, slot, key, mut frame } => {
            let (end, micros) = timed(|| read(disk, slot, &key, frame.bytes_mut()));
            let is_well = end.outcome.as_ref().map_or_else(|error| error.kind() == ErrorKind::Corrupt, |()| true);
            finish(inner, ticket, Some(is_well), |state| state.end_read(id, frame, &end, micros))
        }
        Job::Write { id, meta, frame, spare } => {
            let (outcome, micros) = timed(|| write(inner, disk, &meta, frame.bytes(), spare));
            let is_well = match outcome {
                Written::In(_) => Some(true),
                Written::NoRoom => None,
                Written::Failed(_) => Some(false),
            };
            finish(inner, ticket, is_well, |state| state.end_write(id, frame, outcome, micros))
        }
        Job::Free(mut slots) => {
            while let Some(&slot) = slots.last()
                && guarded(|| disk.free(slot)).is_ok()
            {
                slots.pop();
            }
            finish(inner, ticket, Some(slots.is_empty()), |state| state.end_free(slots))
        }
        Job::Clear => {
            let cleared = guarded(|| disk.clear()).is_ok();
            finish(inner, ticket, Some(cleared), |state| state.end_clear(cleared))
        }
    }
}

fn wait_for_job(inner: &Inner, disk: &dyn LocalTier) -> Option<(u64, Job)> {
    let mut looked = false;
    loop {
        let mut state = inner.books()?;
        if state.disk_books().stopping {
            return None;
        }
        // A slice a lock; then whoever waits for it has a turn.
        if state.recover_some(inner.blocks_per_chunk) || state.is_forgetting() {
            state.forget_slice();
            drop(state);
            inner.idle.notify_all();
            thread::yield_now();
            continue;
        }
        if let Some(job) = state.next_job() {
            return Some(job);
        }
        if looked {
            (state, _) = inner.work.wait_timeout(state, LOOK_AGAIN).ok()?;
            looked = state.disk_books().has_jobs();
        } else {
            // Nothing to do: the time to ask how large the files are, outside the lock.
            drop(state);
            let seen = guarded(|| Ok(disk.stats())).unwrap_or_default();
            let mut state = inner.books()?;
            let books = state.disk_books();
            (books.slots, books.bytes) = (seen.slots, seen.bytes);
            looked = true;
        }
    }
}

/// Enters the outcome of a job; false if the store failed.
fn finish(inner: &Inner, ticket: u64, is_well: Option<bool>, enter: impl FnOnce(&mut State)) -> bool {
    let entered = inner.with_books(|state| {
        enter(state);
        state.end_job(ticket, is_well);
    });
    inner.idle.notify_all();
    entered.is_some()
}

/// Reads, and once more where the system refused.
fn read(disk: &dyn LocalTier, slot: SlotId, key: &crate::ChunkKey, into: &mut [u8]) -> ReadEnd {
    let mut num_refused = 0;
    loop {
        let outcome = guarded(|| disk.read(slot, key, into));
        num_refused += u64::from(outcome.as_ref().is_err_and(|error| error.kind() != ErrorKind::Corrupt));
        if num_refused != 1 || outcome.is_ok() {
            return ReadEnd { outcome, num_refused };
        }
    }
}

fn write(inner: &Inner, disk: &dyn LocalTier, meta: &DiskMeta, bytes: &[u8], spare: Option<SlotId>) -> Written {
    let slot = match spare {
        Some(slot) => slot,
        None => match find_slot(inner, disk) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Written::NoRoom,
            Err(()) => return Written::Failed(None),
        },
    };
    if guarded(|| disk.write(slot, meta, bytes)).is_ok() {
        return Written::In(slot);
    }
    // Where that fails too, the next write has it.
    let freed = guarded(|| disk.free(slot)).is_ok();
    Written::Failed((!freed).then_some(slot))
}

/// A slot to write to, made free if need be. Err if the tier refused to free one: its chunk is there as before.
fn find_slot(inner: &Inner, disk: &dyn LocalTier) -> Result<Option<SlotId>, ()> {
    for _ in 0..SLOT_TRIES {
        if let Some(slot) = guarded(|| Ok(disk.reserve())).map_err(drop)? {
            return Ok(Some(slot));
        }
        let Some((victim, slot)) = inner.with_books(State::begin_eviction).flatten() else { return Ok(None) };
        let freed = guarded(|| disk.free(slot)).is_ok();
        inner.with_books(|state| state.end_eviction(victim, freed));
        if !freed {
            return Err(());
        }
    }
    Ok(None)
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
