//! The memory that one namespace has: a store, opened for the first engine that asks, and the engines' seats in it.
//!
//! A server has one slab. Engines of another namespace or shape are refused until the last seat of this one is free; then theirs
//! takes its place. It must not know sockets.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvloft_core::session::Local;
use kvloft_core::store::{Store, StoreConfig};
use kvloft_core::{Error, ErrorKind, Result};

use crate::message::Hello;
use crate::server::ServerConfig;

/// Longest wait for the disk of a namespace that makes room.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(3);

/// One store, and who uses it.
#[derive(Debug)]
pub(crate) struct Slab {
    pub(crate) hello: Hello,
    pub(crate) store: Arc<Store>,
    num_seats: AtomicUsize,
}

/// An engine's place in a slab, with all that it holds there.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) slab: Arc<Slab>,
    pub(crate) local: Local,
}

/// The slab of a server, once there is one.
#[derive(Debug, Default)]
pub(crate) struct Slabs(Mutex<Option<Arc<Slab>>>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slab {
    fn open(hello: &Hello, config: &ServerConfig) -> Result<Self> {
        let mut disk = config.disk.clone();
        if let Some(disk) = &mut disk {
            disk.description.clone_from(&hello.description);
        }
        let store = Store::open(&StoreConfig {
            frame_bytes: hello.frame_bytes,
            host_bytes: config.host_bytes,
            blocks_per_chunk: hello.blocks_per_chunk,
            eviction: config.eviction,
            available_bytes: config.available_bytes,
            namespace: hello.namespace,
            disk,
        })?;
        Ok(Self { hello: hello.clone(), store: Arc::new(store), num_seats: AtomicUsize::new(0) })
    }

    fn is_for(&self, hello: &Hello) -> bool {
        let of = |hello: &Hello| (hello.namespace, hello.frame_bytes, hello.blocks_per_chunk);
        of(&self.hello) == of(hello)
    }
}

impl Slabs {
    /// A seat for the engine; `Busy` while engines of another namespace are there.
    pub(crate) fn seat(&self, hello: &Hello, config: &ServerConfig) -> Result<Seat> {
        let mut slab = locked(&self.0);
        if let Some(other) = slab.as_ref().filter(|slab| !slab.is_for(hello)) {
            if other.num_seats.load(Ordering::SeqCst) > 0 {
                return Err(refusal(other, hello));
            }
            other.store.close(REPLACE_TIMEOUT);
            *slab = None;
        }
        let slab = match &*slab {
            Some(slab) => Arc::clone(slab),
            None => Arc::clone(slab.insert(Arc::new(Slab::open(hello, config)?))),
        };
        slab.num_seats.fetch_add(1, Ordering::SeqCst);
        Ok(Seat { local: Local::of(Arc::clone(&slab.store)), slab })
    }

    pub(crate) fn current(&self) -> Option<Arc<Slab>> {
        locked(&self.0).clone()
    }
}

fn refusal(other: &Slab, hello: &Hello) -> Error {
    let short = |namespace: &[u8; 32]| {
        let (first, _) = namespace.split_first_chunk().unwrap_or((&[0; 8], &[]));
        format!("{:016x}", u64::from_be_bytes(*first))
    };
    let message = format!(
        "this kvloft server is in use by engines of namespace {} with chunks of {} bytes, and this engine's is {} with {} bytes; \
         start another server for it",
        short(&other.hello.namespace),
        other.hello.frame_bytes,
        short(&hello.namespace),
        hello.frame_bytes
    );
    Error::new(ErrorKind::Busy, message)
}

impl Drop for Seat {
    fn drop(&mut self) {
        // What it holds ends before its seat is free.
        self.local = Local::of(Arc::clone(&self.slab.store));
        self.slab.num_seats.fetch_sub(1, Ordering::SeqCst);
    }
}
