//! Client settings, and the handshake with a server: hello, welcome, and the arena and lifeline
//! descriptors.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvloft_core::io::FrameSizes;
use kvloft_core::session::{ArenaInfo, LifelineInfo};
use kvloft_core::{Error, ErrorKind, Result};

use crate::client::connection::Connection;
use crate::protocol::{Hello, Request, Response, VERSION, Welcome};

/// Timeout for connecting and for receiving the server's welcome. The server may have to open its
/// disk tier first.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// The server's socket path.
    pub socket: PathBuf,
    /// How long each call waits for a response.
    pub deadline: Duration,
    /// See `StoreConfig::namespace`.
    pub namespace: [u8; 32],
    /// See `StoreConfig::frame_sizes`.
    pub frame_sizes: FrameSizes,
    /// See `DiskSettings::description`.
    pub description: String,
}

/// A connection that a server has accepted.
#[derive(Debug)]
pub(crate) struct NewConnection {
    pub(crate) connection: Connection,
    pub(crate) arena: ArenaInfo,
    /// Descriptors of the arena and the lifeline. The paths in `arena` are valid only while these
    /// descriptors are open.
    pub(crate) fds: [OwnedFd; 2],
}

impl NewConnection {
    /// Connects to the server. Returns `Io` if no server responds, `Busy` if the server rejects
    /// this engine, and `InvalidConfig` if the server belongs to another user.
    pub(crate) fn open(config: &ClientConfig) -> Result<Self> {
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let mut connection = Connection::connect(&config.socket, deadline)?;
        let hello = Hello {
            version: VERSION,
            namespace: config.namespace,
            frame_sizes: config.frame_sizes.clone(),
            description: config.description.clone(),
        };
        let refused = |error: Error| match error.kind() {
            // The server might accept the engine later.
            ErrorKind::InvalidConfig => Error::new(ErrorKind::Busy, error.to_string()),
            _ => error,
        };
        let (response, fds) = connection.open(&Request::Hello(hello), deadline).map_err(refused)?;
        let (Response::Welcome(Welcome { size_bytes, slab_bytes }), Ok(fds)) =
            (response, <[OwnedFd; 2]>::try_from(fds))
        else {
            return Err(Error::new(ErrorKind::Io, "the kvloft server sent an unexpected response"));
        };
        let [(path, id), (lifeline_path, lifeline_id)] =
            [path_and_inode(&fds[0])?, path_and_inode(&fds[1])?];
        let lifeline = Some(LifelineInfo { path: lifeline_path, id: lifeline_id });
        let arena = ArenaInfo { path, id, size_bytes, slab_bytes, lifeline };
        Ok(Self { connection, arena, fds })
    }
}

/// Returns a path through which this user's other processes can open `fd`, and the inode of `fd`.
fn path_and_inode(fd: &OwnedFd) -> Result<(String, u64)> {
    let stat = rustix::fs::fstat(fd).map_err(|error| {
        Error::io("cannot inspect a file descriptor from the kvloft server", error.into())
    })?;
    Ok((format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()), stat.st_ino))
}
