//! The server: listens, lets this user's engines in, and owns what they share.
//!
//! A thread for each connection, of which there is a bounded number, and one that looks after what dead engines left. It must not
//! know signals, files of settings or Python; see `connection` for what is answered.

mod admin;
mod connection;
pub(crate) mod counters;
mod disk_directory;
mod disk_space;
mod handler;
mod lifeline;
mod listener;
mod namespace;
pub(crate) mod namespaces;
mod quarantine;
mod shared_state;
mod timed_lock;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvloft_core::Result;

use crate::protocol::Status;
use crate::server::disk_directory::first_try;
use crate::server::listener::Listener;
use crate::server::shared_state::Shared;
use crate::settings::ServerConfig;
use crate::threads::spawn;

/// How often it is looked whether frames of dead engines may be used again.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for connections to end when the server does.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const JOIN_EVERY: Duration = Duration::from_millis(1);
/// Time until namespaces without engines are looked at for what is too old.
const FIRST_ERASE: Duration = Duration::from_secs(30);
/// Listens from `open` until it is closed or dropped.
#[derive(Debug)]
pub struct Server {
    pub(crate) shared: Arc<Shared>,
    listener: Arc<Listener>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// `Busy` if another server has the socket; `InvalidConfig` where its directory is not private or shares are wrong; `Io` where the system refuses.
    /// The disk directory is taken here, or tried again later: see [`Self::disk_trouble`]. Memory is taken and the disk opened for the
    /// first engine, which says how large a frame is.
    pub fn open(config: ServerConfig) -> Result<Self> {
        namespaces::check_shares(&config.shares)?;
        let listener = Arc::new(Listener::bind(&config.socket)?);
        let shared = Arc::new(Shared::new(config));
        let server = Self { shared, listener, threads: Mutex::default() };
        if server.shared.config.disk.is_some() {
            let (shared, (first, came)) = (Arc::clone(&server.shared), mpsc::channel());
            server.keep("disk", move || shared.take_disk(first))?;
            first_try(&came)?;
        }
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

    /// Why the disk directory is not this server's for now, so that there is host memory only; None where it is, or there is none.
    pub fn disk_trouble(&self) -> Option<String> {
        self.shared.disk_trouble()
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
        self.shared.namespaces.disk.let_go();
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
        shared.end_dead_peers();
        shared.quarantine.release_closed();
        if !shared.share() {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
}
