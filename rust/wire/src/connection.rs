//! One connection, as the server has it: who it is, what it asks, and what becomes of what it held when it ends.
//!
//! Whatever arrives is refused or bounded; nothing is believed but the number of bytes. An engine reaches only leases and
//! reservations of its own. It must not know how clients wait.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvloft_core::ChunkKey;
use kvloft_core::session::{LeaseId, Local, Session};
use kvloft_core::store::{Got, Listener, Prefix, Progress, ToSave};
use rustix::event::PollFlags;

use crate::known::Known;
use crate::message::{
    Answer, Hello, Keys, LENGTH_BYTES, MAX_HELLO, MAX_KEYS, MAX_MESSAGE, Request, SentAnchors, SentPrefixes, SentRange,
    VERSION,
};
use crate::namespaces::{self, Seat};
use crate::quarantine::Watch;
use crate::server::{Peer, Shared, spawn};
use crate::socket::{AWAKE, is_own, peer, send_with, stay_awake, widen};
use crate::tally::{Answered, Tally};

/// Longest silence of somebody who has not said hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for somebody who does not take its answers.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Read leases of one engine.
const MAX_LEASES: usize = 1 << 16;
/// Prefixes of all of them, each some 50 bytes.
const MAX_HELD: usize = 1 << 22;
/// What is read at once where more is there.
const READ_BYTES: usize = 64 << 10;

const NOT_OURS: &str = "this kvloft server serves processes of its own user only";
const NO_MESSAGE: &str = "this is no message of kvloft's";

#[derive(Debug)]
struct Connection {
    shared: Arc<Shared>,
    stream: UnixStream,
    number: u64,
    watch: Option<Watch>,
    seat: Option<Arc<Seat>>,
    /// By the engine's numbers, and of how many prefixes each is.
    leases: HashMap<u64, (LeaseId, usize)>,
    num_held: usize,
    /// The last long prefix that came first in a message.
    known: Known,
    /// Hears which chunks come and go, for an engine that asked.
    listener: Option<Listener>,
    /// Keys of other prefixes, one after the other; of a reservation's only those that it needs are meant.
    scratch: Vec<ChunkKey>,
    out: Vec<u8>,
    tally: Arc<Tally>,
    /// Blocks of the prefix that the next question is about, where it is sent without what is not there.
    num_anchored: u32,
    /// As one of those that were accepted; who only looks is none.
    is_counted: bool,
    has_said_bye: bool,
}

/// Why a connection ends.
enum End {
    Gone,
    Refused(String),
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

/// Says why, as far as that can be said at once.
pub(crate) fn refuse(shared: &Shared, mut stream: &UnixStream, text: &str) {
    shared.num_refused.fetch_add(1, Ordering::Relaxed);
    let mut out = Vec::new();
    Answer::Refused(text.to_owned()).encode(0, &mut out);
    let _nobody_listens = stream.set_nonblocking(true).and_then(|()| stream.write_all(&out));
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
    let peer = Peer { stream: clone, pid, since: Instant::now(), seat: None, tally: Arc::clone(&tally) };
    shared.peers().insert(number, peer);
    let mut connection = Connection {
        shared: Arc::clone(shared),
        stream,
        number,
        watch: Some(Watch::new(pid)),
        seat: None,
        leases: HashMap::new(),
        num_held: 0,
        known: Known::default(),
        listener: None,
        scratch: Vec::new(),
        out: Vec::new(),
        tally,
        num_anchored: 0,
        is_counted: false,
        has_said_bye: false,
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
                None => Err(End::Refused(NO_MESSAGE.to_owned())),
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
            (Request::Pin(VERSION, whose, is_pinned), _) => {
                let done = self.shared.pin(whose, *is_pinned);
                Some(Answer::Pinned(done.map_err(|error| End::Refused(error.to_string()))?))
            }
            (Request::Hello(hello), None) => return self.welcome(number, hello),
            (Request::Bye, _) => {
                self.has_said_bye = true;
                return Err(End::Gone);
            }
            (_, None) => return Err(End::Refused(NO_MESSAGE.to_owned())),
            (request, Some(seat)) => self.answer(request, &seat)?,
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
        let seat = Arc::new(seat);
        self.seat = Some(Arc::clone(&seat));
        let mut peers = self.shared.peers();
        let pid = peers.get_mut(&self.number).map_or(0, |peer| {
            peer.seat = Some(seat);
            peer.pid
        });
        drop(peers);
        self.shared.num_joined.fetch_add(1, Ordering::Relaxed);
        let id = namespaces::id(&hello.namespace);
        self.shared.tell(format!("process {pid} is connected, for namespace {id}"));
        send_with(&self.stream, &out, fd.as_fd())?;
        self.stream.set_read_timeout(None)?;
        Ok(())
    }

    fn answer(&mut self, request: &Request<'_>, seat: &Seat) -> Result<Option<Answer>, End> {
        let local = &seat.local;
        Ok(Some(match request {
            Request::Lookup(prefixes) => {
                let (per_chunk, whole) = (seat.space.hello.blocks_per_chunk, std::mem::take(&mut self.num_anchored));
                let prefixes = self.prefixes(prefixes)?;
                let found = local.lookup_many(&prefixes);
                let num_blocks =
                    |(nth, prefix): (usize, &Prefix<'_>)| prefix.num_blocks().max(if nth == 0 { whole } else { 0 });
                let asked = Answered::lookup(prefixes.iter().enumerate().map(num_blocks), &found, per_chunk);
                self.count(asked, seat);
                Answer::Found(found)
            }
            Request::Acquire(lease, prefixes) => {
                self.num_anchored = 0;
                let (is_full, num_held) = (self.leases.len() >= MAX_LEASES, self.num_held);
                let prefixes = self.prefixes(prefixes)?;
                let num = prefixes.len();
                if is_full || num_held + num > MAX_HELD {
                    return Ok(Some(Answer::Progress(Progress::default())));
                }
                let own = local.acquire_all(&prefixes);
                self.release(*lease, local);
                self.leases.insert(*lease, (own, num));
                self.num_held += num;
                Answer::Progress(local.poll(own))
            }
            Request::Anchors(anchors) => self.anchors(anchors, local)?,
            Request::Poll(lease) => {
                Answer::Progress(self.leases.get(lease).map(|(lease, _)| local.poll(*lease)).unwrap_or_default())
            }
            Request::Frames(lease) => {
                let frames = self.leases.get(lease).map(|(lease, _)| local.frames(*lease)).unwrap_or_default();
                self.count(Answered::Loaded(frames.len() as u64), seat);
                Answer::Frames(frames)
            }
            Request::Release(lease) => {
                self.release(*lease, local);
                return Ok(None);
            }
            Request::Reserve(ranges) => {
                let asked = self.ranges(ranges, seat.space.hello.blocks_per_chunk)?;
                let (reserved, got) = local.reserve_many(&asked).map_err(|_| no_message())?;
                let mut reserved = reserved.into_iter();
                let rows = |got: Got| (reserved.by_ref().take(got.num_reserved).collect(), got.num_dropped);
                Answer::Reserved(got.into_iter().map(rows).collect())
            }
            Request::Commit(tickets) => {
                let num_saved = local.commit(tickets).into();
                self.count(Answered::Saved(num_saved), seat);
                Answer::Count(num_saved)
            }
            Request::Abort(tickets) => {
                local.abort(tickets);
                return Ok(None);
            }
            Request::Discard(keys) => {
                Answer::Count(local.discard(&keys.iter().map(|key| ChunkKey(*key)).collect::<Vec<_>>()))
            }
            Request::Clear => {
                local.clear();
                Answer::Count(0)
            }
            Request::Stats => {
                Answer::Stats(local.stats().into_iter().map(|(name, value)| (name.into_owned(), value)).collect())
            }
            Request::LimitFrames(num_frames) => {
                local.limit_frames(*num_frames);
                return Ok(None);
            }
            Request::Changes(asked) => {
                let store = seat.space.store().ok_or(End::Gone)?;
                Answer::Changes(asked.answer(store, &mut self.listener).ok_or_else(no_message)?)
            }
            Request::IsSettled => Answer::Count(local.flush(Duration::ZERO).into()),
            Request::Hello(_)
            | Request::Status(_)
            | Request::Forget(..)
            | Request::Evict(..)
            | Request::Pin(..)
            | Request::Bye => return Err(no_message()),
        }))
    }

    fn count(&self, answered: Answered, seat: &Seat) {
        self.tally.add(answered);
        seat.space.tally.add(answered);
    }

    fn release(&mut self, lease: u64, local: &Local) {
        if let Some((own, num)) = self.leases.remove(&lease) {
            self.num_held -= num;
            local.release(own);
        }
    }

    /// How many of a prefix's anchors are there; it is known as far as the last of those.
    fn anchors(&mut self, sent: &SentAnchors<'_>, local: &Local) -> Result<Answer, End> {
        let all = sent.all().ok_or_else(no_message)?;
        let found = local.anchors(&all);
        self.num_anchored = sent.last;
        self.known.begin((found.num_known as usize).checked_sub(1).map(|last| all[last]));
        Ok(Answer::Anchors(found))
    }

    /// What was sent of prefixes, the first one behind what is known of it.
    fn prefixes(&mut self, sent: &SentPrefixes<'_>) -> Result<Vec<Prefix<'_>>, End> {
        let num_same = usize::try_from(sent.num_same).unwrap_or(usize::MAX);
        let num_sent: usize = sent.all.iter().map(|(_, keys)| keys.iter().len()).sum();
        if num_same.saturating_add(num_sent) > MAX_KEYS {
            return Err(no_message());
        }
        let num_first = sent.all.first().map_or(0, |(_, keys)| keys.iter().len().saturating_add(num_same));
        let is_long = num_first > 1;
        let (first, others) = sent.all.split_at(is_long.into());
        let mut keys = first.iter().flat_map(|(_, keys)| keys.iter()).map(|key| ChunkKey(*key));
        let is_whole = if is_long { self.known.go_on(num_same, &mut keys) } else { num_same == 0 };
        if !is_whole {
            return Err(no_message());
        }
        self.scratch.clear();
        self.scratch.extend(others.iter().flat_map(|(_, keys)| keys.iter()).map(|key| ChunkKey(*key)));
        let mut rest = self.scratch.as_slice();
        let whole = |(root, keys): &(ChunkKey, Keys<'_>)| {
            let (own, behind) = rest.split_at(keys.iter().len());
            rest = behind;
            Prefix::new(*root, own)
        };
        let first = first.iter().map(|(root, _)| self.known.prefix(*root));
        Ok(first.chain(others.iter().map(whole)).collect())
    }

    /// What is to be reserved. Before the keys of each are others', or none: they are not looked at.
    fn ranges(&mut self, sent: &[SentRange<'_>], per_chunk: u32) -> Result<Vec<ToSave<'_>>, End> {
        let num_sent: usize = sent.iter().map(|one| one.keys.iter().len()).sum();
        let is_wrong = |one: &SentRange<'_>| {
            let before = u64::from(one.range.start) * u64::from(per_chunk);
            u64::from(one.first) > before.saturating_sub(1) || one.first as usize + one.keys.iter().len() > MAX_KEYS
        };
        if num_sent > MAX_KEYS || sent.iter().any(is_wrong) {
            return Err(no_message());
        }
        let longest = sent.iter().map(|one| one.first as usize).max().unwrap_or(0);
        self.scratch.resize(longest, ChunkKey::default());
        self.scratch.extend(sent.iter().flat_map(|one| one.keys.iter()).map(|key| ChunkKey(*key)));
        let mut end = longest;
        let range = |one: &SentRange<'_>| {
            end += one.keys.iter().len();
            let start = end - one.keys.iter().len() - one.first as usize;
            let prefix = Prefix::new(one.root, &self.scratch[start..end]);
            ToSave { prefix, range: one.range, is_attached: one.is_attached }
        };
        Ok(sent.iter().map(range).collect())
    }
}

fn no_message() -> End {
    End::Refused(NO_MESSAGE.to_owned())
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.listener = None; // a seat in quarantine listens to nothing
        let seat = self.seat.take();
        self.shared.leave(self.number);
        // No other thread has it now: a status is made while connections cannot leave.
        if let (Some(seat), Some(watch)) = (seat.and_then(Arc::into_inner), self.watch.take())
            && !self.has_said_bye
        {
            self.shared.quarantine.add(seat, watch);
        }
    }
}
