//! The core crate's error type.

use std::fmt;

/// Error kinds for callers to match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is out of range or conflicts with another setting. The message names the setting
    /// and the fix.
    InvalidConfig,
    /// The resource is in use. For example, another process is using the disk directory.
    Busy,
    /// Bytes on disk or in a frame do not match their key.
    Corrupt,
    /// A system call failed (EIO, ENOSPC, EACCES, ...).
    Io,
    /// The object is closed.
    Closed,
}

/// An error: a kind to match on, a one-sentence message for users, and named values for logs.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    source: Option<std::io::Error>,
}

impl Error {
    /// Creates an error. `message` is one sentence that names the setting or file and the fix.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), context: Vec::new(), source: None }
    }

    /// Creates an error for an invalid setting or argument.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidConfig, message)
    }

    /// Creates an error for a failed operation. `message` describes the operation.
    pub fn io(message: impl Into<String>, source: std::io::Error) -> Self {
        Self { source: Some(source), ..Self::new(ErrorKind::Io, message) }
    }

    /// Adds a named value for logs.
    #[must_use]
    pub fn with_context(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((name, value.to_string()));
        self
    }

    /// Returns the kind to match on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns true if the error is a timeout.
    pub fn is_late(&self) -> bool {
        self.source.as_ref().is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut)
    }

    /// Returns true if permission was denied.
    pub fn is_denied(&self) -> bool {
        let denied = std::io::ErrorKind::PermissionDenied;
        self.source.as_ref().is_some_and(|error| error.kind() == denied)
    }

    pub(crate) fn is_no_space(&self) -> bool {
        self.source.as_ref().is_some_and(is_no_space)
    }
}

pub(crate) fn is_no_space(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        for (i, (name, value)) in self.context.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " [" } else { ", " })?;
        }
        if !self.context.is_empty() {
            f.write_str("]")?;
        }
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

/// A result whose error type defaults to [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
