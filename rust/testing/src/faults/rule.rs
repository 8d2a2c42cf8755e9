//! Fault rules, which specify the calls that a fault affects and how it affects them. This module
//! does not access files.

/// Input/output error.
pub const EIO: i32 = 5;
/// No space left on device.
pub const ENOSPC: i32 = 28;
/// Read-only file system.
pub const EROFS: i32 = 30;
/// The file system does not support the operation.
pub const EOPNOTSUPP: i32 = 95;

/// Kinds of file calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// Opening a file.
    Open,
    /// Reading bytes.
    Read,
    /// Writing bytes.
    Write,
    /// Extending a file with a hole.
    SetLen,
    /// Allocating blocks, either at the end of a file or in a hole.
    Allocate,
    /// Freeing blocks.
    Punch,
}

/// All calls that change a file.
pub const CHANGES: &[Call] = &[Call::Write, Call::SetLen, Call::Allocate, Call::Punch];

/// A fault's effect on a call.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// The call fails with this error number.
    Refuse(i32),
    /// The call blocks until `release` or `heal`, and then succeeds.
    Hang,
    /// The call transfers at most this many bytes.
    Short(usize),
    /// Only this many bytes are written. The call then fails with the error number, or succeeds if
    /// there is none.
    Torn(usize, Option<i32>),
    /// A change is reported as successful but has no effect.
    Lost,
    /// This bit of the transferred bytes (modulo the number of bits) is flipped.
    Flip(usize),
    /// The process dies after writing this many 255ths of the bytes. All later calls fail.
    Crash(u8),
}

impl Fault {
    /// Returns the fault's name, as used in counters.
    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::Refuse(ENOSPC) => "enospc",
            Fault::Refuse(EROFS) => "erofs",
            Fault::Refuse(_) => "eio",
            Fault::Hang => "hang",
            Fault::Short(_) => "short",
            Fault::Torn(..) => "torn",
            Fault::Lost => "lost",
            Fault::Flip(_) => "flip",
            Fault::Crash(_) => "crash",
        }
    }
}

/// Selects the calls that a fault affects.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub(super) fault: Fault,
    calls: &'static [Call],
    file: Option<&'static str>,
    from: u64,
    to: u64,
    skip: u64,
    times: u64,
    of_256: u64,
}

impl Rule {
    /// Creates a rule that applies to every change to any file.
    pub fn new(fault: Fault) -> Self {
        let (to, times) = (u64::MAX, u64::MAX);
        Self { fault, calls: CHANGES, file: None, from: 0, to, skip: 0, times, of_256: 256 }
    }

    /// Restricts the rule to these kinds of calls.
    #[must_use]
    pub fn on(self, calls: &'static [Call]) -> Self {
        Self { calls, ..self }
    }

    /// Restricts the rule to files whose names start with `name`.
    #[must_use]
    pub fn in_file(self, name: &'static str) -> Self {
        Self { file: Some(name), ..self }
    }

    /// Restricts the rule to calls at or beyond offset `from`.
    #[must_use]
    pub fn from_offset(self, from: u64) -> Self {
        Self { from, ..self }
    }

    /// Restricts the rule to calls at offset `at`.
    #[must_use]
    pub fn at_offset(self, at: u64) -> Self {
        Self { from: at, to: at, ..self }
    }

    /// Skips the first `skip` matching calls.
    #[must_use]
    pub fn after(self, skip: u64) -> Self {
        Self { skip, ..self }
    }

    /// Limits the fault to `times` occurrences.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Sets the probability of a fault to `of_256` / 256.
    #[must_use]
    pub fn chance(self, of_256: u8) -> Self {
        Self { of_256: of_256.into(), ..self }
    }

    pub(super) fn hits(&mut self, call: Call, (file, offset): (&str, u64), random: u64) -> bool {
        let is_in_file = self.file.is_none_or(|name| file.starts_with(name));
        let is_there = (self.from..=self.to).contains(&offset);
        if !self.calls.contains(&call) || !is_in_file || !is_there {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let hit = self.times > 0 && random % 256 < self.of_256;
        self.times -= u64::from(hit);
        hit
    }
}
