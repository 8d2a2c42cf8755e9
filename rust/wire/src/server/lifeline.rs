//! Whether a process exists that can write to an engine's frames, and whether a client's process has ended.
//!
//! A lifeline is a pipe. The engine receives its write end with the arena, and each worker opens that end again before it maps the
//! arena. The kernel closes the ends of every process that ends, however it ends and in whichever PID namespace, so the read end
//! reports when the last one is closed. A forked child inherits both mapping and pipe, and counts. This file must not know sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::socket::wait;

/// The server's end of an engine's lifeline.
#[derive(Debug)]
pub(crate) struct Lifeline(OwnedFd);

impl Lifeline {
    /// A new lifeline and the end that the engine receives.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Self(read), write))
    }

    /// Whether no process has the engine's end any more.
    pub(crate) fn is_closed(&self) -> bool {
        wait(&self.0, PollFlags::empty(), Instant::now())
    }
}

/// Watches the process of a client, for a forked child can keep its connection open.
#[derive(Debug)]
pub(crate) struct ProcessWatch(Option<OwnedFd>);

impl ProcessWatch {
    /// Process 0 is in another PID namespace and cannot be watched.
    pub(crate) fn new(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Self(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.0.as_ref().is_some_and(|fd| wait(fd, PollFlags::IN, Instant::now()))
    }
}
