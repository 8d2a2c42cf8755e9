//! Counts calls without an answer before their deadline, and decides when to log them.

use std::time::{Duration, Instant};

/// Least time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Counters of missed calls and of the chunks not saved because of them. The first missed call is
/// logged at once, later ones as a sum once per [`LOG_INTERVAL`].
#[derive(Debug, Default)]
pub(crate) struct MissedCalls {
    num: u64,
    num_chunks: u64,
    num_logged: u64,
    num_chunks_logged: u64,
    last_logged: Option<Instant>,
    /// Calls and chunks that the server has counted.
    reported: [u64; 2],
}

impl MissedCalls {
    pub(crate) fn add_call(&mut self) {
        self.num += 1;
    }

    /// Adds chunks that have no frame because their reservation got no answer.
    pub(crate) fn add_unsaved_chunks(&mut self, num: u64) {
        self.num_chunks += num;
    }

    pub(crate) fn num(&self) -> u64 {
        self.num
    }

    pub(crate) fn num_chunks(&self) -> u64 {
        self.num_chunks
    }

    /// Returns calls and chunks since the last call of this function, for the server's counters.
    pub(crate) fn take_new(&mut self) -> [u64; 2] {
        let reported = std::mem::replace(&mut self.reported, [self.num, self.num_chunks]);
        [self.num - reported[0], self.num_chunks - reported[1]]
    }

    /// Returns the line to log now, if any, and marks it as logged.
    pub(crate) fn log_line(
        &mut self,
        now: Instant,
        server: &str,
        deadline: Duration,
    ) -> Option<String> {
        let num_new = self.num - self.num_logged;
        if num_new == 0
            || self.last_logged.is_some_and(|logged| now.duration_since(logged) < LOG_INTERVAL)
        {
            return None;
        }
        let more = if self.num_logged > 0 { " more" } else { "" };
        let (calls, were) =
            if num_new == 1 { ("call", "was a miss") } else { ("calls", "were misses") };
        let num_chunks = self.num_chunks - self.num_chunks_logged;
        let lost = match num_chunks {
            0 => String::new(),
            1 => "; 1 chunk was not saved".to_owned(),
            _ => format!("; {num_chunks} chunks were not saved"),
        };
        (self.num_logged, self.num_chunks_logged, self.last_logged) =
            (self.num, self.num_chunks, Some(now));
        Some(format!(
            "{num_new}{more} {calls} got no answer from {server} within {deadline:?} (server_timeout) and {were}{lost}"
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
    fn first_missed_call_is_logged_at_once_and_later_ones_once_a_minute() {
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
        let line =
            missed.log_line(after(601), "the server", Duration::from_millis(5)).expect("due");
        assert!(
            line.starts_with("1 more call")
                && line.ends_with("was a miss; 5 chunks were not saved"),
            "{line}"
        );
        assert_eq!((missed.take_new(), missed.take_new()), ([5, 5], [0, 0]));
    }
}
