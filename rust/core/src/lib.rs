//! kvloft's core: prefix keys, and the store and tiers that hold chunks.
//!
//! Data flow: `key` (content -> `ChunkKey`) -> `index` (key -> entry) -> `store` (lookup, lease,
//! reserve, commit) -> `tier` (host frames, disk slots). `evict` chooses victims and `tag` verifies
//! bytes. An engine accesses a store through a `session`, and `engine` collects reports from its
//! ranks. This crate does not depend on Python, CUDA, vLLM or the environment.

pub mod chunk_batch;
pub mod engine;
pub mod error;
pub mod event;
pub mod evict;
pub(crate) mod in_flight;
pub(crate) mod index;
pub mod io;
pub mod key;
pub(crate) mod numbered;
pub mod pool;
pub mod session;
pub mod store;
pub mod sync;
pub mod tag;
pub mod tier;
pub mod units;

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[path = "../../testing/src/inside/mod.rs"]
pub mod testing;
// Unit tests of private items need rust/testing compiled against this build of the crate. As a
// dev-dependency, rust/testing would link a second build with distinct types.
#[cfg(test)]
extern crate self as kvloft_core;
#[cfg(test)]
#[path = "../../testing/src/lib.rs"]
pub mod test_support;

pub use error::{Error, ErrorKind, Result};
pub use event::Event;
pub use key::{ChunkKey, KeyChain};
