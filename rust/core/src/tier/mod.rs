//! Tiers: where frames live. `host` is shared memory, `disk` is files; neither knows keys' meaning or who should leave.

pub mod disk;
pub(crate) mod host;

/// A frame-sized place on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);
