//! Compares the state tables in the documentation with the transition functions.

use std::fmt::Debug;

use crate::evict::Removal;
use crate::index::{DiskEvent, DiskState, HostEvent, HostState};
use crate::io::FrameId;
use crate::tier::disk::SlotId;

/// Returns an enum variant's name without its fields.
fn name(variant: impl Debug) -> String {
    format!("{variant:?}").split(['(', ' ']).next().unwrap_or_default().to_owned()
}

/// Checks that the first table in `source` has one row per state and one column per event, and that
/// each cell holds the state after the event, or `-`.
fn check_table<S: Copy + Debug, E: Copy + Debug>(
    source: &str,
    states: &[S],
    events: &[E],
    after: impl Fn(S, E) -> Option<S>,
) {
    let cells = |line: &str| {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    };
    let mut rows = source
        .lines()
        .filter_map(|line| line.strip_prefix("//! "))
        .filter(|line| line.starts_with('|'));
    let header = cells(rows.next().expect("a table"));
    assert_eq!(header[1..], events.iter().map(name).collect::<Vec<_>>());
    let written: Vec<_> = rows.skip(1).map(cells).collect();
    let row = |state: S| {
        let cell = |event: &E| after(state, *event).map_or_else(|| "-".to_owned(), name);
        std::iter::once(name(state)).chain(events.iter().map(cell)).collect::<Vec<_>>()
    };
    assert_eq!(written, states.iter().map(|state| row(*state)).collect::<Vec<_>>());
}

#[test]
fn the_table_of_disk_states_is_what_the_code_does() {
    use DiskEvent::{
        Block, Cancel, Defer, Evict, Found, Keep, Leave, Unblock, Want, Write, Written,
    };
    use DiskState::{Absent, Blocked, Evicting, Queued, Stored, Writing};
    let slot = SlotId(7);
    let states = [Absent, Queued, Blocked, Writing, Stored(slot), Evicting(slot)];
    let leave = Leave(Removal::Dropped);
    let events = [
        Want,
        Block,
        Unblock,
        Cancel,
        Write,
        Defer,
        Written(slot),
        Found(slot),
        Evict,
        Keep,
        leave,
    ];
    check_table(include_str!("../disk_state.rs"), &states, &events, DiskState::after);
}

#[test]
fn the_table_of_host_states_is_what_the_code_does() {
    use HostEvent::{Fail, Fill, Leave, Read, Reserve, Show, Want};
    use HostState::{Absent, Failed, Filled, Queued, Reading, Saving, Visible};
    let frame = FrameId(7);
    let states = [
        Absent,
        Queued,
        Reading(frame),
        Saving(frame),
        Filled(frame),
        Failed(frame),
        Visible(frame),
    ];
    let events = [Want, Read(frame), Reserve(frame), Fill, Show, Fail, Leave(Removal::Dropped)];
    check_table(include_str!("../host_state.rs"), &states, &events, HostState::after);
}
