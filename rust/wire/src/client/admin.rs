//! Sends admin requests to a server, each on a new connection.

use std::path::Path;
use std::time::{Duration, Instant};

use kvloft_core::key::SaltTag;
use kvloft_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;

use crate::client::connection::Connection;
use crate::protocol::admin::{AdminRequest, EvictReport, EvictRequest, Status};
use crate::protocol::{Request, Response, VERSION};

/// Returns the status of the server listening on `socket`.
///
/// Returns `Io` if no server responds within `timeout`, and `InvalidConfig` if the server rejects
/// the request.
pub fn status(socket: &Path, timeout: Duration) -> Result<Status> {
    call(socket, &AdminRequest::Status, timeout)
}

/// Removes all chunks of one namespace from every tier. Returns the number of chunks removed.
///
/// `namespace` is a prefix of the namespace's hex digest. It can be empty if the server has only
/// one namespace. Returns the same errors as [`status`]. Also returns `InvalidConfig` if the disk
/// does not respond or the prefix does not match exactly one namespace. If multiple namespaces
/// match, the error message lists them.
pub fn clear(socket: &Path, namespace: &str, timeout: Duration) -> Result<u64> {
    call(socket, &AdminRequest::Clear { namespace: namespace.to_owned() }, timeout)
}

/// Evicts the chunks of one tenant or of all tenants, either from every tier or only from host
/// memory.
///
/// `namespace` is a prefix of the hex digests to match. An empty prefix matches all namespaces.
/// Returns the same errors as [`status`]. Also returns `InvalidConfig`, with a list of the server's
/// namespaces, if no namespace matches.
pub fn evict(
    socket: &Path,
    namespace: &str,
    tenant: Option<SaltTag>,
    host_only: bool,
    timeout: Duration,
) -> Result<EvictReport> {
    let request = EvictRequest { namespace: namespace.to_owned(), tenant, host_only };
    call(socket, &AdminRequest::Evict(request), timeout)
}

fn call<T: DeserializeOwned>(
    socket: &Path,
    request: &AdminRequest,
    timeout: Duration,
) -> Result<T> {
    let malformed = |error: serde_json::Error| {
        Error::io("the kvloft server sent a malformed response", error.into())
    };
    let json = serde_json::to_vec(request).map_err(malformed)?;
    let deadline = Instant::now() + timeout;
    match Connection::connect(socket, deadline)?.open(&Request::Admin(VERSION, &json), deadline)? {
        (Response::Admin(json), _) => serde_json::from_slice(&json).map_err(malformed),
        _ => Err(Error::new(ErrorKind::Io, "the kvloft server sent an unexpected response")),
    }
}
