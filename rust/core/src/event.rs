//! Log lines for the operator, reported by the store and by clients.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

/// A log line that reports a problem or a recovery.
#[derive(Debug, Clone)]
pub struct Event {
    text: String,
    is_problem: bool,
}

impl Event {
    /// Creates a line that reports a problem.
    pub fn problem(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_problem: true }
    }

    /// Creates a line that reports a recovery.
    pub fn recovery(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_problem: false }
    }

    /// Returns true if the line reports a problem.
    pub fn is_problem(&self) -> bool {
        self.is_problem
    }
}

impl Deref for Event {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl Borrow<str> for Event {
    fn borrow(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}
