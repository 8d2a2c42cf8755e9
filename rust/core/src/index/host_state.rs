//! A chunk's life cycle in the host tier.
//!
//! | state | Want | Read | Reserve | Fill | Show | Fail | Leave |
//! |---|---|---|---|---|---|---|---|
//! | Absent | Queued | - | Saving | - | - | - | - |
//! | Queued | - | Reading | Saving | - | - | Absent | Absent |
//! | Reading | - | - | - | Filled | - | Failed | Absent |
//! | Saving | - | - | - | Filled | - | Failed | Absent |
//! | Filled | - | - | - | - | Visible | Failed | Absent |
//! | Failed | - | - | - | - | - | Failed | Absent |
//! | Visible | - | - | - | - | - | - | Absent |
//!
//! A test checks this table against [`HostState::after`]. Only `State::change_host` changes a
//! chunk's state. That method also updates the frame, the counters, the eviction policy and the
//! waiting chunks.

use crate::evict::Removal;
use crate::io::FrameId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum HostState {
    /// The chunk is not in host memory, and no load is waiting for it.
    #[default]
    Absent,
    /// A load is waiting for the chunk to be read from disk. The chunk has no frame yet.
    Queued,
    /// A disk thread is reading the chunk into the frame.
    Reading(FrameId),
    /// A worker is copying the chunk into the frame under a `WriteLease`.
    Saving(FrameId),
    /// The frame holds the complete chunk, which becomes visible once its parent is visible.
    Filled(FrameId),
    /// The chunk or an ancestor could not be read or saved. The chunk is removed after its last
    /// child.
    Failed(FrameId),
    /// Lookups find the chunk, and loads can use its frame.
    Visible(FrameId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostEvent {
    /// A load needs the chunk to be read from disk.
    Want,
    /// A disk thread starts reading the chunk into the frame.
    Read(FrameId),
    /// A save reserves the frame for the chunk.
    Reserve(FrameId),
    /// The frame holds the complete chunk.
    Fill,
    /// The chunk's parent is visible, or the chunk has no parent.
    Show,
    /// The frame of the chunk or of an ancestor will not be filled.
    Fail,
    /// The chunk is leaving host memory. The reason is passed to the eviction policy.
    Leave(Removal),
}

impl HostState {
    /// Returns the state after an event, or None if the event is impossible in this state.
    pub(crate) fn after(self, event: HostEvent) -> Option<Self> {
        use HostEvent::{Fail, Fill, Leave, Read, Reserve, Show, Want};
        use HostState::{Absent, Failed, Filled, Queued, Reading, Saving, Visible};
        match (self, event) {
            (Absent, Want) => Some(Queued),
            (Queued, Read(frame)) => Some(Reading(frame)),
            (Absent | Queued, Reserve(frame)) => Some(Saving(frame)),
            (Reading(frame) | Saving(frame), Fill) => Some(Filled(frame)),
            (Filled(frame), Show) => Some(Visible(frame)),
            (Reading(frame) | Saving(frame) | Filled(frame) | Failed(frame), Fail) => {
                Some(Failed(frame))
            }
            (Queued, Fail | Leave(_))
            | (Reading(_) | Saving(_) | Filled(_) | Failed(_) | Visible(_), Leave(_)) => {
                Some(Absent)
            }
            _ => None,
        }
    }

    pub(crate) fn frame(self) -> Option<FrameId> {
        match self {
            Self::Absent | Self::Queued => None,
            Self::Reading(frame)
            | Self::Saving(frame)
            | Self::Filled(frame)
            | Self::Failed(frame)
            | Self::Visible(frame) => Some(frame),
        }
    }

    pub(crate) fn is_absent(self) -> bool {
        self == Self::Absent
    }

    pub(crate) fn is_visible(self) -> bool {
        matches!(self, Self::Visible(_))
    }

    /// Returns true if the frame contains the entire chunk.
    pub(crate) fn is_complete(self) -> bool {
        matches!(self, Self::Filled(_) | Self::Visible(_))
    }

    pub(crate) fn awaits_read(self) -> bool {
        matches!(self, Self::Queued | Self::Reading(_))
    }

    /// Returns true if a disk thread or a worker owns the frame.
    pub(crate) fn is_filling(self) -> bool {
        matches!(self, Self::Reading(_) | Self::Saving(_))
    }

    /// Returns true if the chunk was requested or reserved but has neither become visible nor been
    /// removed.
    pub(crate) fn is_pending(self) -> bool {
        !matches!(self, Self::Absent | Self::Visible(_))
    }

    /// Returns true if the chunk's children can get frames because its own frame is filled or being
    /// filled.
    pub(crate) fn may_have_children(self) -> bool {
        self.frame().is_some() && !matches!(self, Self::Failed(_))
    }
}
