//! What an engine or a person asks, and how it crosses: see `protocol`. It must not know what is answered.

use crate::protocol::admin::Whose;
use crate::protocol::changes::{SentChanges, sent_changes};
use crate::protocol::codec::{Reader, message, whole};
use crate::protocol::prefix_cache::{SentAnchors, anchors};
use crate::protocol::prefixes::{Keys, SentPrefixes, SentRange, prefixes, ranges, write_ranges};

/// Version of all that crosses; two sides with different ones do not talk.
pub const VERSION: u32 = 11;

/// Who wants to use the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// As [`VERSION`].
    pub version: u32,
    /// Fingerprint of everything but content that decides KV bytes.
    pub namespace: [u8; 32],
    /// Bytes of one frame.
    pub frame_bytes: u64,
    /// Blocks in a full chunk.
    pub blocks_per_chunk: u32,
    /// One line for people about the namespace.
    pub description: String,
}

/// What an engine asks.
#[derive(Debug, Clone, PartialEq)]
pub enum Request<'a> {
    /// First, once.
    Hello(Hello),
    /// See `Session::lookup_many`.
    Lookup(SentPrefixes<'a>),
    /// The same of prefixes whose save got no place, to go on from what is there: no request asks, so it is not counted.
    LookAgain(SentPrefixes<'a>),
    /// See `Session::acquire_all`; the engine chose the number.
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
    /// See `Session::stats`; with the calls that got no answer in time, and the chunks that were not saved for that, since the last one.
    Stats([u64; 2]),
    /// One-way. See `Session::limit_frames`.
    LimitFrames(u32),
    /// Whether a flush would be done at once.
    IsSettled,
    /// One-way: the engine ends in order.
    Bye,
    /// What the server does, with the version instead of a hello: for people.
    Status(u32),
    /// A person wants a namespace forgotten; the version as above, and how the namespace's name begins.
    Forget(u32, String),
    /// See `Store::anchors`. The next prefix may go on behind the last that is known.
    Anchors(SentAnchors<'a>),
    /// See `Session::changes`. The first of a connection begins to listen.
    Changes(SentChanges<'a>),
    /// A person gives chunks up, in every tier or in host memory only; the version as above.
    Evict(u32, Whose, bool),
}

fn hello(from: &mut Reader<'_>) -> Option<Hello> {
    let version = from.u32()?;
    if version != VERSION {
        from.0 = &[]; // whatever it says is not for this version to read
        return Some(Hello {
            version,
            namespace: [0; 32],
            frame_bytes: 0,
            blocks_per_chunk: 0,
            description: String::new(),
        });
    }
    let (namespace, frame_bytes, blocks_per_chunk) = (from.key()?, from.u64()?, from.u32()?);
    Some(Hello { version, namespace, frame_bytes, blocks_per_chunk, description: from.text()? })
}

impl<'a> Request<'a> {
    /// Appends it to `to`, with its length.
    pub fn encode(&self, number: u32, to: &mut Vec<u8>) {
        message(to, number, self.kind(), |to| match self {
            Self::Hello(hello) => {
                to.u32(hello.version);
                to.key(&hello.namespace);
                to.u64(hello.frame_bytes);
                to.u32(hello.blocks_per_chunk);
                to.text(&hello.description);
            }
            Self::Lookup(prefixes) | Self::LookAgain(prefixes) => prefixes.write(to),
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
            Self::LimitFrames(number) | Self::Status(number) => to.u32(*number),
            Self::Forget(version, name) => {
                to.u32(*version);
                to.text(name);
            }
            Self::Evict(version, whose, is_host_only) => {
                to.u32(*version);
                whose.write(to);
                to.u8((*is_host_only).into());
            }
            Self::Stats(late) => late.iter().for_each(|number| to.u64(*number)),
            Self::Clear | Self::IsSettled | Self::Bye => {}
        });
    }

    /// The number, and what is asked; None for what is no request.
    pub fn decode(bytes: &'a [u8]) -> Option<(u32, Self)> {
        whole(bytes, |kind, from| {
            Some(match kind {
                1 => Self::Hello(hello(from)?),
                2 => Self::Lookup(prefixes(from)?),
                3 => Self::Acquire(from.u64()?, prefixes(from)?),
                4 => Self::Poll(from.u64()?),
                5 => Self::Frames(from.u64()?),
                6 => Self::Release(from.u64()?),
                7 => Self::Reserve(ranges(from)?),
                8 => Self::Commit(from.numbers()?),
                9 => Self::Abort(from.numbers()?),
                10 => Self::Discard(Keys::Bytes(from.keys()?)),
                11 => Self::Clear,
                12 => Self::Stats([from.u64()?, from.u64()?]),
                13 => Self::LimitFrames(from.u32()?),
                14 => Self::IsSettled,
                15 => Self::Bye,
                16 => Self::Status(from.u32()?),
                17 => Self::Forget(from.u32()?, from.text()?),
                18 => Self::Anchors(anchors(from)?),
                19 => Self::Changes(sent_changes(from)?),
                20 => Self::LookAgain(prefixes(from)?),
                21 => Self::Evict(from.u32()?, Whose::read(from)?, from.flag()?),
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
            Self::LimitFrames(_) => 13,
            Self::IsSettled => 14,
            Self::Bye => 15,
            Self::Status(_) => 16,
            Self::Forget(..) => 17,
            Self::Anchors(_) => 18,
            Self::Changes(_) => 19,
            Self::LookAgain(_) => 20,
            Self::Evict(..) => 21,
        }
    }

    /// Whether it gets no answer.
    pub fn is_one_way(&self) -> bool {
        matches!(self, Self::Release(_) | Self::Abort(_) | Self::LimitFrames(_) | Self::Bye)
    }
}
