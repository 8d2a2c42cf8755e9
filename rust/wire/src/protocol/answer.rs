//! What the server says, and how it crosses: see `protocol`. It must not know what was asked.

use kvloft_core::io::FrameId;
use kvloft_core::store::{Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation, TierName};

use crate::protocol::admin::GivenUp;
use crate::protocol::changes::{changes, write_changes};
use crate::protocol::codec::{Reader, Writer, message, whole};
use crate::protocol::status::{Status, stats, status, write_stats, write_status};

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
        }
    }
}
