//! A server that said welcome, and the arena that came with that. It must not know what is asked of it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use kvloft_core::session::ArenaInfo;
use kvloft_core::{Error, ErrorKind, Result};

use crate::link::Link;
use crate::message::{Answer, Hello, Request, VERSION};
use crate::settings::RemoteConfig;

/// Longest wait for a server that opens its disk.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// A server that said welcome.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) link: Link,
    pub(crate) arena: ArenaInfo,
    /// Keeps `arena.path` where it is.
    pub(crate) fd: OwnedFd,
}

impl Found {
    /// `Io` if there is none, `InvalidConfig` if it refuses.
    pub(crate) fn at(config: &RemoteConfig) -> Result<Self> {
        let mut link = Link::connect(&config.socket)?;
        let hello = Hello {
            version: VERSION,
            namespace: config.namespace,
            frame_bytes: config.frame_bytes,
            blocks_per_chunk: config.blocks_per_chunk,
            description: config.description.clone(),
        };
        let (answer, fd) = link.open(&Request::Hello(hello), HELLO_TIMEOUT)?;
        let (Answer::Welcome(num_frames), Some(fd)) = (answer, fd) else {
            return Err(Error::new(ErrorKind::Io, "the kvloft server answered something else"));
        };
        let stat = rustix::fs::fstat(&fd).map_err(|error| Error::io("the arena is not to be seen", error.into()))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        let arena = ArenaInfo { path, id: stat.st_ino, frame_bytes: config.frame_bytes, num_frames };
        Ok(Self { link, arena, fd })
    }
}
