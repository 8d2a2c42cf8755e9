//! Helpers for Unix sockets: peer credentials, waiting with a deadline, buffers and descriptor
//! passing.
//!
//! Message contents are opaque to this module.

use std::io::{self, ErrorKind as IoKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with,
};

use crate::protocol::codec::LENGTH_BYTES;

/// Requested socket buffer size, which is large enough for the keys of a long prefix. The kernel
/// might grant less.
const BUFFER_BYTES: usize = 1 << 20;
/// Minimum free space in a [`ReceiveBuffer`] before each read, in bytes.
const READ_BYTES: usize = 64 << 10;

/// Maximum number of sent bytes kept at the front of a [`SendBuffer`].
const MAX_SENT_BYTES: usize = 1 << 20;

/// Interval between attempts to connect while the listener's queue is full.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// How long to poll before sleeping. Waking a thread takes longer than most responses do.
pub(crate) const SPIN_TIME: Duration = Duration::from_micros(100);

/// Returns the peer's user id and process id. The process id is 0 if the peer is in a different
/// PID namespace.
pub(crate) fn peer_credentials(stream: &UnixStream) -> io::Result<(u32, u32)> {
    let peer = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?;
    Ok((peer.uid(), u32::try_from(peer.pid()).unwrap_or(0)))
}

pub(crate) fn is_current_user(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

/// Connects to the socket at `path` and returns a nonblocking stream. Retries until `deadline`
/// while the listener's queue is full, whereas `UnixStream::connect` would block.
pub(crate) fn connect(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(CONNECT_RETRY_INTERVAL),
            Err(Errno::AGAIN) => return Err(IoKind::TimedOut.into()),
            done => return Ok(done.map(|()| UnixStream::from(socket))?),
        }
    }
}

/// Enlarges a socket's buffers, up to the kernel's limit.
pub(crate) fn enlarge_buffers(stream: &UnixStream) {
    let _best_effort = rustix::net::sockopt::set_socket_send_buffer_size(stream, BUFFER_BYTES);
    let _best_effort = rustix::net::sockopt::set_socket_recv_buffer_size(stream, BUFFER_BYTES);
}

/// Waits until `fd` reports one of `flags`, a hangup or an error. Returns false if the deadline
/// passes or `poll` fails.
pub(crate) fn wait(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> bool {
    loop {
        let left =
            deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(3600));
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), flags)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

/// Like [`wait`], but polls for [`SPIN_TIME`] first.
pub(crate) fn spin_then_wait(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> bool {
    spin(&fd, flags, deadline.min(Instant::now() + SPIN_TIME)) || wait(fd, flags, deadline)
}

/// Like [`wait`], but polls without sleeping. On a single-core machine, returns false immediately,
/// because the peer needs the core.
pub(crate) fn spin(fd: impl AsFd, flags: PollFlags, deadline: Instant) -> bool {
    static HAS_CORES: LazyLock<bool> =
        LazyLock::new(|| thread::available_parallelism().is_ok_and(|num| num.get() > 1));
    while *HAS_CORES && Instant::now() < deadline {
        if wait(&fd, flags, Instant::now()) {
            return true;
        }
        thread::yield_now();
    }
    false
}

/// Sends all of `bytes`, with two descriptors attached to the first byte.
pub(crate) fn send_with_fds(
    mut stream: &UnixStream,
    bytes: &[u8],
    fds: [BorrowedFd<'_>; 2],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent =
        rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}

/// Buffers bytes to be sent on a nonblocking stream.
#[derive(Debug, Default)]
pub(crate) struct SendBuffer {
    bytes: Vec<u8>,
    /// Number of bytes at the front that have already been sent.
    num_sent: usize,
}

impl SendBuffer {
    pub(crate) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    pub(crate) fn num_unsent(&self) -> usize {
        self.bytes.len() - self.num_sent
    }

    /// Sends as many bytes as the socket accepts. Returns an error if the peer has disconnected.
    pub(crate) fn flush(&mut self, mut stream: &UnixStream) -> io::Result<()> {
        while self.num_unsent() > 0 {
            match stream.write(&self.bytes[self.num_sent..]) {
                Ok(0) => return Err(IoKind::WriteZero.into()),
                Ok(num) => self.num_sent += num,
                Err(error) if error.kind() == IoKind::WouldBlock => break,
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.num_unsent() == 0 || self.num_sent > MAX_SENT_BYTES {
            self.bytes.drain(..self.num_sent);
            self.num_sent = 0;
        }
        Ok(())
    }
}

/// Buffers received bytes until they are consumed.
#[derive(Debug, Default)]
pub(crate) struct ReceiveBuffer {
    /// The bytes in `start..end` have not been consumed yet. The rest is free space.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl ReceiveBuffer {
    fn spare(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < READ_BYTES {
            self.bytes.resize(self.end + READ_BYTES * 4, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Reads all available bytes from a nonblocking stream. Returns an error if the peer has
    /// disconnected.
    pub(crate) fn fill(&mut self, mut stream: &UnixStream) -> io::Result<()> {
        let spare = self.spare();
        let num_bytes = spare.len();
        match stream.read(spare) {
            Ok(0) => Err(IoKind::UnexpectedEof.into()),
            Ok(num) => {
                self.end += num;
                if num == num_bytes { self.fill(stream) } else { Ok(()) }
            }
            Err(error) if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Reads from the stream once and returns the received descriptors.
    pub(crate) fn fill_with_fds(&mut self, stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(self.spare())];
        let num =
            rustix::net::recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
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

    /// Returns the next message, or None if it has not fully arrived yet. Returns an error if the
    /// message is longer than `max_bytes`.
    pub(crate) fn next(&mut self, max_bytes: usize) -> io::Result<Option<&[u8]>> {
        let received = &self.bytes[self.start..self.end];
        let Some((length, rest)) = received.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
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
