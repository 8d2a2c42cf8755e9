//! The client's background thread, which detects a lost connection and opens a new connection.
//!
//! Until the client closes, only `Session::renew` switches to the new connection. The caller renews
//! the session between plans, so a plan never mixes frames from two arenas.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::{Error, ErrorKind, Event};
use rustix::event::PollFlags;

use crate::client::connection::Connection;
use crate::client::handshake::NewConnection;
use crate::client::state::ClientInner;
use crate::socket::wait;

/// Interval between connection attempts, and between checks of the connection.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval between connection attempts to a server that rejects this engine.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Tracks failed connection attempts since the last successful one.
#[derive(Debug, Default)]
pub(crate) struct ConnectFailures {
    num_refused: u32,
    reason: String,
}

impl ConnectFailures {
    /// Returns the line to log, or None if it is the same as the previous line.
    pub(crate) fn log_line(&mut self, error: &Error) -> Option<String> {
        let reason = error.to_string();
        let is_new = self.reason != reason;
        self.reason.clone_from(&reason);
        is_new
            .then(|| format!("{reason}; running without the cache and retrying in the background"))
    }

    /// Returns the delay until the next attempt. The delay doubles with each rejection. If no
    /// server is running, the delay is reset, because the next server may accept this engine.
    fn retry_interval(&mut self, error: &Error) -> Duration {
        if error.kind() != ErrorKind::Io {
            self.num_refused += 1;
        } else if !error.is_late() {
            self.num_refused = 0;
        }
        RETRY_INTERVAL.saturating_mul(1 << self.num_refused.min(12)).min(MAX_RETRY_INTERVAL)
    }
}

impl ClientInner {
    /// Runs one iteration of the background thread: checks the connection, or attempts to open a
    /// new connection.
    pub(crate) fn maintain_connection(&self, failures: &mut ConnectFailures) {
        let stream = {
            let state = self.state();
            let next = state.next.as_ref().map(|next| &next.connection);
            next.or(state.connection.as_ref())
                .filter(|connection| !connection.is_closed)
                .map(|connection| Arc::clone(&connection.stream))
        };
        if let Some(stream) = stream {
            if wait(&*stream, PollFlags::empty(), Instant::now() + RETRY_INTERVAL) {
                self.close_connection(&stream);
            }
            return;
        }
        self.drop_connection();
        match NewConnection::open(&self.config) {
            Ok(found) => {
                let mut state = self.state();
                if state.is_closed {
                    return; // otherwise, the server would count this engine until the session drops
                }
                state.log(Event::recovery(format!("connected to {}", self.server_name())));
                state.next = Some(found);
                *failures = ConnectFailures::default();
            }
            Err(error) => {
                // An `Io` error is not logged, because the lost connection has already been logged.
                let line = failures.log_line(&error).filter(|_| error.kind() != ErrorKind::Io);
                if let Some(line) = line {
                    self.state().log(Event::problem(line));
                }
                std::thread::park_timeout(failures.retry_interval(&error));
            }
        }
    }

    /// Drops the next connection or closes the current connection, whichever uses `stream`.
    fn close_connection(&self, stream: &Arc<UnixStream>) {
        let mut state = self.state();
        let uses_stream = |connection: &Connection| Arc::ptr_eq(&connection.stream, stream);
        if state.next.take_if(|next| uses_stream(&next.connection)).is_none()
            && let Some(connection) = state.connection.as_mut().filter(|each| uses_stream(each))
        {
            connection.close();
        }
    }

    fn drop_connection(&self) {
        let mut state = self.state();
        if state.connection.take().is_some() {
            state.num_lost += 1;
            state.log(Event::problem(format!(
                "lost the connection to {}; running without the cache and reconnecting",
                self.server_name()
            )));
        }
        state.release_lost_arena();
    }
}

#[cfg(test)]
mod tests;
