//! The server: listens, lets this user's engines in, and owns what they share.
//!
//! A thread for each connection, of which there is a bounded number, and one that looks after what dead engines left. It must not
//! know signals, files of settings or Python; see `connection` for what is answered.

mod admin;
pub(crate) mod config;
mod connection;
mod counters;
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

use crate::protocol::admin::Status;
use crate::server::config::ServerConfig;
use crate::server::disk_directory::await_first_claim;
use crate::server::listener::SocketListener;
use crate::server::shared_state::ServerState;
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
    pub(crate) state: Arc<ServerState>,
    listener: Arc<SocketListener>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// `Busy` if another server has the socket; `InvalidConfig` where its directory is not private or shares are wrong; `Io` where the system refuses.
    /// The disk directory is taken here, or tried again later: see [`Self::disk_trouble`]. Memory is taken and the disk opened for the
    /// first engine, which says how large a frame is.
    pub fn open(config: ServerConfig) -> Result<Self> {
        namespaces::check_shares(&config.shares)?;
        let listener = Arc::new(SocketListener::bind(&config.socket)?);
        let state = Arc::new(ServerState::new(config));
        let server = Self { state, listener, threads: Mutex::default() };
        if server.state.config.disk.is_some() {
            let (state, (first, came)) = (Arc::clone(&server.state), mpsc::channel());
            server.spawn("disk", move || state.claim_disk(first))?;
            await_first_claim(&came)?;
        }
        let (state, listener) = (Arc::clone(&server.state), Arc::clone(&server.listener));
        server.spawn("accept", move || accept(&state, &listener))?;
        let state = Arc::clone(&server.state);
        server.spawn("look", move || run_housekeeping(&state))?;
        if let Some(every) = server.state.expiry_interval() {
            let state = Arc::clone(&server.state);
            server.spawn("erase", move || run_expiry(&state, every))?;
        }
        Ok(server)
    }

    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = spawn(name, work)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// What it does now.
    pub fn status(&self) -> Status {
        self.state.status()
    }

    /// Why the disk directory is not this server's for now, so that there is host memory only; None where it is, or there is none.
    pub fn disk_trouble(&self) -> Option<String> {
        self.state.disk_trouble()
    }

    /// What a person should see in the log since the last call, oldest first.
    pub fn take_events(&self) -> Vec<String> {
        let all = self.state.namespaces.all();
        self.state.log_store_events(&all, all.len() == 1);
        std::mem::take(&mut *self.state.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends every connection, writes what still has to get to disk until the timeout, and gives the disk up. Again does nothing.
    pub fn close(&self, timeout: Duration) {
        self.state.is_stopping.store(true, Ordering::SeqCst);
        self.listener.shut();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        join(threads, Instant::now() + END_TIMEOUT);
        let peers = self.state.peers();
        for peer in peers.values() {
            let _gone = peer.stream.shutdown(std::net::Shutdown::Both);
        }
        let gone = self.state.peer_left.wait_timeout_while(peers, END_TIMEOUT, |peers| !peers.is_empty());
        drop(gone);
        self.state.namespaces.close(timeout);
        self.state.namespaces.disk.let_go();
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

fn accept(state: &Arc<ServerState>, listener: &SocketListener) {
    for number in 0.. {
        let accepted = listener.socket.accept();
        if state.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            std::thread::sleep(LOOK_EVERY); // no descriptor is left, say
            continue;
        };
        if state.peers().len() >= state.config.max_connections {
            state.num_accepted.fetch_add(1, Ordering::Relaxed);
            connection::refuse(state, &stream, "this kvloft server has as many connections as it takes; close some");
            continue;
        }
        connection::start(state, stream, number);
    }
}

/// Erases what is too old in namespaces without a store; those with one do so themselves.
fn run_expiry(state: &ServerState, every: Duration) {
    // Not at once: engines that begin now would find their namespaces in use, and their disks a second later.
    let mut next = Instant::now() + FIRST_ERASE;
    while !state.is_stopping.load(Ordering::SeqCst) {
        let left = next.saturating_duration_since(Instant::now());
        if left.is_zero() {
            state.erase_expired();
            next = Instant::now() + every;
        }
        std::thread::park_timeout(left);
    }
}

fn run_housekeeping(state: &ServerState) {
    let _own = state.housekeeper.set(std::thread::current());
    while !state.is_stopping.load(Ordering::SeqCst) {
        state.disconnect_dead_peers();
        state.quarantine.release_closed();
        if !state.rebalance() {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
}
