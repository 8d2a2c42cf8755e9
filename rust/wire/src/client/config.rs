//! Settings of a client.

use std::path::PathBuf;
use std::time::Duration;

/// Least time that a reservation or commit waits for its answer, however short the deadline of lookups is: a request waits for a
/// lookup, but a save that is dropped is lost.
const MIN_SAVE_DEADLINE: Duration = Duration::from_millis(100);

/// What is asked for of a server.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Where it listens.
    pub socket: PathBuf,
    /// Longest wait of a call.
    pub deadline: Duration,
    /// As in `StoreConfig`.
    pub namespace: [u8; 32],
    /// As in `StoreConfig`.
    pub frame_bytes: u64,
    /// As in `StoreConfig`.
    pub blocks_per_chunk: u32,
    /// As in `DiskSettings`.
    pub description: String,
}

impl ClientConfig {
    /// Longest wait of a reservation or commit.
    pub(crate) fn save_deadline(&self) -> Duration {
        self.deadline.max(MIN_SAVE_DEADLINE)
    }
}
