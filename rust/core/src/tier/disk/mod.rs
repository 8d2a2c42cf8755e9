//! The disk tier stores frames in files. Each frame size has a frames file and an index with one
//! 128-byte record per frame. A directory has one owner at a time.
//!
//! The tier verifies frames when they are read. The store queues reads and decides which chunks to
//! evict. The tier never calls fsync: after a power loss, checksums turn lost writes into misses,
//! which are counted.

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
