//! Settings of a client.

use std::path::PathBuf;
use std::time::Duration;

use kvloft_core::io::FrameSizes;

/// Shortest deadline of reservations and commits: a request waits for a lookup, but a save without
/// an answer is lost.
const MIN_SAVE_DEADLINE: Duration = Duration::from_millis(100);

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Path of the server's socket.
    pub socket: PathBuf,
    /// Longest wait for the answer of a call.
    pub deadline: Duration,
    /// As in `StoreConfig`.
    pub namespace: [u8; 32],
    /// As in `StoreConfig`.
    pub frame_sizes: FrameSizes,
    /// As in `DiskSettings`.
    pub description: String,
}

impl ClientConfig {
    pub(crate) fn save_deadline(&self) -> Duration {
        self.deadline.max(MIN_SAVE_DEADLINE)
    }
}
