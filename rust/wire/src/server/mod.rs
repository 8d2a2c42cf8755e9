//! The server accepts engines that run as the same user, and owns the stores that they share.
//!
//! Each connection has its own thread, and the number of connections is limited. Other threads
//! accept connections, claim the disk, remove expired chunks and do housekeeping. The caller
//! handles signals and settings files.

mod admin;
pub(crate) mod config;
mod connection;
mod disk_directory;
mod handler;
mod listener;
pub(crate) mod namespace;
pub(crate) mod namespaces;
mod quarantine;
mod refusals;
mod shared_state;
mod status;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvloft_core::Result;
use kvloft_core::sync::join;

use crate::protocol::admin::Status;
use crate::server::config::ServerConfig;
use crate::server::disk_directory::await_first_claim;
use crate::server::listener::SocketListener;
use crate::server::shared_state::ServerState;
use crate::threads::{locked, spawn};

const HOUSEKEEPING_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout for threads to exit and for connections to close when the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay before the first search for expired chunks in closed namespaces.
const FIRST_EXPIRY: Duration = Duration::from_secs(30);

/// A server that listens until it is closed or dropped.
#[derive(Debug)]
pub struct Server {
    pub(crate) state: Arc<ServerState>,
    listener: Arc<SocketListener>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// Starts a server. Claims the disk directory, retrying in the background if necessary (see
    /// [`Self::disk_trouble`]). Memory is allocated and the disk tier is opened when the first
    /// engine connects, because only an engine's hello carries the frame sizes.
    ///
    /// Returns `Busy` if another server owns the socket, and `Io` if a system call fails. Returns
    /// `InvalidConfig` if the shares are invalid, the socket's directory is not private or the disk
    /// directory can never be used.
    pub fn open(config: ServerConfig) -> Result<Self> {
        namespaces::check_shares(&config.shares)?;
        let listener = Arc::new(SocketListener::bind(&config.socket)?);
        let state = Arc::new(ServerState::new(config));
        let server = Self { state, listener, threads: Mutex::default() };
        if server.state.config.disk.is_some() {
            let (state, (send, result)) = (Arc::clone(&server.state), mpsc::channel());
            server.spawn("disk", move || state.claim_disk(send))?;
            await_first_claim(&result)?;
        }
        let (state, listener) = (Arc::clone(&server.state), Arc::clone(&server.listener));
        server.spawn("accept", move || accept(&state, &listener))?;
        let state = Arc::clone(&server.state);
        server.spawn("housekeeping", move || run_housekeeping(&state))?;
        if let Some(interval) = server.state.expiry_interval() {
            let state = Arc::clone(&server.state);
            server.spawn("expiry", move || run_expiry(&state, interval))?;
        }
        Ok(server)
    }

    /// Starts a thread that `close` waits for.
    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = spawn(name, work)?;
        locked(&self.threads).push(thread);
        Ok(())
    }

    /// Returns the server's status.
    pub fn status(&self) -> Status {
        self.state.status()
    }

    /// Returns the reason the server cannot use its disk directory. Returns None if the directory
    /// is usable or the server has no disk tier.
    pub fn disk_trouble(&self) -> Option<String> {
        self.state.disk_trouble()
    }

    /// Returns the log lines added since the last call, oldest first.
    pub fn take_events(&self) -> Vec<String> {
        let all = self.state.namespaces.all();
        self.state.log_store_events(&all, all.len() == 1);
        std::mem::take(&mut *locked(&self.state.events))
    }

    /// Closes all connections, writes pending chunks to disk until the timeout, and releases the
    /// disk. A second call has no effect.
    pub fn close(&self, timeout: Duration) {
        self.state.is_stopping.store(true, Ordering::SeqCst);
        self.listener.shut();
        let threads = std::mem::take(&mut *locked(&self.threads));
        for thread in &threads {
            thread.thread().unpark();
        }
        join(threads, Instant::now() + CLOSE_TIMEOUT);
        let peers = self.state.peers();
        for peer in peers.values() {
            let _gone = peer.stream.shutdown(std::net::Shutdown::Both);
        }
        let gone = self
            .state
            .peer_left
            .wait_timeout_while(peers, CLOSE_TIMEOUT, |peers| !peers.is_empty());
        drop(gone);
        self.state.namespaces.close(timeout);
        self.state.namespaces.disk.release();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

fn accept(state: &Arc<ServerState>, listener: &SocketListener) {
    let mut is_failing = false;
    for number in 0.. {
        let accepted = listener.socket.accept();
        if state.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    state.log(format!("cannot accept connections ({error}); retrying"));
                }
                std::thread::sleep(HOUSEKEEPING_INTERVAL);
                continue;
            }
        };
        is_failing = false;
        if state.peers().len() >= state.config.max_connections {
            state.num_accepted.fetch_add(1, Ordering::Relaxed);
            let limit = state.config.max_connections;
            let text = format!(
                "this kvloft server has reached its limit of {limit} connections; close some of them"
            );
            connection::refuse(state, &stream, &text);
            continue;
        }
        connection::start(state, stream, number);
    }
}

/// Removes expired chunks from closed namespaces. Open namespaces remove their own expired chunks.
fn run_expiry(state: &ServerState, interval: Duration) {
    // Delay the first search, because an engine that starts during a search would find its
    // namespace busy.
    let mut next = Instant::now() + FIRST_EXPIRY;
    while !state.is_stopping.load(Ordering::SeqCst) {
        let left = next.saturating_duration_since(Instant::now());
        if left.is_zero() {
            state.remove_expired();
            next = Instant::now() + interval;
        }
        std::thread::park_timeout(left);
    }
}

/// Disconnects dead peers, releases their frames, and moves slabs between namespaces.
fn run_housekeeping(state: &ServerState) {
    let _set = state.housekeeper.set(std::thread::current());
    let mut released = Instant::now();
    while !state.is_stopping.load(Ordering::SeqCst) {
        state.disconnect_dead_peers();
        state.quarantine.release_closed();
        if released.elapsed() >= state.config.save_grace {
            state.release_stale_keys();
            released = Instant::now();
        }
        if !state.rebalance() {
            std::thread::park_timeout(HOUSEKEEPING_INTERVAL);
        }
    }
}
