//! The store's counters and gauges, and the result of an operator-requested eviction.

use std::ops::{AddAssign, Sub};

use serde::{Deserialize, Serialize};

use crate::index::Entry;
use crate::io::FRAME_ALIGN;
use crate::tier::host::HostTier;

/// Defines a struct of `u64` fields that can be listed by name.
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
/// Counters since the store opened, followed by gauges. `State::stats` fills in the gauges tracked
/// elsewhere. Invariant I8: `frames_reserved + frames_visible + frames_free = frames_total`.
struct Stats {
    /// Number of chunks that became visible after a save.
    commits,
    /// Number of reservations that were aborted or dropped, or whose chunk was removed before the
    /// commit.
    aborts,
    /// Number of chunks that were not reserved because no frame was available or their parent was
    /// missing.
    reserve_dropped,
    host_evictions,
    /// Number of chunks removed by `discard` or because of corruption, including descendants.
    discards,
    /// Number of chunks removed by `clear`.
    cleared,
    /// Number of chunks evicted by an operator, from all tiers or from host memory only.
    evicted,
    disk_evictions,
    /// Number of `host_evictions` caused by a tenant's quota.
    quota_evictions,
    /// Number of `disk_evictions` caused by a tenant's quota.
    quota_disk_evictions,
    /// Number of times a chunk could not be saved, loaded or written because its tenant was at its
    /// quota and had nothing to evict.
    quota_dropped,
    /// Number of chunks removed because they expired.
    expired,
    /// Number of chunks never written to disk because they were evicted first, their parent was not
    /// written, their tenant was at its quota, no slot could be freed, or the file system was full.
    disk_dropped,
    /// Number of `disk_dropped` chunks evicted before they were written.
    disk_unwritten,
    /// Number of chunks found on disk when the tier opened.
    disk_recovered,
    /// Number of chunks written to disk.
    disk_writes,
    disk_bytes_written,
    /// Time that disk threads spent writing, in microseconds.
    disk_write_us,
    /// Number of failed writes (except when the file system was full), failed clears, and attempts
    /// to free slots that left some of them unfreed.
    disk_write_errors,
    /// Number of times the disk directory was removed or moved while in use.
    disk_removals,
    /// Number of chunks read from disk.
    disk_reads,
    disk_bytes_read,
    /// Time that disk threads spent reading, in microseconds.
    disk_read_us,
    /// Time during which at least one read was pending, in microseconds. `disk_reads` divided by
    /// this time is the read rate that loads see, including delays from writes.
    disk_read_busy_us,
    /// Number of failed read attempts, excluding corrupt chunks. A failed read is retried once.
    disk_read_errors,
    /// Number of on-disk chunks whose content or position in the prefix did not match their key.
    disk_verify_failures,
    /// Host memory that the store keeps even when other stores need memory, in bytes. Without a
    /// pool, this is the whole host tier.
    host_share_bytes,
    /// Total size of all frames in use, in bytes.
    host_used_bytes,
    /// Uncompressed size of all chunks with a frame, in bytes.
    host_raw_bytes,
    /// Number of frames in the store's slabs.
    frames_total,
    /// Number of frames that are being filled, or are filled but waiting for the parent chunk.
    frames_reserved,
    /// Number of frames with visible chunks, including removed chunks that are still pinned.
    frames_visible,
    frames_free,
    /// Number of keys in the index, including chunks still being saved.
    entries,
    /// Number of pinned chunks, counted once per read lease.
    pins,
    read_leases,
    write_leases,
    /// Number of chunks on disk.
    disk_used,
    /// Total size of occupied slots, in bytes.
    disk_used_bytes,
    /// Uncompressed size of the chunks on disk, in bytes.
    disk_raw_bytes,
    /// Number of visible chunks being written or queued for writing.
    disk_pending,
    /// Number of slots in the tier's files, as of a disk thread's last check.
    disk_slots,
    /// Accounted size of the disk directory, in bytes, as of a disk thread's last check.
    disk_bytes,
    /// 1 while reads from or writes to the disk tier are paused because the tier is failing, hung
    /// or not open.
    disk_broken,
    /// Number of times reads or writes were paused.
    disk_trips,
    /// Number of queued disk reads.
    reads_pending,
    /// Number of salts with at least one chunk.
    salts,
}
}

/// Result of an operator-requested eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Number of chunks removed, or evicted from host memory.
    pub num_chunks: u64,
    /// Host memory that these chunks occupied, in bytes.
    pub host_bytes: u64,
    /// Disk space that these chunks occupied, in bytes.
    pub disk_bytes: u64,
    /// Number of selected chunks that were in use. An eviction from every tier removes these chunks
    /// and frees their frames after use, whereas an eviction from host memory keeps them.
    pub num_in_use: u64,
    /// True if the eviction is incomplete: lookups or a restart may still find some of the chunks.
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
