//! Compares the table of states in a module's documentation with the transition function below it.

use std::fmt::Debug;

/// The name of an enum's variant, without its fields.
fn name(variant: impl Debug) -> String {
    format!("{variant:?}").split(['(', ' ']).next().unwrap_or_default().to_owned()
}

/// Panics unless the first table in `source` has a row for each state, a column for each event, and
/// in each cell the state after the event, or `-`.
pub(super) fn check_table<S: Copy + Debug, E: Copy + Debug>(
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
