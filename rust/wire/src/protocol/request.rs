//! Requests of engines. Must not depend on answers.

use kvloft_core::io::FrameSizes;

use crate::protocol::changes::SentChanges;
use crate::protocol::codec::{Field, Reader, Writer, messages};
use crate::protocol::prefix_cache::SentAnchors;
use crate::protocol::prefixes::{Keys, SentPrefixes, SentRange};

/// Version of the protocol. A server refuses clients of any other version.
pub const VERSION: u32 = 14;

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
