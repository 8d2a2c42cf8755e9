//! Threads with a name and a small stack. It must not know what they do.

use std::thread::JoinHandle;

use kvloft_core::{Error, Result};

/// Enough for what a connection's thread calls.
const STACK_BYTES: usize = 512 << 10;

/// Begins a thread that is named `kvloft-` and `name`; `Io` where the system has none.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(format!("kvloft-{name}")).stack_size(STACK_BYTES);
    thread.spawn(work).map_err(|error| Error::io("a thread of the kvloft server cannot be started", error))
}
