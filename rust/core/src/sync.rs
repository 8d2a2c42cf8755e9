//! Locks, conditions and threads: the standard library's, or under `--cfg shuttle` those of a model
//! checker, which chooses who goes next at each of them (`tests/models.rs`).

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};

/// Whether the thread has ended. A model's threads never hang, so there it is joined in any case.
pub(crate) fn has_ended(thread: &thread::JoinHandle<()>) -> bool {
    #[cfg(shuttle)]
    return thread.thread().id() != thread::current().id();
    #[cfg(not(shuttle))]
    thread.is_finished()
}
