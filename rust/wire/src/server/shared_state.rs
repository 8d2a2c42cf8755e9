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

use crate::protocol::{EngineStatus, Hello, NamespaceStatus, Status};
use crate::server::counters::Tally;
use crate::server::disk_space::DiskRoom;
use crate::server::lifeline::ProcessWatch;
use crate::server::namespace::{Seat, Space, id};
use crate::server::namespaces::Namespaces;
use crate::server::quarantine::Quarantine;
use crate::server::timed_lock::Turns;
use crate::settings::ServerConfig;

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
    pub(crate) peer_left: Condvar,
    pub(crate) events: Mutex<Vec<String>>,
    pub(crate) is_stopping: AtomicBool,
    /// The thread that looks after dead engines and slabs that are wanted.
    pub(crate) looker: Arc<OnceLock<Thread>>,
    pub(crate) num_accepted: AtomicU64,
    /// Engines that got a place, also those that are gone.
    pub(crate) num_joined: AtomicU64,
    pub(crate) num_refused: AtomicU64,
    /// Why the disk directory is not the server's for now.
    pub(crate) disk_trouble: Mutex<Option<String>>,
    /// None until it was looked at.
    pub(crate) disk_room: Mutex<Option<DiskRoom>>,
}

impl Shared {
    pub(crate) fn new(config: ServerConfig) -> Self {
        let no_answer = config.disk.as_ref().map(|disk| format!("disk_path {} does not answer", disk.dir.display()));
        let disk_trouble = Mutex::new(no_answer); // until it did
        Self {
            quarantine: Quarantine::new(config.gpu_settle),
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
            disk_trouble,
            disk_room: Mutex::default(),
        }
    }

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

    /// Ends connections whose process has ended: a forked child that has the socket would keep them open.
    pub(crate) fn end_dead_peers(&self) {
        for peer in self.peers().values().filter(|peer| peer.watch.has_ended()) {
            let _gone = peer.stream.shutdown(std::net::Shutdown::Both);
        }
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
        let seat = self.namespaces.seat(hello, &self.config, wake, |event| self.tell(event))?;
        if self.is_stopping.load(Ordering::SeqCst) {
            // Its disk may have hung until the server had closed all others: it is given up now.
            seat.space.close(Duration::ZERO);
            return Err(Error::new(ErrorKind::Busy, "this kvloft server has ended"));
        }
        Ok(seat)
    }

    /// Why the disk directory is not the server's for now; None where it is, or there is none.
    pub(crate) fn disk_trouble(&self) -> Option<String> {
        self.disk_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn disk_room(&self) -> Option<DiskRoom> {
        self.disk_room.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        let room = self.disk_room().map(|DiskRoom { free_bytes, closed }| {
            let closed_bytes = self.namespaces.disk.bytes_closed(&closed);
            [("server_disk_free_bytes", free_bytes), ("server_disk_closed_bytes", closed_bytes)]
        });
        let stats = stats.into_iter().chain(room.into_iter().flatten());
        let stats = stats.map(|(name, value)| (name.to_owned(), value)).collect();
        let namespaces = self.namespaces.all().iter().map(|space| self.namespace_status(space)).collect();
        Status { host_bytes, slab_bytes, stats, settings: self.config.settings.clone(), namespaces }
    }

    fn namespace_status(&self, space: &Arc<Space>) -> NamespaceStatus {
        let stats = space.store().map(|store| store.stats()).unwrap_or_default();
        let percent = space.percent(&self.config).map(|percent| ("share_percent", percent.into()));
        let asked = space.tally.counts();
        let asked = asked.named().chain(percent).filter(|_| !stats.is_empty()).collect::<Vec<_>>();
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
    pub(crate) fn tell_of(&self, spaces: &[Arc<Space>], is_one: bool) {
        for space in spaces {
            for event in space.store().map(|store| store.take_events()).unwrap_or_default() {
                let id = id(&space.hello.namespace);
                self.tell(if is_one { event } else { format!("namespace {id}: {event}") });
            }
        }
    }

    /// Has memory go where it is wanted; whether more is to be done at once.
    pub(crate) fn share(&self) -> bool {
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
        let (num_saved, id) = (self.tally.num_saved(), id(&space.hello.namespace));
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
