//! Frames in shared memory: a memfd that is mapped by its owner and by workers in other processes.
//!
//! Three mechanisms prevent reads from racing with writes. Within the owner's process, the borrow
//! checker prevents races: the bytes of a frame are accessible only through its single [`Frame`].
//! Between processes, leases prevent races: a worker maps the memory through [`Arena`], writes only
//! to frames reserved for it, and reads only frames pinned for it. Between stores that share an
//! arena, slabs prevent races: each store accesses only frames in its own slabs.
#![expect(unsafe_code, reason = "there is no safe way to map memory and view it as bytes")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

pub use super::frame::FRAME_ALIGN;
use super::frame::{FrameGrid, FrameId, FrameSizes};
use super::numa::{self, Place};
use super::part::{Damage, PartSpec, TRAILER_BYTES};
use crate::{Error, Result};

/// Number of bytes to unmap per call. Other threads can change mappings between calls.
const UNMAP_BYTES: usize = 64 << 20;

/// A shared mapping of the whole arena.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    size_bytes: usize,
}

// SAFETY: the mapping is plain memory, valid in all threads until Drop, which runs once; Frame and
// Arena below control access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared Mapping provides only addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `size_bytes` bytes of `fd`. The caller guarantees that the file is at least
    /// this large and cannot shrink.
    fn new(fd: impl AsFd, size_bytes: u64) -> Result<Self> {
        let size_bytes = checked_size(size_bytes)?;
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: no address is given, so the kernel picks memory that this process does not use.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), size_bytes, access, flags, fd, 0) }
            .map_err(|error| {
                Error::io("cannot map the frames", error.into()).with_context("bytes", size_bytes)
            })?;
        let start =
            NonNull::new(start.cast()).expect("a mapping without a fixed address is never at 0");
        Ok(Self { start, size_bytes })
    }

    /// Returns the address of `bytes` bytes at `offset`. Returns `InvalidConfig` if any of these
    /// bytes are outside the mapping.
    fn at(&self, offset: u64, bytes: usize) -> Result<NonNull<u8>> {
        let offset_in = usize::try_from(offset).ok();
        let end = offset_in.and_then(|offset| offset.checked_add(bytes));
        match (offset_in, end) {
            (Some(offset), Some(end)) if end <= self.size_bytes => {
                // SAFETY: offset is at most the mapping's size, which is at most isize::MAX
                // (checked before mapping).
                Ok(unsafe { self.start.add(offset) })
            }
            _ => Err(Error::invalid("a range is outside the arena")
                .with_context("offset", offset)
                .with_context("bytes", bytes)
                .with_context("arena_bytes", self.size_bytes)),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for at in (0..self.size_bytes).step_by(UNMAP_BYTES) {
            let bytes = UNMAP_BYTES.min(self.size_bytes - at);
            // SAFETY: start and size are the values from mmap in `new`, and there are no references
            // into the mapping: Frames and Arenas own this Mapping, and slices borrow from them.
            let _unmapped =
                unsafe { rustix::mm::munmap(self.start.add(at).as_ptr().cast(), bytes) };
        }
    }
}

fn checked_size(size_bytes: u64) -> Result<usize> {
    let size = isize::try_from(size_bytes).ok().filter(|size| *size > 0);
    match size {
        Some(size) if size_bytes.is_multiple_of(FRAME_ALIGN) => Ok(size.unsigned_abs()),
        _ => Err(Error::invalid("the arena size must be a positive multiple of 4096")
            .with_context("size_bytes", size_bytes)),
    }
}

/// Exclusive access to a frame's bytes in the process that owns the arena. At most one `Frame`
/// exists for any given bytes at a time, so `&mut Frame` is unique.
#[derive(Debug)]
pub struct Frame {
    mapping: Arc<Mapping>,
    id: FrameId,
    offset: u64,
    len: usize,
}

impl Frame {
    /// Returns the frame's id.
    pub fn id(&self) -> FrameId {
        self.id
    }

    fn start(&self) -> NonNull<u8> {
        self.mapping.at(self.offset, self.len).expect("every frame is inside the arena")
    }

    /// Returns the frame's bytes. Leases must keep workers from writing to the frame while the
    /// slice exists.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the frame is inside the mapping, which self keeps alive. In this process, these
        // bytes are otherwise accessed only through &mut self, which the borrow excludes, because
        // `Frames` never lends the same bytes twice and other stores lend only frames in their own
        // slabs (HostTier). Workers write only to frames that are reserved for them, and the store
        // reads a frame only once it is visible.
        unsafe { slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }

    /// Returns the frame's bytes for writing. Leases must keep workers from accessing the frame
    /// while the slice exists.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; &mut self excludes any other view in this process, and the store
        // fills a frame only before it is visible and while it is reserved for no other writer.
        unsafe { slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

/// A store's frames in all size classes. Each disk thread borrows at most one frame at a time.
#[derive(Debug)]
pub struct Frames {
    mapping: Arc<Mapping>,
    grids: Vec<FrameGrid>,
    /// Frames that are currently lent out. Lent frames never overlap, so each `Frame` is exclusive.
    lent: Vec<(FrameId, Range<u64>)>,
}

impl Frames {
    /// Returns the frame layout of each size class.
    pub fn grids(&self) -> &[FrameGrid] {
        &self.grids
    }

    /// Returns true if the frame is lent out.
    pub fn is_lent(&self, id: FrameId) -> bool {
        self.lent.iter().any(|(lent, _)| *lent == id)
    }

    /// Lends a frame's bytes. Returns None if any of the bytes are already lent out or if there is
    /// no such frame. A frame stays lent if its `Frame` is dropped without a call to `take_back`.
    pub fn lend(&mut self, id: FrameId) -> Option<Frame> {
        let grid = self.grids.get(id.class().index())?;
        if id.number() >= grid.num_frames() {
            return None;
        }
        let (offset, len) = (grid.start(id.number()), usize::try_from(grid.frame_bytes).ok()?);
        let range = offset..offset + grid.frame_bytes;
        if self.lent.iter().any(|(_, lent)| lent.start < range.end && range.start < lent.end) {
            return None;
        }
        self.lent.push((id, range));
        Some(Frame { mapping: Arc::clone(&self.mapping), id, offset, len })
    }

    /// Takes back a lent frame. A frame that was lent by a different `Frames` is simply dropped.
    pub fn take_back(&mut self, frame: Frame) {
        let Frame { mapping, id, .. } = frame;
        let is_own = Arc::ptr_eq(&self.mapping, &mapping);
        debug_assert!(is_own, "frame {id:?} belongs to a different arena");
        if is_own {
            self.lent.retain(|(lent, _)| *lent != id);
        }
    }
}

/// The owner's handle to an arena. The memory lives until this handle and all mappings are gone.
#[derive(Debug)]
pub struct HostArena {
    fd: OwnedFd,
    size_bytes: u64,
}

impl HostArena {
    /// Allocates zeroed memory that contains no frames yet. Returns `InvalidConfig` if the size is
    /// not a positive multiple of 4096, and `Io` if a system call fails.
    pub fn of_bytes(size_bytes: u64) -> Result<Self> {
        checked_size(size_bytes)?;
        let fail = |error: rustix::io::Errno| {
            Error::io("cannot allocate shared memory", error.into())
                .with_context("bytes", size_bytes)
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("kvloft-arena", flags).map_err(fail)?;
        rustix::fs::ftruncate(&fd, size_bytes).map_err(fail)?;
        // Prevents the file from being truncated. A process that accessed its mapping beyond the
        // end of the file would be killed.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(fail)?;
        Ok(Self { fd, size_bytes })
    }

    /// Maps the arena again and returns its frames of the given sizes. If multiple stores share the
    /// arena, each store must lend only frames in its own slabs.
    ///
    /// Returns `InvalidConfig` if any of the sizes exceeds the slab size.
    pub fn frames(&self, slab_bytes: u64, sizes: &FrameSizes) -> Result<Frames> {
        let grid = |size: &u64| FrameGrid::new(self.size_bytes, slab_bytes, *size);
        let grids = sizes.all().iter().map(grid).collect::<Result<Vec<_>>>()?;
        let mapping = Arc::new(Mapping::new(&self.fd, self.size_bytes)?);
        Ok(Frames { mapping, grids, lent: Vec::new() })
    }

    /// Returns the arena size, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Sets the preferred NUMA nodes of unallocated pages in all mappings. `places` must be in
    /// ascending order. Returns `Io` if the kernel rejects the placement.
    pub fn place(&self, places: &[Place]) -> Result<()> {
        numa::place(&self.fd, self.size_bytes, places)
            .map_err(|error| Error::io("cannot place memory on the requested NUMA nodes", error))
    }

    /// Returns the same number as [`Arena::id`].
    pub fn id(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.fd);
        Ok(stat.map_err(|error| Error::io("cannot inspect the arena", error.into()))?.st_ino)
    }

    /// Returns the path at which other processes run by the same user can open the arena. The path
    /// is valid as long as this handle is alive.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", rustix::process::getpid().as_raw_nonzero(), self.fd.as_raw_fd())
    }
}

/// A worker's view of the arena, possibly in another process. It checks only bounds, so the caller
/// must respect leases.
#[derive(Debug)]
pub struct Arena {
    mapping: Mapping,
    id: u64,
    // Held while a trailer is read or written, to prevent races between threads of this process.
    trailers: Mutex<()>,
}

impl Arena {
    /// Maps the arena at `path` (see [`HostArena::path`]), whose size must be `size_bytes`.
    pub fn open(path: &str, size_bytes: u64) -> Result<Self> {
        checked_size(size_bytes)?;
        let fail = |message: &str, error: std::io::Error| {
            Error::io(message, error).with_context("path", path)
        };
        let file = File::options().read(true).write(true).open(path).map_err(|error| {
            fail(
                "cannot open the arena; check that this user's scheduler process is running",
                error,
            )
        })?;
        let seals = rustix::fs::fcntl_get_seals(&file)
            .map_err(|error| fail("the file is not an arena", error.into()))?;
        let metadata =
            file.metadata().map_err(|error| fail("cannot read the arena size", error))?;
        let len = metadata.len();
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::invalid("the file is not an arena").with_context("path", path));
        }
        if len != size_bytes {
            let message = format!(
                "unexpected arena size: {len} bytes instead of {size_bytes}; was the server \
                 restarted?"
            );
            return Err(Error::invalid(message).with_context("path", path));
        }
        let mapping = Mapping::new(&file, size_bytes)?;
        Ok(Self { mapping, id: metadata.ino(), trailers: Mutex::new(()) })
    }

    /// Allocates memory that only this process maps, for sealing and checking private copies of
    /// parts.
    pub fn private(size_bytes: u64) -> Result<Self> {
        let memory = HostArena::of_bytes(size_bytes)?;
        Self::open(&memory.path(), size_bytes)
    }

    /// Returns a number that identifies the memory. The number is unique among all live arenas on a
    /// machine.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the arena's start address in this process.
    pub fn address(&self) -> usize {
        self.mapping.start.as_ptr().addr()
    }

    /// Returns the arena size, in bytes.
    pub fn size_bytes(&self) -> usize {
        self.mapping.size_bytes
    }

    /// Computes the tag of a part (`part_bytes` bytes at `offset`) and writes the part's trailer.
    /// Returns the tag.
    ///
    /// The frame must be reserved for the caller, and the caller must have finished writing to it.
    /// Returns `InvalidConfig` if the part is outside the arena.
    pub fn seal(&self, offset: u64, part_bytes: usize, spec: &PartSpec<'_>) -> Result<u64> {
        let end = self.trailer_at(offset, part_bytes)?;
        let (trailer, tag) = spec.seal(self.payload(offset, spec.payload_bytes(part_bytes)?)?)?;
        let _alone = self.trailers.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the 128 bytes at `end` are inside the mapping (see `trailer_at`), and no slice
        // covers them, because payloads end before trailers (see `payload_bytes`). `trailers`
        // excludes other threads of this process, and the reservation excludes other processes.
        unsafe { ptr::copy_nonoverlapping(trailer.as_ptr(), end.as_ptr(), TRAILER_BYTES) };
        Ok(tag)
    }

    /// Returns how the part is damaged, or None if the part matches `spec`. The caller must have
    /// pinned the frame.
    pub fn check(
        &self,
        offset: u64,
        part_bytes: usize,
        spec: &PartSpec<'_>,
    ) -> Result<Option<Damage>> {
        let end = self.trailer_at(offset, part_bytes)?;
        let payload = self.payload(offset, spec.payload_bytes(part_bytes)?)?;
        let mut trailer = [0; TRAILER_BYTES];
        {
            let _alone = self.trailers.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the 128 bytes at `end` are inside the mapping, and `trailers` excludes
            // writers in this process.
            unsafe { ptr::copy_nonoverlapping(end.as_ptr(), trailer.as_mut_ptr(), TRAILER_BYTES) };
        }
        Ok(spec.check(payload, &trailer))
    }

    fn trailer_at(&self, offset: u64, part_bytes: usize) -> Result<NonNull<u8>> {
        self.mapping.at(offset, part_bytes)?;
        if part_bytes < TRAILER_BYTES {
            return Err(Error::invalid("a part must be at least as large as its 128-byte trailer")
                .with_context("part_bytes", part_bytes));
        }
        self.mapping.at(offset + (part_bytes - TRAILER_BYTES) as u64, TRAILER_BYTES)
    }

    fn payload(&self, offset: u64, bytes: usize) -> Result<&[u8]> {
        let start = self.mapping.at(offset, bytes)?;
        // SAFETY: the bytes are inside the mapping, which self keeps alive. Nothing writes to them
        // while the slice exists: the frame is reserved for or pinned by the caller, whose copies
        // are complete, as `seal` and `check` require.
        Ok(unsafe { slice::from_raw_parts(start.as_ptr(), bytes) })
    }
}

#[cfg(test)]
mod tests;
