//! Counts calls that got no response by their deadline, and decides when to log missed calls.

use std::time::{Duration, Instant};

/// Minimum interval between log lines about missed calls.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Counts missed calls and the chunks whose saves they delayed. The first missed call is logged
/// immediately; later missed calls are logged at most once per [`LOG_INTERVAL`].
#[derive(Debug, Default)]
pub(crate) struct MissedCalls {
    pub(crate) num: u64,
    /// Number of chunks that got no frame because their reservation timed out. The engine retries
    /// the reservation in the next step, and each attempt is counted.
    pub(crate) num_chunks: u64,
    num_logged: u64,
    num_chunks_logged: u64,
    last_logged: Option<Instant>,
    /// Numbers of missed calls and delayed chunks already reported to the server.
    reported: [u64; 2],
}

impl MissedCalls {
    /// Returns the numbers of missed calls and delayed chunks since this method was last called.
    /// The client sends both to the server, which adds them to its counters.
    pub(crate) fn take_new(&mut self) -> [u64; 2] {
        let reported = std::mem::replace(&mut self.reported, [self.num, self.num_chunks]);
        [self.num - reported[0], self.num_chunks - reported[1]]
    }

    /// Returns the next line to log and marks it as logged. Returns None if no line is due.
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
        let (calls, were) = if num_new == 1 {
            ("call", "was treated as a miss")
        } else {
            ("calls", "were treated as misses")
        };
        let num_chunks = self.num_chunks - self.num_chunks_logged;
        let delayed = match num_chunks {
            0 => String::new(),
            1 => "; retrying the save of 1 chunk".to_owned(),
            _ => format!("; retrying the saves of {num_chunks} chunks"),
        };
        (self.num_logged, self.num_chunks_logged, self.last_logged) =
            (self.num, self.num_chunks, Some(now));
        Some(format!(
            "{num_new}{more} {calls} to {server} timed out (server_timeout = {deadline:?}) and \
             {were}{delayed}"
        ))
    }
}

#[cfg(test)]
mod tests;
