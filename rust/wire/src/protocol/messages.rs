//! Requests from engines, and responses from the server.

use kvloft_core::io::FrameSizes;
use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation};

use crate::protocol::codec::{Field, Reader, Writer, fields, messages};
use crate::protocol::prefix_cache::SentAnchors;
use crate::protocol::prefixes::{Keys, SentPrefixes, SentRange};

/// Version of the protocol. A server rejects clients with a different version.
pub const VERSION: u32 = 14;
/// Maximum number of changes queued for a listener, of keys in a request for changes, and of
/// additional rows in the response.
pub const MAX_CHANGES: u32 = 1 << 16;

/// First request from an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The client's [`VERSION`].
    pub version: u32,
    /// Digest of everything that determines KV bytes, except content.
    pub namespace: [u8; 32],
    /// See `StoreConfig::frame_sizes`.
    pub frame_sizes: FrameSizes,
    /// One-line description of the namespace.
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

/// A request for changes in the store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentChanges<'a> {
    /// See `Session::watch`.
    pub capacity: u32,
    /// Maximum number of changed chunks to report in addition to the chunks in `asked`.
    pub limit: u32,
    /// Keys of chunks to report even if they have not changed.
    pub asked: Keys<'a>,
}

messages! {
    /// A request to the server.
    enum Request<'a> {
        /// The first request from an engine.
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
        /// See `Session::stats`. Carries the number of calls that timed out since the previous such
        /// request, and the number of chunks that were not saved because of these timeouts.
        12 = Stats(num_calls: u64, num_chunks: u64),
        /// One-way. See `Session::limit_memory`.
        13 = LimitMemory(limit_bytes: u64),
        /// See `Session::flush`. Asks whether no chunk is waiting to be written to disk.
        14 = IsSettled,
        /// One-way. The engine is shutting down.
        15 = Bye,
        /// An admin request: the protocol version, and an `AdminRequest` in JSON. Does not require
        /// a hello.
        16 = Admin(version: u32, json: &'a [u8]),
        /// See `Store::anchors`. The next prefix may omit its keys up to the last known anchor.
        18 = Anchors(anchors: SentAnchors<'a>),
        /// See `Session::changes`. The first such request on a connection starts recording changes.
        19 = Changes(asked: SentChanges<'a>),
        /// Like [`Self::Lookup`], but for prefixes with chunks that a reservation dropped. These
        /// lookups are not included in the counters.
        20 = LookupForSave(prefixes: SentPrefixes<'a>),
    }
}

impl Request<'_> {
    /// Returns whether the request gets no response.
    pub fn is_one_way(&self) -> bool {
        matches!(self, Self::Release(_) | Self::Abort(_) | Self::LimitMemory(_) | Self::Bye)
    }
}

/// Sizes of the server's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Size of the arena, in bytes.
    pub size_bytes: u64,
    /// Size of a slab, in bytes.
    pub slab_bytes: u64,
}

/// Reservations for one range of chunks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservedRange {
    /// Number of chunks that got no frame.
    pub num_dropped: u32,
    /// Reserved chunks, which the engine must fill.
    pub rows: Vec<Reservation>,
}

fields! {
    SentChanges<'a> { capacity, limit, asked }
    Welcome { size_bytes, slab_bytes }
    ReservedRange { num_dropped, rows }
}

messages! {
    /// A response from the server.
    enum Response {
        /// Accepts an engine. Carries the descriptors of the arena and the lifeline.
        1 = Welcome(sizes: Welcome),
        /// Why the server rejected the request, in one sentence. The server then closes the
        /// connection.
        2 = Refused(text: String),
        /// Lookup results, one per prefix.
        3 = Found(found: Vec<Lookup>),
        /// Progress of a lease.
        4 = Progress(progress: Progress),
        /// Frames of a lease.
        5 = Frames(frames: Vec<LeasedFrame>),
        /// Reservations for each range.
        6 = Reserved(ranges: Vec<ReservedRange>),
        /// Number of committed or removed chunks. For `IsSettled`, 1 means true and 0 means false.
        7 = Count(number: u64),
        /// Counters and gauges of the store.
        8 = Stats(stats: Vec<(String, u64)>),
        /// Result of an admin request, in JSON.
        9 = Admin(json: Vec<u8>),
        /// Result of looking up anchors.
        10 = Anchors(anchors: Anchors),
        /// Changes in the store. The first such response on a connection has `lost` set.
        11 = Changes(changes: Changes),
    }
}
