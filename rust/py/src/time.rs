//! Times as Python has them, and the calendar's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Converts seconds: negative values and NaN count as 0, huge values as no limit.
pub(crate) fn timeout(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
