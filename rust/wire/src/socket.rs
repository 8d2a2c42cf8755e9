//! The Unix socket: who is at the other end, waiting with a deadline, and a descriptor beside bytes.
//!
//! It must not know what the messages say.

use std::io::{self, ErrorKind as IoKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::protocol::codec::LENGTH_BYTES;

/// Bytes of a socket's buffer, each way: a long prefix goes through at once. The system may give less.
const BUFFER_BYTES: usize = 1 << 20;
/// Bytes that a read asks for.
const READ_BYTES: usize = 64 << 10;

/// How long an end stays awake for what is about to come: to be woken takes longer than to answer.
pub(crate) const AWAKE: Duration = Duration::from_micros(100);

/// The user and the process at the other end; process 0: of another PID namespace, so not visible from here.
pub(crate) fn peer(stream: &UnixStream) -> io::Result<(u32, u32)> {
    let peer = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?;
    Ok((peer.uid(), u32::try_from(peer.pid()).unwrap_or(0)))
}

/// Whether the process at the other end is this user's.
pub(crate) fn is_own(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

/// Larger buffers, as far as the system gives them.
pub(crate) fn widen(stream: &UnixStream) {
    let _as_it_is = rustix::net::sockopt::set_socket_send_buffer_size(stream, BUFFER_BYTES);
    let _as_it_is = rustix::net::sockopt::set_socket_recv_buffer_size(stream, BUFFER_BYTES);
}

/// Waits for one of `flags`, or the end of the connection; false at the deadline.
pub(crate) fn wait(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(3600));
        let timeout =
            Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(0), tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), flags)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

/// As [`wait`], but awake at first.
pub(crate) fn wait_awake(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> bool {
    stay_awake(&fd, flags, deadline.min(Instant::now() + AWAKE)) || wait(fd, flags, deadline)
}

/// As [`wait`], but looks again and again, unless there is only one core, which the other side needs.
pub(crate) fn stay_awake(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> bool {
    static HAS_CORES: LazyLock<bool> = LazyLock::new(|| thread::available_parallelism().is_ok_and(|num| num.get() > 1));
    while *HAS_CORES && Instant::now() < deadline {
        if wait(&fd, flags, Instant::now()) {
            return true;
        }
        thread::yield_now();
    }
    false
}

/// Sends all of `bytes`, and with its first byte two descriptors.
pub(crate) fn send_with(mut stream: &UnixStream, bytes: &[u8], fds: [BorrowedFd<'_>; 2]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}

/// What was received and is not a whole message yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// Room, of which `start..end` was received and not taken yet.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// Where the next bytes go.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < READ_BYTES {
            self.bytes.resize(self.end + READ_BYTES * 4, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Reads what is there of a stream that does not block. Err: the other side is gone.
    pub(crate) fn fill(&mut self, mut stream: &UnixStream) -> io::Result<()> {
        let room = self.room();
        let num_bytes = room.len();
        match stream.read(room) {
            Ok(0) => Err(IoKind::UnexpectedEof.into()),
            Ok(num) => {
                self.end += num;
                if num == num_bytes { self.fill(stream) } else { Ok(()) }
            }
            Err(error) if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Reads once, and returns the descriptors that came with it.
    pub(crate) fn fill_with(&mut self, stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(self.room())];
        let num = rustix::net::recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        if num == 0 {
            return Err(IoKind::UnexpectedEof.into());
        }
        self.end += num;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        Ok(rights.flatten().collect())
    }

    /// The next whole message. Err: one longer than `max_bytes`.
    pub(crate) fn next(&mut self, max_bytes: usize) -> io::Result<Option<&[u8]>> {
        let received = &self.bytes[self.start..self.end];
        let Some((length, rest)) = received.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length > max_bytes {
            return Err(IoKind::InvalidData.into());
        }
        if rest.len() < length {
            return Ok(None);
        }
        self.start += LENGTH_BYTES + length;
        Ok(Some(&rest[..length]))
    }
}
