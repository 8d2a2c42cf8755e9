//! The server: listens, lets this user's engines in, and owns what they share.
//!
//! A thread for each connection, of which there is a bounded number, and one that looks after what dead engines left. It must not
//! know signals, files of settings or Python; see `connection` for what is answered.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::store::{DiskSettings, TenantLimits};
use kvloft_core::units::size_text;
use kvloft_core::{Error, Result};

use crate::connection;
use crate::message::{EngineStatus, Hello, NamespaceStatus, Status};
use crate::namespaces::{self, Namespaces, Seat, Space};
use crate::quarantine::{Patience, Quarantine};
use crate::socket::Listener;
use crate::tally::Tally;
use crate::turns::Turns;

/// How often it is looked whether frames of dead engines may be used again.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for connections to end when the server does.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const JOIN_EVERY: Duration = Duration::from_millis(1);
/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 256;
/// Time until namespaces without engines are looked at for what is too old.
const FIRST_ERASE: Duration = Duration::from_secs(30);
/// Most salts of a namespace that a status tells of.
const MAX_TENANTS: usize = 16;
/// Enough for what a connection's thread calls.
const STACK_BYTES: usize = 512 << 10;

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where it listens.
    pub socket: PathBuf,
    /// Bytes of host memory for frames.
    pub host_bytes: u64,
    /// Policy of each tier.
    pub eviction: Eviction,
    /// As `StoreConfig::available_bytes`.
    pub available_bytes: Option<u64>,
    /// The disk tier, if there is one; its description is the engine's.
    pub disk: Option<DiskSettings>,
    /// Percent of host memory for namespaces whose names in hex begin so; the others with engines share the rest equally.
    pub shares: Vec<(String, u32)>,
    /// The NUMA node of each shard's part of a chunk, in their order; one for all. Empty: wherever the system puts memory.
    pub numa: Vec<u32>,
    /// What each salt may have, in each namespace.
    pub limits: TenantLimits,
    /// What it was started with, as engines and people are told.
    pub settings: Vec<(String, String)>,
    /// Connections at one time.
    pub max_connections: usize,
    /// About engines that went without a word.
    pub patience: Patience,
}

/// A connection as others see it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stream: UnixStream,
    pub(crate) pid: u32,
    pub(crate) since: Instant,
    /// Once it said hello.
    pub(crate) seat: Option<Arc<Seat>>,
    pub(crate) tally: Arc<Tally>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: ServerConfig,
    pub(crate) namespaces: Namespaces,
    pub(crate) quarantine: Quarantine,
    /// Of evictions, which count what went; of work on the disk of closed namespaces, which may hang.
    pub(crate) evicting: Arc<Turns>,
    pub(crate) erasing: Arc<Turns>,
    peers: Mutex<HashMap<u64, Peer>>,
    peer_left: Condvar,
    events: Mutex<Vec<String>>,
    is_stopping: AtomicBool,
    /// The thread that looks after dead engines and slabs that are wanted.
    looker: Arc<OnceLock<Thread>>,
    pub(crate) num_accepted: AtomicU64,
    /// Engines that got a place, also those that are gone.
    pub(crate) num_joined: AtomicU64,
    pub(crate) num_refused: AtomicU64,
}

impl Shared {
    pub(crate) fn peers(&self) -> MutexGuard<'_, HashMap<u64, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection is over; it has no seat from here on.
    pub(crate) fn leave(&self, number: u64) {
        let left = self.peers().remove(&number);
        if let Some(event) = left.as_ref().and_then(Peer::farewell)
            && !self.is_stopping.load(Ordering::SeqCst)
        {
            self.tell(event);
        }
        drop(left);
        self.peer_left.notify_all();
    }

    /// Notes what a person should see; what is too much is dropped.
    pub(crate) fn tell(&self, event: String) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < MAX_EVENTS {
            events.push(event);
        }
    }

    /// A place for the engine; errors say why there is none.
    pub(crate) fn seat(&self, hello: &Hello) -> Result<Seat> {
        let looker = Arc::clone(&self.looker);
        let wake = move || looker.get().map_or((), Thread::unpark);
        self.namespaces.seat(hello, &self.config, wake, |event| self.tell(event))
    }

    /// Empties the namespace whose name begins so; returns how many chunks there were. `InvalidConfig` if there is not one.
    pub(crate) fn forget(&self, name: &str) -> Result<u64> {
        let Some(space) = self.namespaces.find(name)? else { return Ok(0) };
        let Some(store) = space.store() else { return Ok(0) };
        let count = || store.stats().into_iter().find(|(name, _)| *name == "cleared").map_or(0, |(_, number)| number);
        let before = count();
        store.clear();
        let num_chunks = count() - before;
        let id = namespaces::id(&space.hello.namespace);
        self.tell(format!("{num_chunks} chunks of namespace {id} are forgotten, as a person asked"));
        Ok(num_chunks)
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
        ];
        let stats = stats.map(|(name, value)| (name.to_owned(), value)).to_vec();
        let namespaces = self.namespaces.all().iter().map(|space| self.namespace_status(space)).collect();
        Status { host_bytes, slab_bytes, stats, settings: self.config.settings.clone(), namespaces }
    }

    fn namespace_status(&self, space: &Arc<Space>) -> NamespaceStatus {
        let stats = space.store().map(|store| store.stats()).unwrap_or_default();
        let percent = space.percent(&self.config).map(|percent| ("share_percent", percent.into()));
        let (counts, pinned) = (space.tally.counts(), [("pinned", space.is_pinned().into())]);
        let asked = counts.named().chain(percent).chain(pinned).filter(|_| !stats.is_empty()).collect::<Vec<_>>();
        let peers = self.peers();
        let mut engines: Vec<_> = peers.values().filter_map(|peer| peer.status(space)).collect();
        drop(peers);
        engines.sort_by_key(|engine| (u64::MAX - engine.connected_ms, engine.pid));
        let tenants = space.store().map(|store| store.tenants(MAX_TENANTS).0).unwrap_or_default();
        NamespaceStatus {
            namespace: space.hello.namespace,
            description: space.hello.description.clone(),
            frame_bytes: space.hello.frame_bytes,
            num_slabs: space.store().map_or(0, |store| store.num_slabs().0),
            stats: stats.into_iter().chain(asked).map(|(name, value)| (name.to_owned(), value)).collect(),
            tenants,
            engines,
        }
    }

    /// Lines of the stores for people, each with its namespace where there are several.
    fn tell_of(&self, spaces: &[Arc<Space>], is_one: bool) {
        for space in spaces {
            for event in space.store().map(|store| store.take_events()).unwrap_or_default() {
                let id = namespaces::id(&space.hello.namespace);
                self.tell(if is_one { event } else { format!("namespace {id}: {event}") });
            }
        }
    }

    /// Has memory go where it is wanted; whether more is to be done at once.
    fn share(&self) -> bool {
        if self.namespaces.give_way() {
            return true;
        }
        let idle = self.namespaces.take_idle();
        idle.iter().filter_map(|space| space.store()).for_each(|store| store.close(Duration::ZERO));
        self.tell_of(&idle, false);
        false
    }
}

impl Peer {
    /// What a person should see of an engine that left.
    fn farewell(&self) -> Option<String> {
        let space = &self.seat.as_ref()?.space;
        let (num_saved, id) = (self.tally.num_saved(), namespaces::id(&space.hello.namespace));
        let (pid, seconds) = (self.pid, self.since.elapsed().as_secs());
        let size = size_text(num_saved * space.hello.frame_bytes);
        let chunks = if num_saved == 1 { "chunk" } else { "chunks" };
        Some(format!("process {pid} has left namespace {id} after {seconds} s; it saved {num_saved} {chunks} ({size})"))
    }

    fn status(&self, of: &Arc<Space>) -> Option<EngineStatus> {
        let seat = self.seat.as_ref().filter(|seat| Arc::ptr_eq(&seat.space, of))?;
        let (num_reserved, num_leases) = seat.local.num_open();
        Some(EngineStatus {
            pid: self.pid,
            connected_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            num_reserved: num_reserved as u64,
            num_leases: num_leases as u64,
            counts: self.tally.counts(),
        })
    }
}

/// Listens from `open` until it is closed or dropped.
#[derive(Debug)]
pub struct Server {
    pub(crate) shared: Arc<Shared>,
    listener: Arc<Listener>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// `Busy` if another server has the socket; `InvalidConfig` where its directory is not private or shares are wrong; `Io` where the system refuses.
    /// Memory is taken and the disk opened for the first engine, which says how large a frame is.
    pub fn open(config: ServerConfig) -> Result<Self> {
        namespaces::check_shares(&config.shares)?;
        let listener = Arc::new(Listener::bind(&config.socket)?);
        let shared = Arc::new(Shared {
            quarantine: Quarantine::new(config.patience),
            config,
            namespaces: Namespaces::default(),
            looker: Arc::default(),
            evicting: Arc::default(),
            erasing: Arc::default(),
            peers: Mutex::default(),
            peer_left: Condvar::new(),
            events: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            num_accepted: AtomicU64::new(0),
            num_joined: AtomicU64::new(0),
            num_refused: AtomicU64::new(0),
        });
        let server = Self { shared, listener, threads: Mutex::default() };
        let (shared, listener) = (Arc::clone(&server.shared), Arc::clone(&server.listener));
        server.keep("accept", move || accept(&shared, &listener))?;
        let shared = Arc::clone(&server.shared);
        server.keep("look", move || look(&shared))?;
        if let Some(every) = server.shared.erases_every() {
            let shared = Arc::clone(&server.shared);
            server.keep("erase", move || erase(&shared, every))?;
        }
        Ok(server)
    }

    pub(crate) fn keep(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = spawn(name, work)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// What it does now.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// What a person should see in the log since the last call, oldest first.
    pub fn take_events(&self) -> Vec<String> {
        let all = self.shared.namespaces.all();
        self.shared.tell_of(&all, all.len() == 1);
        std::mem::take(&mut *self.shared.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends every connection, writes what still has to get to disk until the timeout, and gives the disk up. Again does nothing.
    pub fn close(&self, timeout: Duration) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.listener.shut();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        join(threads, Instant::now() + END_TIMEOUT);
        let peers = self.shared.peers();
        for peer in peers.values() {
            let _gone = peer.stream.shutdown(std::net::Shutdown::Both);
        }
        let gone = self.shared.peer_left.wait_timeout_while(peers, END_TIMEOUT, |peers| !peers.is_empty());
        drop(gone);
        self.shared.namespaces.close(timeout);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

/// Ends threads that are told to end. One that a disk holds, as it erases what is too old, is left to itself at the deadline.
fn join(threads: Vec<JoinHandle<()>>, deadline: Instant) {
    for thread in &threads {
        thread.thread().unpark();
    }
    for thread in threads {
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(JOIN_EVERY);
        }
        if thread.is_finished() {
            let _ended = thread.join();
        }
    }
}

pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(format!("kvloft-{name}")).stack_size(STACK_BYTES);
    thread.spawn(work).map_err(|error| Error::io("a thread of the kvloft server cannot be started", error))
}

fn accept(shared: &Arc<Shared>, listener: &Listener) {
    for number in 0.. {
        let accepted = listener.socket.accept();
        if shared.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            std::thread::sleep(LOOK_EVERY); // no descriptor is left, say
            continue;
        };
        if shared.peers().len() >= shared.config.max_connections {
            shared.num_accepted.fetch_add(1, Ordering::Relaxed);
            connection::refuse(shared, &stream, "this kvloft server has as many connections as it takes; close some");
            continue;
        }
        connection::start(shared, stream, number);
    }
}

/// Erases what is too old in namespaces without a store; those with one do so themselves.
fn erase(shared: &Shared, every: Duration) {
    // Not at once: engines that begin now would find their namespaces in use, and their disks a second later.
    let mut next = Instant::now() + FIRST_ERASE;
    while !shared.is_stopping.load(Ordering::SeqCst) {
        let left = next.saturating_duration_since(Instant::now());
        if left.is_zero() {
            shared.erase_expired();
            next = Instant::now() + every;
        }
        std::thread::park_timeout(left);
    }
}

fn look(shared: &Shared) {
    let _own = shared.looker.set(std::thread::current());
    while !shared.is_stopping.load(Ordering::SeqCst) {
        shared.quarantine.look();
        if !shared.share() {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
}
