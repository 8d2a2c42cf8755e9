//! Times as Python has them.

use std::time::Duration;

/// Converts seconds: negative values and NaN count as 0, huge values as no limit.
pub(crate) fn timeout(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}
