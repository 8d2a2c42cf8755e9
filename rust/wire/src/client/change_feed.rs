//! The client's view of the stored chunks, across connections.

use std::time::{Duration, Instant};

use kvloft_core::ChunkKey;
use kvloft_core::store::Changes;

use crate::protocol::{Keys, MAX_CHANGES, SentChanges};

/// Time without an answer after which the chunks reported so far count as lost.
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);

/// Requests the changes of the server's store and turns missing answers into "lost".
#[derive(Debug, Default)]
pub(crate) struct ChangeFeed {
    /// As in `Session::watch`.
    pub(crate) capacity: u32,
    last: FeedState,
}

/// Result of the last request.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum FeedState {
    Answered,
    /// No request has been answered in time since then.
    Late(Instant),
    /// Every chunk reported so far counts as lost.
    #[default]
    Lost,
}

impl ChangeFeed {
    /// Returns the request to send; None if `asked` has more keys than a request may have.
    pub(crate) fn request<'a>(
        &self,
        asked: &'a [ChunkKey],
        limit: usize,
    ) -> Option<SentChanges<'a>> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let sent = SentChanges { capacity: self.capacity, limit, asked: Keys::Own(asked) };
        (asked.len() <= MAX_CHANGES as usize).then_some(sent)
    }

    /// Returns the changes to report for an answer, or for a missing one.
    pub(crate) fn apply(
        &mut self,
        asked: &[ChunkKey],
        answer: Option<Changes>,
        is_connected: bool,
    ) -> Changes {
        let before = self.last;
        if let Some(Changes { rows, lost }) = answer {
            self.last = FeedState::Answered;
            return Changes { rows, lost: lost || before != FeedState::Answered };
        }
        self.last = match before {
            FeedState::Answered if is_connected => FeedState::Late(Instant::now()),
            FeedState::Late(since) if is_connected && since.elapsed() < LOSS_TIMEOUT => before,
            _ => FeedState::Lost,
        };
        if self.last == FeedState::Lost {
            Changes { lost: before != FeedState::Lost, ..Changes::of_none(asked) }
        } else {
            Changes::default() // the caller requests the same keys again
        }
    }
}
