//! Checks that the store's derived data matches its entries. Tests run this slow check after each
//! step.

use std::collections::HashSet;

use super::super::Store;
use super::super::state::State;
use crate::evict::ChunkId;
use crate::index::{DiskState, Entry, HostState};

macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err(format!($($message)+));
        }
    };
}

impl Store {
    /// Recomputes all derived data. Returns the first difference from the stored data as an error.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        check(&*self.inner.lock().ok_or_else(|| "the store failed".to_owned())?)
    }

    /// Runs one round of the sweeper.
    #[doc(hidden)]
    pub fn sweep(&self) {
        self.inner.sweep();
    }
}

pub(super) fn check(state: &State) -> Result<(), String> {
    let mut frames = HashSet::new();
    let (mut visible, mut reserved, mut attached) = (0, 0, 0);
    let roots: HashSet<_> = state.index.roots().collect();
    let is_old = |id| state.index.ancestry(id).last().is_none_or(|root| !roots.contains(&root));
    for (id, entry) in state.index.iter() {
        check_links(state, id, entry)?;
        if entry.detached {
            check_detached(entry)?;
        } else {
            let is_mapped = !entry.removing && !is_old(id);
            check_attached(state, id, entry, is_mapped)?;
            attached += usize::from(is_mapped);
        }
        if let Some(frame) = entry.host.frame() {
            ensure!(frames.insert(frame), "I4: {frame:?} has two owners");
            *(if entry.host.is_visible() { &mut visible } else { &mut reserved }) += 1;
        }
    }
    ensure!(
        state.tenants.check(state.index.iter().map(|(_, entry)| (entry.tenant, entry)), |class| {
            state.host.pages(class)
        }),
        "{:?}",
        state.tenants
    );
    let gauges = state.stats();
    ensure!(check_expiry(state), "{:?}", state.expiries);
    ensure!(
        attached == state.index.len(),
        "{attached} attached entries, but {} keys",
        state.index.len()
    );
    ensure!(
        (visible, reserved) == (gauges.frames_visible, gauges.frames_reserved),
        "gauges {gauges:?}, counted {visible} visible and {reserved} reserved"
    );
    ensure!(visible + reserved + gauges.frames_free == gauges.frames_total, "I8: {gauges:?}");
    check_disk(state)
}

fn check_expiry(state: &State) -> bool {
    let is_noted = |id: ChunkId, entry: &Entry| state.expiries.0.contains(&(entry.expires_s, id));
    let is_right = |(id, entry): (ChunkId, &Entry)| {
        let is_old = entry.removing || entry.detached;
        is_noted(id, entry) == state.expires_alone(entry) || is_old && !is_noted(id, entry)
    };
    state.index.iter().all(is_right)
        && state.expiries.0.iter().all(|(_, id)| state.index.at(id.0).is_some())
}

fn check_disk(state: &State) -> Result<(), String> {
    let disk = &state.disk;
    let count = |holds: &dyn Fn(&Entry) -> bool| {
        state.index.iter().filter(|(_, entry)| holds(entry)).count() as u64
    };
    let counts = [
        ("chunks on disk", state.stats.disk_used, count(&|entry| entry.disk.slot().is_some())),
        (
            "detached chunks on disk",
            disk.num_detached_slots,
            count(&|entry| entry.disk.slot().is_some() && entry.detached),
        ),
        ("chunks to write", disk.num_unwritten, count(&|entry| entry.disk.is_unwritten())),
        ("chunks to read", disk.num_queued_reads, count(&Entry::is_to_read)),
        (
            "writes",
            disk.in_flight.iter().filter(|job| job.writes_chunk).count() as u64,
            count(&|entry| entry.disk == DiskState::Writing),
        ),
    ];
    for (what, said, counted) in counts {
        ensure!(said == counted, "{what}: {said}, counted {counted}");
    }
    let mut slots = HashSet::new();
    let here = state.index.iter().filter_map(|(_, entry)| entry.disk.slot());
    for slot in here.chain(disk.to_free.iter().chain(&disk.unfreed).copied()) {
        ensure!(slots.insert(slot), "{slot:?} has two owners");
    }
    Ok(())
}

fn check_links(state: &State, id: ChunkId, entry: &Entry) -> Result<(), String> {
    let children =
        || state.index.iter().map(|(_, child)| child).filter(|child| child.parent == Some(id));
    let host_children = children().filter(|child| !child.host.is_absent()).count();
    ensure!(
        entry.host_children as usize == host_children,
        "host_children of {entry:?} should be {host_children}"
    );
    let disk_children = children().filter(|child| child.disk.takes_slot()).count();
    ensure!(
        entry.disk_children as usize == disk_children,
        "disk_children of {entry:?} should be {disk_children}"
    );
    ensure!(
        entry.has_children() == children().next().is_some(),
        "the children of {entry:?} are not linked correctly"
    );
    Ok(())
}

fn check_detached(entry: &Entry) -> Result<(), String> {
    ensure!(
        entry.host_evictable.is_none() && entry.disk_evictable.is_none(),
        "a policy has a detached chunk: {entry:?}"
    );
    let used = entry.holds > 0
        || entry.has_children()
        || entry.host.is_filling()
        || entry.disk.takes_slot();
    ensure!(used, "an unused detached chunk was not freed: {entry:?}");
    ensure!(!entry.disk.is_waiting(), "a detached chunk waits to be written: {entry:?}");
    Ok(())
}

fn check_attached(
    state: &State,
    id: ChunkId,
    entry: &Entry,
    is_mapped: bool,
) -> Result<(), String> {
    ensure!(
        (state.index.get(&entry.key) == Some(id)) == is_mapped,
        "the key of {entry:?} leads to a different entry"
    );
    ensure!(is_mapped || state.is_removing(), "{entry:?} would never be removed");
    let may_go = entry.host.is_complete() && entry.host_children == 0 && entry.holds == 0;
    let known = entry.host.frame().map(|_| may_go);
    ensure!(entry.host_evictable == known, "the host policy was not notified about {entry:?}");
    let may_go = entry.disk.is_stored() && entry.disk_children == 0 && !entry.host.awaits_read();
    ensure!(
        entry.disk_evictable == entry.disk.slot().map(|_| may_go),
        "the disk policy was not notified about {entry:?}"
    );
    ensure!(!entry.host.is_absent() || entry.disk.takes_slot(), "{entry:?} is in no tier");
    let failed = matches!(entry.host, HostState::Failed(_));
    ensure!(
        !failed || entry.host_children > 0,
        "a failed chunk without children was not removed: {entry:?}"
    );
    ensure!(
        !entry.is_to_read() || entry.holds > 0 || entry.host_children > 0,
        "a read is queued without a lease: {entry:?}"
    );
    ensure!(
        !matches!(entry.host, HostState::Filled(_)) || entry.parent.is_some(),
        "{entry:?} is still waiting"
    );
    if let Some(parent) = entry.parent.map(|parent| &state.index[parent]) {
        ensure!(!parent.detached, "{entry:?} outlives its parent");
        ensure!(
            entry.host.is_absent() || !parent.host.is_absent(),
            "host is not monotone at {entry:?}"
        );
        let frames_fit = entry.host.frame().is_none() || parent.host.frame().is_some();
        ensure!(frames_fit, "frames are not monotone at {entry:?}");
        ensure!(
            !entry.host.is_visible() || parent.host.is_visible(),
            "visibility is not monotone at {entry:?}"
        );
        ensure!(
            !entry.disk.takes_slot() || parent.disk.is_stored(),
            "the disk is not monotone at {entry:?}"
        );
        ensure!(
            (parent.key, parent.depth + 1) == (entry.parent_key, entry.depth),
            "wrong position of {entry:?}"
        );
        ensure!(!entry.proven || parent.proven, "{entry:?} is proven, but its parent is not");
    }
    Ok(())
}
