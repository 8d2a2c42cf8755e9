//! Changes of the store in messages: chunks that were added to a tier or removed from it.
//!
//! Each connection has a listener in the store, from its first request on. If an answer is late or
//! the connection is lost, the next answer has `lost` set: earlier reports may be wrong. Must not
//! depend on sockets.

use kvloft_core::store::{Changes, Listener, Store};

use crate::protocol::codec::{Field, Reader, Writer, fields};
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

fields! {
    SentChanges<'a> { capacity, limit, asked }
}

impl SentChanges<'_> {
    /// Returns the changes for `listener`, which the first request creates. None if there are too
    /// many keys.
    pub(crate) fn answer(&self, store: &Store, listener: &mut Option<Listener>) -> Option<Changes> {
        if self.asked.iter().len() > MAX_CHANGES as usize {
            return None;
        }
        let asked: Vec<_> = self.asked.iter().collect();
        let [capacity, limit] =
            [self.capacity, self.limit].map(|number| number.min(MAX_CHANGES) as usize);
        let is_first = listener.is_none();
        let Changes { rows, lost } =
            listener.get_or_insert_with(|| store.watch(capacity)).changes(&asked, limit);
        Some(Changes { rows, lost: lost || is_first })
    }
}

#[cfg(test)]
mod tests;
