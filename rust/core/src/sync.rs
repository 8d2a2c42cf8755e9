//! Locks, condition variables and threads from the standard library or, with `--cfg shuttle`, from
//! a model checker that picks the next thread at each synchronization point (`tests/models.rs`).

use std::sync::PoisonError;
use std::time::{Duration, Instant};

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

/// Locks a mutex, even if it is poisoned.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Joins stopping threads. At the deadline, detaches threads that are still running, for example in
/// a hung system call.
pub fn join(threads: Vec<thread::JoinHandle<()>>, deadline: Instant) {
    for thread in threads {
        while !has_ended(&thread) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if has_ended(&thread) {
            let _ended = thread.join(); // a panic was already logged and poisoned the lock
        }
    }
}

/// Returns true if the thread can be joined without blocking. The model checker's threads never
/// hang, so they are always joined.
fn has_ended(thread: &thread::JoinHandle<()>) -> bool {
    #[cfg(shuttle)]
    return thread.thread().id() != thread::current().id();
    #[cfg(not(shuttle))]
    thread.is_finished()
}
