//! Rules: the calls that fail, and the effect of each fault. Data only: no file is touched here.

/// I/O error.
pub const EIO: i32 = 5;
/// No space left.
pub const ENOSPC: i32 = 28;
/// Read-only file system.
pub const EROFS: i32 = 30;
/// The file system does not support the call.
pub const EOPNOTSUPP: i32 = 95;

/// Kinds of file calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// A file is opened.
    Open,
    /// Bytes are read.
    Read,
    /// Bytes are written.
    Write,
    /// The file is extended by a hole.
    SetLen,
    /// The file is extended by blocks, or a hole is filled.
    Allocate,
    /// Blocks are freed.
    Punch,
}

/// Every call that changes a file.
pub const CHANGES: &[Call] = &[Call::Write, Call::SetLen, Call::Allocate, Call::Punch];

/// Effect on a call.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// It fails with this error number.
    Refuse(i32),
    /// It waits until `release` or `heal`, and then succeeds.
    Hang,
    /// At most this number of bytes is transferred.
    Short(usize),
    /// This number of bytes is written; then it fails with the error number, or reports success.
    Torn(usize, Option<i32>),
    /// A change reports success without an effect.
    Lost,
    /// This bit (modulo the number of bits) of the transferred bytes is flipped.
    Flip(usize),
    /// The process dies: this fraction of 255 of a write is done, and no later call has an effect.
    Crash(u8),
}

impl Fault {
    /// Returns its name, for counters.
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

/// Which calls meet a fault.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub(super) fault: Fault,
    calls: &'static [Call],
    file: Option<&'static str>,
    from: u64,
    skip: u64,
    times: u64,
    of_256: u64,
}

impl Rule {
    /// A rule for every change of any file.
    pub fn new(fault: Fault) -> Self {
        Self { fault, calls: CHANGES, file: None, from: 0, skip: 0, times: u64::MAX, of_256: 256 }
    }

    /// Restricts it to these kinds of calls.
    #[must_use]
    pub fn on(self, calls: &'static [Call]) -> Self {
        Self { calls, ..self }
    }

    /// Restricts it to files with this name prefix.
    #[must_use]
    pub fn in_file(self, name: &'static str) -> Self {
        Self { file: Some(name), ..self }
    }

    /// Restricts it to writes from this offset on.
    #[must_use]
    pub fn from_offset(self, from: u64) -> Self {
        Self { from, ..self }
    }

    /// Skips the first `skip` calls.
    #[must_use]
    pub fn after(self, skip: u64) -> Self {
        Self { skip, ..self }
    }

    /// Limits the number of faults.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Sets the probability of a fault, out of 256.
    #[must_use]
    pub fn chance(self, of_256: u8) -> Self {
        Self { of_256: of_256.into(), ..self }
    }

    pub(super) fn hits(&mut self, call: Call, (file, offset): (&str, u64), random: u64) -> bool {
        let is_there = self.file.is_none_or(|name| file.starts_with(name)) && offset >= self.from;
        if !self.calls.contains(&call) || !is_there {
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
