//! Formats sizes for messages and converts durations for counters.

use std::time::Duration;

/// Formats a size with a binary unit and up to two decimals, such as `32 GiB`, `1.50 MiB` or `1000
/// bytes`.
pub fn size_text(bytes: u64) -> String {
    for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        let hundredths = (u128::from(bytes) * 100) >> shift;
        if hundredths >= 100 {
            let (whole, rest) = (hundredths / 100, hundredths % 100);
            return if rest == 0 {
                format!("{whole} {unit}")
            } else {
                format!("{whole}.{rest:02} {unit}")
            };
        }
    }
    format!("{bytes} bytes")
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
