//! Counters and gauges of the store, and the result of an eviction by an operator.

use std::ops::{AddAssign, Sub};

use serde::{Deserialize, Serialize};

use crate::index::Entry;
use crate::io::FRAME_ALIGN;
use crate::tier::host::HostTier;

/// Defines a struct of numbers that can be listed by name.
macro_rules! numbers {
    ($(#[$about:meta])* struct $name:ident { $($(#[$what:meta])* $field:ident,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default)]
        pub(crate) struct $name { $($(#[$what])* pub(crate) $field: u64,)+ }

        impl $name {
            pub(crate) fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field)),+]
            }
        }
    };
}

numbers! {
/// Counters since the store was opened, then gauges. Gauges that are counted elsewhere are filled
/// in by `State::stats`. Invariant I8: `frames_reserved + frames_visible + frames_free =
/// frames_total`.
struct Stats {
    /// Chunks that became visible after a save.
    commits,
    /// Reservations that were aborted or dropped, or whose parent was gone.
    aborts,
    /// Chunks that `reserve` refused because no frame or no parent was available, once per attempt.
    reserve_dropped,
    /// Chunks evicted from host memory.
    host_evictions,
    /// Chunks removed by `discard` or because of proven damage, with all chunks below them.
    discards,
    /// Chunks removed by `clear`.
    cleared,
    /// Chunks that an operator evicted from all tiers or from host memory.
    evicted,
    /// Chunks evicted from disk.
    disk_evictions,
    /// The part of `host_evictions` for a tenant at its quota.
    quota_evictions,
    /// The part of `disk_evictions` for a tenant at its quota.
    quota_disk_evictions,
    /// Attempts to save, load or write a chunk that failed because its tenant was at its quota and
    /// none of its chunks could be evicted. Repeated attempts count again.
    quota_dropped,
    /// Chunks removed because they expired, including those found on disk.
    expired,
    /// Chunks that were not written to disk: they were evicted first, their parent was not written,
    /// no slot could be freed, or the file system was full.
    disk_dropped,
    /// The part of `disk_dropped` that was evicted before it was written.
    disk_unwritten,
    /// Chunks found on disk when the store was opened.
    disk_recovered,
    /// Chunks written to disk.
    disk_writes,
    /// Bytes written to disk.
    disk_bytes_written,
    /// Microseconds that disk threads spent writing.
    disk_write_us,
    /// Failed writes, except for lack of space, and slots that could not be freed.
    disk_write_errors,
    /// Times the disk directory was removed or moved while it was open.
    disk_removals,
    /// Chunks read from disk.
    disk_reads,
    /// Bytes read from disk.
    disk_bytes_read,
    /// Microseconds that disk threads spent reading.
    disk_read_us,
    /// Microseconds in which at least one read was wanted. With `disk_reads` it gives the rate of
    /// reads that loads see, including the time taken by writes.
    disk_read_busy_us,
    /// Failed attempts to read a chunk; each chunk is tried twice.
    disk_read_errors,
    /// Chunks on disk whose bytes, or whose place in their prefix, do not match their key.
    disk_verify_failures,
    /// Bytes of host memory that it may keep while other stores need memory; all, without a pool.
    host_share_bytes,
    /// Bytes of frames that are not free.
    host_used_bytes,
    /// Bytes that the chunks in these frames would take uncompressed.
    host_raw_bytes,
    /// Frames in its part of host memory.
    frames_total,
    /// Frames being filled, or filled and waiting for their parent.
    frames_reserved,
    /// Frames of visible chunks, including removed chunks that are pinned.
    frames_visible,
    /// Free frames.
    frames_free,
    /// Chunks that lookups can find, in any tier.
    entries,
    /// Chunks pinned by read leases, counted once per lease.
    pins,
    /// Read leases held.
    read_leases,
    /// Write leases held.
    write_leases,
    /// Chunks on disk.
    disk_used,
    /// Bytes of their slots.
    disk_used_bytes,
    /// Bytes that they would take uncompressed.
    disk_raw_bytes,
    /// Visible chunks that are queued for writing or being written.
    disk_pending,
    /// Slots in the disk's files, as last read by a disk thread.
    disk_slots,
    /// Accounted bytes of the disk directory, as last read by a disk thread.
    disk_bytes,
    /// 1 while reads or writes of the disk tier are paused because it fails, hangs or is not open.
    disk_broken,
    /// Times that reads or writes were paused.
    disk_trips,
    /// Chunks that wait to be read from disk.
    reads_pending,
    /// Salts with at least one chunk.
    salts,
}
}

/// Result of an eviction by an operator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Chunks removed, or evicted from host memory.
    pub num_chunks: u64,
    /// Bytes they had in host memory.
    pub host_bytes: u64,
    /// Bytes they had on disk.
    pub disk_bytes: u64,
    /// Chunks in use. Removed chunks keep their frames until that ends; in host memory only, they
    /// stay.
    pub num_in_use: u64,
    /// The deadline passed: lookups or a restart may still find some chunks.
    pub is_cut_short: bool,
}

impl Evicted {
    pub(crate) fn count(&mut self, entry: &Entry, host: &HostTier) {
        let host_bytes = entry.host.frame().map_or(0, |frame| host.frame_bytes(frame.class()));
        let has_slot = entry.disk.slot().is_some();
        self.num_chunks += 1;
        self.host_bytes += host_bytes;
        self.disk_bytes += u64::from(has_slot) * u64::from(entry.disk_pages) * FRAME_ALIGN;
    }
}

impl AddAssign for Evicted {
    fn add_assign(&mut self, other: Self) {
        self.num_chunks += other.num_chunks;
        self.host_bytes += other.host_bytes;
        self.disk_bytes += other.disk_bytes;
        self.num_in_use += other.num_in_use;
        self.is_cut_short |= other.is_cut_short;
    }
}

impl Sub for Evicted {
    type Output = Self;
    fn sub(self, before: Self) -> Self {
        Self {
            num_chunks: self.num_chunks - before.num_chunks,
            host_bytes: self.host_bytes - before.host_bytes,
            disk_bytes: self.disk_bytes - before.disk_bytes,
            num_in_use: self.num_in_use - before.num_in_use,
            is_cut_short: self.is_cut_short,
        }
    }
}
