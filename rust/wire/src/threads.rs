//! Named threads with small stacks, and locks that outlive a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvloft_core::{Error, Result};

/// Stack size of each thread.
const STACK_BYTES: usize = 512 << 10;

/// Starts a thread named `kvloft-{name}`; `Io` if the system cannot start one.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(format!("kvloft-{name}")).stack_size(STACK_BYTES);
    thread.spawn(work).map_err(|error| Error::io("cannot start a kvloft thread", error))
}

/// Locks a mutex, even if a thread panicked while it held it.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
