//! Many questions in messages of a bounded size, and their answers one by one again. It must not know how they are sent.

use kvloft_core::Result;
use kvloft_core::store::{Prefix, ToSave};

use crate::protocol::{Answer, Keys, MAX_KEYS, SentRange};

/// Keys in a message, where there are more: the server begins with the first while the next is made.
const AT_ONCE: usize = 1024;

/// As much of a prefix as a server takes.
pub(crate) fn bounded<'a>(prefix: &Prefix<'a>) -> Prefix<'a> {
    Prefix { keys: &prefix.keys[..prefix.keys.len().min(MAX_KEYS)], ..*prefix }
}

/// None where there are more keys than a server takes.
pub(crate) fn sent_range<'a>(asked: &ToSave<'a>, per_chunk: u32) -> Result<Option<SentRange<'a>>> {
    let ToSave { prefix, range, is_attached } = *asked;
    range.check(&prefix, per_chunk)?;
    // The parent of the first chunk is the last that has to be known of what comes before.
    let first = (range.start * per_chunk).saturating_sub(1);
    let end = (range.stop * per_chunk + range.tail_blocks) as usize;
    // Of what is kept alone, the key of what it is kept beside may come behind the range's.
    let end = if is_attached { prefix.keys.len().min(end + 1) } else { end };
    let keys = Keys::Own(&prefix.keys[(first as usize).min(end)..end]);
    Ok((end <= MAX_KEYS).then_some(SentRange { root: prefix.root, first, keys, range, is_attached }))
}

/// What is asked in messages of a bounded size, or of one thing.
pub(crate) fn messages<T>(asked: &[T], num_keys: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let (mut parts, mut start, mut total) = (Vec::new(), 0, 0);
    for (at, one) in asked.iter().enumerate() {
        let num = num_keys(one) + 1; // what has no key is something, too
        if at > start && total + num > AT_ONCE {
            parts.push(&asked[start..at]);
            (start, total) = (at, 0);
        }
        total += num;
    }
    parts.extend(asked.get(start..).filter(|rest| !rest.is_empty()));
    parts
}

/// One answer for each of what was asked in messages: None where theirs is missing.
pub(crate) fn one_by_one<Q, T>(
    parts: &[&[Q]],
    answers: Vec<Option<Answer>>,
    of: impl Fn(Answer) -> Option<Vec<T>>,
) -> impl Iterator<Item = Option<T>> {
    let mut answers = answers.into_iter();
    let each = parts.iter().map(move |part| {
        let found = answers.next().flatten().and_then(&of).filter(|found| found.len() == part.len());
        let missing = if found.is_some() { 0 } else { part.len() };
        found.into_iter().flatten().map(Some).chain((0..missing).map(|_| None))
    });
    each.flatten()
}
