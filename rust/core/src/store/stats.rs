//! The store's numbers, by name. Counters only grow; gauges say how it is now.

/// Counters since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Chunks that became visible after a save.
    pub commits: u64,
    /// Reservations that came to nothing: aborted, dropped, or their parent was gone.
    pub aborts: u64,
    /// Chunks that `reserve` could give no frame or that had no parent.
    pub reserve_dropped: u64,
    /// Chunks that left host memory to make room.
    pub host_evictions: u64,
    /// Chunks forgotten by `discard` and for proven damage, with all that hung on them.
    pub discards: u64,
    /// Chunks forgotten by `clear`.
    pub cleared: u64,
    /// Chunks that left the disk to make room.
    pub disk_evictions: u64,
    /// Chunks that could not get to disk: they left host memory first, their parent did not get there, or no slot may be freed.
    pub disk_dropped: u64,
    /// Chunks found on disk when the store was opened.
    pub disk_recovered: u64,
    /// Chunks written to disk.
    pub disk_writes: u64,
    /// Bytes of those.
    pub disk_bytes_written: u64,
    /// Microseconds that disk threads spent writing.
    pub disk_write_us: u64,
    /// Writes that the system refused (no space, an I/O error), and slots that could not be freed.
    pub disk_write_errors: u64,
    /// Chunks read from disk.
    pub disk_reads: u64,
    /// Bytes of those.
    pub disk_bytes_read: u64,
    /// Microseconds that disk threads spent reading.
    pub disk_read_us: u64,
    /// Tries to read a chunk that the system refused; each is tried twice.
    pub disk_read_errors: u64,
    /// Chunks on disk whose bytes, or whose place in their prefix, were not what their key says.
    pub disk_verify_failures: u64,
}

impl Counters {
    /// Names and values.
    pub(crate) fn named(&self) -> [(&'static str, u64); 18] {
        [
            ("commits", self.commits),
            ("aborts", self.aborts),
            ("reserve_dropped", self.reserve_dropped),
            ("host_evictions", self.host_evictions),
            ("discards", self.discards),
            ("cleared", self.cleared),
            ("disk_evictions", self.disk_evictions),
            ("disk_dropped", self.disk_dropped),
            ("disk_recovered", self.disk_recovered),
            ("disk_writes", self.disk_writes),
            ("disk_bytes_written", self.disk_bytes_written),
            ("disk_write_us", self.disk_write_us),
            ("disk_write_errors", self.disk_write_errors),
            ("disk_reads", self.disk_reads),
            ("disk_bytes_read", self.disk_bytes_read),
            ("disk_read_us", self.disk_read_us),
            ("disk_read_errors", self.disk_read_errors),
            ("disk_verify_failures", self.disk_verify_failures),
        ]
    }
}

/// How it is now. Invariant I8: `frames_reserved + frames_visible + frames_free = frames_total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Frames in host memory.
    pub frames_total: u64,
    /// Frames being filled, or filled and waiting for their parent.
    pub frames_reserved: u64,
    /// Frames that hold a chunk, found by lookups or still pinned.
    pub frames_visible: u64,
    /// Frames that hold nothing.
    pub frames_free: u64,
    /// Chunks that lookups can find, in any tier.
    pub entries: u64,
    /// Chunks pinned by read leases, counted once per lease.
    pub pins: u64,
    /// Read leases held.
    pub read_leases: u64,
    /// Write leases held.
    pub write_leases: u64,
    /// Chunks on disk.
    pub disk_used: u64,
    /// Visible chunks on their way to disk.
    pub disk_pending: u64,
    /// Slots that the disk's files hold, as last seen by a disk thread.
    pub disk_slots: u64,
    /// Bytes that the disk directory is accounted at, as last seen by a disk thread.
    pub disk_bytes: u64,
    /// 1 while the disk tier is left alone, for reads, writes or both, because it fails, hangs or could not be opened.
    pub disk_broken: u64,
    /// Times that it began to be left alone.
    pub disk_trips: u64,
    /// Chunks that wait to be read from disk; they have no frame yet.
    pub reads_pending: u64,
}

impl Gauges {
    /// Names and values.
    pub(crate) fn named(&self) -> [(&'static str, u64); 15] {
        [
            ("frames_total", self.frames_total),
            ("frames_reserved", self.frames_reserved),
            ("frames_visible", self.frames_visible),
            ("frames_free", self.frames_free),
            ("entries", self.entries),
            ("pins", self.pins),
            ("read_leases", self.read_leases),
            ("write_leases", self.write_leases),
            ("disk_used", self.disk_used),
            ("disk_pending", self.disk_pending),
            ("disk_slots", self.disk_slots),
            ("disk_bytes", self.disk_bytes),
            ("disk_broken", self.disk_broken),
            ("disk_trips", self.disk_trips),
            ("reads_pending", self.reads_pending),
        ]
    }
}
