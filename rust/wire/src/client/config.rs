//! Settings of a client.

use std::path::PathBuf;
use std::time::Duration;

use kvloft_core::io::FrameSizes;

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
