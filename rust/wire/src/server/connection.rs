//! The server side of a connection: peer checks, framing, the hello, and cleanup.
//!
//! All input is validated. `handler` serves the engines' requests.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvloft_core::key::namespace_id;
use kvloft_core::session::Session;
use rustix::event::PollFlags;

use crate::protocol::admin::AdminRequest;
use crate::protocol::{
    Hello, LENGTH_BYTES, MAX_HELLO, MAX_MESSAGE, Request, Response, VERSION, Welcome,
};
use crate::server::handler::{Disconnect, EngineHandler, malformed};
use crate::server::namespace::{Counters, Membership};
use crate::server::quarantine::{Lifeline, ProcessWatch};
use crate::server::shared_state::{Peer, ServerState};
use crate::socket::{
    SPIN_TIME, enlarge_buffers, is_current_user, peer_credentials, send_with_fds, spin,
};
use crate::threads::{locked, spawn};

/// Timeout for the first request on a connection.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for writing to a client that is not reading its responses.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
const READ_BYTES: usize = 64 << 10;

const OTHER_USER: &str = "this kvloft server accepts connections only from its own user";

#[derive(Debug)]
struct ServedConnection {
    state: Arc<ServerState>,
    stream: UnixStream,
    number: u64,
    membership: Option<Arc<Membership>>,
    /// None until the engine's hello is accepted.
    lifeline: Option<Lifeline>,
    handler: EngineHandler,
    out: Vec<u8>,
    /// True once `num_accepted` includes this connection. Connections that only request the status
    /// are not counted.
    is_counted: bool,
}

/// Sends the reason for a rejection. Does not wait for space in the socket buffer.
pub(crate) fn refuse(state: &ServerState, mut stream: &UnixStream, text: &str) {
    state.num_refused.fetch_add(1, Ordering::Relaxed);
    let mut out = Vec::new();
    Response::Refused(text.to_owned()).encode(0, &mut out);
    let _unsent = stream.set_nonblocking(true).and_then(|()| stream.write_all(&out));
}

/// Serves a connection on a new thread, or rejects the connection if it belongs to another user.
pub(crate) fn start(state: &Arc<ServerState>, stream: UnixStream, number: u64) {
    let Ok((uid, pid)) = peer_credentials(&stream) else { return };
    if !is_current_user(uid) {
        state.num_accepted.fetch_add(1, Ordering::Relaxed);
        state.log(format!("rejected a connection from user {uid}: {OTHER_USER}"));
        return refuse(state, &stream, OTHER_USER);
    }
    enlarge_buffers(&stream);
    let limits = stream
        .set_read_timeout(Some(HELLO_TIMEOUT))
        .and(stream.set_write_timeout(Some(WRITE_TIMEOUT)));
    let (Ok(()), Ok(clone)) = (limits, stream.try_clone()) else { return };
    let counters = Arc::<Counters>::default();
    let watch = ProcessWatch::new(pid);
    let peer = Peer {
        stream: clone,
        pid,
        watch,
        since: Instant::now(),
        membership: None,
        counters: Arc::clone(&counters),
    };
    state.peers().insert(number, peer);
    let mut connection = ServedConnection {
        state: Arc::clone(state),
        stream,
        number,
        membership: None,
        lifeline: None,
        handler: EngineHandler::new(counters),
        out: Vec::new(),
        is_counted: false,
    };
    // If the thread cannot be started, dropping the connection closes it.
    let _spawned = spawn("engine", move || connection.serve());
}

/// Reads the next message, which must not exceed `max_bytes` bytes. Allocates memory for the bytes
/// that arrive, not for the announced length.
fn receive(reader: &mut impl Read, into: &mut Vec<u8>, max_bytes: usize) -> Result<(), Disconnect> {
    let mut length = [0; LENGTH_BYTES];
    reader.read_exact(&mut length)?;
    let length = u64::from(u32::from_le_bytes(length));
    if length > max_bytes as u64 {
        return Err(Disconnect::Refused(format!(
            "a message of {length} bytes exceeds the limit of {max_bytes} bytes"
        )));
    }
    into.clear();
    let num_read = reader.take(length).read_to_end(into)?;
    if num_read as u64 == length { Ok(()) } else { Err(Disconnect::Closed) }
}

fn check_version(version: u32) -> Result<(), Disconnect> {
    if version == VERSION {
        return Ok(());
    }
    Err(Disconnect::Refused(format!(
        "the kvloft server speaks protocol version {VERSION}, but the client speaks version \
         {version}; install the same kvloft version on both sides"
    )))
}

impl ServedConnection {
    fn serve(&mut self) {
        let Ok(clone) = self.stream.try_clone() else { return };
        let mut reader = BufReader::with_capacity(READ_BYTES, clone);
        let mut bytes = Vec::new();
        let end = loop {
            let max_bytes = if self.membership.is_some() { MAX_MESSAGE } else { MAX_HELLO };
            let done = receive(&mut reader, &mut bytes, max_bytes).and_then(|()| {
                match Request::decode(&bytes) {
                    Some((number, request)) => self.handle(number, &request),
                    None => Err(malformed()),
                }
            });
            if let Err(end) = done {
                break end;
            }
            if reader.buffer().is_empty() {
                // An engine often sends two or three requests in a row, so spin before blocking.
                spin(&self.stream, PollFlags::IN, Instant::now() + SPIN_TIME);
            }
        };
        if let Disconnect::Refused(text) = end {
            self.count_once();
            let pid = self.state.peers().get(&self.number).map_or(0, |peer| peer.pid);
            let line = locked(&self.state.refusals).log_line(pid, &text, Instant::now());
            if let Some(line) = line {
                self.state.log(line);
            }
            refuse(&self.state, &self.stream, &text);
        }
    }

    fn count_once(&mut self) {
        let is_new = !std::mem::replace(&mut self.is_counted, true);
        self.state.num_accepted.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    fn handle(&mut self, number: u32, request: &Request<'_>) -> Result<(), Disconnect> {
        let answer = match (request, self.membership.clone()) {
            (Request::Admin(version, json), _) => Some(self.answer_admin(*version, json)?),
            (Request::Hello(hello), None) => {
                let welcomed = self.welcome(number, hello);
                let id = namespace_id(&hello.namespace);
                let mut refusals = locked(&self.state.refusals);
                match &welcomed {
                    Ok(()) => refusals.remove(&id),
                    Err(Disconnect::Refused(text)) => refusals.add(&id, text, Instant::now()),
                    Err(Disconnect::Closed) => {}
                }
                drop(refusals);
                return welcomed;
            }
            (Request::Bye, _) => return Err(Disconnect::Closed),
            (_, None) => return Err(malformed()),
            (request, Some(membership)) => self.handler.respond(request, &membership)?,
        };
        let Some(answer) = answer else { return Ok(()) };
        self.out.clear();
        answer.encode(number, &mut self.out);
        self.stream.write_all(&self.out)?;
        Ok(())
    }

    fn answer_admin(&mut self, version: u32, json: &[u8]) -> Result<Response, Disconnect> {
        check_version(version)?;
        let request = AdminRequest::parse(json).ok_or_else(malformed)?;
        if request != AdminRequest::Status {
            self.count_once();
        }
        self.state
            .answer_admin(&request)
            .map(Response::Admin)
            .map_err(|error| Disconnect::Refused(error.to_string()))
    }

    fn welcome(&mut self, number: u32, hello: &Hello) -> Result<(), Disconnect> {
        self.count_once();
        check_version(hello.version)?;
        let refused = |error: kvloft_core::Error| Disconnect::Refused(error.to_string());
        let membership = self.state.join(hello).map_err(refused)?;
        let Some(arena) = membership.local.arena() else { return Err(Disconnect::Closed) };
        let fd = File::options().read(true).write(true).open(&arena.path)?;
        let mut out = Vec::new();
        let sizes = Welcome { size_bytes: arena.size_bytes, slab_bytes: arena.slab_bytes };
        Response::Welcome(sizes).encode(number, &mut out);
        let (lifeline, engine_end) = Lifeline::new()?;
        self.lifeline = Some(lifeline);
        let membership = Arc::new(membership);
        self.membership = Some(Arc::clone(&membership));
        let mut peers = self.state.peers();
        let pid = peers.get_mut(&self.number).map_or(0, |peer| {
            peer.membership = Some(membership);
            peer.pid
        });
        drop(peers);
        self.state.num_joined.fetch_add(1, Ordering::Relaxed);
        let id = namespace_id(&hello.namespace);
        self.state.log(format!("process {pid} connected to namespace {id}"));
        send_with_fds(&self.stream, &out, [fd.as_fd(), engine_end.as_fd()])?;
        self.stream.set_read_timeout(None)?;
        Ok(())
    }
}

impl Drop for ServedConnection {
    fn drop(&mut self) {
        // This also drops the change listener, which a quarantined membership does not need.
        self.handler = EngineHandler::default();
        let membership = self.membership.take();
        self.state.remove_peer(self.number);
        // `membership` is the last reference: `remove_peer` dropped the reference that status
        // requests use while they hold the peers' lock.
        if let (Some(membership), Some(lifeline)) =
            (membership.and_then(Arc::into_inner), self.lifeline.take())
        {
            self.state.quarantine.add(membership, lifeline);
        }
    }
}
