//! A disk directory and those of its namespaces that are open in this process: one owner for all, and one cap.
//!
//! Each open namespace claims bytes before its files grow, so that all together stay below the cap at every instant; closed ones
//! are measured, and may be deleted to make room, open ones never. No lock is held while the system works, but one for the first
//! to open.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, PoisonError, Weak};

use super::lock::DirLock;
use super::types::DiskConfig;
use super::{budget, namespaces};
use crate::sync::{Mutex, MutexGuard};
use crate::{Error, ErrorKind, Result};

/// A namespace's directory and superblock, where it is open beside others.
const NAMESPACE_BYTES: u64 = 4 * budget::PAGE_BYTES;
/// Times that room is looked for again because a namespace was opened or closed meanwhile.
const TRIES: usize = 16;

/// What the tiers of one directory in this process share.
#[derive(Debug, Default)]
pub struct DiskRoot {
    books: Mutex<Books>,
    opening: Mutex<()>,
}

#[derive(Debug, Default)]
struct Books {
    lock: Weak<DirLock>,
    /// Bytes that each open namespace may take, by its directory's name.
    open: BTreeMap<String, u64>,
    /// Names that are being deleted.
    leaving: BTreeSet<String>,
    /// Namespaces opened and closed so far.
    changes: u64,
}

/// The right to the files of one namespace, and with the others' to the directory; given up with the last part of it.
#[derive(Debug)]
pub(super) struct Owner {
    root: Arc<DiskRoot>,
    name: String,
    _lock: Arc<DirLock>,
}

/// What may be taken.
pub(super) struct Room {
    /// Slots that the namespace may have.
    pub(super) slots: u32,
    /// Bytes of all other namespaces.
    pub(super) foreign_bytes: u64,
}

impl DiskRoot {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the directory, if nobody of this process has it, and the namespace. `Busy` where another has one of them.
    pub(super) fn enter(self: &Arc<Self>, config: &DiskConfig) -> Result<Arc<Owner>> {
        let _alone = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let held = self.books().lock.upgrade();
        let lock = match held {
            Some(lock) => lock,
            None => Arc::new(DirLock::acquire(&config.dir)?),
        };
        let name = namespaces::dir_name(&config.namespace);
        let mut books = self.books();
        if books.open.contains_key(&name) || books.leaving.contains(&name) {
            let message = format!("{} is in use by this process: it ends soon, or is another's", config.dir.join(&name).display());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        books.lock = Arc::downgrade(&lock);
        books.open.insert(name.clone(), 0);
        books.changes += 1;
        Ok(Arc::new(Owner { root: Arc::clone(self), name, _lock: lock }))
    }
}

impl Owner {
    /// Bytes of other open namespaces, which are never looked at on disk.
    fn open_bytes(&self, books: &Books) -> u64 {
        let others = books.open.iter().filter(|(name, _)| **name != self.name);
        others.map(|(_, bytes)| bytes + NAMESPACE_BYTES).fold(0, u64::saturating_add)
    }

    /// Claims room for `want` slots or fewer, of which `have` are there; closed namespaces go only if else not even `enough` fit.
    pub(super) fn claim(
        &self,
        config: &DiskConfig,
        [have, enough, want]: [u32; 3],
        mut note: impl FnMut(String),
    ) -> io::Result<Room> {
        for _ in 0..TRIES {
            let books = self.root.books();
            let (changes, open_bytes) = (books.changes, self.open_bytes(&books));
            let open: BTreeSet<_> = books.open.keys().cloned().collect();
            drop(books);
            let foreign = |closed: u64| closed.saturating_add(open_bytes);
            let fits = |closed| budget::dir_bytes(enough, config.frame_bytes, foreign(closed)) <= config.cap_bytes;
            let closed_bytes = namespaces::make_room(config, &open, fits, |path| self.remove(path), &mut note)?;
            let mut books = self.root.books();
            if books.changes == changes {
                let foreign_bytes = closed_bytes.saturating_add(self.open_bytes(&books));
                let slots = want.min(budget::max_slots(config, foreign_bytes));
                let bytes = budget::dir_bytes(slots.max(have), config.frame_bytes, 0) - budget::FIXED_BYTES;
                books.open.insert(self.name.clone(), bytes);
                return Ok(Room { slots, foreign_bytes });
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "namespaces come and go"))
    }

    /// It has so many slots now, and no claim to more.
    pub(super) fn settle(&self, config: &DiskConfig, slots: u32) {
        let bytes = budget::dir_bytes(slots, config.frame_bytes, 0) - budget::FIXED_BYTES;
        self.root.books().open.insert(self.name.clone(), bytes);
    }

    /// Deletes a closed namespace, which cannot be opened meanwhile.
    fn remove(&self, found: &namespaces::Found) -> io::Result<()> {
        let mut books = self.root.books();
        if books.open.contains_key(&found.name) || !books.leaving.insert(found.name.clone()) {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "it is in use"));
        }
        drop(books);
        let removed = namespaces::remove(&found.path);
        self.root.books().leaving.remove(&found.name);
        removed
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut books = self.root.books();
        books.open.remove(&self.name);
        books.changes += 1;
    }
}
