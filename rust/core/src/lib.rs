//! kvloft's core: what a prefix's key is, and where its bytes are kept.
//!
//! Data flow: `key` (content -> `ChunkKey`) -> `index` (key -> entry) -> `store` (lookup, lease,
//! reserve, commit) -> `tier` (host frames, disk slots), with `evict` choosing what goes and `tag`
//! proving bytes. Engines ask a store through a `session`; an `engine` counts its ranks' reports
//! and has chunks in `batch`es. Nothing here knows Python, CUDA, vLLM, the clock or the
//! environment.

pub mod chunk_batch;
pub mod engine;
pub mod error;
pub mod evict;
pub(crate) mod in_flight;
pub(crate) mod index;
pub mod io;
pub mod key;
pub(crate) mod numbered;
pub mod pool;
pub mod session;
pub mod store;
pub(crate) mod sync;
pub mod tag;
pub mod tier;
pub mod units;

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
// Unit tests of private items need rust/testing built against this build of the crate. As a
// dev-dependency it brings another one, with other types.
#[cfg(test)]
extern crate self as kvloft_core;
#[cfg(test)]
#[path = "../../testing/src/lib.rs"]
pub mod test_support;

pub use error::{Error, ErrorKind, Result};
pub use key::{ChunkKey, KeyChain};
