//! The disk tier: frames of one size in one file, a 128-byte record per frame in another, one owner
//! per directory.
//!
//! It stores bytes in slots and verifies them on reads. Must not depend on eviction (`evict`), on
//! waiting reads (`store`) or on the contents of a frame. It never calls fsync: after a power loss,
//! checksums turn lost writes into counted misses.

pub(crate) mod budget;
mod files;
mod fit;
mod growth;
mod inspect;
mod local;
pub(crate) mod namespaces;
mod open;
mod owner;
mod punch;
pub(crate) mod record;
mod remove_closed;
mod root;
mod slots;
pub(crate) mod superblock;
mod tier;
mod types;
mod verify;

#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use files::{OpenFiles, OsFiles};
pub use inspect::{NamespaceInfo, inspect};
pub use remove_closed::RemovedChunks;
pub(crate) use remove_closed::remove_closed;
pub use root::DiskRoot;
pub use tier::DiskTier;
pub use types::{Damage, DiskConfig, DiskEntry, DiskMeta, DiskStats, SlotId};
pub use verify::Verifier;
