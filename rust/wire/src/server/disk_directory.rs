//! A server's disk directory: taken as it starts, so that a second server on it says so at once and not with its first engine.
//!
//! While it cannot be had, there is host memory only, and it is tried again; stores that are open by then try by themselves. Once it
//! is had, its room is looked at now and then. It must not know what the directory holds.

use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use kvloft_core::{Error, ErrorKind, Result};

use crate::server::disk_space::DiskRoom;
use crate::server::shared_state::Shared;

/// Longest that a start waits for the disk, which may hang.
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time until it is tried again; each time doubles it.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// Between two looks at its room, which are a call or two of the system each.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

/// What the first try came to, as far as it was one: `InvalidConfig` where the directory can never be used.
pub(crate) fn first_try(came: &Receiver<Option<Error>>) -> Result<()> {
    match came.recv_timeout(FIRST_TIMEOUT) {
        Ok(Some(error)) if error.kind() == ErrorKind::InvalidConfig => Err(error),
        _ => Ok(()),
    }
}

impl Shared {
    /// Until the directory is the server's, or the server ends. What the first try comes to goes to `first`; what comes of it later, or
    /// so late that none waits for it, is told.
    pub(crate) fn take_disk(&self, first: Sender<Option<Error>>) {
        let Some(disk) = &self.config.disk else { return };
        let (mut first, mut wait) = (Some(first), FIRST_RETRY);
        while !self.is_stopping.load(Ordering::SeqCst) {
            let error = self.namespaces.disk.keep(&disk.dir).err();
            if error.is_none() {
                self.measure(&disk.dir);
            }
            let (is_ours, trouble) = (error.is_none(), error.as_ref().map(ToString::to_string));
            let is_new = self.note_trouble(trouble.clone());
            let is_heard = first.take().is_some_and(|first| first.send(error).is_ok());
            if is_new && !is_heard {
                let dir = disk.dir.display();
                self.tell(match trouble {
                    Some(why) => format!("{why}; there is host memory only until it can be used"),
                    None => format!("the disk {dir} is used from now on"),
                });
            }
            if is_ours {
                break;
            }
            std::thread::park_timeout(wait);
            wait = (wait * 2).min(LONGEST_RETRY);
        }
        while !self.is_stopping.load(Ordering::SeqCst) {
            std::thread::park_timeout(MEASURE_EVERY);
            if !self.is_stopping.load(Ordering::SeqCst) {
                self.measure(&disk.dir);
            }
        }
        self.namespaces.disk.let_go(); // the server may have ended while this one hung
    }

    /// Looks at the directory's room; where that fails, what was found before stands.
    fn measure(&self, dir: &Path) {
        let found = rustix::fs::statvfs(dir).map_err(std::io::Error::from);
        let closed = self.namespaces.disk.closed(dir);
        if let (Ok(found), Ok(closed)) = (found, closed) {
            let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
            let room = DiskRoom { free_bytes, closed };
            *self.disk_room.lock().unwrap_or_else(PoisonError::into_inner) = Some(room);
        }
    }

    /// Whether it was another one before.
    fn note_trouble(&self, trouble: Option<String>) -> bool {
        let mut noted = self.disk_trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *noted != trouble;
        *noted = trouble;
        is_new
    }
}
