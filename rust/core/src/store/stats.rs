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
/// Counters since the store was opened, followed by gauges. `State::stats` fills in the gauges that
/// are maintained elsewhere. Invariant I8: `frames_reserved + frames_visible + frames_free =
/// frames_total`.
struct Stats {
    /// Number of chunks that became visible after a save.
    commits,
    /// Number of reservations that were aborted or dropped, or whose chunk was removed before the
    /// commit.
    aborts,
    /// Number of failed reservations of a chunk because no frame or no parent was available.
    reserve_dropped,
    /// Number of chunks evicted from host memory.
    host_evictions,
    /// Number of chunks removed by `discard` or because of proven damage, including descendants.
    discards,
    /// Number of chunks removed by `clear`.
    cleared,
    /// Number of chunks that an operator evicted from all tiers or from host memory.
    evicted,
    /// Number of chunks evicted from disk.
    disk_evictions,
    /// Number of `host_evictions` for a tenant at its quota.
    quota_evictions,
    /// Number of `disk_evictions` for a tenant at its quota.
    quota_disk_evictions,
    /// Number of failed attempts to save, load or write a chunk because its tenant was at its quota
    /// and none of the tenant's chunks could be evicted.
    quota_dropped,
    /// Number of chunks removed because they expired.
    expired,
    /// Number of chunks that were not written to disk because they were evicted first, their parent
    /// was not written, no slot could be freed, or the file system was full.
    disk_dropped,
    /// Number of `disk_dropped` chunks that were evicted before they were written.
    disk_unwritten,
    /// Number of chunks found on disk when the tier was opened.
    disk_recovered,
    /// Number of chunks written to disk.
    disk_writes,
    /// Number of bytes written to disk.
    disk_bytes_written,
    /// Time that disk threads spent writing, in microseconds.
    disk_write_us,
    /// Number of failed writes (except for lack of space), of jobs that could not free all slots,
    /// and of failed clears.
    disk_write_errors,
    /// Number of times that the disk directory was removed or moved while it was open.
    disk_removals,
    /// Number of chunks read from disk.
    disk_reads,
    /// Number of bytes read from disk.
    disk_bytes_read,
    /// Time that disk threads spent reading, in microseconds.
    disk_read_us,
    /// Time with at least one pending read, in microseconds. `disk_reads` divided by this time is
    /// the read rate that loads experience, including delays by writes.
    disk_read_busy_us,
    /// Number of failed attempts to read a chunk. A failed read is retried once.
    disk_read_errors,
    /// Number of chunks on disk whose bytes, or whose position in their prefix, do not match their
    /// key.
    disk_verify_failures,
    /// Size of the host memory that the store can keep while other stores need memory, in bytes;
    /// all of it without a pool.
    host_share_bytes,
    /// Size of all frames that are not free, in bytes.
    host_used_bytes,
    /// Uncompressed size of the chunks in these frames, in bytes.
    host_raw_bytes,
    /// Number of frames in the store's slabs.
    frames_total,
    /// Number of frames that are being filled, or that are filled and wait for their parent.
    frames_reserved,
    /// Number of frames of visible chunks, including removed chunks that are pinned.
    frames_visible,
    /// Number of free frames.
    frames_free,
    /// Number of chunks that lookups can find, in any tier.
    entries,
    /// Number of chunks pinned by read leases, counted once per lease.
    pins,
    /// Number of read leases.
    read_leases,
    /// Number of write leases.
    write_leases,
    /// Number of chunks on disk.
    disk_used,
    /// Size of the slots of chunks on disk, in bytes.
    disk_used_bytes,
    /// Uncompressed size of the chunks on disk, in bytes.
    disk_raw_bytes,
    /// Number of visible chunks that are queued for writing or being written.
    disk_pending,
    /// Number of slots in the tier's files, as last read by a disk thread.
    disk_slots,
    /// Accounted size of the disk directory in bytes, as last read by a disk thread.
    disk_bytes,
    /// 1 while reads or writes of the disk tier are paused because the tier fails, hangs or is not
    /// open.
    disk_broken,
    /// Number of times that reads or writes were paused.
    disk_trips,
    /// Number of chunks that wait to be read from disk.
    reads_pending,
    /// Number of salts with at least one chunk.
    salts,
}
}

/// Result of an eviction by an operator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Number of chunks that were removed, or evicted from host memory.
    pub num_chunks: u64,
    /// Size of their frames in host memory, in bytes.
    pub host_bytes: u64,
    /// Size of their slots on disk, in bytes.
    pub disk_bytes: u64,
    /// Number of selected chunks that are in use. If chunks are evicted from every tier, these
    /// chunks are removed but keep their frames until they are no longer used; otherwise they stay.
    pub num_in_use: u64,
    /// True if the deadline passed, so that lookups or a restart may still find some chunks.
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
