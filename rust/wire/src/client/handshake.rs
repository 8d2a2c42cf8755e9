//! A server that said welcome, and the arena that came with that. It must not know what is asked of it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use kvloft_core::session::{ArenaInfo, LifelineInfo};
use kvloft_core::{Error, ErrorKind, Result};

use crate::client::connection::Link;
use crate::protocol::{Answer, Hello, Request, VERSION};
use crate::settings::RemoteConfig;

/// Longest wait for a server that opens its disk.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// A server that said welcome.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) link: Link,
    pub(crate) arena: ArenaInfo,
    /// Keep the paths in `arena` valid: the arena and the lifeline.
    pub(crate) fds: [OwnedFd; 2],
}

impl Found {
    /// `Io` if there is none, `Busy` if it refuses this engine for now, `InvalidConfig` for a socket of another user's process.
    pub(crate) fn at(config: &RemoteConfig) -> Result<Self> {
        let mut link = Link::connect(&config.socket)?;
        let hello = Hello {
            version: VERSION,
            namespace: config.namespace,
            frame_bytes: config.frame_bytes,
            blocks_per_chunk: config.blocks_per_chunk,
            description: config.description.clone(),
        };
        let refused = |error: Error| match error.kind() {
            ErrorKind::InvalidConfig => Error::new(ErrorKind::Busy, error.to_string()), // another server may accept it
            _ => error,
        };
        let (answer, fds) = link.open(&Request::Hello(hello), HELLO_TIMEOUT).map_err(refused)?;
        let (Answer::Welcome(num_frames), Ok(fds)) = (answer, <[OwnedFd; 2]>::try_from(fds)) else {
            return Err(Error::new(ErrorKind::Io, "the kvloft server answered something else"));
        };
        let [(path, id), (lifeline_path, lifeline_id)] = [place_of(&fds[0])?, place_of(&fds[1])?];
        let lifeline = Some(LifelineInfo { path: lifeline_path, id: lifeline_id });
        let arena = ArenaInfo { path, id, frame_bytes: config.frame_bytes, num_frames, lifeline };
        Ok(Self { link, arena, fds })
    }
}

/// Where another process of this user opens `fd`, and its inode.
fn place_of(fd: &OwnedFd) -> Result<(String, u64)> {
    let stat = rustix::fs::fstat(fd).map_err(|error| Error::io("the arena cannot be inspected", error.into()))?;
    Ok((format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()), stat.st_ino))
}
