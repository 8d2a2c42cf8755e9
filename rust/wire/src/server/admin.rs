//! What the server does for people: it gives chunks up, and erases what is too old without being told.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvloft_core::store::{Evict, erase_closed, erase_expired};
use kvloft_core::tier::disk::Erased;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::admin::{GivenUp, Whose};
use crate::server::namespace::{Space, id, unix_s};
use crate::server::shared_state::Shared;
use crate::threads::spawn;

/// Longest work at emptying a namespace; `kvloft clear` waits a little longer.
const FORGET_TIMEOUT: Duration = Duration::from_secs(25);
/// Longest wait for the list of namespaces on disk.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest work of a server at one order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(50);

impl Shared {
    /// Gives chunks up, in the namespaces that are open and in those that are on disk only. `InvalidConfig` if no namespace is meant.
    pub(crate) fn evict(&self, whose: &Whose, is_host_only: bool) -> Result<GivenUp> {
        let (begin, mut all) = (Instant::now(), GivenUp::default());
        let deadline = begin + ORDER_TIMEOUT;
        // Each counts what goes while it has its turn.
        let Some(_turn) = self.evicting.take(deadline) else { return Ok(GivenUp { is_cut_short: true, ..all }) };
        // Before, for what is opened meanwhile, and after, for what is closed. A disk that hangs leaves time for what is open.
        let before = self.erase_closed(whose, is_host_only, begin + ORDER_TIMEOUT / 3, &mut all)?;
        let spaces = self.namespaces.all_of(&whose.namespace);
        for space in &spaces {
            evict_in(space, Evict { salt: whose.salt, is_host_only }, deadline, &mut all);
        }
        let num_namespaces = all.num_namespaces;
        let after = self.erase_closed(whose, is_host_only, deadline, &mut all)?;
        all.num_namespaces = num_namespaces;
        let ids: Vec<_> = spaces.iter().map(|space| id(&space.hello.namespace)).collect();
        all.is_cut_short |= before.intersection(&after).any(|name| !ids.contains(name)); // it is being closed
        if all.num_namespaces == 0 && !whose.namespace.is_empty() {
            return Err(self.namespaces.none_of("no such namespace"));
        }
        let from = if is_host_only { " from host memory" } else { "" };
        let chunks = if all.num_chunks == 1 { "chunk" } else { "chunks" };
        let num_closed = all.num_namespaces.saturating_sub(spaces.len() as u64);
        let beside = if num_closed > 0 { format!(" and {num_closed} on disk only") } else { String::new() };
        let (num, what, place) = (all.num_chunks, whose.name(), in_namespaces(&spaces));
        self.tell(format!("kvloft evict: {num} {chunks} of {what} evicted{from} in {place}{beside}"));
        Ok(all)
    }

    /// Returns the names of those that are open.
    fn erase_closed(
        &self,
        whose: &Whose,
        is_host_only: bool,
        deadline: Instant,
        all: &mut GivenUp,
    ) -> Result<BTreeSet<String>> {
        if let (Some(salt), Some(disk), false) = (whose.salt, &self.config.disk, is_host_only) {
            let (disk, root, prefix) = (disk.clone(), Arc::clone(&self.namespaces.disk), whose.namespace.clone());
            let erased = self.erase_within(deadline, move || erase_closed(&disk, &root, &prefix, Some(salt)))?;
            all.num_namespaces += erased.num_namespaces;
            all.num_chunks += erased.num_chunks;
            all.disk_bytes += erased.num_bytes;
            all.is_cut_short |= erased.is_cut_short;
            return Ok(erased.open);
        }
        Ok(BTreeSet::new())
    }

    /// Empties the namespace whose name begins so, also one that is on disk only; returns how many chunks there were. `InvalidConfig`
    /// if there is not one, `Busy` if some of it may still be on disk.
    pub(crate) fn forget(&self, name: &str) -> Result<u64> {
        let deadline = Instant::now() + FORGET_TIMEOUT;
        let closed = self.closed(name, deadline);
        let open = self.namespaces.all_of(name);
        match (open.as_slice(), closed.as_deref()) {
            ([space], None | Some([])) => Ok(self.forget_open(space)),
            ([], Some([one])) => self.forget_closed(one, deadline),
            ([], Some([])) if name.is_empty() => Ok(0),
            ([], Some([])) => Err(self.namespaces.none_of("no such namespace")),
            ([], None) => {
                let message = "what this kvloft server has on disk is not known: its disk is not used for now, or does not \
                               answer; `kvloft status` says which, so run this again once it is";
                Err(Error::new(ErrorKind::Busy, message))
            }
            _ => {
                let ids = open.iter().map(|space| id(&space.hello.namespace)).chain(closed.into_iter().flatten());
                let ids: Vec<_> = ids.collect();
                let message = format!(
                    "this kvloft server has several namespaces, open or on disk only; say --namespace with one of {}",
                    ids.join(", ")
                );
                Err(Error::new(ErrorKind::InvalidConfig, message))
            }
        }
    }

    fn forget_open(&self, space: &Space) -> u64 {
        let Some(store) = space.store() else { return 0 };
        let count = || store.stats().into_iter().find(|(name, _)| *name == "cleared").map_or(0, |(_, number)| number);
        let before = count();
        store.clear();
        let num_chunks = count() - before;
        self.tell_forgotten(num_chunks, &id(&space.hello.namespace));
        num_chunks
    }

    fn forget_closed(&self, name: &str, deadline: Instant) -> Result<u64> {
        let Some(disk) = self.config.disk.clone() else { return Ok(0) };
        let (root, prefix) = (Arc::clone(&self.namespaces.disk), name.to_owned());
        let erased = self.erase_within(deadline, move || erase_closed(&disk, &root, &prefix, None))?;
        self.tell_forgotten(erased.num_chunks, name);
        if erased.is_cut_short || !erased.open.is_empty() {
            let message = format!(
                "namespace {name} is not empty yet: it is being opened, or the disk does not answer; run this again"
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        Ok(erased.num_chunks)
    }

    fn tell_forgotten(&self, num_chunks: u64, id: &str) {
        let chunks = if num_chunks == 1 { "chunk" } else { "chunks" };
        self.tell(format!("kvloft clear: {num_chunks} {chunks} of namespace {id} forgotten"));
    }

    /// Names of namespaces that are on disk only and begin so, as `kvloft status` prints names; None where the disk does not say, or is
    /// not this server's now.
    fn closed(&self, prefix: &str, deadline: Instant) -> Option<Vec<String>> {
        let Some(disk) = self.config.disk.clone() else { return Some(Vec::new()) };
        if self.disk_trouble().is_some() {
            return None;
        }
        let root = Arc::clone(&self.namespaces.disk);
        let found = self.within(deadline.min(Instant::now() + LIST_TIMEOUT), move || root.closed(&disk.dir));
        let names = found.ok()??.ok()?.into_keys();
        Some(names.filter(|name| name.starts_with(prefix) || prefix.starts_with(name.as_str())).collect())
    }

    /// What `erase` comes to, or that it was cut short.
    fn erase_within(
        &self,
        deadline: Instant,
        erase: impl FnOnce() -> Result<Erased> + Send + 'static,
    ) -> Result<Erased> {
        let cut_short = || Ok(Erased { is_cut_short: true, ..Erased::default() });
        self.within(deadline, erase)?.unwrap_or_else(cut_short)
    }

    /// What `work` on the disk comes to, in a thread of its own, which may be left with a disk that hangs: until it is done there is no
    /// other. None at the deadline.
    fn within<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Option<T>> {
        let Some(turn) = self.erasing.take(deadline) else { return Ok(None) };
        let (send, receive) = mpsc::channel();
        spawn("erase", move || {
            let done = work();
            drop(turn);
            let _none_waits = send.send(done);
        })?;
        Ok(receive.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok())
    }
}

impl Shared {
    /// How often closed namespaces are looked at for what is too old; None if nothing becomes so.
    pub(crate) fn erases_every(&self) -> Option<Duration> {
        let ttl_s = self.config.disk.as_ref().and(self.config.limits.shortest_ttl_s())?;
        Some(Duration::from_secs((u64::from(ttl_s) / 16).clamp(60, 3600)))
    }

    /// Erases what is too old in namespaces that are on disk only.
    pub(crate) fn erase_expired(&self) {
        let Some(disk) = &self.config.disk else { return };
        let erased = erase_expired(disk, &self.namespaces.disk, &self.config.limits, unix_s());
        let num_chunks = erased.map_or(0, |erased| erased.num_chunks);
        if num_chunks > 0 {
            self.tell(format!(
                "{num_chunks} chunks of namespaces without engines are erased from disk: they are too old"
            ));
        }
    }
}

/// The namespaces that are open in which an order was obeyed, for a log.
fn in_namespaces(spaces: &[Arc<Space>]) -> String {
    let ids: Vec<_> = spaces.iter().map(|space| id(&space.hello.namespace)).collect();
    match ids.as_slice() {
        [] => "no open namespace".to_owned(),
        [one] => format!("namespace {one}"),
        all => format!("namespaces {}", all.join(", ")),
    }
}

fn evict_in(space: &Space, what: Evict, deadline: Instant, all: &mut GivenUp) {
    all.num_namespaces += 1;
    let Some(store) = space.store() else {
        all.is_cut_short = true; // it is being opened
        return;
    };
    let evicted = store.evict(what, deadline);
    all.num_chunks += evicted.num_chunks;
    all.host_bytes += evicted.num_host * space.hello.frame_bytes;
    all.disk_bytes += evicted.num_disk * space.hello.frame_bytes;
    all.num_in_use += evicted.num_in_use;
    all.is_cut_short |= evicted.is_cut_short;
}

#[cfg(test)]
mod tests;
