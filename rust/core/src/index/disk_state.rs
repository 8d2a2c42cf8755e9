//! A chunk's life cycle in the disk tier.
//!
//! | state | Want | Block | Unblock | Cancel | Write | Defer | Written | Found | Evict | Keep | Leave |
//! |---|---|---|---|---|---|---|---|---|---|---|---|
//! | Absent | Queued | - | - | - | - | - | - | Stored | - | - | - |
//! | Queued | - | Blocked | - | Absent | Writing | - | - | Stored | - | - | - |
//! | Blocked | - | - | Queued | Absent | - | - | - | Stored | - | - | - |
//! | Writing | - | - | - | - | - | Queued | Stored | - | - | - | Absent |
//! | Stored | - | - | - | - | - | - | - | - | Evicting | - | Absent |
//! | Evicting | - | - | - | - | - | - | - | - | - | Stored | Absent |
//!
//! A test checks this table against [`DiskState::after`]. Only `State::change_disk` changes a
//! chunk's state. That method also updates the counters and the eviction policies.

use crate::evict::Removal;
use crate::tier::disk::SlotId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum DiskState {
    /// The chunk is not on disk and will not be written.
    #[default]
    Absent,
    /// The chunk is queued for writing.
    Queued,
    /// The chunk is waiting for its parent to be written.
    Blocked,
    /// A disk thread is writing the chunk.
    Writing,
    /// The chunk is stored in the slot.
    Stored(SlotId),
    /// A disk thread is freeing the chunk's slot. If that fails, the state returns to `Stored`.
    Evicting(SlotId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskEvent {
    /// The chunk became visible in host memory, or one of its descendants must be written.
    Want,
    /// The chunk's parent is not on disk.
    Block,
    /// The chunk's parent is now on disk, or has left the disk and can be rewritten.
    Unblock,
    /// The chunk no longer needs to be written.
    Cancel,
    /// A disk thread starts writing the chunk.
    Write,
    /// No slot is available yet, so the write is requeued.
    Defer,
    /// The chunk was written to the slot.
    Written(SlotId),
    /// The chunk was found in the slot when the tier was opened.
    Found(SlotId),
    /// A disk thread starts freeing the chunk's slot.
    Evict,
    /// The chunk's slot could not be freed.
    Keep,
    /// The chunk could not be written or is leaving the disk. The reason is passed to the eviction
    /// policy.
    Leave(Removal),
}

impl DiskState {
    /// Returns the state after an event, or None if the event is impossible in this state.
    pub(crate) fn after(self, event: DiskEvent) -> Option<Self> {
        use DiskEvent::{
            Block, Cancel, Defer, Evict, Found, Keep, Leave, Unblock, Want, Write, Written,
        };
        use DiskState::{Absent, Blocked, Evicting, Queued, Stored, Writing};
        match (self, event) {
            (Absent, Want) | (Blocked, Unblock) | (Writing, Defer) => Some(Queued),
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

    pub(crate) fn is_waiting(self) -> bool {
        matches!(self, Self::Queued | Self::Blocked)
    }

    pub(crate) fn is_unwritten(self) -> bool {
        matches!(self, Self::Queued | Self::Blocked | Self::Writing)
    }
}
