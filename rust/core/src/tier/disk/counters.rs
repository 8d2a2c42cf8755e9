//! The tier's counters, and the few lines of events that a person should see.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::types::DiskStats;

/// Events that wait to be taken, and events that are remembered as told.
const MAX_EVENTS: usize = 64;

/// A counter that any thread may move.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Events {
    waiting: Vec<String>,
    told: Vec<String>,
}

/// Counters that move after open; `at_open` holds the others.
#[derive(Debug, Default)]
pub(super) struct Counters {
    at_open: DiskStats,
    events: Mutex<Events>,
    pub(super) writes: Counter,
    pub(super) write_bytes: Counter,
    pub(super) reads: Counter,
    pub(super) read_bytes: Counter,
    pub(super) write_errors: Counter,
    pub(super) read_errors: Counter,
    pub(super) corrupt_reads: Counter,
    pub(super) grow_errors: Counter,
    pub(super) namespaces_removed: Counter,
}

impl Counters {
    /// Starts from what opening counted and saw.
    pub(super) fn new(at_open: DiskStats, events: Vec<String>) -> Self {
        let counters = Self { at_open, ..Self::default() };
        for line in events {
            counters.event(line);
        }
        counters
    }

    /// Notes an event, up to a limit, and not again what was told lately.
    pub(super) fn event(&self, line: String) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.waiting.len() < MAX_EVENTS && !events.waiting.contains(&line) && !events.told.contains(&line) {
            events.waiting.push(line);
        }
    }

    /// The events noted since the last call.
    pub(super) fn take_events(&self) -> Vec<String> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = std::mem::take(&mut events.waiting);
        if !taken.is_empty() {
            events.told.clone_from(&taken);
        }
        taken
    }

    /// The counters' part of the stats; gauges are left at zero.
    pub(super) fn snapshot(&self) -> DiskStats {
        DiskStats {
            namespaces_removed: self.at_open.namespaces_removed + self.namespaces_removed.get(),
            writes: self.writes.get(),
            write_bytes: self.write_bytes.get(),
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            write_errors: self.write_errors.get(),
            read_errors: self.read_errors.get(),
            corrupt_reads: self.corrupt_reads.get(),
            grow_errors: self.grow_errors.get(),
            ..self.at_open
        }
    }
}
