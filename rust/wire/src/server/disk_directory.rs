//! Claims a server's disk directory at startup, so that a second server reports the conflict
//! immediately rather than when its first engine connects. After that, periodically measures the
//! free disk space.
//!
//! Until the claim succeeds, the server uses only host memory and keeps retrying.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use kvloft_core::{Error, ErrorKind, Result};

use crate::server::shared_state::{DiskSpace, ServerState};
use crate::threads::locked;

/// Timeout for the first claim. A hung disk must not block startup.
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// Delay before the first retry. The delay doubles after each retry.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);
const MEASURE_INTERVAL: Duration = Duration::from_secs(5);

/// Waits for the first claim to finish or time out. Returns `InvalidConfig` if the directory can
/// never be used.
pub(crate) fn await_first_claim(result: &Receiver<Option<Error>>) -> Result<()> {
    match result.recv_timeout(FIRST_TIMEOUT) {
        Ok(Some(error)) if error.kind() == ErrorKind::InvalidConfig => Err(error),
        _ => Ok(()),
    }
}

impl ServerState {
    /// Claims the directory, then measures its free space until the server stops. Sends the first
    /// claim's result to `first`, or logs it if startup is no longer waiting for it. Logs later
    /// results only when they change.
    pub(crate) fn claim_disk(&self, first: Sender<Option<Error>>) {
        let Some(disk) = &self.config.disk else { return };
        let (mut first, mut wait) = (Some(first), FIRST_RETRY);
        while !self.is_stopping.load(Ordering::SeqCst) {
            let error = self.namespaces.disk.hold(&disk.dir).err();
            if error.is_none() {
                self.measure_disk(&disk.dir);
            }
            let (is_claimed, trouble) = (error.is_none(), error.as_ref().map(ToString::to_string));
            let is_new = self.set_disk_trouble(trouble.clone());
            let is_received = first.take().is_some_and(|first| first.send(error).is_ok());
            if is_new && !is_received {
                let dir = disk.dir.display();
                self.log(match trouble {
                    Some(why) => {
                        format!("{why}; using host memory only until the disk is available")
                    }
                    None => format!("disk tier: now using {dir}"),
                });
            }
            if is_claimed {
                break;
            }
            std::thread::park_timeout(wait);
            wait = (wait * 2).min(MAX_RETRY_INTERVAL);
        }
        while !self.is_stopping.load(Ordering::SeqCst) {
            std::thread::park_timeout(MEASURE_INTERVAL);
            if !self.is_stopping.load(Ordering::SeqCst) {
                self.measure_disk(&disk.dir);
            }
        }
        self.namespaces.disk.release(); // the server may have stopped while the claim was hung
    }

    /// Measures the free space and the sizes of closed namespaces. On error, keeps the previous
    /// result.
    fn measure_disk(&self, dir: &Path) {
        let found = rustix::fs::statvfs(dir).map_err(std::io::Error::from);
        let closed = self.namespaces.disk.closed(dir);
        if let (Ok(found), Ok(closed)) = (found, closed) {
            let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
            let space = DiskSpace { free_bytes, closed };
            *locked(&self.disk_space) = Some(space);
        }
    }

    /// Sets the reason why the disk is not in use. Returns true if the reason changed.
    fn set_disk_trouble(&self, trouble: Option<String>) -> bool {
        let mut current = locked(&self.disk_trouble);
        let is_new = *current != trouble;
        *current = trouble;
        is_new
    }
}
