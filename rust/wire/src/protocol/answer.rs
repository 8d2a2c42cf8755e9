//! Answers of the server. Must not depend on requests.

use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation};

use crate::protocol::codec::{Field, Reader, Writer, fields, messages};

/// Sizes of the memory that the server shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Bytes of the arena.
    pub size_bytes: u64,
    /// Bytes of a slab.
    pub slab_bytes: u64,
}

/// Reservations of one range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservedRange {
    /// Chunks without a frame.
    pub num_dropped: u32,
    /// Chunks to fill.
    pub rows: Vec<Reservation>,
}

fields! {
    Welcome { size_bytes, slab_bytes }
    ReservedRange { num_dropped, rows }
}

messages! {
    /// An answer.
    enum Answer {
        /// Accepts an engine. The arena's and the lifeline's descriptors come with it.
        1 = Welcome(sizes: Welcome),
        /// Reason of a refusal, in one sentence. The server closes the connection.
        2 = Refused(text: String),
        /// Result of a lookup, one for each prefix.
        3 = Found(found: Vec<Lookup>),
        /// Progress of a lease.
        4 = Progress(progress: Progress),
        /// Frames of a lease.
        5 = Frames(frames: Vec<LeasedFrame>),
        /// Reservations of each range.
        6 = Reserved(ranges: Vec<ReservedRange>),
        /// Chunks committed or removed; 1 or 0 for yes or no.
        7 = Count(number: u64),
        /// Counters of the store.
        8 = Stats(stats: Vec<(String, u64)>),
        /// Result of an admin request, in JSON.
        9 = Admin(json: Vec<u8>),
        /// Anchors that are stored.
        10 = Anchors(anchors: Anchors),
        /// Changes of the store. The first such answer of a connection has `lost` set.
        11 = Changes(changes: Changes),
    }
}
