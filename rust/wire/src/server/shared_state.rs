//! State shared by all connections of a server: namespaces, peers, counters and log lines.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvloft_core::units::size_text;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::Hello;
use crate::server::config::ServerConfig;
use crate::server::namespace::{Count, Counters, Membership, Namespace};
use crate::server::namespaces::Namespaces;
use crate::server::quarantine::{ProcessWatch, Quarantine};
use crate::server::refusals::Refusals;
use crate::threads::{TimedLock, locked};

/// Maximum number of log lines queued for `take_events`.
const MAX_EVENTS: usize = 256;

/// The part of a connection that other threads use.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stream: UnixStream,
    pub(crate) pid: u32,
    pub(crate) watch: ProcessWatch,
    pub(crate) since: Instant,
    /// None until the engine's hello is accepted.
    pub(crate) membership: Option<Arc<Membership>>,
    pub(crate) counters: Arc<Counters>,
}

/// The last disk space measurement, which can be stale if the disk hangs.
#[derive(Debug, Clone)]
pub(crate) struct DiskSpace {
    /// File system space available to this user, in bytes.
    pub(crate) free_bytes: u64,
    /// Size in bytes of each namespace that was closed at the time of the measurement, keyed by
    /// directory name.
    pub(crate) closed: BTreeMap<String, u64>,
}

#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) config: ServerConfig,
    pub(crate) namespaces: Namespaces,
    pub(crate) quarantine: Quarantine,
    /// Held during an eviction, so that each eviction counts only its own chunks.
    pub(crate) evict_lock: Arc<TimedLock>,
    /// Held during disk I/O on closed namespaces, so that at most one thread can hang.
    pub(crate) closed_lock: Arc<TimedLock>,
    peers: Mutex<HashMap<u64, Peer>>,
    pub(crate) peer_left: Condvar,
    pub(crate) events: Mutex<Vec<String>>,
    pub(crate) is_stopping: AtomicBool,
    pub(crate) housekeeper: Arc<OnceLock<Thread>>,
    pub(crate) num_accepted: AtomicU64,
    /// Number of engines that have been accepted.
    pub(crate) num_joined: AtomicU64,
    pub(crate) num_refused: AtomicU64,
    pub(crate) refusals: Mutex<Refusals>,
    /// The reason the server cannot use its disk directory, if any.
    pub(crate) disk_trouble: Mutex<Option<String>>,
    /// None until the space is first measured.
    pub(crate) disk_space: Mutex<Option<DiskSpace>>,
}

impl ServerState {
    pub(crate) fn new(config: ServerConfig) -> Self {
        let unclaimed = config
            .disk
            .as_ref()
            .map(|disk| format!("disk_path {} is not responding", disk.dir.display()));
        let disk_trouble = Mutex::new(unclaimed); // until the first claim
        Self {
            quarantine: Quarantine::new(config.gpu_settle),
            config,
            namespaces: Namespaces::default(),
            housekeeper: Arc::default(),
            evict_lock: Arc::default(),
            closed_lock: Arc::default(),
            peers: Mutex::default(),
            peer_left: Condvar::new(),
            events: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            num_accepted: AtomicU64::new(0),
            num_joined: AtomicU64::new(0),
            num_refused: AtomicU64::new(0),
            refusals: Mutex::default(),
            disk_trouble,
            disk_space: Mutex::default(),
        }
    }

    pub(crate) fn peers(&self) -> MutexGuard<'_, HashMap<u64, Peer>> {
        locked(&self.peers)
    }

    /// Removes a closed connection together with its reference to the membership.
    pub(crate) fn remove_peer(&self, number: u64) {
        let left = self.peers().remove(&number);
        if let Some(event) = left.as_ref().and_then(Peer::departure_line)
            && !self.is_stopping.load(Ordering::SeqCst)
        {
            self.log(event);
        }
        drop(left);
        self.peer_left.notify_all();
    }

    /// Closes connections of exited processes, because a forked child can keep the socket open.
    pub(crate) fn disconnect_dead_peers(&self) {
        for peer in self.peers().values().filter(|peer| peer.watch.has_ended()) {
            let _gone = peer.stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Lets other engines save chunks that an engine reserved before the previous call to this
    /// method and has not saved yet. The memberships are not cloned, because a connection must own
    /// the last reference to its membership when it closes.
    pub(crate) fn release_stale_keys(&self) {
        for membership in self.peers().values().filter_map(|peer| peer.membership.as_ref()) {
            if membership.namespace.has_multiple_engines() {
                membership.local.release_stale_keys();
            }
        }
    }

    /// Queues a line for the server's log. Lines beyond [`MAX_EVENTS`] are dropped.
    pub(crate) fn log(&self, event: String) {
        let mut events = locked(&self.events);
        if events.len() < MAX_EVENTS {
            events.push(event);
        }
    }

    /// Adds an engine to its namespace. Opens the namespace if necessary.
    pub(crate) fn join(&self, hello: &Hello) -> Result<Membership> {
        let housekeeper = Arc::clone(&self.housekeeper);
        let wake = move || housekeeper.get().map_or((), Thread::unpark);
        let membership =
            self.namespaces.join(hello, &self.config, wake, |event| self.log(event))?;
        if self.is_stopping.load(Ordering::SeqCst) {
            // If the disk was hung, the server may already have closed all other namespaces.
            membership.namespace.close(Duration::ZERO);
            return Err(Error::new(ErrorKind::Busy, "this kvloft server is shutting down"));
        }
        Ok(membership)
    }

    /// Returns the reason the server cannot use its disk directory. Returns None if the directory
    /// is usable or the server has no disk tier.
    pub(crate) fn disk_trouble(&self) -> Option<String> {
        locked(&self.disk_trouble).clone()
    }

    /// Queues the stores' log lines. If `is_one` is false, prefixes each line with the namespace's
    /// id.
    pub(crate) fn log_store_events(&self, namespaces: &[Arc<Namespace>], is_one: bool) {
        for namespace in namespaces {
            for event in namespace.store().map(|store| store.take_events()).unwrap_or_default() {
                let id = namespace.id();
                self.log(if is_one {
                    event.to_string()
                } else {
                    format!("namespace {id}: {event}")
                });
            }
        }
    }

    /// Moves slabs to namespaces that need them, and closes namespaces that have no memory and have
    /// been idle for a long time. Returns true if the caller should repeat the call immediately.
    pub(crate) fn rebalance(&self) -> bool {
        if self.namespaces.release_slabs() {
            return true;
        }
        let idle = self.namespaces.remove_idle(self.config.restart_grace);
        for namespace in &idle {
            namespace.close(Duration::ZERO);
        }
        self.log_store_events(&idle, false);
        false
    }
}

impl Peer {
    fn departure_line(&self) -> Option<String> {
        let namespace = &self.membership.as_ref()?.namespace;
        let (num_saved, id) = (self.counters.get(Count::SaveChunks), namespace.id());
        let (pid, seconds) = (self.pid, self.since.elapsed().as_secs());
        let chunks = if num_saved == 1 { "chunk" } else { "chunks" };
        let size = match namespace.hello.frame_sizes.all() {
            [frame_bytes] => format!(" ({})", size_text(num_saved * frame_bytes)),
            _ => String::new(),
        };
        Some(format!(
            "process {pid} disconnected from namespace {id} after {seconds} s; saved {num_saved} \
             {chunks}{size}"
        ))
    }
}
