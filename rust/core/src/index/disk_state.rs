//! Life of a chunk in the disk tier.
//!
//! | state | Want | Block | Unblock | Cancel | Write | Written | Found | Evict | Keep | Leave |
//! |---|---|---|---|---|---|---|---|---|---|---|
//! | Absent | Queued | - | - | - | - | - | Stored | - | - | - |
//! | Queued | - | Blocked | - | Absent | Writing | - | Stored | - | - | - |
//! | Blocked | - | - | Queued | Absent | - | - | Stored | - | - | - |
//! | Writing | - | - | - | - | - | Stored | - | - | - | Absent |
//! | Stored | - | - | - | - | - | - | - | Evicting | - | Absent |
//! | Evicting | - | - | - | - | - | - | - | - | Stored | Absent |
//!
//! A test compares this table with [`DiskState::after`]. `State::change_disk` is the only code that
//! changes a chunk's state. It also updates the counters and the eviction policies.

use crate::evict::Removal;
use crate::tier::disk::SlotId;

/// State of a chunk on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum DiskState {
    /// The chunk is not on disk and will not be written.
    #[default]
    Absent,
    /// It is queued for writing.
    Queued,
    /// It waits until its parent is on disk.
    Blocked,
    /// A disk thread is writing it.
    Writing,
    /// The chunk is stored in the slot.
    Stored(SlotId),
    /// A disk thread is freeing its slot. If that fails, the state returns to `Stored`.
    Evicting(SlotId),
}

/// Events of a chunk in the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskEvent {
    /// The chunk became visible in host memory, or a descendant must be written.
    Want,
    /// The chunk's parent is not on disk.
    Block,
    /// The chunk's parent is on disk, or can be written now.
    Unblock,
    /// It no longer needs to be written.
    Cancel,
    /// A disk thread starts writing it.
    Write,
    /// It was written to the slot.
    Written(SlotId),
    /// It was in the slot when the tier was opened.
    Found(SlotId),
    /// A disk thread starts freeing its slot.
    Evict,
    /// Its slot could not be freed.
    Keep,
    /// It was not written or leaves the disk; the policy receives the reason.
    Leave(Removal),
}

impl DiskState {
    /// Returns the state after an event; None if the event cannot happen in this state.
    pub(crate) fn after(self, event: DiskEvent) -> Option<Self> {
        use DiskEvent::{Block, Cancel, Evict, Found, Keep, Leave, Unblock, Want, Write, Written};
        use DiskState::{Absent, Blocked, Evicting, Queued, Stored, Writing};
        match (self, event) {
            (Absent, Want) | (Blocked, Unblock) => Some(Queued),
            (Queued, Block) => Some(Blocked),
            (Queued | Blocked, Cancel) | (Writing | Stored(_) | Evicting(_), Leave(_)) => {
                Some(Absent)
            }
            (Queued, Write) => Some(Writing),
            (Writing, Written(slot))
            | (Absent | Queued | Blocked, Found(slot))
            | (Evicting(slot), Keep) => Some(Stored(slot)),
            (Stored(slot), Evict) => Some(Evicting(slot)),
            _ => None,
        }
    }

    pub(crate) fn slot(self) -> Option<SlotId> {
        match self {
            Self::Stored(slot) | Self::Evicting(slot) => Some(slot),
            Self::Absent | Self::Queued | Self::Blocked | Self::Writing => None,
        }
    }

    pub(crate) fn is_stored(self) -> bool {
        matches!(self, Self::Stored(_))
    }

    /// Returns true if the chunk occupies a slot: it is stored, being written or being evicted.
    pub(crate) fn takes_slot(self) -> bool {
        matches!(self, Self::Writing | Self::Stored(_) | Self::Evicting(_))
    }

    /// Returns true if the chunk waits for a disk thread to write it.
    pub(crate) fn is_waiting(self) -> bool {
        matches!(self, Self::Queued | Self::Blocked)
    }

    /// Returns true if the chunk waits to be written or is being written.
    pub(crate) fn is_unwritten(self) -> bool {
        matches!(self, Self::Queued | Self::Blocked | Self::Writing)
    }
}
