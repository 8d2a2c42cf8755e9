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
    /// Chunks forgotten by `discard` and by failed reads, with all that hung on them.
    pub discards: u64,
    /// Chunks forgotten by `clear`.
    pub cleared: u64,
}

impl Counters {
    /// Names and values.
    pub(crate) fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("commits", self.commits),
            ("aborts", self.aborts),
            ("reserve_dropped", self.reserve_dropped),
            ("host_evictions", self.host_evictions),
            ("discards", self.discards),
            ("cleared", self.cleared),
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
}

impl Gauges {
    /// Names and values.
    pub(crate) fn named(&self) -> [(&'static str, u64); 8] {
        [
            ("frames_total", self.frames_total),
            ("frames_reserved", self.frames_reserved),
            ("frames_visible", self.frames_visible),
            ("frames_free", self.frames_free),
            ("entries", self.entries),
            ("pins", self.pins),
            ("read_leases", self.read_leases),
            ("write_leases", self.write_leases),
        ]
    }
}
