//! A disk directory with one owner and one size limit, and the namespaces that this process has
//! open in it.
//!
//! Each open namespace claims space before its files grow, so that the total never exceeds the
//! limit. Closed namespaces are measured and can be deleted to make room. Open namespaces are never
//! deleted. While multiple namespaces are open, each leaves an equal share of the space to every
//! other namespace, but keeps its earlier claims until it closes. Only the `opening` lock is held
//! during system calls.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::owner::DirLock;
use super::types::DiskConfig;
use super::{budget, namespaces, owner};
use crate::key::namespace_id;
use crate::sync::{Mutex, MutexGuard, locked};
use crate::{Error, ErrorKind, Result};

/// Size of a namespace's directory and superblock, reserved for every other open namespace.
const NAMESPACE_BYTES: u64 = 4 * budget::PAGE_BYTES;
/// Approximate file growth per allocation.
const EXTENT_BYTES: u64 = 64 * 1024 * 1024;
/// Minimum number of extents that fit within the size limit if multiple namespaces may be open.
const MIN_EXTENTS: u64 = 16;
/// Maximum number of attempts to claim space while namespaces are being opened and closed.
const TRIES: usize = 16;
/// Timeout for acquiring the `opening` lock. After the timeout, an engine starts with host memory
/// only.
const OPENING_TIMEOUT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// State of one directory, shared by all its tiers in this process.
#[derive(Debug, Default)]
pub struct DiskRoot {
    state: Mutex<RootState>,
    opening: Mutex<()>,
    /// True if multiple namespaces may be open.
    is_shared: bool,
}

#[derive(Debug, Default)]
struct RootState {
    lock: Weak<DirLock>,
    /// Keeps the directory locked while no namespace is open.
    kept: Option<Arc<DirLock>>,
    /// Bytes claimed by each open namespace, by directory name.
    open: BTreeMap<String, u64>,
    /// Names of namespaces that are being deleted.
    leaving: BTreeSet<String>,
    /// Number of times a namespace was opened or closed.
    changes: u64,
    /// True if any namespace has run out of space since the last check.
    is_short: bool,
}

/// Exclusive ownership of a namespace's files, and shared ownership of the directory.
#[derive(Debug)]
pub(super) struct OpenNamespace {
    root: Arc<DiskRoot>,
    name: String,
    _lock: Arc<DirLock>,
}

pub(super) struct Claim {
    /// Total number of bytes that the namespace may use.
    pub(super) bytes: u64,
    /// Total size of all other namespaces, in bytes. 0 if the other namespaces report their own
    /// sizes.
    pub(super) foreign_bytes: u64,
}

impl DiskRoot {
    /// Creates the state for multiple namespaces. Use `default` for a single namespace.
    pub fn shared() -> Arc<Self> {
        Arc::new(Self { is_shared: true, ..Self::default() })
    }

    fn state(&self) -> MutexGuard<'_, RootState> {
        locked(&self.state)
    }

    /// Locks the directory for this process until [`Self::release`], even while no namespace is
    /// open. Creates the directory if it is missing. Returns the same errors as
    /// [`super::DiskTier::open_in`].
    pub fn hold(&self, dir: &Path) -> Result<()> {
        let _alone = locked(&self.opening);
        let lock = self.lock(dir)?;
        self.state().kept = Some(lock);
        Ok(())
    }

    /// Releases the lock taken by [`Self::hold`]. The directory stays locked while a namespace is
    /// open.
    pub fn release(&self) {
        let kept = self.state().kept.take();
        drop(kept); // may unlock the directory, so `state` must not be locked
    }

    /// Returns each closed namespace's size on disk in bytes, by directory name. Returns an
    /// empty map if the directory is missing. Does I/O.
    pub fn closed(&self, dir: &Path) -> io::Result<BTreeMap<String, u64>> {
        match namespaces::scan(dir, &self.open_names()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            found => Ok(found?.into_iter().map(|found| (found.name, found.bytes)).collect()),
        }
    }

    /// Returns the total size of the `measured` namespaces that are still closed.
    pub fn bytes_closed(&self, measured: &BTreeMap<String, u64>) -> u64 {
        let open = self.open_names();
        measured
            .iter()
            .filter(|(name, _)| !open.contains(*name))
            .map(|(_, bytes)| bytes)
            .fold(0, |sum, of| sum.saturating_add(*of))
    }

    /// Returns the directory's lock, acquiring it if needed. The caller must hold `opening`.
    fn lock(&self, dir: &Path) -> Result<Arc<DirLock>> {
        namespaces::make_dir(dir).map_err(|e| {
            owner::missing_place(dir, &e).unwrap_or_else(|| owner::dir_error(owner::MAKE, dir, e))
        })?;
        let held = self.state().lock.upgrade().filter(|lock| lock.is_of(dir));
        if let Some(lock) = held {
            return Ok(lock);
        }
        let lock = Arc::new(DirLock::acquire(dir)?);
        let mut state = self.state();
        state.lock = Arc::downgrade(&lock);
        let before = state
            .kept
            .as_ref()
            .map(|_| Arc::clone(&lock))
            .and_then(|lock| state.kept.replace(lock));
        drop(state);
        drop(before);
        Ok(lock)
    }

    /// Returns true if any namespace has run out of space since the last call. If so, closing
    /// another namespace would help.
    pub fn take_short(&self) -> bool {
        std::mem::take(&mut self.state().is_short)
    }

    pub(super) fn open_names(&self) -> BTreeSet<String> {
        self.state().open.keys().cloned().collect()
    }

    /// Acquires the `opening` lock. Returns `Busy` after a timeout.
    fn alone(&self, dir: &Path) -> Result<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + OPENING_TIMEOUT;
        loop {
            match self.opening.try_lock() {
                Ok(alone) => return Ok(alone),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(LOOK_EVERY);
                }
                Err(TryLockError::WouldBlock) => {
                    let message = format!("disk_path {} is not responding", dir.display());
                    return Err(Error::new(ErrorKind::Busy, message));
                }
            }
        }
    }

    /// Creates the directory if it is missing, locks it for this process and opens the namespace.
    /// Returns `Busy` if another process uses the directory, if this process has the namespace open
    /// or is deleting it, or if the directory cannot be locked in time.
    pub(super) fn enter(self: &Arc<Self>, config: &DiskConfig) -> Result<Arc<OpenNamespace>> {
        let _alone = self.alone(&config.dir)?;
        let lock = self.lock(&config.dir)?;
        let name = namespace_id(&config.namespace);
        // The existing files count as claimed, so that other namespaces cannot claim their space
        // first.
        let found = namespaces::measure(name.clone(), config.dir.join(&name));
        let mut state = self.state();
        if state.open.contains_key(&name) || state.leaving.contains(&name) {
            let message = format!(
                "{} is in use by this process: another store has it open, or it is being closed or deleted",
                config.dir.join(&name).display()
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        state.open.insert(name.clone(), found.bytes);
        state.changes += 1;
        Ok(Arc::new(OpenNamespace { root: Arc::clone(self), name, _lock: lock }))
    }
}

impl OpenNamespace {
    /// Returns the maximum file growth per allocation.
    pub(super) fn extent_bytes(&self, cap_bytes: u64) -> u64 {
        let share = if self.root.is_shared { cap_bytes / MIN_EXTENTS } else { cap_bytes };
        share.min(EXTENT_BYTES)
    }

    /// Returns the bytes reserved for other open namespaces: for each, its claim or an equal share,
    /// whichever is larger.
    fn open_bytes(&self, state: &RootState, cap_bytes: u64) -> u64 {
        let part = cap_bytes.saturating_sub(budget::FIXED_BYTES) / state.open.len().max(1) as u64;
        let others = state.open.iter().filter(|(name, _)| **name != self.name);
        others.map(|(_, bytes)| part.max(bytes + NAMESPACE_BYTES)).fold(0, u64::saturating_add)
    }

    /// Claims up to `want` bytes in total. Deletes closed namespaces only if `enough` bytes would
    /// not fit otherwise and deleting them can help.
    pub(super) fn claim(
        &self,
        config: &DiskConfig,
        [enough, want]: [u64; 2],
        mut note: impl FnMut(String),
    ) -> io::Result<Claim> {
        let cap_bytes = config.cap_bytes.saturating_sub(budget::FIXED_BYTES);
        for _ in 0..TRIES {
            let state = self.root.state();
            let (changes, open_bytes) = (state.changes, self.open_bytes(&state, config.cap_bytes));
            let open: BTreeSet<_> = state.open.keys().cloned().collect();
            let is_first = state.open.get(&self.name).is_none_or(|claimed| *claimed == 0);
            drop(state);
            let fits =
                |closed: u64| enough.saturating_add(closed).saturating_add(open_bytes) <= cap_bytes;
            // When a namespace is opened, space for part of its files is better than no space.
            // After that, anything less than `enough` bytes is useless.
            let may_help = fits(0) || is_first;
            let is_enough = |closed| !may_help || fits(closed);
            let remove = |path: &_| self.remove(path);
            let closed_bytes = namespaces::make_room(config, &open, is_enough, remove, &mut note)?;
            let mut state = self.root.state();
            if state.changes == changes {
                let foreign_bytes =
                    closed_bytes.saturating_add(self.open_bytes(&state, config.cap_bytes));
                let bytes = want.min(cap_bytes.saturating_sub(foreign_bytes));
                let claimed = state.open.entry(self.name.clone()).or_default();
                *claimed = bytes.max(*claimed);
                // An idle namespace loses its memory and files only to a namespace that has less
                // than its share.
                let part = cap_bytes / state.open.len().max(1) as u64;
                state.is_short |= bytes < enough && enough <= part;
                return Ok(Claim {
                    bytes,
                    foreign_bytes: if self.root.is_shared { 0 } else { foreign_bytes },
                });
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "namespaces keep opening and closing"))
    }

    /// Deletes the least recently used closed namespace. Called if the file system fills up
    /// before the directory reaches its size limit. Returns false if no namespace could be deleted.
    pub(super) fn delete_closed(&self, config: &DiskConfig, note: impl FnMut(String)) -> bool {
        let is_deleted = Cell::new(false);
        let delete = |found: &namespaces::Found| {
            self.remove(found)?;
            is_deleted.set(true);
            Ok(())
        };
        let open = self.root.open_names();
        let _listed = namespaces::make_room(config, &open, |_| is_deleted.get(), delete, note);
        self.root.state().is_short |= !is_deleted.get();
        is_deleted.get()
    }

    /// Sets the namespace's claim to `bytes`.
    pub(super) fn settle(&self, bytes: u64) {
        self.root.state().open.insert(self.name.clone(), bytes);
    }

    /// Deletes a closed namespace, which cannot be opened while it is being deleted.
    pub(super) fn remove(&self, found: &namespaces::Found) -> io::Result<()> {
        let mut state = self.root.state();
        if state.open.contains_key(&found.name) || !state.leaving.insert(found.name.clone()) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "it is in use"));
        }
        drop(state);
        let removed = namespaces::remove(&found.path);
        self.root.state().leaving.remove(&found.name);
        removed
    }
}

impl Drop for OpenNamespace {
    fn drop(&mut self) {
        let mut state = self.root.state();
        state.open.remove(&self.name);
        state.changes += 1;
    }
}

#[cfg(test)]
mod tests;
