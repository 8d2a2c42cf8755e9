//! Chunks that come and go, as they cross: an engine asks now and then, and what it hears of a store that many use is what its own
//! would say.
//!
//! Each connection has a listener of its own in the store, from its first question on. An answer that comes too late is not taken
//! in, and a connection that ends takes its listener with it: then the next answer says that whatever was told may be wrong. A
//! server that pauses for a moment is not believed to be gone. It must not know sockets.

use std::time::{Duration, Instant};

use kvloft_core::ChunkKey;
use kvloft_core::store::{Changes, Listener, Store, Tiers};

use crate::protocol::codec::{Reader, Writer};
use crate::protocol::prefixes::Keys;

/// Most keys that wait for a listener, that are asked for at once, and that are told beside those.
pub const MAX_CHANGES: u32 = 1 << 16;

/// How long a server that does not answer is believed to have what it had.
const PATIENCE: Duration = Duration::from_secs(1);

/// What is asked of chunks that come and go.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentChanges<'a> {
    /// As of `Session::watch`.
    pub capacity: u32,
    /// Most rows beside those asked for.
    pub limit: u32,
    /// Keys of chunks.
    pub asked: Keys<'a>,
}

impl SentChanges<'_> {
    pub(crate) fn write(&self, to: &mut Writer<'_>) {
        to.u32(self.capacity);
        to.u32(self.limit);
        self.asked.write(to);
    }

    /// As `store` says to `listener`, which begins with the first question. None for more keys than may be asked for.
    pub(crate) fn answer(&self, store: &Store, listener: &mut Option<Listener>) -> Option<Changes> {
        if self.asked.iter().len() > MAX_CHANGES as usize {
            return None;
        }
        let asked: Vec<_> = self.asked.iter().map(|key| ChunkKey(*key)).collect();
        let [capacity, limit] = [self.capacity, self.limit].map(|number| number.min(MAX_CHANGES) as usize);
        let is_first = listener.is_none();
        let Changes { rows, lost } = listener.get_or_insert_with(|| store.watch(capacity)).changes(&asked, limit);
        Some(Changes { rows, lost: lost || is_first })
    }
}

pub(crate) fn sent_changes<'a>(from: &mut Reader<'a>) -> Option<SentChanges<'a>> {
    Some(SentChanges { capacity: from.u32()?, limit: from.u32()?, asked: Keys::Bytes(from.keys()?) })
}

pub(crate) fn write_changes(to: &mut Writer<'_>, changes: &Changes) {
    to.u8(changes.lost.into());
    to.count(changes.rows.len());
    for (key, tiers) in &changes.rows {
        to.key(&key.0);
        to.u8(tiers.bits());
    }
}

pub(crate) fn changes(from: &mut Reader<'_>) -> Option<Changes> {
    let lost = from.flag()?;
    let rows = from.list(33, |from| Some((from.chunk_key()?, Tiers::of_bits(from.u8()?)?)))?;
    Some(Changes { rows, lost })
}

/// What an engine hears, from one connection to the next.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    /// As of `Session::watch`.
    pub(crate) capacity: u32,
    last: Last,
}

/// What became of the last question.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum Last {
    Answered,
    /// It, and those before it since then, had no answer in time.
    Late(Instant),
    /// Nothing that was told is there.
    #[default]
    Gone,
}

impl Hearing {
    /// None where there are more keys than may be asked for.
    pub(crate) fn question<'a>(&self, asked: &'a [ChunkKey], limit: usize) -> Option<SentChanges<'a>> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let sent = SentChanges { capacity: self.capacity, limit, asked: Keys::Own(asked) };
        (asked.len() <= MAX_CHANGES as usize).then_some(sent)
    }

    /// What follows from the answer; or from none, of a server that is there or not.
    pub(crate) fn hear(&mut self, asked: &[ChunkKey], answer: Option<Changes>, is_there: bool) -> Changes {
        let before = self.last;
        if let Some(Changes { rows, lost }) = answer {
            self.last = Last::Answered;
            return Changes { rows, lost: lost || before != Last::Answered };
        }
        self.last = match before {
            Last::Answered if is_there => Last::Late(Instant::now()),
            Last::Late(since) if is_there && since.elapsed() < PATIENCE => before,
            _ => Last::Gone,
        };
        if self.last == Last::Gone {
            Changes { lost: before != Last::Gone, ..Changes::of_none(asked) }
        } else {
            Changes::default() // all is asked for again once there is an answer
        }
    }
}

#[cfg(test)]
mod tests {
    use kvloft_core::evict::Eviction;
    use kvloft_core::key::KeyChain;
    use kvloft_core::store::{SaveRange, StoreConfig, TenantLimits};

    use super::*;

    fn store() -> Store {
        let config = StoreConfig {
            frame_bytes: 4096,
            host_bytes: 2 * 4096,
            blocks_per_chunk: 1,
            eviction: Eviction::Lru,
            available_bytes: None,
            namespace: [7; 32],
            disk: None,
            now_s: 0,
            limits: TenantLimits::default(),
        };
        Store::open(&config).expect("a store")
    }

    #[test]
    fn a_listener_cannot_make_the_queue_longer_than_its_bound() {
        let (store, mut listener) = (store(), None);
        let sent = SentChanges { capacity: 8 * MAX_CHANGES, limit: 1, asked: Keys::Own(&[]) };
        let mut is_lost = || sent.answer(&store, &mut listener).expect("few keys").lost;
        assert!(is_lost(), "the first answer: everything may have changed");
        assert!(!is_lost());
        for token in 0..=MAX_CHANGES {
            let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
            chain.append_tokens(&[token]).expect("tokens");
            let range = SaveRange { start: 0, stop: 1, tail_blocks: 0 };
            let reserved = store.reserve(&chain, range).expect("in range");
            assert_eq!(store.commit(reserved.leases), 1);
        }
        assert!(is_lost(), "more keys than the bound were queued");
    }
}
