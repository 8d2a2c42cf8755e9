//! Requests sent by engines, and responses sent by the server.

use kvloft_core::io::FrameSizes;
use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reserved};

use crate::protocol::codec::{Field, Reader, Writer, fields, messages};
use crate::protocol::prefix_cache::SentAnchors;
use crate::protocol::prefixes::{Keys, SentPrefixes, SentRange};

/// Protocol version. Servers reject clients with a different version.
pub const VERSION: u32 = 14;
/// Maximum number of changes queued for a listener. Also limits the number of keys in a request for
/// changes, and the number of unrequested chunks in the response.
pub const MAX_CHANGES: u32 = 1 << 16;

/// An engine's first request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The client's protocol version.
    pub version: u32,
    /// Digest of everything that affects KV bytes, other than the content itself.
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

/// A request for the changes to a store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentChanges<'a> {
    /// See `Session::watch`.
    pub capacity: u32,
    /// Maximum number of changed chunks to report in addition to `asked`.
    pub limit: u32,
    /// Keys of chunks to report even if they have not changed.
    pub asked: Keys<'a>,
}

messages! {
    /// A request that a client sends to the server.
    enum Request<'a> {
        /// An engine's first request.
        1 = Hello(hello: Hello),
        /// See `Session::lookup_many`.
        2 = Lookup(prefixes: SentPrefixes<'a>),
        /// See `Session::acquire_all`. The engine chooses the lease number.
        3 = Acquire(lease: u64, prefixes: SentPrefixes<'a>),
        /// See `Session::poll`.
        4 = Poll(lease: u64),
        /// See `Session::frames`.
        5 = Frames(lease: u64),
        /// One-way request. See `Session::release`.
        6 = Release(lease: u64),
        /// See `Session::reserve_many`.
        7 = Reserve(ranges: Vec<SentRange<'a>>),
        /// See `Session::commit`.
        8 = Commit(tickets: Vec<u64>),
        /// One-way request. See `Session::abort`.
        9 = Abort(tickets: Vec<u64>),
        /// See `Session::discard`.
        10 = Discard(keys: Keys<'a>),
        /// See `Session::clear`.
        11 = Clear,
        /// See `Session::stats`. Carries the number of calls that timed out since the previous
        /// request of this kind, and the number of chunks whose saves these timeouts delayed.
        12 = Stats(num_calls: u64, num_chunks: u64),
        /// One-way request. See `Session::limit_memory`.
        13 = LimitMemory(limit_bytes: u64),
        /// See `Session::flush`. Checks whether all chunks have been written to disk.
        14 = IsSettled,
        /// One-way request: the engine is shutting down.
        15 = Bye,
        /// An admin request: the protocol version and an `AdminRequest` as JSON. Does not require a
        /// hello.
        16 = Admin(version: u32, json: &'a [u8]),
        /// See `Store::anchors`. The next prefix can omit its keys up to the last known anchor.
        18 = Anchors(anchors: SentAnchors<'a>),
        /// See `Session::changes`. The server starts recording changes at the first such request on
        /// a connection.
        19 = Changes(asked: SentChanges<'a>),
        /// Like [`Self::Lookup`], but for prefixes where a reservation dropped chunks. These
        /// lookups are not counted.
        20 = LookupForSave(prefixes: SentPrefixes<'a>),
    }
}

impl Request<'_> {
    /// Returns true if the request gets no response.
    pub fn is_one_way(&self) -> bool {
        matches!(self, Self::Release(_) | Self::Abort(_) | Self::LimitMemory(_) | Self::Bye)
    }
}

/// Sizes of a server's arena and slabs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Size of the arena, in bytes.
    pub size_bytes: u64,
    /// Size of a slab, in bytes.
    pub slab_bytes: u64,
}

fields! {
    SentChanges<'a> { capacity, limit, asked }
    Welcome { size_bytes, slab_bytes }
}

messages! {
    /// A response that the server sends to a client.
    enum Response {
        /// Accepts an engine and carries the descriptors of the arena and the lifeline.
        1 = Welcome(sizes: Welcome),
        /// The reason for a rejection, in one sentence. The server then closes the connection.
        2 = Refused(text: String),
        /// One lookup result per prefix.
        3 = Found(found: Vec<Lookup>),
        /// A lease's progress.
        4 = Progress(progress: Progress),
        /// A lease's frames.
        5 = Frames(frames: Vec<LeasedFrame>),
        /// The reservations for each range.
        6 = Reserved(ranges: Vec<Reserved>),
        /// The number of chunks committed or removed. For `IsSettled`, 1 is true and 0 is false.
        7 = Count(number: u64),
        /// The store's counters and gauges.
        8 = Stats(stats: Vec<(String, u64)>),
        /// The result of an admin request, as JSON.
        9 = Admin(json: Vec<u8>),
        /// The result of an anchor lookup.
        10 = Anchors(anchors: Anchors),
        /// Changes to the store. The first such response on a connection always sets `lost`.
        11 = Changes(changes: Changes),
    }
}
