//! Answers of the server, and their encoding. Must not depend on requests.

use kvloft_core::io::FrameId;
use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation, TierName};

use crate::protocol::changes::{read_changes, write_changes};
use crate::protocol::codec::{Reader, Writer, read_message, write_message};

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Accepts an engine. The arena's and the lifeline's descriptors come with it.
    Welcome {
        /// Bytes of the arena.
        size_bytes: u64,
        /// Bytes of a slab.
        slab_bytes: u64,
    },
    /// Reason of a refusal, in one sentence. The server closes the connection.
    Refused(String),
    /// Result of a lookup, one for each prefix.
    Found(Vec<Lookup>),
    /// Progress of a lease.
    Progress(Progress),
    /// Frames of a lease.
    Frames(Vec<LeasedFrame>),
    /// Reservations of each range, and the number of chunks dropped.
    Reserved(Vec<(Vec<Reservation>, u32)>),
    /// Chunks committed or removed; 1 or 0 for yes or no.
    Count(u64),
    /// Counters of the store.
    Stats(Vec<(String, u64)>),
    /// Result of an admin request, in JSON.
    Admin(Vec<u8>),
    /// Anchors that are stored.
    Anchors(Anchors),
    /// Changes of the store. The first such answer of a connection has `lost` set.
    Changes(Changes),
}

fn read_lookup(from: &mut Reader<'_>) -> Option<Lookup> {
    Some(Lookup { host_units: from.u32()?, stored_units: from.u32()? })
}

fn write_frame(to: &mut Writer<'_>, frame: &LeasedFrame) {
    to.u32(frame.frame.0);
    to.key(&frame.key.0);
    to.u8(u8::from(frame.tier == TierName::Disk));
}

fn read_frame(from: &mut Reader<'_>) -> Option<LeasedFrame> {
    let (frame, key) = (FrameId(from.u32()?), from.chunk_key()?);
    let tier = if from.flag()? { TierName::Disk } else { TierName::Host };
    Some(LeasedFrame { frame, key, tier })
}

fn write_reservation(to: &mut Writer<'_>, row: &Reservation) {
    to.u64(row.ticket);
    to.u32(row.frame.0);
    to.key(&row.key.0);
    to.u32(row.unit);
}

fn read_reservation(from: &mut Reader<'_>) -> Option<Reservation> {
    let (ticket, frame, key) = (from.u64()?, FrameId(from.u32()?), from.chunk_key()?);
    Some(Reservation { ticket, frame, key, unit: from.u32()? })
}

impl Answer {
    /// Appends the answer with its length to `to`.
    pub fn encode(&self, number: u32, to: &mut Vec<u8>) {
        write_message(to, number, self.kind(), |to| match self {
            Self::Welcome { size_bytes, slab_bytes } => {
                to.u64(*size_bytes);
                to.u64(*slab_bytes);
            }
            Self::Refused(text) => to.text(text),
            Self::Found(found) => {
                to.count(found.len());
                for Lookup { host_units, stored_units } in found {
                    to.u32(*host_units);
                    to.u32(*stored_units);
                }
            }
            Self::Progress(Progress { ready_units, pending_units }) => {
                to.u32(*ready_units);
                to.u32(*pending_units);
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
            Self::Stats(stats) => {
                to.count(stats.len());
                for (name, value) in stats {
                    to.text(name);
                    to.u64(*value);
                }
            }
            Self::Admin(json) => to.bytes(json),
            Self::Anchors(Anchors { num_known, num_stored }) => {
                to.u32(*num_known);
                to.u32(*num_stored);
            }
            Self::Changes(changes) => write_changes(to, changes),
        });
    }

    /// Decodes an answer and the number of its request; None if it is malformed.
    pub fn decode(bytes: &[u8]) -> Option<(u32, Self)> {
        read_message(bytes, |kind, from| {
            Some(match kind {
                1 => Self::Welcome { size_bytes: from.u64()?, slab_bytes: from.u64()? },
                2 => Self::Refused(from.text()?),
                3 => Self::Found(from.list(8, read_lookup)?),
                4 => Self::Progress(Progress {
                    ready_units: from.u32()?,
                    pending_units: from.u32()?,
                }),
                5 => Self::Frames(from.list(37, read_frame)?),
                6 => Self::Reserved(from.list(8, |from| {
                    let num_dropped = from.u32()?;
                    Some((from.list(48, read_reservation)?, num_dropped))
                })?),
                7 => Self::Count(from.u64()?),
                8 => Self::Stats(from.list(12, |from| Some((from.text()?, from.u64()?)))?),
                9 => Self::Admin(from.bytes()?.to_vec()),
                10 => Self::Anchors(Anchors { num_known: from.u32()?, num_stored: from.u32()? }),
                11 => Self::Changes(read_changes(from)?),
                _ => return None,
            })
        })
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Welcome { .. } => 1,
            Self::Refused(_) => 2,
            Self::Found(_) => 3,
            Self::Progress(_) => 4,
            Self::Frames(_) => 5,
            Self::Reserved(_) => 6,
            Self::Count(_) => 7,
            Self::Stats(_) => 8,
            Self::Admin(_) => 9,
            Self::Anchors(_) => 10,
            Self::Changes(_) => 11,
        }
    }
}
