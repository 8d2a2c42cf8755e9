//! Disk threads: plain threads that take jobs under the lock and do their I/O outside it.
//!
//! A panic inside the disk tier counts as a failed job. A panic in the books poisons the lock: the threads end and the
//! store misses from then on.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::evict::ChunkId;
use crate::key::ChunkKey;
use crate::store::disk::jobs::{End, Job, Written};
use crate::store::disk::opener::{Opened, Opening, guarded};
use crate::store::disk::removed_dir::Emptying;
use crate::store::disk::slots::SlotFor;
use crate::store::locked::Locked;
use crate::store::state::State;
use crate::sync::has_ended;
use crate::sync::thread::{self, JoinHandle};
use crate::tier::LocalTier;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::{Error, ErrorKind, Result};

/// Times a write asks for a slot: another thread may take the one that was just freed.
const SLOT_TRIES: u32 = 4;
/// Times a chunk is written: where the file system is full, the second time to the slot of an evicted chunk.
const WRITE_TRIES: u32 = 2;
/// Longest sleep of a thread: the time may bring work (a probe, a tier to open) that nothing announces.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Time until a tier that could not be opened is tried again; each time doubles it.
pub(crate) const FIRST_REOPEN: Duration = Duration::from_secs(1);
const LONGEST_REOPEN: Duration = Duration::from_secs(60);

/// What a thread does next, and with which tier.
enum Work {
    /// The tier is not open.
    Open,
    /// It was removed, and its chunks are dropped.
    Close,
    /// A check that its directory is still there is due.
    Look(u64, Arc<dyn LocalTier>),
    Job(u64, Job, Arc<dyn LocalTier>),
}

/// Starts a thread; `Io` if the system has none left.
pub(crate) fn spawn(inner: &Arc<Locked>, nth: u32) -> Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    let thread = thread::Builder::new().name(format!("kvloft-disk-{nth}"));
    let work = move || while do_next(&inner) {};
    thread.spawn(work).map_err(|error| Error::io("a disk thread cannot be started", error))
}

/// Waits for threads that were told to stop. One that hangs inside the system is left behind at the timeout.
pub(crate) fn join(threads: Vec<JoinHandle<()>>, timeout: Duration) {
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
fn open(inner: &Locked) -> bool {
    let Some(opener) = &inner.opener else { return false };
    let mut wait = FIRST_REOPEN;
    loop {
        let Some(mut state) = inner.lock() else { return false };
        if state.disk.stopping {
            return false;
        }
        if !state.disk.is_closed() {
            return true;
        }
        if !state.must_open() {
            if inner.work.wait_timeout(state, LOOK_AGAIN).is_err() {
                return false;
            }
            continue;
        }
        drop(state);
        let late = inner.late.lock().unwrap_or_else(PoisonError::into_inner).take();
        let tier = late.map_or_else(|| Some(guarded(&***opener)), |opening| wait_for(&opening, inner));
        match tier {
            None => return false,
            Some(Ok((disk, found))) => {
                inner.change_tier(Some(Arc::clone(&disk)));
                let is_wanted = inner.with_state(|state| state.attach(found)).unwrap_or(false);
                if !is_wanted {
                    disk.close();
                }
                return is_wanted;
            }
            Some(Err(error)) => {
                wait = (wait * 2).min(LONGEST_REOPEN);
                inner.with_state(|state| state.postpone(wait, &error.to_string()));
            }
        }
    }
}

/// What comes of a first try that takes long; None where the store ends before.
fn wait_for(opening: &Opening, inner: &Locked) -> Option<Result<Opened>> {
    loop {
        let tier = opening.wait(LOOK_AGAIN);
        if tier.is_some() || inner.lock()?.disk.stopping {
            return tier;
        }
    }
}

/// Waits for something to do and does it; false when there will be nothing.
fn do_next(inner: &Locked) -> bool {
    match wait_for_work(inner) {
        None => false,
        Some(Work::Open) => open(inner),
        Some(Work::Close) => close_removed(inner),
        Some(Work::Look(ticket, disk)) => {
            let removed = guarded(|| Ok(disk.removed())).unwrap_or_default();
            inner.with_state(|state| state.end_check(ticket, removed.as_deref())).is_some()
        }
        Some(Work::Job(ticket, job, disk)) => do_job(inner, &*disk, ticket, job),
    }
}

/// Closes a tier whose directory was removed. The space of its files is free before a new one claims any.
fn close_removed(inner: &Locked) -> bool {
    if let Some(disk) = inner.change_tier(None) {
        let _ = guarded(|| {
            disk.close();
            Ok(())
        });
    }
    inner.with_state(State::reopen).is_some()
}

/// Does a job and enters what came of it; false after a failure.
fn do_job(inner: &Locked, disk: &dyn LocalTier, ticket: u64, job: Job) -> bool {
    let end = match job {
        Job::Read { id, slot, key, mut frame } => {
            let (outcome, num_refused) = read(disk, slot, &key, frame.bytes_mut());
            End::Read { id, frame, outcome, num_refused }
        }
        Job::Write { id, meta, frame } => {
            let outcome = write(inner, disk, id, &meta, frame.bytes());
            End::Write { id, frame, outcome }
        }
        Job::Free(slots) => End::Free(free(disk, slots)),
        Job::Clear(mut slots) => {
            let mut keep_stuck = || slots.retain(|&slot| guarded(|| disk.free(slot)).is_err());
            keep_stuck();
            let is_cleared = guarded(|| disk.clear()).is_ok(); // also where one slot refuses: the others need not stay for it
            keep_stuck(); // the slots that the clear freed are still unused: no other job is under way
            End::Clear(slots, is_cleared)
        }
    };
    let entered = inner.with_state(|state| state.end_job(ticket, end));
    inner.idle.notify_all();
    entered.is_some()
}

fn wait_for_work(inner: &Locked) -> Option<Work> {
    let mut looked = false;
    loop {
        let mut state = inner.lock()?;
        if state.disk.stopping {
            return None;
        }
        if state.disk.is_closed() {
            return Some(Work::Open);
        }
        let emptying = state.empty_removed();
        if emptying == Emptying::Done {
            return Some(Work::Close);
        }
        // A slice a lock; then a thread that waits for it has a turn.
        if emptying == Emptying::Working || state.recover_some() || state.is_removing() {
            state.remove_slice();
            drop(state);
            inner.idle.notify_all();
            thread::yield_now();
            continue;
        }
        let disk = inner.tier()?;
        if disk.is_removable()
            && let Some(ticket) = state.begin_check()
        {
            return Some(Work::Look(ticket, disk));
        }
        if let Some((ticket, job)) = state.next_job() {
            return Some(Work::Job(ticket, job, disk));
        }
        if looked {
            (state, _) = inner.work.wait_timeout(state, LOOK_AGAIN).ok()?;
            looked = state.disk.has_jobs();
        } else {
            // Nothing to do: the time to ask how large the files are, outside the lock.
            drop(state);
            let seen = guarded(|| Ok(disk.stats())).unwrap_or_default();
            let books = &mut inner.lock()?.stats;
            (books.disk_slots, books.disk_bytes) = (seen.slots, seen.bytes);
            looked = true;
        }
    }
}

/// Reads, and once more where the system refused; and how often it did.
fn read(disk: &dyn LocalTier, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> (Result<()>, u64) {
    let mut num_refused = 0;
    loop {
        let outcome = guarded(|| disk.read(slot, key, into));
        num_refused += u64::from(outcome.as_ref().is_err_and(|error| error.kind() != ErrorKind::Corrupt));
        if num_refused != 1 || outcome.is_ok() {
            return (outcome, num_refused);
        }
    }
}

/// Frees slots, the last first, up to one that cannot be; returns the rest.
fn free(disk: &dyn LocalTier, mut slots: Vec<SlotId>) -> Vec<SlotId> {
    while slots.last().is_some_and(|&slot| guarded(|| disk.free(slot)).is_ok()) {
        slots.pop();
    }
    slots
}

fn write(inner: &Locked, disk: &dyn LocalTier, id: ChunkId, meta: &DiskMeta, bytes: &[u8]) -> Written {
    match keep_quota(inner, disk, id) {
        Ok(true) => {}
        Ok(false) => return Written::NoQuota,
        Err(_) => return Written::Failed(None),
    }
    for _ in 0..WRITE_TRIES {
        let slot = match find_slot(inner, disk) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Written::NoRoom,
            Err(_) => return Written::Failed(None),
        };
        let Err(error) = guarded(|| disk.write(slot, meta, bytes)) else { return Written::In(slot) };
        if guarded(|| disk.free(slot)).is_err() {
            return Written::Failed(Some(slot));
        }
        if !error.is_no_space() {
            return Written::Failed(None);
        }
    }
    Written::NoRoom
}

/// Makes a chunk that is to be written fit its tenant's quota; false if nothing of its tenant's may go. Err if the tier refused to
/// free a slot: its chunk is there as before.
fn keep_quota(inner: &Locked, disk: &dyn LocalTier, id: ChunkId) -> Result<bool> {
    for _ in 0..SLOT_TRIES {
        match inner.with_state(|state| state.slot_for(id)) {
            Some(SlotFor::Fits) => return Ok(true),
            Some(SlotFor::After(victim, slot)) => {
                let freed = guarded(|| disk.free(slot));
                inner.with_state(|state| state.end_quota_eviction(victim, freed.is_ok()));
                freed?;
            }
            Some(SlotFor::None) | None => return Ok(false),
        }
    }
    Ok(false)
}

/// A slot to write to, made free if need be. Err if the tier refused to free one: its chunk is there as before.
fn find_slot(inner: &Locked, disk: &dyn LocalTier) -> Result<Option<SlotId>> {
    for _ in 0..SLOT_TRIES {
        if let Some(slot) = guarded(|| Ok(disk.reserve()))? {
            return Ok(Some(slot));
        }
        let Some((victim, slot)) = inner.with_state(State::begin_disk_eviction).flatten() else { return Ok(None) };
        let freed = guarded(|| disk.free(slot));
        inner.with_state(|state| state.end_disk_eviction(victim, freed.is_ok()));
        freed?;
    }
    Ok(None)
}
