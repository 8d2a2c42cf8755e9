//! Calls that got no answer before the deadline: how many, and when a person is told. It must not know what was asked.

use std::time::{Duration, Instant};

/// Between two lines about it.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Counts them, and the chunks that were not saved for it. The first is logged at once, then at most once a minute how many more
/// there were.
#[derive(Debug, Default)]
pub(crate) struct Late {
    num: u64,
    num_chunks: u64,
    num_told: u64,
    num_chunks_told: u64,
    told: Option<Instant>,
    /// Calls and chunks of which the server knows.
    known: [u64; 2],
}

impl Late {
    /// One call more.
    pub(crate) fn note(&mut self) {
        self.num += 1;
    }

    /// So many chunks more have no frame, for their reservation got no answer.
    pub(crate) fn drop_chunks(&mut self, num: u64) {
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
        let known = std::mem::replace(&mut self.known, [self.num, self.num_chunks]);
        [self.num - known[0], self.num_chunks - known[1]]
    }

    /// The line that is due, if there is one; it is told with that. `at` says where the server is.
    pub(crate) fn line(&mut self, now: Instant, at: &str, deadline: Duration) -> Option<String> {
        let num_new = self.num - self.num_told;
        if num_new == 0 || self.told.is_some_and(|told| now.duration_since(told) < TELL_EVERY) {
            return None;
        }
        let more = if self.num_told > 0 { " more" } else { "" };
        let (calls, were) = if num_new == 1 { ("call", "was a miss") } else { ("calls", "were misses") };
        let num_chunks = self.num_chunks - self.num_chunks_told;
        let lost = match num_chunks {
            0 => String::new(),
            1 => "; 1 chunk was not saved".to_owned(),
            _ => format!("; {num_chunks} chunks were not saved"),
        };
        (self.num_told, self.num_chunks_told, self.told) = (self.num, self.num_chunks, Some(now));
        Some(format!(
            "{num_new}{more} {calls} got no answer from {at} within {deadline:?} (server_timeout) and {were}{lost}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(late: &mut Late, now: Instant) -> Option<String> {
        let line = late.line(now, "the server", Duration::from_millis(5))?;
        line.split(" got no answer from the server within 5ms").next().map(str::to_owned)
    }

    #[test]
    fn the_first_is_told_at_once_and_the_others_once_a_minute() {
        let (mut late, begin) = (Late::default(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(told(&mut late, begin), None);
        late.note();
        assert_eq!(told(&mut late, after(1)).as_deref(), Some("1 call"));
        assert_eq!(told(&mut late, after(2)), None);
        (0..3).for_each(|_| late.note());
        assert_eq!(told(&mut late, after(60)), None);
        assert_eq!(told(&mut late, after(61)).as_deref(), Some("3 more calls"));
        assert_eq!((told(&mut late, after(600)), late.num()), (None, 4));
        late.note();
        late.drop_chunks(5);
        let line = late.line(after(601), "the server", Duration::from_millis(5)).expect("due");
        assert!(line.starts_with("1 more call") && line.ends_with("was a miss; 5 chunks were not saved"), "{line}");
        assert_eq!((late.take_new(), late.take_new()), ([5, 5], [0, 0]));
    }
}
