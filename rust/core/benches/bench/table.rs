//! Timing and table output shared by all sections.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The times of one measurement, in ascending order.
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn new(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }

    /// Returns a quantile of the times in seconds: 0 is the minimum, 0.5 the median and 1 the
    /// maximum.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let last = self.0.len() - 1;
        let at = (0..last).find(|&at| at as f64 >= share * last as f64).unwrap_or(last);
        self.0[at].as_secs_f64()
    }

    pub(crate) fn min(&self) -> f64 {
        self.quantile(0.0)
    }
}

/// Times two functions, alternating between them.
pub(crate) fn in_turns<A, B>(
    turns: usize,
    mut one: impl FnMut() -> A,
    mut two: impl FnMut() -> B,
) -> [Times; 2] {
    let (mut ones, mut twos) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        let start = Instant::now();
        black_box(one());
        let middle = Instant::now();
        black_box(two());
        ones.push(middle - start);
        twos.push(middle.elapsed());
    }
    [Times::new(ones), Times::new(twos)]
}

pub(crate) fn title(text: &str) {
    println!("\n== {text}");
}

pub(crate) fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}
