//! Changes of the store in messages: chunks that were added to a tier or removed from it.
//!
//! Each connection has a listener in the store, from its first request on. If an answer is late or
//! the connection is lost, the next answer has `lost` set: earlier reports may be wrong. Must not
//! depend on sockets.

use kvloft_core::ChunkKey;
use kvloft_core::store::{Changes, Listener, Store, Tiers};

use crate::protocol::codec::{Reader, Writer};
use crate::protocol::prefixes::Keys;

/// Maximum number of changes queued for a listener, of keys in a request, and of other rows in an
/// answer.
pub const MAX_CHANGES: u32 = 1 << 16;

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

impl SentChanges<'_> {
    pub(crate) fn write(&self, to: &mut Writer<'_>) {
        to.u32(self.capacity);
        to.u32(self.limit);
        self.asked.write(to);
    }

    /// Returns the changes for `listener`, which the first request creates. None if there are too
    /// many keys.
    pub(crate) fn answer(&self, store: &Store, listener: &mut Option<Listener>) -> Option<Changes> {
        if self.asked.iter().len() > MAX_CHANGES as usize {
            return None;
        }
        let asked: Vec<_> = self.asked.iter().map(|key| ChunkKey(*key)).collect();
        let [capacity, limit] =
            [self.capacity, self.limit].map(|number| number.min(MAX_CHANGES) as usize);
        let is_first = listener.is_none();
        let Changes { rows, lost } =
            listener.get_or_insert_with(|| store.watch(capacity)).changes(&asked, limit);
        Some(Changes { rows, lost: lost || is_first })
    }
}

pub(crate) fn read_sent_changes<'a>(from: &mut Reader<'a>) -> Option<SentChanges<'a>> {
    Some(SentChanges {
        capacity: from.u32()?,
        limit: from.u32()?,
        asked: Keys::Bytes(from.keys()?),
    })
}

pub(crate) fn write_changes(to: &mut Writer<'_>, changes: &Changes) {
    to.u8(changes.lost.into());
    to.count(changes.rows.len());
    for (key, tiers) in &changes.rows {
        to.key(&key.0);
        to.u8(tiers.bits());
    }
}

pub(crate) fn read_changes(from: &mut Reader<'_>) -> Option<Changes> {
    let lost = from.flag()?;
    let rows = from.list(33, |from| Some((from.chunk_key()?, Tiers::of_bits(from.u8()?)?)))?;
    Some(Changes { rows, lost })
}

#[cfg(test)]
mod tests;
