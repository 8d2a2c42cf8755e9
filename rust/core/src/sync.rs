//! Locks, condition variables and threads: the standard library's, or with `--cfg shuttle` those of
//! a model checker, which chooses the thread to run at each of them (`tests/models.rs`).

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

/// Locks a mutex, even if a thread panicked while it held it.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for threads that are stopping. Detaches a thread that hangs in the system at the deadline.
pub fn join(threads: Vec<thread::JoinHandle<()>>, deadline: Instant) {
    for thread in threads {
        while !has_ended(&thread) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if has_ended(&thread) {
            let _ended = thread.join(); // a panic was logged, and has poisoned its lock
        }
    }
}

/// Returns whether the thread has ended. Threads of a model never hang, so they are always joined.
fn has_ended(thread: &thread::JoinHandle<()>) -> bool {
    #[cfg(shuttle)]
    return thread.thread().id() != thread::current().id();
    #[cfg(not(shuttle))]
    thread.is_finished()
}
