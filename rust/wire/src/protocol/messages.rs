//! Requests of engines, and answers of the server.

use kvloft_core::io::FrameSizes;
use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation};

use crate::protocol::codec::{Field, Reader, Writer, fields, messages};
use crate::protocol::prefix_cache::SentAnchors;
use crate::protocol::prefixes::{Keys, SentPrefixes, SentRange};

/// Version of the protocol. A server refuses clients of any other version.
pub const VERSION: u32 = 14;
/// Maximum number of changes queued for a listener, of keys in a request, and of other rows in an
/// answer.
pub const MAX_CHANGES: u32 = 1 << 16;

/// First request of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The client's [`VERSION`].
    pub version: u32,
    /// Digest of everything except content that decides KV bytes.
    pub namespace: [u8; 32],
    /// As in `StoreConfig`.
    pub frame_sizes: FrameSizes,
    /// One line about the namespace.
    pub description: String,
}

impl<'a> Field<'a> for Hello {
    fn write(&self, to: &mut Writer<'_>) {
        self.version.write(to);
        self.namespace.write(to);
        self.frame_sizes.write(to);
        self.description.write(to);
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        let version = u32::read(from)?;
        if version == VERSION {
            let (namespace, frame_sizes) = (Field::read(from)?, Field::read(from)?);
            return Some(Self { version, namespace, frame_sizes, description: Field::read(from)? });
        }
        from.skip_all();
        let description = String::new();
        Some(Self { version, namespace: [0; 32], frame_sizes: 0.into(), description })
    }
}

/// Requests changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentChanges<'a> {
    /// As in `Session::watch`.
    pub capacity: u32,
    /// Maximum number of rows in addition to those of `asked`.
    pub limit: u32,
    /// Keys of chunks to report in any case.
    pub asked: Keys<'a>,
}

messages! {
    /// A request.
    enum Request<'a> {
        /// The first request of an engine.
        1 = Hello(hello: Hello),
        /// See `Session::lookup_many`.
        2 = Lookup(prefixes: SentPrefixes<'a>),
        /// See `Session::acquire_all`. The engine chooses the lease's number.
        3 = Acquire(lease: u64, prefixes: SentPrefixes<'a>),
        /// See `Session::poll`.
        4 = Poll(lease: u64),
        /// See `Session::frames`.
        5 = Frames(lease: u64),
        /// One-way. See `Session::release`.
        6 = Release(lease: u64),
        /// See `Session::reserve_many`.
        7 = Reserve(ranges: Vec<SentRange<'a>>),
        /// See `Session::commit`.
        8 = Commit(tickets: Vec<u64>),
        /// One-way. See `Session::abort`.
        9 = Abort(tickets: Vec<u64>),
        /// See `Session::discard`.
        10 = Discard(keys: Keys<'a>),
        /// See `Session::clear`.
        11 = Clear,
        /// See `Session::stats`. Carries the calls without an answer in time, and the chunks not
        /// saved because of them, since the last such request.
        12 = Stats(num_calls: u64, num_chunks: u64),
        /// One-way. See `Session::limit_memory`.
        13 = LimitMemory(limit_bytes: u64),
        /// Returns whether every chunk that goes to disk is there.
        14 = IsSettled,
        /// One-way. The engine shuts down.
        15 = Bye,
        /// An admin request: the version, and an `AdminRequest` in JSON. Needs no hello.
        16 = Admin(version: u32, json: &'a [u8]),
        /// See `Store::anchors`. The next prefix may continue after the last anchor that is stored.
        18 = Anchors(anchors: SentAnchors<'a>),
        /// See `Session::changes`. The first such request of a connection starts the change log.
        19 = Changes(asked: SentChanges<'a>),
        /// As [`Self::Lookup`], for prefixes whose chunks a reservation dropped. Not counted as a
        /// lookup.
        20 = LookupForSave(prefixes: SentPrefixes<'a>),
    }
}

impl Request<'_> {
    /// Returns whether the request gets no answer.
    pub fn is_one_way(&self) -> bool {
        matches!(self, Self::Release(_) | Self::Abort(_) | Self::LimitMemory(_) | Self::Bye)
    }
}

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
    SentChanges<'a> { capacity, limit, asked }
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
