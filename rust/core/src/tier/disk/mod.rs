//! The disk tier: frames of one size in one file, a 128-byte record per frame in another, one owner
//! per directory.
//!
//! It stores bytes in slots and verifies them on reads. Must not depend on eviction (`evict`), on
//! waiting reads (`store`) or on the contents of a frame. It never calls fsync: after a power loss,
//! checksums turn lost writes into counted misses.

mod books;
pub(crate) mod budget;
mod erase;
mod file_size;
mod files;
mod fit;
mod growth;
mod inspect;
mod local;
mod lock;
pub(crate) mod namespaces;
mod open;
mod paths;
mod punch;
pub(crate) mod record;
pub(crate) mod recover;
mod root;
mod slots;
pub(crate) mod superblock;
mod tier;
mod types;
mod verify;

#[cfg(test)]
mod tests;

pub use erase::Erased;
pub(crate) use erase::erase;
#[doc(hidden)]
pub use files::{OpenFiles, OsFiles};
pub use inspect::{NamespaceInfo, inspect};
pub use root::DiskRoot;
pub use tier::DiskTier;
pub use types::{Damage, DiskConfig, DiskEntry, DiskMeta, DiskStats, SlotId};
pub use verify::Verifier;
