//! Calls that got no answer before the deadline: how many, and when a person is told. It must not know what was asked.

use std::time::{Duration, Instant};

/// Between two lines about it.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Counts them. The first is told as soon as somebody listens, then at most once a minute how many more there were.
#[derive(Debug, Default)]
pub(crate) struct Late {
    num: u64,
    num_told: u64,
    told: Option<Instant>,
}

impl Late {
    /// One call more.
    pub(crate) fn note(&mut self) {
        self.num += 1;
    }

    /// Calls so far.
    pub(crate) fn num(&self) -> u64 {
        self.num
    }

    /// The line that is due, if there is one; it is told with that. `at` says where the server is.
    pub(crate) fn line(&mut self, now: Instant, at: &str, deadline: Duration) -> Option<String> {
        let num_new = self.num - self.num_told;
        if num_new == 0 || self.told.is_some_and(|told| now.duration_since(told) < TELL_EVERY) {
            return None;
        }
        let more = if self.num_told > 0 { " more" } else { "" };
        let (calls, were) = if num_new == 1 { ("call", "was a miss") } else { ("calls", "were misses") };
        (self.num_told, self.told) = (self.num, Some(now));
        Some(format!(
            "{num_new}{more} {calls} got no answer from {at} within {deadline:?} (server_timeout), and {were}; \
             server_late counts them"
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
        assert_eq!(told(&mut late, after(601)).as_deref(), Some("1 more call"));
    }
}
