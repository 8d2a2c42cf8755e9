//! What crosses the socket: length (u32), then one message. Little endian, by hand, so that it is small and every byte is checked.
//!
//! A request is `u32 number, u8 kind, fields`; each but the one-way kinds gets one answer `u32 number, u8 kind, fields`, in order.
//! A first request says the version: any other is refused. A prefix is sent without what the last one had of it, because a key
//! stands for its whole prefix; those behind it in the same message are sent whole. Before a long one that is new, anchors are asked
//! about: see `known`.

use kvloft_core::io::FrameId;
use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation, Tenant, TierName};

use crate::bytes::{Reader, Writer};
pub use crate::known::SentAnchors;
use crate::known::anchors;
pub use crate::listening::{MAX_CHANGES, SentChanges};
use crate::listening::{changes, sent_changes, write_changes};
use crate::orders::{GivenUp, Pinned, Whose};
pub use crate::prefixes::{Keys, MAX_KEYS, MAX_PREFIXES, SentPrefixes, SentRange};
use crate::prefixes::{prefixes, ranges, write_ranges};
use crate::tally::Counts;
use crate::tenants::{tenant, write_tenant};

/// Version of all that crosses; two sides with different ones do not talk.
pub const VERSION: u32 = 6;
/// Most bytes of a message, and of one from somebody who has not said hello.
pub const MAX_MESSAGE: usize = 64 << 20;
/// See [`MAX_MESSAGE`].
pub const MAX_HELLO: usize = 64 << 10;
/// Bytes before each message.
pub const LENGTH_BYTES: usize = 4;

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
    /// See `Session::stats`.
    Stats,
    /// One-way. See `Session::limit_frames`.
    LimitFrames(u32),
    /// Whether a flush would be done at once.
    IsSettled,
    /// One-way: the engine ends in order, so nothing of it writes to frames any more.
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
    /// A person keeps chunks from eviction, or no more; the version as above.
    Pin(u32, Whose, bool),
}

/// What the server says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The arena's descriptor comes with it: number of frames.
    Welcome(u32),
    /// One sentence; the connection ends.
    Refused(String),
    /// Of a lookup, of each prefix.
    Found(Vec<Lookup>),
    /// Of a lease, taken or polled.
    Progress(Progress),
    /// Of a lease.
    Frames(Vec<LeasedFrame>),
    /// Of each range what was reserved, and how many chunks could not be had.
    Reserved(Vec<(Vec<Reservation>, u32)>),
    /// Chunks that became visible, or were forgotten; 1 or 0 for yes or no.
    Count(u64),
    /// Of the store.
    Stats(Vec<(String, u64)>),
    /// Of the server.
    Status(Status),
    /// Of a prefix.
    Anchors(Anchors),
    /// Of the store; the first of a connection says that what was told before may be wrong.
    Changes(Changes),
    /// Of an eviction.
    GivenUp(GivenUp),
    /// Of a pin.
    Pinned(Pinned),
}

/// What a server does now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Bytes of the arena; 0 before the first engine.
    pub host_bytes: u64,
    /// Bytes of its slabs; the last one is longer.
    pub slab_bytes: u64,
    /// Of the server, over all namespaces.
    pub stats: Vec<(String, u64)>,
    /// What it was started with, for people.
    pub settings: Vec<(String, String)>,
    /// Open now, in the order of their names.
    pub namespaces: Vec<NamespaceStatus>,
}

impl Status {
    /// All that are connected.
    pub fn engines(&self) -> impl Iterator<Item = &EngineStatus> {
        self.namespaces.iter().flat_map(|space| &space.engines)
    }
}

/// One namespace of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamespaceStatus {
    /// Whose KV it is.
    pub namespace: [u8; 32],
    /// One line about it.
    pub description: String,
    /// Bytes of one frame.
    pub frame_bytes: u64,
    /// Slabs of the arena that it has.
    pub num_slabs: u32,
    /// Of its store.
    pub stats: Vec<(String, u64)>,
    /// Salts that have most, what has none among them; their tags do not tell them.
    pub tenants: Vec<Tenant>,
    /// Connected now.
    pub engines: Vec<EngineStatus>,
}

/// One connected engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStatus {
    /// Its process, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// Milliseconds since it said hello.
    pub connected_ms: u64,
    /// Reservations that it holds.
    pub num_reserved: u64,
    /// Read leases that it holds.
    pub num_leases: u64,
    /// What it asked for and got.
    pub counts: Counts,
}

/// Begins a message at the end of `to`; `finish` writes its length.
fn message(to: &mut Vec<u8>, number: u32, kind: u8, fields: impl FnOnce(&mut Writer<'_>)) {
    let start = to.len();
    let mut writer = Writer(to);
    writer.u32(0);
    writer.u32(number);
    writer.u8(kind);
    fields(&mut writer);
    let num_bytes = u32::try_from(to.len() - start - LENGTH_BYTES).unwrap_or(u32::MAX);
    to[start..start + LENGTH_BYTES].copy_from_slice(&num_bytes.to_le_bytes());
}

/// The whole of `bytes`, or nothing.
fn whole<'a, T>(bytes: &'a [u8], read: impl FnOnce(u8, &mut Reader<'a>) -> Option<T>) -> Option<(u32, T)> {
    let mut reader = Reader(bytes);
    let (number, kind) = (reader.u32()?, reader.u8()?);
    let value = read(kind, &mut reader)?;
    reader.0.is_empty().then_some((number, value))
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
            Self::Lookup(prefixes) => prefixes.write(to),
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
            Self::Evict(version, whose, is_so) | Self::Pin(version, whose, is_so) => {
                to.u32(*version);
                whose.write(to);
                to.u8((*is_so).into());
            }
            Self::Clear | Self::Stats | Self::IsSettled | Self::Bye => {}
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
                12 => Self::Stats,
                13 => Self::LimitFrames(from.u32()?),
                14 => Self::IsSettled,
                15 => Self::Bye,
                16 => Self::Status(from.u32()?),
                17 => Self::Forget(from.u32()?, from.text()?),
                18 => Self::Anchors(anchors(from)?),
                19 => Self::Changes(sent_changes(from)?),
                21 => Self::Evict(from.u32()?, Whose::read(from)?, from.flag()?),
                22 => Self::Pin(from.u32()?, Whose::read(from)?, from.flag()?),
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
            Self::Stats => 12,
            Self::LimitFrames(_) => 13,
            Self::IsSettled => 14,
            Self::Bye => 15,
            Self::Status(_) => 16,
            Self::Forget(..) => 17,
            Self::Anchors(_) => 18,
            Self::Changes(_) => 19,
            Self::Evict(..) => 21,
            Self::Pin(..) => 22,
        }
    }

    /// Whether it gets no answer.
    pub fn is_one_way(&self) -> bool {
        matches!(self, Self::Release(_) | Self::Abort(_) | Self::LimitFrames(_) | Self::Bye)
    }
}

fn lookup(from: &mut Reader<'_>) -> Option<Lookup> {
    Some(Lookup { host_blocks: from.u32()?, stored_blocks: from.u32()? })
}

fn write_frame(to: &mut Writer<'_>, frame: &LeasedFrame) {
    to.u32(frame.frame.0);
    to.key(&frame.key.0);
    to.u32(frame.first_block);
    to.u32(frame.num_blocks);
    to.u8(u8::from(frame.tier == TierName::Disk));
}

fn frame(from: &mut Reader<'_>) -> Option<LeasedFrame> {
    let (frame, key) = (FrameId(from.u32()?), from.chunk_key()?);
    let (first_block, num_blocks) = (from.u32()?, from.u32()?);
    let tier = if from.flag()? { TierName::Disk } else { TierName::Host };
    Some(LeasedFrame { frame, key, first_block, num_blocks, tier })
}

fn write_reservation(to: &mut Writer<'_>, row: &Reservation) {
    to.u64(row.ticket);
    to.u32(row.frame.0);
    to.key(&row.key.0);
    to.u32(row.first_block);
    to.u32(row.num_blocks);
}

fn reservation(from: &mut Reader<'_>) -> Option<Reservation> {
    let (ticket, frame, key) = (from.u64()?, FrameId(from.u32()?), from.chunk_key()?);
    Some(Reservation { ticket, frame, key, first_block: from.u32()?, num_blocks: from.u32()? })
}

fn write_stats(to: &mut Writer<'_>, stats: &[(String, u64)]) {
    to.count(stats.len());
    for (name, value) in stats {
        to.text(name);
        to.u64(*value);
    }
}

fn stats(from: &mut Reader<'_>) -> Option<Vec<(String, u64)>> {
    from.list(12, |from| Some((from.text()?, from.u64()?)))
}

fn write_status(to: &mut Writer<'_>, status: &Status) {
    to.u64(status.host_bytes);
    to.u64(status.slab_bytes);
    write_stats(to, &status.stats);
    to.count(status.settings.len());
    for (name, value) in &status.settings {
        to.text(name);
        to.text(value);
    }
    to.count(status.namespaces.len());
    for space in &status.namespaces {
        to.key(&space.namespace);
        to.text(&space.description);
        to.u64(space.frame_bytes);
        to.u32(space.num_slabs);
        write_stats(to, &space.stats);
        to.count(space.tenants.len());
        space.tenants.iter().for_each(|tenant| write_tenant(to, tenant));
        to.count(space.engines.len());
        for engine in &space.engines {
            to.u32(engine.pid);
            for number in [engine.connected_ms, engine.num_reserved, engine.num_leases].iter().chain(&engine.counts.0) {
                to.u64(*number);
            }
        }
    }
}

fn status(from: &mut Reader<'_>) -> Option<Status> {
    let (host_bytes, slab_bytes, stats) = (from.u64()?, from.u64()?, stats(from)?);
    let settings = from.list(8, |from| Some((from.text()?, from.text()?)))?;
    Some(Status { host_bytes, slab_bytes, stats, settings, namespaces: from.list(60, namespace_status)? })
}

fn namespace_status(from: &mut Reader<'_>) -> Option<NamespaceStatus> {
    let (namespace, description) = (from.key()?, from.text()?);
    let (frame_bytes, num_slabs, stats) = (from.u64()?, from.u32()?, stats(from)?);
    let tenants = from.list(21, tenant)?;
    let engines = from.list(68, |from| {
        let (pid, connected_ms, num_reserved, num_leases) = (from.u32()?, from.u64()?, from.u64()?, from.u64()?);
        let mut counts = Counts::default();
        for number in &mut counts.0 {
            *number = from.u64()?;
        }
        Some(EngineStatus { pid, connected_ms, num_reserved, num_leases, counts })
    })?;
    Some(NamespaceStatus { namespace, description, frame_bytes, num_slabs, stats, tenants, engines })
}

impl Answer {
    /// Appends it to `to`, with its length.
    pub fn encode(&self, number: u32, to: &mut Vec<u8>) {
        message(to, number, self.kind(), |to| match self {
            Self::Welcome(num_frames) => to.u32(*num_frames),
            Self::Refused(text) => to.text(text),
            Self::Found(found) => {
                to.count(found.len());
                for Lookup { host_blocks, stored_blocks } in found {
                    to.u32(*host_blocks);
                    to.u32(*stored_blocks);
                }
            }
            Self::Progress(Progress { ready_blocks, pending_blocks }) => {
                to.u32(*ready_blocks);
                to.u32(*pending_blocks);
            }
            Self::Frames(frames) => {
                to.count(frames.len());
                for frame in frames {
                    write_frame(to, frame);
                }
            }
            Self::Reserved(ranges) => {
                to.count(ranges.len());
                for (rows, num_dropped) in ranges {
                    to.u32(*num_dropped);
                    to.count(rows.len());
                    for row in rows {
                        write_reservation(to, row);
                    }
                }
            }
            Self::Count(number) => to.u64(*number),
            Self::Stats(stats) => write_stats(to, stats),
            Self::Status(status) => write_status(to, status),
            Self::Anchors(Anchors { num_known, num_stored }) => {
                to.u32(*num_known);
                to.u32(*num_stored);
            }
            Self::Changes(changes) => write_changes(to, changes),
            Self::GivenUp(given_up) => given_up.write(to),
            Self::Pinned(pinned) => pinned.write(to),
        });
    }

    /// The number of the request, and the answer; None for what is none.
    pub fn decode(bytes: &[u8]) -> Option<(u32, Self)> {
        whole(bytes, |kind, from| {
            Some(match kind {
                1 => Self::Welcome(from.u32()?),
                2 => Self::Refused(from.text()?),
                3 => Self::Found(from.list(8, lookup)?),
                4 => Self::Progress(Progress { ready_blocks: from.u32()?, pending_blocks: from.u32()? }),
                5 => Self::Frames(from.list(45, frame)?),
                6 => Self::Reserved(from.list(8, |from| {
                    let num_dropped = from.u32()?;
                    Some((from.list(52, reservation)?, num_dropped))
                })?),
                7 => Self::Count(from.u64()?),
                8 => Self::Stats(stats(from)?),
                9 => Self::Status(status(from)?),
                10 => Self::Anchors(Anchors { num_known: from.u32()?, num_stored: from.u32()? }),
                11 => Self::Changes(changes(from)?),
                12 => Self::GivenUp(GivenUp::read(from)?),
                13 => Self::Pinned(Pinned::read(from)?),
                _ => return None,
            })
        })
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Welcome(_) => 1,
            Self::Refused(_) => 2,
            Self::Found(_) => 3,
            Self::Progress(_) => 4,
            Self::Frames(_) => 5,
            Self::Reserved(_) => 6,
            Self::Count(_) => 7,
            Self::Stats(_) => 8,
            Self::Status(_) => 9,
            Self::Anchors(_) => 10,
            Self::Changes(_) => 11,
            Self::GivenUp(_) => 12,
            Self::Pinned(_) => 13,
        }
    }
}
