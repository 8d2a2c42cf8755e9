//! Handles admin requests, and removes expired chunks from closed namespaces.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvloft_core::store::{Evict, Evicted, remove_closed, remove_expired};
use kvloft_core::tier::disk::RemovedChunks;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::admin::{AdminRequest, EvictReport, EvictRequest};
use crate::server::namespace::{Namespace, unix_s};
use crate::server::shared_state::ServerState;
use crate::threads::spawn;

/// Timeout for clearing a namespace. `kvloft clear` waits slightly longer.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(25);
/// Timeout for listing namespaces on disk.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
const EVICT_TIMEOUT: Duration = Duration::from_secs(50);

impl ServerState {
    /// Handles an admin request. Returns the result as JSON.
    pub(crate) fn answer_admin(&self, request: &AdminRequest) -> Result<Vec<u8>> {
        let json = match request {
            AdminRequest::Status => serde_json::to_vec(&self.status()),
            AdminRequest::Clear { namespace } => serde_json::to_vec(&self.clear(namespace)?),
            AdminRequest::Evict(request) => serde_json::to_vec(&self.evict(request)?),
        };
        json.map_err(|error| Error::io("cannot encode the response", error.into()))
    }

    /// Evicts chunks from open namespaces. If the request names a tenant and includes the disk,
    /// also removes the tenant's chunks from closed namespaces. Returns `InvalidConfig` if no
    /// namespace matches and the search was not cut short.
    pub(crate) fn evict(&self, request: &EvictRequest) -> Result<EvictReport> {
        let (begin, mut all) = (Instant::now(), EvictReport::default());
        let deadline = begin + EVICT_TIMEOUT;
        let Some(_guard) = self.evict_lock.lock(deadline) else {
            all.evicted.is_cut_short = true;
            return Ok(all);
        };
        // Search closed namespaces both before and after the open namespaces, because a namespace
        // may be opened or closed during the eviction. The first search has a shorter deadline, so
        // that there is time left for open namespaces even if the disk hangs.
        let before = self.evict_closed(request, begin + EVICT_TIMEOUT / 3, &mut all)?;
        let namespaces = self.namespaces.matching(&request.namespace);
        let what = Evict { salt: request.tenant, is_host_only: request.host_only };
        let being_opened = Evicted { is_cut_short: true, ..Evicted::default() };
        for namespace in &namespaces {
            all.num_namespaces += 1;
            all.evicted +=
                namespace.store().map_or(being_opened, |store| store.evict(what, deadline));
        }
        let num_namespaces = all.num_namespaces;
        let after = self.evict_closed(request, deadline, &mut all)?;
        all.num_namespaces = num_namespaces;
        let ids: Vec<_> = namespaces.iter().map(|namespace| namespace.id()).collect();
        // A namespace whose disk files are in use but that is not open is being closed.
        all.evicted.is_cut_short |= before.intersection(&after).any(|name| !ids.contains(name));
        if all.num_namespaces == 0 && !request.namespace.is_empty() && !all.evicted.is_cut_short {
            return Err(self.namespaces.no_such_namespace(&request.namespace));
        }
        let tenant = request.tenant.map_or("all tenants".to_owned(), |tag| format!("tenant {tag}"));
        let from = if request.host_only { " from host memory" } else { "" };
        let num_closed = all.num_namespaces.saturating_sub(namespaces.len() as u64);
        let and_closed = match num_closed {
            0 => String::new(),
            1 => " and one closed namespace".to_owned(),
            num => format!(" and {num} closed namespaces"),
        };
        let open = match ids.as_slice() {
            [] => "no open namespaces".to_owned(),
            [one] => format!("namespace {one}"),
            all => format!("namespaces {}", all.join(", ")),
        };
        let chunks = num_chunks_text(all.evicted.num_chunks);
        self.log(format!("kvloft evict: evicted {chunks} of {tenant}{from} in {open}{and_closed}"));
        Ok(all)
    }

    /// Removes a tenant's chunks from closed namespaces. Returns the ids of matching namespaces
    /// whose disk files are in use.
    fn evict_closed(
        &self,
        request: &EvictRequest,
        deadline: Instant,
        all: &mut EvictReport,
    ) -> Result<BTreeSet<String>> {
        if let (Some(_), Some(disk), false) = (request.tenant, &self.config.disk, request.host_only)
        {
            let (disk, root, request) =
                (disk.clone(), Arc::clone(&self.namespaces.disk), request.clone());
            let remove = move || remove_closed(&disk, &root, &request.namespace, request.tenant);
            let removed = self.remove_within(deadline, remove)?;
            all.num_namespaces += removed.num_namespaces;
            all.evicted += Evicted {
                num_chunks: removed.num_chunks,
                disk_bytes: removed.num_bytes,
                is_cut_short: removed.is_cut_short,
                ..Evicted::default()
            };
            return Ok(removed.open);
        }
        Ok(BTreeSet::new())
    }

    /// Removes all chunks of the open or closed namespace whose hex digits start with `prefix`.
    /// Returns the number of removed chunks. Returns `InvalidConfig` if several namespaces match or
    /// none matches a nonempty `prefix`, and `Busy` if some chunks may still be on disk.
    pub(crate) fn clear(&self, prefix: &str) -> Result<u64> {
        let deadline = Instant::now() + CLEAR_TIMEOUT;
        let closed = self.closed(prefix, deadline);
        let open = self.namespaces.matching(prefix);
        match (open.as_slice(), closed.as_deref()) {
            ([namespace], None | Some([])) => self.clear_open(namespace),
            ([], Some([one])) => self.clear_closed(one, deadline),
            ([], Some([])) if prefix.is_empty() => Ok(0),
            ([], Some([])) => Err(self.namespaces.no_such_namespace(prefix)),
            ([], None) => {
                let message = "cannot list the namespaces on disk: the server cannot use its disk, \
                               or the disk is not responding; check `kvloft status`, and retry \
                               once the disk works";
                Err(Error::new(ErrorKind::Busy, message))
            }
            _ => {
                let ids =
                    open.iter().map(|namespace| namespace.id()).chain(closed.into_iter().flatten());
                let ids = ids.collect::<Vec<_>>().join(", ");
                let message = format!(
                    "multiple open or closed namespaces match; use --namespace with one of: {ids}"
                );
                Err(Error::invalid(message))
            }
        }
    }

    fn clear_open(&self, namespace: &Namespace) -> Result<u64> {
        let id = namespace.id();
        let busy = |message| Err(Error::new(ErrorKind::Busy, message));
        let Some(store) = namespace.store() else {
            return busy(format!(
                "namespace {id} was not cleared because it is still opening; retry in a moment"
            ));
        };
        let count = || {
            store
                .stats()
                .into_iter()
                .find(|(name, _)| *name == "cleared")
                .map_or(0, |(_, number)| number)
        };
        let before = count();
        let is_cleared = store.clear();
        let num_chunks = count() - before;
        self.log_cleared(num_chunks, &id);
        if !is_cleared {
            return busy(format!(
                "namespace {id} no longer serves its old chunks, but its disk directory is not \
                 cleared yet, so a restart could bring them back. The server is retrying; run the \
                 command again to check"
            ));
        }
        Ok(num_chunks)
    }

    fn clear_closed(&self, id: &str, deadline: Instant) -> Result<u64> {
        let Some(disk) = self.config.disk.clone() else { return Ok(0) };
        let (root, prefix) = (Arc::clone(&self.namespaces.disk), id.to_owned());
        let removed =
            self.remove_within(deadline, move || remove_closed(&disk, &root, &prefix, None))?;
        self.log_cleared(removed.num_chunks, id);
        if removed.is_cut_short || !removed.open.is_empty() {
            let message = format!(
                "some chunks in namespace {id} remain because the namespace is opening or the disk \
                 is not responding; retry in a moment"
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        Ok(removed.num_chunks)
    }

    fn log_cleared(&self, num_chunks: u64, id: &str) {
        self.log(format!(
            "kvloft clear: removed {} from namespace {id}",
            num_chunks_text(num_chunks)
        ));
    }

    /// Returns the ids of matching closed namespaces, or None if the server cannot use its disk or
    /// the disk is not responding.
    fn closed(&self, prefix: &str, deadline: Instant) -> Option<Vec<String>> {
        let Some(disk) = self.config.disk.clone() else { return Some(Vec::new()) };
        if self.disk_trouble().is_some() {
            return None;
        }
        let root = Arc::clone(&self.namespaces.disk);
        let found = self.run_within(deadline.min(Instant::now() + LIST_TIMEOUT), move || {
            root.closed(&disk.dir)
        });
        let names = found.ok()??.ok()?.into_keys();
        Some(
            names
                .filter(|name| name.starts_with(prefix) || prefix.starts_with(name.as_str()))
                .collect(),
        )
    }

    /// Returns the result of `remove`, or a result with `is_cut_short` set if the deadline passes
    /// first.
    fn remove_within(
        &self,
        deadline: Instant,
        remove: impl FnOnce() -> Result<RemovedChunks> + Send + 'static,
    ) -> Result<RemovedChunks> {
        let cut_short = || Ok(RemovedChunks { is_cut_short: true, ..RemovedChunks::default() });
        self.run_within(deadline, remove)?.unwrap_or_else(cut_short)
    }

    /// Runs `work` on another thread, one call at a time. Returns None at the deadline, without
    /// waiting for the thread, because its disk I/O might hang.
    fn run_within<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Option<T>> {
        let Some(guard) = self.closed_lock.lock(deadline) else { return Ok(None) };
        let (send, receive) = mpsc::channel();
        spawn("remove", move || {
            let done = work();
            drop(guard);
            let _none_waits = send.send(done);
        })?;
        Ok(receive.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok())
    }

    /// Returns the interval between searches for expired chunks, or None if chunks never expire.
    pub(crate) fn expiry_interval(&self) -> Option<Duration> {
        let ttl_s = self.config.disk.as_ref().and(self.config.limits.shortest_ttl_s())?;
        Some(Duration::from_secs((u64::from(ttl_s) / 16).clamp(60, 3600)))
    }

    /// Removes expired chunks from closed namespaces.
    pub(crate) fn remove_expired(&self) {
        let Some(disk) = &self.config.disk else { return };
        let removed = remove_expired(disk, &self.namespaces.disk, &self.config.limits, unix_s());
        let num_chunks = removed.map_or(0, |removed| removed.num_chunks);
        if num_chunks > 0 {
            let chunks = if num_chunks == 1 { "chunk" } else { "chunks" };
            self.log(format!("removed {num_chunks} expired {chunks} from closed namespaces"));
        }
    }
}

fn num_chunks_text(num_chunks: u64) -> String {
    format!("{num_chunks} {}", if num_chunks == 1 { "chunk" } else { "chunks" })
}

#[cfg(test)]
mod tests;
