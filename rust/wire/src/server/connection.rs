//! One connection, as the server has it: who it is, how messages come and go, and what becomes of what it held when it ends.
//!
//! Nothing is believed but the number of bytes. It must not know how clients wait, nor what is asked: see `engine`.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvloft_core::session::Session;
use rustix::event::PollFlags;

use crate::protocol::{Answer, Hello, LENGTH_BYTES, MAX_HELLO, MAX_MESSAGE, Request, VERSION};
use crate::server::counters::Tally;
use crate::server::handler::{End, Engine, no_message};
use crate::server::lifeline::{Lifeline, ProcessWatch};
use crate::server::namespace::{Seat, id};
use crate::server::shared_state::{Peer, Shared};
use crate::socket::{AWAKE, is_own, peer, send_with, stay_awake, widen};
use crate::threads::spawn;

/// Longest silence of somebody who has not said hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for somebody who does not take its answers.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// What is read at once where more is there.
const READ_BYTES: usize = 64 << 10;

const NOT_OURS: &str = "this kvloft server serves processes of its own user only";

#[derive(Debug)]
struct Connection {
    shared: Arc<Shared>,
    stream: UnixStream,
    number: u64,
    seat: Option<Arc<Seat>>,
    /// Of the engine whose seat it is.
    lifeline: Option<Lifeline>,
    engine: Engine,
    out: Vec<u8>,
    /// As one of those that were accepted; who only looks is none.
    is_counted: bool,
}

/// Says why, as far as that can be said at once.
pub(crate) fn refuse(shared: &Shared, mut stream: &UnixStream, text: &str) {
    shared.num_refused.fetch_add(1, Ordering::Relaxed);
    let mut out = Vec::new();
    Answer::Refused(text.to_owned()).encode(0, &mut out);
    let _none_listens = stream.set_nonblocking(true).and_then(|()| stream.write_all(&out));
}

/// Serves a new connection in a thread of its own, if it is this user's.
pub(crate) fn start(shared: &Arc<Shared>, stream: UnixStream, number: u64) {
    let Ok((uid, pid)) = peer(&stream) else { return };
    if !is_own(uid) {
        shared.num_accepted.fetch_add(1, Ordering::Relaxed);
        shared.tell(format!("refused a connection of user {uid}: {NOT_OURS}"));
        return refuse(shared, &stream, NOT_OURS);
    }
    widen(&stream);
    let limits = stream.set_read_timeout(Some(HELLO_TIMEOUT)).and(stream.set_write_timeout(Some(WRITE_TIMEOUT)));
    let (Ok(()), Ok(clone)) = (limits, stream.try_clone()) else { return };
    let tally = Arc::<Tally>::default();
    let watch = ProcessWatch::new(pid);
    let peer = Peer { stream: clone, pid, watch, since: Instant::now(), seat: None, tally: Arc::clone(&tally) };
    shared.peers().insert(number, peer);
    let mut connection = Connection {
        shared: Arc::clone(shared),
        stream,
        number,
        seat: None,
        lifeline: None,
        engine: Engine::new(tally),
        out: Vec::new(),
        is_counted: false,
    };
    // Where no thread starts, the connection is dropped, and with it ends.
    let _none = spawn("engine", move || connection.serve());
}

/// Reads the next message of at most `max_bytes`. Memory is taken as bytes come, not as they are announced.
fn receive(reader: &mut impl Read, into: &mut Vec<u8>, max_bytes: usize) -> Result<(), End> {
    let mut length = [0; LENGTH_BYTES];
    reader.read_exact(&mut length)?;
    let length = u64::from(u32::from_le_bytes(length));
    if length > max_bytes as u64 {
        return Err(End::Refused(format!("a message of {length} bytes is too long: at most {max_bytes} are taken")));
    }
    into.clear();
    let num_read = reader.take(length).read_to_end(into)?;
    if num_read as u64 == length { Ok(()) } else { Err(End::Gone) }
}

impl Connection {
    fn serve(&mut self) {
        let Ok(clone) = self.stream.try_clone() else { return };
        let mut reader = BufReader::with_capacity(READ_BYTES, clone);
        let mut bytes = Vec::new();
        let end = loop {
            let max_bytes = if self.seat.is_some() { MAX_MESSAGE } else { MAX_HELLO };
            let done = receive(&mut reader, &mut bytes, max_bytes).and_then(|()| match Request::decode(&bytes) {
                Some((number, request)) => self.handle(number, &request),
                None => Err(no_message()),
            });
            if let Err(end) = done {
                break end;
            }
            if reader.buffer().is_empty() {
                stay_awake(&self.stream, PollFlags::IN, Instant::now() + AWAKE); // an engine asks twice or thrice in a row
            }
        };
        if let End::Refused(text) = end {
            self.count_once();
            let pid = self.shared.peers().get(&self.number).map_or(0, |peer| peer.pid);
            self.shared.tell(format!("refused process {pid}: {text}"));
            refuse(&self.shared, &self.stream, &text);
        }
    }

    fn count_once(&mut self) {
        let is_new = !std::mem::replace(&mut self.is_counted, true);
        self.shared.num_accepted.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    fn handle(&mut self, number: u32, request: &Request<'_>) -> Result<(), End> {
        if !matches!(request, Request::Status(_)) {
            self.count_once();
        }
        let answer = match (request, self.seat.clone()) {
            (Request::Status(VERSION), _) => Some(Answer::Status(self.shared.status())),
            (Request::Forget(VERSION, name), _) => {
                Some(Answer::Count(self.shared.forget(name).map_err(|error| End::Refused(error.to_string()))?))
            }
            (Request::Evict(VERSION, whose, is_host_only), _) => {
                let done = self.shared.evict(whose, *is_host_only);
                Some(Answer::GivenUp(done.map_err(|error| End::Refused(error.to_string()))?))
            }
            (Request::Hello(hello), None) => return self.welcome(number, hello),
            (Request::Bye, _) => return Err(End::Gone),
            (_, None) => return Err(no_message()),
            (request, Some(seat)) => self.engine.answer(request, &seat)?,
        };
        let Some(answer) = answer else { return Ok(()) };
        self.out.clear();
        answer.encode(number, &mut self.out);
        self.stream.write_all(&self.out)?;
        Ok(())
    }

    fn welcome(&mut self, number: u32, hello: &Hello) -> Result<(), End> {
        if hello.version != VERSION {
            let theirs = hello.version;
            let text = format!(
                "this kvloft server speaks version {VERSION}, and the engine {theirs}; run one kvloft on both sides"
            );
            return Err(End::Refused(text));
        }
        let refused = |error: kvloft_core::Error| End::Refused(error.to_string());
        let seat = self.shared.seat(hello).map_err(refused)?;
        let Some(arena) = seat.local.arena() else { return Err(End::Gone) };
        let fd = File::options().read(true).write(true).open(&arena.path)?;
        let mut out = Vec::new();
        Answer::Welcome(arena.num_frames).encode(number, &mut out);
        let (lifeline, engine_end) = Lifeline::new()?;
        self.lifeline = Some(lifeline);
        let seat = Arc::new(seat);
        self.seat = Some(Arc::clone(&seat));
        let mut peers = self.shared.peers();
        let pid = peers.get_mut(&self.number).map_or(0, |peer| {
            peer.seat = Some(seat);
            peer.pid
        });
        drop(peers);
        self.shared.num_joined.fetch_add(1, Ordering::Relaxed);
        let id = id(&hello.namespace);
        self.shared.tell(format!("process {pid} is connected, for namespace {id}"));
        send_with(&self.stream, &out, [fd.as_fd(), engine_end.as_fd()])?;
        self.stream.set_read_timeout(None)?;
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.engine = Engine::default(); // a seat in quarantine listens to nothing
        let seat = self.seat.take();
        self.shared.leave(self.number);
        // No other thread has it now: a status is made while connections cannot leave.
        if let (Some(seat), Some(lifeline)) = (seat.and_then(Arc::into_inner), self.lifeline.take()) {
            self.shared.quarantine.add(seat, lifeline);
        }
    }
}
