//! What all connections of a server share: its namespaces, who is connected, and what people are told. It must not know how messages
//! come.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvloft_core::units::size_text;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::Hello;
use crate::protocol::admin::{EngineStatus, NamespaceStatus, Status, TenantStatus};
use crate::server::config::ServerConfig;
use crate::server::counters::Counters;
use crate::server::disk_space::DiskSpace;
use crate::server::lifeline::ProcessWatch;
use crate::server::namespace::{Membership, Namespace, namespace_id};
use crate::server::namespaces::Namespaces;
use crate::server::quarantine::Quarantine;
use crate::server::timed_lock::TimedLock;

/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 256;
/// Most salts of a namespace that a status tells of.
const MAX_TENANTS: usize = 16;

/// A connection as others see it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stream: UnixStream,
    pub(crate) pid: u32,
    pub(crate) watch: ProcessWatch,
    pub(crate) since: Instant,
    /// Once it said hello.
    pub(crate) membership: Option<Arc<Membership>>,
    pub(crate) counters: Arc<Counters>,
}

#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) config: ServerConfig,
    pub(crate) namespaces: Namespaces,
    pub(crate) quarantine: Quarantine,
    /// Of evictions, which count what went; of work on the disk of closed namespaces, which may hang.
    pub(crate) evict_lock: Arc<TimedLock>,
    pub(crate) erase_lock: Arc<TimedLock>,
    peers: Mutex<HashMap<u64, Peer>>,
    pub(crate) peer_left: Condvar,
    pub(crate) events: Mutex<Vec<String>>,
    pub(crate) is_stopping: AtomicBool,
    /// The thread that looks after dead engines and slabs that are wanted.
    pub(crate) housekeeper: Arc<OnceLock<Thread>>,
    pub(crate) num_accepted: AtomicU64,
    /// Engines that got a place, also those that are gone.
    pub(crate) num_joined: AtomicU64,
    pub(crate) num_refused: AtomicU64,
    /// Why the disk directory is not the server's for now.
    pub(crate) disk_trouble: Mutex<Option<String>>,
    /// None until it was looked at.
    pub(crate) disk_space: Mutex<Option<DiskSpace>>,
}

impl ServerState {
    pub(crate) fn new(config: ServerConfig) -> Self {
        let no_answer = config.disk.as_ref().map(|disk| format!("disk_path {} does not answer", disk.dir.display()));
        let disk_trouble = Mutex::new(no_answer); // until it did
        Self {
            quarantine: Quarantine::new(config.gpu_settle),
            config,
            namespaces: Namespaces::default(),
            housekeeper: Arc::default(),
            evict_lock: Arc::default(),
            erase_lock: Arc::default(),
            peers: Mutex::default(),
            peer_left: Condvar::new(),
            events: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            num_accepted: AtomicU64::new(0),
            num_joined: AtomicU64::new(0),
            num_refused: AtomicU64::new(0),
            disk_trouble,
            disk_space: Mutex::default(),
        }
    }

    pub(crate) fn peers(&self) -> MutexGuard<'_, HashMap<u64, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection is over; it has no membership from here on.
    pub(crate) fn leave(&self, number: u64) {
        let left = self.peers().remove(&number);
        if let Some(event) = left.as_ref().and_then(Peer::departure_line)
            && !self.is_stopping.load(Ordering::SeqCst)
        {
            self.log(event);
        }
        drop(left);
        self.peer_left.notify_all();
    }

    /// Ends connections whose process has ended: a forked child that has the socket would keep them open.
    pub(crate) fn disconnect_dead_peers(&self) {
        for peer in self.peers().values().filter(|peer| peer.watch.has_ended()) {
            let _gone = peer.stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Notes what a person should see; what is too much is dropped.
    pub(crate) fn log(&self, event: String) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < MAX_EVENTS {
            events.push(event);
        }
    }

    /// A place for the engine; errors say why there is none.
    pub(crate) fn join(&self, hello: &Hello) -> Result<Membership> {
        let housekeeper = Arc::clone(&self.housekeeper);
        let wake = move || housekeeper.get().map_or((), Thread::unpark);
        let membership = self.namespaces.join(hello, &self.config, wake, |event| self.log(event))?;
        if self.is_stopping.load(Ordering::SeqCst) {
            // Its disk may have hung until the server had closed all others: it is given up now.
            membership.namespace.close(Duration::ZERO);
            return Err(Error::new(ErrorKind::Busy, "this kvloft server has ended"));
        }
        Ok(membership)
    }

    /// Why the disk directory is not the server's for now; None where it is, or there is none.
    pub(crate) fn disk_trouble(&self) -> Option<String> {
        self.disk_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn disk_space(&self) -> Option<DiskSpace> {
        self.disk_space.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn status(&self) -> Status {
        let kept = self.quarantine.num_open();
        let (host_bytes, slab_bytes) = self.namespaces.memory().unwrap_or_default();
        let stats = [
            ("server_accepted", self.num_accepted.load(Ordering::Relaxed)),
            ("server_joined", self.num_joined.load(Ordering::Relaxed)),
            ("server_refused", self.num_refused.load(Ordering::Relaxed)),
            ("quarantined_reservations", kept.0 as u64),
            ("quarantined_leases", kept.1 as u64),
            ("server_host_bytes", self.config.host_bytes),
            ("server_disk_bytes", self.config.disk.as_ref().map_or(0, |disk| disk.cap_bytes)),
            ("server_disk_unused", self.disk_trouble().is_some().into()),
        ];
        let room = self.disk_space().map(|DiskSpace { free_bytes, closed }| {
            let closed_bytes = self.namespaces.disk.bytes_closed(&closed);
            [("server_disk_free_bytes", free_bytes), ("server_disk_closed_bytes", closed_bytes)]
        });
        let stats = stats.into_iter().chain(room.into_iter().flatten());
        let stats = stats.map(|(name, value)| (name.to_owned(), value)).collect();
        let namespaces = self.namespaces.all().iter().map(|namespace| self.namespace_status(namespace)).collect();
        let settings = self.config.settings.iter().cloned().collect();
        Status { host_bytes, slab_bytes, stats, settings, namespaces }
    }

    fn namespace_status(&self, namespace: &Arc<Namespace>) -> NamespaceStatus {
        let stats = namespace.store().map(|store| {
            let own = store.stats().into_iter().map(|(name, value)| (name.to_owned(), value));
            let percent = namespace.percent(&self.config).map(|percent| ("share_percent".to_owned(), percent.into()));
            own.chain(namespace.counters.stats()).chain(percent).collect()
        });
        let peers = self.peers();
        let mut engines: Vec<_> = peers.values().filter_map(|peer| peer.status(namespace)).collect();
        drop(peers);
        engines.sort_by_key(|engine| (u64::MAX - engine.connected_ms, engine.pid));
        let tenants = namespace.store().map(|store| store.tenants(MAX_TENANTS).0).unwrap_or_default();
        let tenants = tenants.into_iter().map(TenantStatus::from).collect();
        NamespaceStatus {
            namespace: namespace.hello.namespace,
            description: namespace.hello.description.clone(),
            frame_bytes: namespace.hello.frame_bytes,
            num_slabs: namespace.store().map_or(0, |store| store.num_slabs().0),
            stats: stats.unwrap_or_default(),
            tenants,
            engines,
        }
    }

    /// Lines of the stores for people, each with its namespace where there are several.
    pub(crate) fn log_store_events(&self, namespaces: &[Arc<Namespace>], is_one: bool) {
        for namespace in namespaces {
            for event in namespace.store().map(|store| store.take_events()).unwrap_or_default() {
                let id = namespace_id(&namespace.hello.namespace);
                self.log(if is_one { event } else { format!("namespace {id}: {event}") });
            }
        }
    }

    /// Has memory go where it is wanted; whether more is to be done at once.
    pub(crate) fn rebalance(&self) -> bool {
        if self.namespaces.release_slabs() {
            return true;
        }
        let idle = self.namespaces.remove_idle();
        idle.iter().filter_map(|namespace| namespace.store()).for_each(|store| store.close(Duration::ZERO));
        self.log_store_events(&idle, false);
        false
    }
}

impl Peer {
    /// What a person should see of an engine that left.
    fn departure_line(&self) -> Option<String> {
        let namespace = &self.membership.as_ref()?.namespace;
        let (num_saved, id) = (self.counters.num_saved(), namespace_id(&namespace.hello.namespace));
        let (pid, seconds) = (self.pid, self.since.elapsed().as_secs());
        let size = size_text(num_saved * namespace.hello.frame_bytes);
        let chunks = if num_saved == 1 { "chunk" } else { "chunks" };
        Some(format!("process {pid} has left namespace {id} after {seconds} s; it saved {num_saved} {chunks} ({size})"))
    }

    fn status(&self, of: &Arc<Namespace>) -> Option<EngineStatus> {
        let membership = self.membership.as_ref().filter(|membership| Arc::ptr_eq(&membership.namespace, of))?;
        let (num_reserved, num_leases) = membership.local.num_open();
        Some(EngineStatus {
            pid: self.pid,
            connected_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            num_reserved: num_reserved as u64,
            num_leases: num_leases as u64,
            counters: self.counters.stats(),
        })
    }
}
