//! The store's numbers, by name; and what giving chunks up came to.

use std::ops::{AddAssign, Sub};

use crate::index::Entry;

/// A struct of numbers that can name them.
macro_rules! numbers {
    ($(#[$about:meta])* struct $name:ident { $($(#[$what:meta])* $field:ident,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default)]
        pub(crate) struct $name { $($(#[$what])* pub(crate) $field: u64,)+ }

        impl $name {
            /// Names and values.
            pub(crate) fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field)),+]
            }
        }
    };
}

numbers! {
/// Counters since the store was opened, which only grow, then gauges. Those that nothing else counts are kept here; the others
/// are filled in when somebody asks. Invariant I8: `frames_reserved + frames_visible + frames_free = frames_total`.
struct Stats {
    /// Chunks that became visible after a save.
    commits,
    /// Reservations that came to nothing: aborted, dropped, or their parent was gone.
    aborts,
    /// Chunks that `reserve` could give no frame or that had no parent, each time that it was asked for them.
    reserve_dropped,
    /// Chunks that left host memory to make room.
    host_evictions,
    /// Chunks forgotten by `discard` and for proven damage, with all that hung on them.
    discards,
    /// Chunks forgotten by `clear`.
    cleared,
    /// Chunks forgotten by `evict`, or taken out of host memory by it.
    evicted,
    /// Chunks that left the disk to make room.
    disk_evictions,
    /// Chunks of those in `host_evictions` that left because their own salt had its quota.
    quota_evictions,
    /// The same of `disk_evictions`.
    quota_disk_evictions,
    /// Tries, each of one chunk, that got no frame or no place on disk because its salt had its quota and nothing of its own could
    /// go. A chunk that is tried again counts again: to know it, the store would have to keep the keys of what it does not have.
    quota_dropped,
    /// Chunks forgotten because they were saved too long ago, those found on disk among them.
    expired,
    /// Chunks that could not get to disk: they left host memory first, their parent did not get there, no slot may be freed, or
    /// the file system is full.
    disk_dropped,
    /// Chunks of those that left host memory before they were written.
    disk_unwritten,
    /// Chunks found on disk when the store was opened.
    disk_recovered,
    /// Chunks written to disk.
    disk_writes,
    /// Bytes of those.
    disk_bytes_written,
    /// Microseconds that disk threads spent writing.
    disk_write_us,
    /// Writes that the system refused other than for lack of space, and slots that could not be freed.
    disk_write_errors,
    /// Times that the disk directory was removed or moved while it was open.
    disk_removals,
    /// Chunks read from disk.
    disk_reads,
    /// Bytes of those.
    disk_bytes_read,
    /// Microseconds that disk threads spent reading.
    disk_read_us,
    /// Microseconds in which at least one chunk was wanted from disk: with `disk_reads` it is the rate of reads as those who wait
    /// for them see it, with what writes take.
    disk_read_busy_us,
    /// Tries to read a chunk that the system refused; each is tried twice.
    disk_read_errors,
    /// Chunks on disk whose bytes, or whose place in their prefix, were not what their key says.
    disk_verify_failures,
    /// Frames in host memory.
    frames_total,
    /// Frames that it may have while other stores want memory, too; without others, all.
    frames_share,
    /// Frames being filled, or filled and waiting for their parent.
    frames_reserved,
    /// Frames that hold a chunk, found by lookups or still pinned.
    frames_visible,
    /// Frames that hold nothing.
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
    /// Visible chunks on their way to disk.
    disk_pending,
    /// Slots that the disk's files hold, as last seen by a disk thread.
    disk_slots,
    /// Bytes that the disk directory is accounted at, as last seen by a disk thread.
    disk_bytes,
    /// 1 while the disk tier is left alone, for reads, writes or both, because it fails, hangs or could not be opened.
    disk_broken,
    /// Times that it began to be left alone.
    disk_trips,
    /// Chunks that wait to be read from disk; they have no frame yet.
    reads_pending,
    /// Salts that have something here.
    salts,
}
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Chunks that are found no more, or not in host memory any more.
    pub num_chunks: u64,
    /// Frames that they had in host memory.
    pub num_host: u64,
    /// Places that they had on disk.
    pub num_disk: u64,
    /// Chunks in use: forgotten ones keep their memory until that ends; in host memory alone, they stay.
    pub num_in_use: u64,
    /// Something was not done in time: it may be found yet, or by the next life of the store.
    pub is_cut_short: bool,
}

impl Evicted {
    pub(crate) fn count(&mut self, entry: &Entry) {
        self.num_chunks += 1;
        self.num_host += u64::from(entry.host.frame().is_some());
        self.num_disk += u64::from(entry.disk.slot().is_some());
    }
}

impl AddAssign for Evicted {
    fn add_assign(&mut self, other: Self) {
        self.num_chunks += other.num_chunks;
        self.num_host += other.num_host;
        self.num_disk += other.num_disk;
        self.num_in_use += other.num_in_use;
        self.is_cut_short |= other.is_cut_short;
    }
}

impl Sub for Evicted {
    type Output = Self;
    fn sub(self, before: Self) -> Self {
        Self {
            num_chunks: self.num_chunks - before.num_chunks,
            num_host: self.num_host - before.num_host,
            num_disk: self.num_disk - before.num_disk,
            num_in_use: self.num_in_use - before.num_in_use,
            is_cut_short: self.is_cut_short,
        }
    }
}
