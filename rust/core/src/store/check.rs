//! The invariants, counted again from the entries: what tests ask for after every step. Slow; nothing else uses it.

use std::collections::HashSet;

use super::state::State;
use crate::evict::ChunkId;
use crate::index::{Dirty, DiskState, Entry, HostState};

macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err(format!($($message)+));
        }
    };
}

pub(super) fn check(state: &State) -> Result<(), String> {
    let mut frames = HashSet::new();
    let (mut visible, mut reserved, mut attached) = (0, 0, 0);
    for (id, entry) in state.index.iter() {
        check_entry(state, id, entry)?;
        attached += usize::from(!entry.detached);
        if let Some(frame) = entry.host.frame() {
            ensure!(frames.insert(frame), "I4: {frame:?} is held twice");
            *(if entry.is_visible() { &mut visible } else { &mut reserved }) += 1;
        }
    }
    let gauges = state.gauges();
    ensure!(attached == state.index.len(), "every attached entry has a key: {attached} {}", state.index.len());
    ensure!(
        (visible, reserved) == (gauges.frames_visible, gauges.frames_reserved),
        "gauges {gauges:?}, counted {visible} visible and {reserved} reserved"
    );
    if let Some(disk) = &state.disk {
        let used = state.index.iter().filter(|(_, entry)| entry.is_on_disk()).count() as u64;
        ensure!(used == disk.used, "{} chunks on disk, counted {used}", disk.used);
        let doomed = state.index.iter().filter(|(_, entry)| entry.is_on_disk() && entry.detached).count() as u64;
        ensure!(doomed == disk.num_doomed, "{} forgotten chunks on disk, counted {doomed}", disk.num_doomed);
        let dirty = state.index.iter().filter(|(_, entry)| entry.dirty != Dirty::Clean).count() as u64;
        ensure!(dirty == disk.num_dirty, "{} chunks to write, counted {dirty}", disk.num_dirty);
    }
    ensure!(visible + reserved + gauges.frames_free == gauges.frames_total, "I8: {gauges:?}");
    Ok(())
}

fn check_entry(state: &State, id: ChunkId, entry: &Entry) -> Result<(), String> {
    let children: Vec<&Entry> = state.index.children(id).map(|child| &state.index[child]).collect();
    let host_children = children.iter().filter(|child| child.host != HostState::Absent).count();
    ensure!(entry.host_children as usize == host_children, "host_children of {entry:?}: counted {host_children}");
    let disk_children = children.iter().filter(|child| child.disk != DiskState::Absent).count();
    ensure!(entry.disk_children as usize == disk_children, "disk_children of {entry:?}: counted {disk_children}");
    for child in &children {
        ensure!(child.parent == Some(id), "links of {entry:?} and {child:?}");
    }
    if entry.detached {
        ensure!(
            entry.host_evictable.is_none() && entry.disk_evictable.is_none(),
            "a policy knows a forgotten chunk: {entry:?}"
        );
        let used = entry.holds > 0
            || !children.is_empty()
            || entry.reading
            || matches!(entry.host, HostState::Reserved(_) | HostState::Loading(_));
        ensure!(used, "a forgotten chunk that nobody uses was not freed: {entry:?}");
        return Ok(());
    }
    ensure!(state.index.get(&entry.key) == Some(id), "the key of {entry:?} leads elsewhere");
    ensure!(entry.host != HostState::Failed || state.closed, "a failed chunk can be found: {entry:?}");
    let may_go = entry.is_visible() && entry.host_children == 0 && entry.holds == 0;
    let known = (entry.host != HostState::Absent).then_some(may_go);
    ensure!(entry.host_evictable == known, "the host policy was not told about {entry:?}");
    let may_go = entry.disk_children == 0 && !entry.reading;
    ensure!(
        entry.disk_evictable == entry.is_on_disk().then_some(may_go),
        "the disk policy was not told about {entry:?}"
    );
    ensure!(entry.host != HostState::Absent || entry.disk != DiskState::Absent, "{entry:?} is nowhere");
    if let Some(parent) = entry.parent.map(|parent| &state.index[parent]) {
        ensure!(!parent.detached, "{entry:?} outlives its parent");
        ensure!(
            entry.host == HostState::Absent || parent.host != HostState::Absent,
            "host is not monotone at {entry:?}"
        );
        ensure!(!entry.is_visible() || parent.is_visible(), "visibility is not monotone at {entry:?}");
        ensure!(entry.disk == DiskState::Absent || parent.is_on_disk(), "the disk is not monotone at {entry:?}");
        ensure!((parent.key, parent.depth + 1) == (entry.parent_key, entry.depth), "place of {entry:?}");
    }
    Ok(())
}
