//! Requests of engines, and their encoding. Must not depend on answers.

use kvloft_core::io::FrameSizes;

use crate::protocol::changes::{SentChanges, read_sent_changes};
use crate::protocol::codec::{Reader, read_message, write_message};
use crate::protocol::prefix_cache::{SentAnchors, read_anchors};
use crate::protocol::prefixes::{
    Keys, SentPrefixes, SentRange, read_prefixes, read_ranges, write_ranges,
};

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

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub enum Request<'a> {
    /// The first request of an engine.
    Hello(Hello),
    /// See `Session::lookup_many`.
    Lookup(SentPrefixes<'a>),
    /// As [`Self::Lookup`], for prefixes whose chunks a reservation dropped. Not counted as a
    /// lookup.
    LookupForSave(SentPrefixes<'a>),
    /// See `Session::acquire_all`. The engine chooses the lease's number.
    Acquire(u64, SentPrefixes<'a>),
    /// See `Session::poll`.
    Poll(u64),
    /// See `Session::frames`.
    Frames(u64),
    /// One-way. See `Session::release`.
    Release(u64),
    /// See `Session::reserve_many`.
    Reserve(Vec<SentRange<'a>>),
    /// See `Session::commit`.
    Commit(Vec<u64>),
    /// One-way. See `Session::abort`.
    Abort(Vec<u64>),
    /// See `Session::discard`.
    Discard(Keys<'a>),
    /// See `Session::clear`.
    Clear,
    /// See `Session::stats`. Carries the calls without an answer in time, and the chunks not saved
    /// because of them, since the last such request.
    Stats([u64; 2]),
    /// One-way. See `Session::limit_memory`.
    LimitMemory(u64),
    /// Returns whether every pending chunk is on disk.
    IsSettled,
    /// One-way. The engine shuts down.
    Bye,
    /// An admin request: the version, and an `AdminRequest` in JSON. Needs no hello.
    Admin(u32, &'a [u8]),
    /// See `Store::anchors`. The next prefix may continue after the last anchor that is stored.
    Anchors(SentAnchors<'a>),
    /// See `Session::changes`. The first such request of a connection starts the change log.
    Changes(SentChanges<'a>),
}

fn read_hello(from: &mut Reader<'_>) -> Option<Hello> {
    let version = from.u32()?;
    if version != VERSION {
        from.0 = &[]; // another version may have other fields
        return Some(Hello {
            version,
            namespace: [0; 32],
            frame_sizes: 0.into(),
            description: String::new(),
        });
    }
    let namespace = from.key()?;
    let frame_sizes = from.list(16, |from| Some((from.u64()?, from.u64()?)))?.into();
    Some(Hello { version, namespace, frame_sizes, description: from.text()? })
}

impl<'a> Request<'a> {
    /// Appends the request with its length to `to`.
    pub fn encode(&self, number: u32, to: &mut Vec<u8>) {
        write_message(to, number, self.kind(), |to| match self {
            Self::Hello(hello) => {
                to.u32(hello.version);
                to.key(&hello.namespace);
                let sizes = &hello.frame_sizes;
                to.count(sizes.all().len());
                for (bytes, raw_bytes) in sizes.all().iter().zip(sizes.raw()) {
                    to.u64(*bytes);
                    to.u64(*raw_bytes);
                }
                to.text(&hello.description);
            }
            Self::Lookup(prefixes) | Self::LookupForSave(prefixes) => prefixes.write(to),
            Self::Acquire(lease, prefixes) => {
                to.u64(*lease);
                prefixes.write(to);
            }
            Self::Poll(lease) | Self::Frames(lease) | Self::Release(lease) => to.u64(*lease),
            Self::Reserve(ranges) => write_ranges(to, ranges),
            Self::Commit(tickets) | Self::Abort(tickets) => to.numbers(tickets),
            Self::Discard(keys) => keys.write(to),
            Self::Anchors(anchors) => anchors.write(to),
            Self::Changes(sent) => sent.write(to),
            Self::LimitMemory(bytes) => to.u64(*bytes),
            Self::Admin(version, json) => {
                to.u32(*version);
                to.bytes(json);
            }
            Self::Stats(late) => late.iter().for_each(|number| to.u64(*number)),
            Self::Clear | Self::IsSettled | Self::Bye => {}
        });
    }

    /// Decodes a request and its number; None if it is malformed.
    pub fn decode(bytes: &'a [u8]) -> Option<(u32, Self)> {
        read_message(bytes, |kind, from| {
            Some(match kind {
                1 => Self::Hello(read_hello(from)?),
                2 => Self::Lookup(read_prefixes(from)?),
                3 => Self::Acquire(from.u64()?, read_prefixes(from)?),
                4 => Self::Poll(from.u64()?),
                5 => Self::Frames(from.u64()?),
                6 => Self::Release(from.u64()?),
                7 => Self::Reserve(read_ranges(from)?),
                8 => Self::Commit(from.numbers()?),
                9 => Self::Abort(from.numbers()?),
                10 => Self::Discard(Keys::Bytes(from.keys()?)),
                11 => Self::Clear,
                12 => Self::Stats([from.u64()?, from.u64()?]),
                13 => Self::LimitMemory(from.u64()?),
                14 => Self::IsSettled,
                15 => Self::Bye,
                16 => Self::Admin(from.u32()?, from.bytes()?),
                18 => Self::Anchors(read_anchors(from)?),
                19 => Self::Changes(read_sent_changes(from)?),
                20 => Self::LookupForSave(read_prefixes(from)?),
                _ => return None,
            })
        })
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => 1,
            Self::Lookup(_) => 2,
            Self::Acquire(..) => 3,
            Self::Poll(_) => 4,
            Self::Frames(_) => 5,
            Self::Release(_) => 6,
            Self::Reserve(_) => 7,
            Self::Commit(_) => 8,
            Self::Abort(_) => 9,
            Self::Discard(_) => 10,
            Self::Clear => 11,
            Self::Stats(_) => 12,
            Self::LimitMemory(_) => 13,
            Self::IsSettled => 14,
            Self::Bye => 15,
            Self::Admin(..) => 16,
            Self::Anchors(_) => 18,
            Self::Changes(_) => 19,
            Self::LookupForSave(_) => 20,
        }
    }

    /// Returns whether the request gets no answer.
    pub fn is_one_way(&self) -> bool {
        matches!(self, Self::Release(_) | Self::Abort(_) | Self::LimitMemory(_) | Self::Bye)
    }
}
