//! Log lines of the store and of a client for the operator.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

/// A log line, and whether it reports a problem. Any other reports that a problem has ended.
#[derive(Debug, Clone)]
pub struct Event {
    text: String,
    is_problem: bool,
}

impl Event {
    /// A problem.
    pub fn problem(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_problem: true }
    }

    /// The end of a problem.
    pub fn recovery(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_problem: false }
    }

    /// Returns true if it reports a problem.
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
