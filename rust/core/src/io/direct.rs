//! Files of page-aligned frames, read and written without bounce copies if the file system supports
//! it.
//!
//! Each method of [`RawFile`] is one system call, so that tests can substitute a failing file. Must
//! not depend on slots, records or keys.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Direct I/O requires memory, offset and length to be multiples of this; it is a multiple of every
/// file system's requirement.
pub const ALIGN_BYTES: usize = 4096;

/// One open file; each method is one system call, so reads and writes can be short. The methods of
/// std's trait complete them.
pub trait RawFile: FileExt + Send + Sync + fmt::Debug {
    /// The file's status, which has its device and its number of links.
    fn metadata(&self) -> Result<Metadata>;
    /// The file's length.
    fn size(&self) -> Result<u64>;
    /// Returns where data begin at or after `offset`; None if only a hole follows.
    fn next_data(&self, offset: u64) -> Result<Option<u64>>;
    /// Cuts the file, or extends it with a hole of zeros.
    fn set_len(&self, len: u64) -> Result<()>;
    /// Allocates zeros for holes from `from` to `to`, and extends the file; `Unsupported`
    /// if the file system cannot allocate.
    fn allocate(&self, from: u64, to: u64) -> Result<()>;
    /// Frees the blocks from `from` to `to` and keeps the length; they read as zeros. `Unsupported`
    /// if the file system cannot.
    fn punch(&self, from: u64, to: u64) -> Result<()>;
    /// Whether aligned transfers bypass the page cache.
    fn is_direct(&self) -> bool;
}

/// A file of the operating system: a buffered descriptor and, if requested and possible, one with
/// `O_DIRECT`.
#[derive(Debug)]
pub struct OsFile {
    buffered: File,
    direct: Option<File>,
    /// Set once the file system refused a direct transfer although `open` accepted the flag.
    direct_refused: AtomicBool,
}

impl OsFile {
    /// Opens `path` for reading and writing; creates it with mode 0600 if it is missing.
    pub fn open(path: &Path, direct: bool) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        Self::with_options(path, &options, direct)
    }

    /// Opens an existing file for reading only.
    pub fn open_read(path: &Path, direct: bool) -> Result<Self> {
        Self::with_options(path, OpenOptions::new().read(true), direct)
    }

    fn with_options(path: &Path, options: &OpenOptions, direct: bool) -> Result<Self> {
        // Without O_NONBLOCK, opening a FIFO waits for its other end.
        let flags =
            |extra: OFlags| (OFlags::NOFOLLOW | OFlags::NONBLOCK | extra).bits().cast_signed();
        let buffered = options.clone().custom_flags(flags(OFlags::empty())).open(path)?;
        if !buffered.metadata()?.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
        }
        // A file system without O_DIRECT returns EINVAL here; other errors appear in use.
        let direct = direct
            .then(|| options.clone().custom_flags(flags(OFlags::DIRECT)).open(path).ok())
            .flatten();
        Ok(Self { buffered, direct, direct_refused: AtomicBool::new(false) })
    }

    fn fallocate(&self, flags: FallocateFlags, from: u64, to: u64) -> Result<()> {
        match fallocate(&self.buffered, flags, from, to.saturating_sub(from)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Err(Error::from(ErrorKind::Unsupported)),
            other => Ok(other?),
        }
    }

    /// One transfer at `offset`, without the page cache if everything is aligned and the file
    /// system supports it.
    fn transfer(
        &self,
        memory: (usize, usize),
        offset: u64,
        mut io: impl FnMut(&File) -> Result<usize>,
    ) -> Result<usize> {
        let (address, len) = memory;
        let is_aligned = (address | len).is_multiple_of(ALIGN_BYTES)
            && offset.is_multiple_of(ALIGN_BYTES as u64);
        if let Some(direct) =
            self.direct.as_ref().filter(|_| is_aligned && len > 0 && self.is_direct())
        {
            match io(direct) {
                // The file system accepted the flag but refuses the transfer.
                Err(e)
                    if matches!(
                        Errno::from_io_error(&e),
                        Some(Errno::INVAL | Errno::OPNOTSUPP)
                    ) =>
                {
                    self.direct_refused.store(true, Ordering::Relaxed);
                }
                result => return result,
            }
        }
        io(&self.buffered)
    }
}

impl FileExt for OsFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize> {
        self.transfer((into.as_ptr().addr(), into.len()), offset, |file| file.read_at(into, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize> {
        self.transfer((bytes.as_ptr().addr(), bytes.len()), offset, |file| {
            file.write_at(bytes, offset)
        })
    }
}

impl RawFile for OsFile {
    fn metadata(&self) -> Result<Metadata> {
        self.buffered.metadata()
    }

    fn size(&self) -> Result<u64> {
        Ok(self.buffered.metadata()?.len())
    }

    fn next_data(&self, offset: u64) -> Result<Option<u64>> {
        match seek(&self.buffered, SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            // A file system without holes has none.
            Err(Errno::INVAL) => Ok(Some(offset)),
            Err(e) => Err(e.into()),
        }
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.buffered.set_len(len)
    }

    fn allocate(&self, from: u64, to: u64) -> Result<()> {
        self.fallocate(FallocateFlags::empty(), from, to)
    }

    fn punch(&self, from: u64, to: u64) -> Result<()> {
        self.fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to)
    }

    fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.direct_refused.load(Ordering::Relaxed)
    }
}
