//! The Unix socket: a private place for it, who is at the other end, waiting with a deadline, and a descriptor beside bytes.
//!
//! It must not know what the messages say.

use std::fs::{DirBuilder, File, Permissions, TryLockError};
use std::io::{self, ErrorKind as IoKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use kvloft_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::message::LENGTH_BYTES;

/// Bytes of a socket's buffer, each way: a long prefix goes through at once. The system may give less.
const BUFFER_BYTES: usize = 1 << 20;
/// Bytes that a read asks for.
const READ_BYTES: usize = 64 << 10;

/// How long an end stays awake for what is about to come: to be woken takes longer than to answer.
pub(crate) const AWAKE: Duration = Duration::from_micros(100);

/// A listening socket that only this user can reach. It is gone from its place when this goes.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    /// Locked while the socket is ours, so that a stale one can be told from another server's.
    lock: File,
}

impl Listener {
    /// `Busy` if another server listens there; `InvalidConfig` for a place that is not private.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        let fail = |what: &str, error: io::Error| Error::io(format!("{what} {}", path.display()), error);
        check_place(path)?;
        let lock = lock(path)?;
        if path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
            std::fs::remove_file(path).map_err(|error| fail("a stale socket cannot be removed:", error))?;
        }
        if path.symlink_metadata().is_ok_and(|found| !found.file_type().is_socket()) {
            let message = format!("{} is there already and is no socket; set socket to another path", path.display());
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        let socket = UnixListener::bind(path).map_err(|error| fail("the server cannot listen at", error))?;
        let private = Permissions::from_mode(0o600);
        std::fs::set_permissions(path, private).map_err(|error| fail("the socket cannot be made private:", error))?;
        Ok(Self { socket, path: path.to_owned(), lock })
    }

    /// Ends `accept`.
    pub(crate) fn shut(&self) {
        let _ended = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.path);
        // While it is locked: who has it open, and gets the lock then, sees that it is not there any more.
        if is_there(&self.lock, &lock_path(&self.path)).unwrap_or(false) {
            let _gone = std::fs::remove_file(lock_path(&self.path));
        }
    }
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// Whether the file is the one at that path, or that a link there leads to.
fn is_there(file: &File, path: &Path) -> io::Result<bool> {
    let (own, found) = (file.metadata()?, path.metadata()?);
    Ok((own.dev(), own.ino()) == (found.dev(), found.ino()))
}

/// Takes the lock of a socket; `Busy` if another server has it.
fn lock(socket: &Path) -> Result<File> {
    let fail = |what: &str, error: io::Error| Error::io(format!("{what} {}", socket.display()), error);
    let path = lock_path(socket);
    loop {
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(|error| fail("no lock can be made for the socket", error))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                let message = format!("another kvloft server listens at {}; choose another socket", socket.display());
                Error::new(ErrorKind::Busy, message)
            }
            TryLockError::Error(error) => fail("the lock cannot be taken of the socket", error),
        })?;
        // A server that ended meanwhile took the file with it.
        if is_there(&lock, &path).unwrap_or(false) {
            return Ok(lock);
        }
    }
}

/// Makes the socket's directory; one that is there must be this user's, and no other user may write to it.
fn check_place(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::io(format!("the socket's directory {} cannot be made", folder.display()), error))?;
    let found = folder.metadata();
    let found =
        found.map_err(|error| Error::io(format!("the directory {} cannot be looked at", folder.display()), error))?;
    if found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    let message = format!(
        "{} belongs to another user, or others may write to it; set socket to a path in a directory of your own",
        folder.display()
    );
    Err(Error::new(ErrorKind::InvalidConfig, message))
}

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

/// Sends all of `bytes`, and with its first a descriptor.
pub(crate) fn send_with(mut stream: &UnixStream, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
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

    /// Reads once, and takes the descriptor that came along.
    pub(crate) fn fill_with(&mut self, stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(self.room())];
        let num = rustix::net::recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        if num == 0 {
            return Err(IoKind::UnexpectedEof.into());
        }
        self.end += num;
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        Ok(fds.last())
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    /// The one that listens has the socket and the lock, whoever ends or begins meanwhile.
    #[test]
    fn servers_that_end_and_begin_at_once_never_listen_together() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        let (num_listening, num_bound) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            for _ in 0..500 {
                let Ok(listener) = Listener::bind(&path) else { continue };
                assert_eq!(num_listening.fetch_add(1, Ordering::SeqCst), 0, "two listen at once");
                assert!(is_there(&listener.lock, &lock_path(&path)).unwrap_or(false), "its lock is another's");
                assert!(UnixStream::connect(&path).is_ok(), "its socket is gone");
                num_bound.fetch_add(1, Ordering::SeqCst);
                num_listening.fetch_sub(1, Ordering::SeqCst);
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
        assert!(num_bound.into_inner() > 0);
        assert_eq!(dir.path().read_dir().expect("it is there").count(), 0, "something is left");
    }

    #[test]
    fn a_lock_that_is_a_link_is_a_lock() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), lock_path(&path)).expect("the path is free");
        let (send, bound) = mpsc::channel();
        let own = path.clone();
        thread::spawn(move || send.send(Listener::bind(&own)));
        let listener = bound.recv_timeout(Duration::from_secs(20)).expect("it is still at it").expect("it is free");
        assert!(Listener::bind(&path).is_err(), "it is taken");
        drop(listener);
        assert!(!path.exists() && lock_path(&path).symlink_metadata().is_err());
    }
}
