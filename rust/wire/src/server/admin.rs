//! What the server does for people: it gives chunks up, and erases what is too old without being told.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvloft_core::store::{Evict, erase_closed, erase_expired};
use kvloft_core::tier::disk::Erased;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::admin::{AdminRequest, EvictReport, EvictRequest, tag_text};
use crate::server::namespace::{Namespace, namespace_id, unix_s};
use crate::server::shared_state::ServerState;
use crate::threads::spawn;

/// Longest work at emptying a namespace; `kvloft clear` waits a little longer.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(25);
/// Longest wait for the list of namespaces on disk.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest work of a server at one order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(50);

impl ServerState {
    /// Handles an admin request and returns its result in JSON.
    pub(crate) fn answer_admin(&self, request: &AdminRequest) -> Result<Vec<u8>> {
        let json = match request {
            AdminRequest::Status => serde_json::to_vec(&self.status()),
            AdminRequest::Clear { namespace } => serde_json::to_vec(&self.clear(namespace)?),
            AdminRequest::Evict(request) => serde_json::to_vec(&self.evict(request)?),
        };
        json.map_err(|error| Error::io("the response cannot be encoded", error.into()))
    }

    /// Evicts chunks from open namespaces and from namespaces on disk. `InvalidConfig` if none matches.
    pub(crate) fn evict(&self, request: &EvictRequest) -> Result<EvictReport> {
        let (begin, mut all) = (Instant::now(), EvictReport::default());
        let deadline = begin + ORDER_TIMEOUT;
        // Each counts what goes while it has its turn.
        let Some(_turn) = self.evict_lock.lock(deadline) else { return Ok(EvictReport { is_cut_short: true, ..all }) };
        // Before, for what is opened meanwhile, and after, for what is closed. A disk that hangs leaves time for what is open.
        let before = self.evict_closed(request, begin + ORDER_TIMEOUT / 3, &mut all)?;
        let namespaces = self.namespaces.matching(&request.namespace);
        for namespace in &namespaces {
            evict_in(namespace, Evict { salt: request.tenant, is_host_only: request.host_only }, deadline, &mut all);
        }
        let num_namespaces = all.num_namespaces;
        let after = self.evict_closed(request, deadline, &mut all)?;
        all.num_namespaces = num_namespaces;
        let ids: Vec<_> = namespaces.iter().map(|namespace| namespace_id(&namespace.hello.namespace)).collect();
        all.is_cut_short |= before.intersection(&after).any(|name| !ids.contains(name)); // it is being closed
        if all.num_namespaces == 0 && !request.namespace.is_empty() {
            return Err(self.namespaces.no_namespace("no such namespace"));
        }
        let from = if request.host_only { " from host memory" } else { "" };
        let chunks = if all.num_chunks == 1 { "chunk" } else { "chunks" };
        let num_closed = all.num_namespaces.saturating_sub(namespaces.len() as u64);
        let beside = if num_closed > 0 { format!(" and {num_closed} on disk only") } else { String::new() };
        let tenant =
            request.tenant.map_or("all tenants".to_owned(), |tag| format!("the tenant with tag {}", tag_text(tag)));
        let (num, place) = (all.num_chunks, in_namespaces(&namespaces));
        self.log(format!("kvloft evict: {num} {chunks} of {tenant} evicted{from} in {place}{beside}"));
        Ok(all)
    }

    /// Returns the names of those that are open.
    fn evict_closed(
        &self,
        request: &EvictRequest,
        deadline: Instant,
        all: &mut EvictReport,
    ) -> Result<BTreeSet<String>> {
        if let (Some(_), Some(disk), false) = (request.tenant, &self.config.disk, request.host_only) {
            let (disk, root, request) = (disk.clone(), Arc::clone(&self.namespaces.disk), request.clone());
            let erase = move || erase_closed(&disk, &root, &request.namespace, request.tenant);
            let erased = self.erase_within(deadline, erase)?;
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
    pub(crate) fn clear(&self, name: &str) -> Result<u64> {
        let deadline = Instant::now() + CLEAR_TIMEOUT;
        let closed = self.closed(name, deadline);
        let open = self.namespaces.matching(name);
        match (open.as_slice(), closed.as_deref()) {
            ([namespace], None | Some([])) => Ok(self.clear_open(namespace)),
            ([], Some([one])) => self.clear_closed(one, deadline),
            ([], Some([])) if name.is_empty() => Ok(0),
            ([], Some([])) => Err(self.namespaces.no_namespace("no such namespace")),
            ([], None) => {
                let message = "what this kvloft server has on disk is not known: its disk is not used for now, or does not \
                               answer; `kvloft status` says which, so run this again once it is";
                Err(Error::new(ErrorKind::Busy, message))
            }
            _ => {
                let ids = open
                    .iter()
                    .map(|namespace| namespace_id(&namespace.hello.namespace))
                    .chain(closed.into_iter().flatten());
                let ids: Vec<_> = ids.collect();
                let message = format!(
                    "this kvloft server has several namespaces, open or on disk only; say --namespace with one of {}",
                    ids.join(", ")
                );
                Err(Error::new(ErrorKind::InvalidConfig, message))
            }
        }
    }

    fn clear_open(&self, namespace: &Namespace) -> u64 {
        let Some(store) = namespace.store() else { return 0 };
        let count = || store.stats().into_iter().find(|(name, _)| *name == "cleared").map_or(0, |(_, number)| number);
        let before = count();
        store.clear();
        let num_chunks = count() - before;
        self.log_cleared(num_chunks, &namespace_id(&namespace.hello.namespace));
        num_chunks
    }

    fn clear_closed(&self, name: &str, deadline: Instant) -> Result<u64> {
        let Some(disk) = self.config.disk.clone() else { return Ok(0) };
        let (root, prefix) = (Arc::clone(&self.namespaces.disk), name.to_owned());
        let erased = self.erase_within(deadline, move || erase_closed(&disk, &root, &prefix, None))?;
        self.log_cleared(erased.num_chunks, name);
        if erased.is_cut_short || !erased.open.is_empty() {
            let message = format!(
                "namespace {name} is not empty yet: it is being opened, or the disk does not answer; run this again"
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        Ok(erased.num_chunks)
    }

    fn log_cleared(&self, num_chunks: u64, id: &str) {
        let chunks = if num_chunks == 1 { "chunk" } else { "chunks" };
        self.log(format!("kvloft clear: {num_chunks} {chunks} of namespace {id} cleared"));
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
        let Some(turn) = self.erase_lock.lock(deadline) else { return Ok(None) };
        let (send, receive) = mpsc::channel();
        spawn("erase", move || {
            let done = work();
            drop(turn);
            let _none_waits = send.send(done);
        })?;
        Ok(receive.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok())
    }
}

impl ServerState {
    /// How often closed namespaces are looked at for what is too old; None if nothing becomes so.
    pub(crate) fn expiry_interval(&self) -> Option<Duration> {
        let ttl_s = self.config.disk.as_ref().and(self.config.limits.shortest_ttl_s())?;
        Some(Duration::from_secs((u64::from(ttl_s) / 16).clamp(60, 3600)))
    }

    /// Erases what is too old in namespaces that are on disk only.
    pub(crate) fn erase_expired(&self) {
        let Some(disk) = &self.config.disk else { return };
        let erased = erase_expired(disk, &self.namespaces.disk, &self.config.limits, unix_s());
        let num_chunks = erased.map_or(0, |erased| erased.num_chunks);
        if num_chunks > 0 {
            self.log(format!(
                "{num_chunks} chunks of namespaces without engines are erased from disk: they are too old"
            ));
        }
    }
}

/// The namespaces that are open in which an order was obeyed, for a log.
fn in_namespaces(namespaces: &[Arc<Namespace>]) -> String {
    let ids: Vec<_> = namespaces.iter().map(|namespace| namespace_id(&namespace.hello.namespace)).collect();
    match ids.as_slice() {
        [] => "no open namespace".to_owned(),
        [one] => format!("namespace {one}"),
        all => format!("namespaces {}", all.join(", ")),
    }
}

fn evict_in(namespace: &Namespace, what: Evict, deadline: Instant, all: &mut EvictReport) {
    all.num_namespaces += 1;
    let Some(store) = namespace.store() else {
        all.is_cut_short = true; // it is being opened
        return;
    };
    let evicted = store.evict(what, deadline);
    all.num_chunks += evicted.num_chunks;
    all.host_bytes += evicted.num_host * namespace.hello.frame_bytes;
    all.disk_bytes += evicted.num_disk * namespace.hello.frame_bytes;
    all.num_in_use += evicted.num_in_use;
    all.is_cut_short |= evicted.is_cut_short;
}

#[cfg(test)]
mod tests;
