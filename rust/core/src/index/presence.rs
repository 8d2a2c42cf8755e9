//! Where a chunk is in one tier.

/// `P` is a place of that tier: a frame, a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Presence<P> {
    /// Nowhere.
    #[default]
    Absent,
    /// It will be here; it may not have a place yet.
    Coming(Option<P>),
    /// Here, as good as its key says.
    Here(P),
    /// Its place is being freed. It is back where that fails.
    Leaving(P),
}

impl<P: Copy> Presence<P> {
    /// Its place, if it has one.
    pub(crate) fn place(self) -> Option<P> {
        match self {
            Presence::Absent => None,
            Presence::Coming(place) => place,
            Presence::Here(place) | Presence::Leaving(place) => Some(place),
        }
    }

    pub(crate) fn is_absent(self) -> bool {
        matches!(self, Presence::Absent)
    }

    pub(crate) fn is_here(self) -> bool {
        matches!(self, Presence::Here(_))
    }
}
