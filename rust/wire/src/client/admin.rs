//! What people ask a server, each in a connection of its own. It must not know engines.

use std::path::Path;
use std::time::Duration;

use kvloft_core::{Error, ErrorKind, Result};

use crate::client::connection::Link;
use crate::protocol::admin::{GivenUp, Whose};
use crate::protocol::{Answer, Request, Status, VERSION};

/// What the server at `socket` does now. `InvalidConfig` if it refuses to say, `Io` if no server answers in time.
pub fn status(socket: &Path, timeout: Duration) -> Result<Status> {
    match Link::connect(socket)?.open(&Request::Status(VERSION), timeout)? {
        (Answer::Status(status), _) => Ok(status),
        _ => Err(Error::new(ErrorKind::Io, "the kvloft server answered something else")),
    }
}

/// Has the server at `socket` forget a namespace in every tier, for all its engines: the one whose name in hex begins with
/// `namespace`, open or on disk only; that may be empty where there is one. Returns how many chunks. Errors as [`status`], and
/// `InvalidConfig` with what there is if not one name begins so, or if the disk does not say.
pub fn forget(socket: &Path, namespace: &str, timeout: Duration) -> Result<u64> {
    match Link::connect(socket)?.open(&Request::Forget(VERSION, namespace.to_owned()), timeout)? {
        (Answer::Count(num_chunks), _) => Ok(num_chunks),
        _ => Err(Error::new(ErrorKind::Io, "the kvloft server answered something else")),
    }
}

/// Has the server at `socket` give chunks up: in every tier, or in host memory only. `InvalidConfig` with what there is if no namespace
/// is meant, `Io` if no server answers in time.
pub fn evict(socket: &Path, whose: &Whose, is_host_only: bool, timeout: Duration) -> Result<GivenUp> {
    match Link::connect(socket)?.open(&Request::Evict(VERSION, whose.clone(), is_host_only), timeout)? {
        (Answer::GivenUp(given_up), _) => Ok(given_up),
        _ => Err(Error::new(ErrorKind::Io, "the kvloft server answered something else")),
    }
}
