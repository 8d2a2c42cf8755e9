//! Splits requests into messages of bounded size and joins their answers. Must not depend on
//! sockets.

use kvloft_core::Result;
use kvloft_core::store::{Prefix, SaveRequest};

use crate::protocol::{Answer, Keys, MAX_KEYS, SentRange};

/// Maximum number of keys in a message with several items: the server handles one message while the
/// client encodes the next.
const KEYS_PER_MESSAGE: usize = 1024;

/// Truncates a prefix to the number of keys that a server accepts.
pub(crate) fn clamp_prefix<'a>(prefix: &Prefix<'a>) -> Prefix<'a> {
    Prefix { keys: &prefix.keys[..prefix.keys.len().min(MAX_KEYS)], ..*prefix }
}

/// Returns the range to send; None if it has more keys than a server accepts.
pub(crate) fn sent_range<'a>(asked: &SaveRequest<'a>) -> Result<Option<SentRange<'a>>> {
    asked.check()?;
    let SaveRequest { prefix, units, class, is_attached } = asked.clone();
    // Of the keys before the range only the parent of the first chunk is needed.
    let first = units.start.saturating_sub(1);
    // The key that an attached chunk belongs to may follow the range.
    let end = prefix.num_units().min(units.end.saturating_add(is_attached.into()));
    let at = |unit: u32| unit.saturating_sub(prefix.first) as usize;
    let (root, keys) = (prefix.root, Keys::Own(&prefix.keys[at(first.min(end))..at(end)]));
    let range = SentRange { root, first, keys, units, class, is_attached };
    Ok((end as usize <= MAX_KEYS).then_some(range))
}

/// Splits items into messages of at most `KEYS_PER_MESSAGE` keys, or of one item each.
pub(crate) fn split_batches<T>(asked: &[T], num_keys: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let (mut parts, mut start, mut total) = (Vec::new(), 0, 0);
    for (at, one) in asked.iter().enumerate() {
        let num = num_keys(one) + 1; // an item without keys counts, too
        if at > start && total + num > KEYS_PER_MESSAGE {
            parts.push(&asked[start..at]);
            (start, total) = (at, 0);
        }
        total += num;
    }
    parts.extend(asked.get(start..).filter(|rest| !rest.is_empty()));
    parts
}

/// Returns one answer for each item of each message; None for every item of a message without one.
pub(crate) fn join_answers<Q, T>(
    parts: &[&[Q]],
    answers: Vec<Option<Answer>>,
    of: impl Fn(Answer) -> Option<Vec<T>>,
) -> impl Iterator<Item = Option<T>> {
    let mut answers = answers.into_iter();
    let each = parts.iter().map(move |part| {
        let found =
            answers.next().flatten().and_then(&of).filter(|found| found.len() == part.len());
        let missing = if found.is_some() { 0 } else { part.len() };
        found.into_iter().flatten().map(Some).chain((0..missing).map(|_| None))
    });
    each.flatten()
}
