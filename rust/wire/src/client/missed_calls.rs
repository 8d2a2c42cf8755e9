//! Calls that got no answer before the deadline: how many, and when a person is logged. It must not know what was asked.

use std::time::{Duration, Instant};

/// Between two lines about it.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Counts them, and the chunks that were not saved for it. The first is logged at once, then at most once a minute how many more
/// there were.
#[derive(Debug, Default)]
pub(crate) struct MissedCalls {
    num: u64,
    num_chunks: u64,
    num_logged: u64,
    num_chunks_logged: u64,
    logged: Option<Instant>,
    /// Calls and chunks of which the server knows.
    reported: [u64; 2],
}

impl MissedCalls {
    /// One call more.
    pub(crate) fn add_call(&mut self) {
        self.num += 1;
    }

    /// So many chunks more have no frame, for their reservation got no answer.
    pub(crate) fn add_unsaved_chunks(&mut self, num: u64) {
        self.num_chunks += num;
    }

    /// Calls so far.
    pub(crate) fn num(&self) -> u64 {
        self.num
    }

    /// Chunks so far.
    pub(crate) fn num_chunks(&self) -> u64 {
        self.num_chunks
    }

    /// Calls and chunks since the last time, for the server, which cannot count them.
    pub(crate) fn take_new(&mut self) -> [u64; 2] {
        let reported = std::mem::replace(&mut self.reported, [self.num, self.num_chunks]);
        [self.num - reported[0], self.num_chunks - reported[1]]
    }

    /// The line that is due, if there is one; it is logged with that. `at` says where the server is.
    pub(crate) fn log_line(&mut self, now: Instant, at: &str, deadline: Duration) -> Option<String> {
        let num_new = self.num - self.num_logged;
        if num_new == 0 || self.logged.is_some_and(|logged| now.duration_since(logged) < LOG_INTERVAL) {
            return None;
        }
        let more = if self.num_logged > 0 { " more" } else { "" };
        let (calls, were) = if num_new == 1 { ("call", "was a miss") } else { ("calls", "were misses") };
        let num_chunks = self.num_chunks - self.num_chunks_logged;
        let lost = match num_chunks {
            0 => String::new(),
            1 => "; 1 chunk was not saved".to_owned(),
            _ => format!("; {num_chunks} chunks were not saved"),
        };
        (self.num_logged, self.num_chunks_logged, self.logged) = (self.num, self.num_chunks, Some(now));
        Some(format!(
            "{num_new}{more} {calls} got no answer from {at} within {deadline:?} (server_timeout) and {were}{lost}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(missed: &mut MissedCalls, now: Instant) -> Option<String> {
        let line = missed.log_line(now, "the server", Duration::from_millis(5))?;
        line.split(" got no answer from the server within 5ms").next().map(str::to_owned)
    }

    #[test]
    fn the_first_is_told_at_once_and_the_others_once_a_minute() {
        let (mut missed, begin) = (MissedCalls::default(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(logged(&mut missed, begin), None);
        missed.add_call();
        assert_eq!(logged(&mut missed, after(1)).as_deref(), Some("1 call"));
        assert_eq!(logged(&mut missed, after(2)), None);
        (0..3).for_each(|_| missed.add_call());
        assert_eq!(logged(&mut missed, after(60)), None);
        assert_eq!(logged(&mut missed, after(61)).as_deref(), Some("3 more calls"));
        assert_eq!((logged(&mut missed, after(600)), missed.num()), (None, 4));
        missed.add_call();
        missed.add_unsaved_chunks(5);
        let line = missed.log_line(after(601), "the server", Duration::from_millis(5)).expect("due");
        assert!(line.starts_with("1 more call") && line.ends_with("was a miss; 5 chunks were not saved"), "{line}");
        assert_eq!((missed.take_new(), missed.take_new()), ([5, 5], [0, 0]));
    }
}
