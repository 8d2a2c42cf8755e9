//! The error type of the core: a kind, a message and context. Independent of Python.

use std::fmt;

/// Kinds of errors that a caller can match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is out of range or contradicts another; the message names it and the fix.
    InvalidConfig,
    /// Another owner has the resource (a second opener of a disk directory).
    Busy,
    /// Bytes on disk or in a frame do not match their key.
    Corrupt,
    /// The operating system refused (EIO, ENOSPC, EACCES, ...).
    Io,
    /// The object was closed.
    Closed,
}

/// A kind to match on, one sentence for users, and named context for logs.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    source: Option<std::io::Error>,
}

impl Error {
    /// Creates an error of `kind`; `message` is one sentence that names the setting or file and the
    /// fix.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), context: Vec::new(), source: None }
    }

    /// A setting or an argument that can never work.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidConfig, message)
    }

    /// An I/O error with the operation that failed.
    pub fn io(message: impl Into<String>, source: std::io::Error) -> Self {
        Self { source: Some(source), ..Self::new(ErrorKind::Io, message) }
    }

    /// Adds a named value for logs.
    #[must_use]
    pub fn with_context(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((name, value.to_string()));
        self
    }

    /// The kind to match on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns whether an answer did not arrive in time.
    pub fn is_late(&self) -> bool {
        self.source.as_ref().is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut)
    }

    /// Returns whether this user lacks a permission.
    pub fn is_denied(&self) -> bool {
        let denied = std::io::ErrorKind::PermissionDenied;
        self.source.as_ref().is_some_and(|error| error.kind() == denied)
    }

    pub(crate) fn is_no_space(&self) -> bool {
        self.source.as_ref().is_some_and(is_no_space)
    }
}

/// Returns true if an I/O error means a lack of space.
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

/// Shorthand used throughout the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;
