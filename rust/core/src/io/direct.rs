//! Files of page-aligned frames, accessed with direct I/O if the file system supports it.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Alignment that direct I/O requires of the address, offset and length. 4096 bytes is sufficient
/// on all common file systems.
pub const ALIGN_BYTES: usize = 4096;

/// An open file. Each method makes one system call, so that tests can make any call fail. Reads and
/// writes can be short, so use `read_exact_at` and `write_all_at` of [`FileExt`] for complete
/// transfers.
pub trait RawFile: FileExt + Send + Sync + fmt::Debug {
    /// Returns the file's metadata, such as its device and link count.
    fn metadata(&self) -> Result<Metadata>;
    /// Returns the file's length.
    fn size(&self) -> Result<u64>;
    /// Returns the offset of the first data at or after `offset`, or None if only a hole follows.
    fn next_data(&self, offset: u64) -> Result<Option<u64>>;
    /// Truncates the file or extends it with a hole that reads as zeros.
    fn set_len(&self, len: u64) -> Result<()>;
    /// Allocates zeroed blocks for all holes between `from` and `to`, and extends the file if
    /// needed. Returns `Unsupported` if the file system cannot preallocate.
    fn allocate(&self, from: u64, to: u64) -> Result<()>;
    /// Frees the blocks between `from` and `to`, so that this range reads as zeros. The file's
    /// length is unchanged. Returns `Unsupported` if the file system cannot punch holes.
    fn punch(&self, from: u64, to: u64) -> Result<()>;
    /// Returns true if aligned transfers bypass the page cache.
    fn is_direct(&self) -> bool;
}

/// A file with a buffered descriptor and, if requested and supported, a second descriptor with
/// `O_DIRECT`.
#[derive(Debug)]
pub struct OsFile {
    buffered: File,
    direct: Option<File>,
    /// True once a direct transfer has been rejected even though `open` accepted `O_DIRECT`.
    direct_refused: AtomicBool,
}

impl OsFile {
    /// Opens `path` for reading and writing. If the file does not exist, creates it with mode 0600.
    pub fn open(path: &Path, direct: bool) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        Self::with_options(path, &options, direct)
    }

    /// Opens an existing file read-only.
    pub fn open_read(path: &Path, direct: bool) -> Result<Self> {
        Self::with_options(path, OpenOptions::new().read(true), direct)
    }

    fn with_options(path: &Path, options: &OpenOptions, direct: bool) -> Result<Self> {
        // Without O_NONBLOCK, opening a FIFO would block until a process opens the other end.
        let flags =
            |extra: OFlags| (OFlags::NOFOLLOW | OFlags::NONBLOCK | extra).bits().cast_signed();
        let buffered = options.clone().custom_flags(flags(OFlags::empty())).open(path)?;
        if !buffered.metadata()?.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
        }
        // A file system that does not support O_DIRECT returns EINVAL here. On any failure, the
        // file is accessed through the page cache.
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

    /// Performs one transfer at `offset`. Bypasses the page cache if the address, offset and length
    /// are aligned and the file system supports direct I/O.
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
            // The file system cannot report holes, so everything is treated as data.
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
