//! One connection to a server, as the client has it: asks with a deadline, and never waits for an answer twice.
//!
//! Answers come in the order of requests. While one is overdue nothing that can be a miss is asked, so that a server that stands
//! still costs one deadline; what must not be lost is still sent, as far as there is room. A late answer is taken in when it comes.

use std::collections::VecDeque;
use std::io::{self, ErrorKind as IoKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::store::Prefix;
use kvloft_core::{ChunkKey, Error, ErrorKind, Result};
use rustix::event::PollFlags;

use crate::protocol::prefix_cache::{PrefixCache, anchor_ends};
use crate::protocol::{Answer, Keys, MAX_MESSAGE, Request, SentAnchors, SentPrefixes};
use crate::socket::{ReceiveBuffer, enlarge_buffers, is_current_user, peer_credentials, spin_then_wait, wait};

/// Most bytes that wait for a server that does not read when another request is made.
const MAX_UNSENT: usize = 8 << 20;
/// Sent bytes that are left at the front until the rest is sent.
const SPARE_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: Arc<UnixStream>,
    received: ReceiveBuffer,
    /// Of it, bytes before `sent` are sent.
    out: Vec<u8>,
    sent: usize,
    next_number: u32,
    /// Numbers of requests that have no answer yet.
    unanswered: VecDeque<u32>,
    /// The prefix that the server knows.
    pub(crate) prefix_cache: PrefixCache,
    is_closed: bool,
    /// A save has waited in vain, and nothing was answered since: the next ones do not wait.
    is_unresponsive: bool,
}

impl Connection {
    /// `Io` if no server listens, `InvalidConfig` for a socket that another user's process has.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let fail = |error| Error::io(format!("no kvloft server answers at {}", path.display()), error);
        let stream = UnixStream::connect(path).map_err(fail)?;
        let (uid, _) = peer_credentials(&stream).map_err(fail)?;
        if !is_current_user(uid) {
            let message = format!("the server at {} is another user's; set server to one of your own", path.display());
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        enlarge_buffers(&stream);
        stream.set_nonblocking(true).map_err(fail)?;
        Ok(Self {
            stream: Arc::new(stream),
            received: ReceiveBuffer::default(),
            out: Vec::new(),
            sent: 0,
            next_number: 0,
            unanswered: VecDeque::new(),
            prefix_cache: PrefixCache::default(),
            is_closed: false,
            is_unresponsive: false,
        })
    }

    /// The first request, and the descriptors that come with its answer. `InvalidConfig`: the server refused, in its own words.
    pub(crate) fn open(&mut self, request: &Request<'_>, timeout: Duration) -> Result<(Answer, Vec<OwnedFd>)> {
        let deadline = Instant::now() + timeout;
        let fail = |error| Error::io("the kvloft server does not answer", error);
        let late = || fail(IoKind::TimedOut.into());
        self.enqueue(request);
        let mut found = Vec::new();
        loop {
            let sent = self.flush(); // one who refuses may be gone already, but has said why
            let out = if self.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            if !wait(&*self.stream, PollFlags::IN | out, deadline) {
                return Err(late());
            }
            match self.received.fill_with_fds(&self.stream) {
                Ok(fds) => found.extend(fds),
                Err(error) if error.kind() == IoKind::WouldBlock => continue,
                Err(error) => return Err(fail(error)),
            }
            if let Some(bytes) = self.received.next(MAX_MESSAGE).map_err(fail)? {
                self.unanswered.clear();
                return match Answer::decode(bytes) {
                    Some((_, Answer::Refused(text))) => Err(Error::new(ErrorKind::InvalidConfig, text)),
                    Some((_, answer)) => Ok((answer, found)),
                    None => Err(fail(IoKind::InvalidData.into())),
                };
            }
            sent.map_err(fail)?;
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(crate) fn is_unresponsive(&self) -> bool {
        self.is_unresponsive
    }

    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        let _gone = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Whether some answer is overdue. Takes in what has come.
    pub(crate) fn is_overdue(&mut self) -> bool {
        if !self.unanswered.is_empty() {
            let _late = self.exchange(None, Instant::now());
        }
        self.is_closed || !self.unanswered.is_empty()
    }

    /// Asks, unless an answer is overdue. None: a miss.
    pub(crate) fn call(&mut self, request: &Request<'_>, deadline: Instant) -> Option<Answer> {
        if self.is_overdue() { None } else { self.call_always(request, deadline) }
    }

    /// Asks in any case, and waits unless an answer is overdue already.
    pub(crate) fn call_always(&mut self, request: &Request<'_>, deadline: Instant) -> Option<Answer> {
        let is_overdue = self.is_overdue();
        if self.is_closed {
            return None;
        }
        let number = self.enqueue(request);
        self.exchange(Some(number), if is_overdue { Instant::now() } else { deadline })
    }

    /// Asks all of them at once, unless an answer is overdue. None: a miss.
    pub(crate) fn call_all(&mut self, requests: &[Request<'_>], deadline: Instant) -> Vec<Option<Answer>> {
        if self.is_overdue() {
            return requests.iter().map(|_| None).collect();
        }
        let (mut numbers, mut answers) = (Vec::with_capacity(requests.len()), Vec::with_capacity(requests.len()));
        for request in requests {
            while self.unsent() > MAX_UNSENT / 2 && answers.len() < numbers.len() {
                answers.push(self.exchange(Some(numbers[answers.len()]), deadline)); // the server has all the time that there is
            }
            numbers.push(self.enqueue(request));
            let sent = self.flush(); // the server begins with it while the next is written
            self.close_on_error(&sent);
        }
        let rest = &numbers[answers.len()..];
        answers.extend(rest.iter().map(|number| self.exchange(Some(*number), deadline)));
        answers
    }

    /// Waits until no answer is overdue; whether that is so. Does not wait for a server that has been silent since the last time.
    pub(crate) fn wait_for_overdue(&mut self, deadline: Instant) -> bool {
        while self.is_overdue() && !self.is_closed {
            let out = if self.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            if self.is_unresponsive || !spin_then_wait(&*self.stream, PollFlags::IN | out, deadline) {
                self.is_unresponsive = true;
                return false;
            }
        }
        !self.is_closed
    }

    /// As [`Self::call_all`], but overdue answers are waited for, too.
    pub(crate) fn call_for_saves(&mut self, requests: &[Request<'_>], deadline: Instant) -> Vec<Option<Answer>> {
        if !self.wait_for_overdue(deadline) {
            return Vec::new();
        }
        let answers = self.call_all(requests, deadline);
        self.is_unresponsive |= answers.iter().any(Option::is_none);
        answers
    }

    /// Sends what has no answer.
    pub(crate) fn send(&mut self, request: &Request<'_>) {
        if !self.is_closed {
            self.enqueue(request);
            let sent = self.flush();
            self.close_on_error(&sent);
        }
    }

    /// Leaves as much of a prefix as can be stored. Of a long one that the server does not know, its anchors say how much that is;
    /// without an answer the next question is a miss.
    pub(crate) fn trim_prefix(&mut self, prefix: &mut Prefix<'_>, per_chunk: u32, deadline: Instant) {
        if !self.prefix_cache.needs_anchors(prefix.keys) {
            return;
        }
        let ends = anchor_ends(prefix.keys.len(), per_chunk);
        let (Some(&stride), Some(&last)) = (ends.first(), ends.last()) else { return };
        let keys: Vec<_> = ends.iter().map(|end| prefix.keys[*end as usize - 1]).collect();
        let sent = SentAnchors { stride, last, keys: Keys::Own(&keys) };
        self.prefix_cache.reset(None);
        if let Some(Answer::Anchors(found)) = self.call(&Request::Anchors(sent), deadline) {
            let known = (found.num_known as usize).checked_sub(1);
            self.prefix_cache.reset(known.and_then(|last| Some((*ends.get(last)?, *keys.get(last)?))));
            let end = ends.get(found.num_stored as usize).map_or(prefix.keys.len(), |end| *end as usize);
            prefix.keys = &prefix.keys[..end];
        }
    }

    /// Prefixes without what the server knows of the first one. They must be sent.
    pub(crate) fn prefixes<'a>(&mut self, prefixes: &[Prefix<'a>]) -> SentPrefixes<'a> {
        let mut all: Vec<_> = prefixes.iter().map(|prefix| (prefix.root, prefix.keys)).collect();
        let num_same = all.first_mut().map_or(0, |(_, keys)| self.strip_cached(keys));
        let num_same = u32::try_from(num_same).unwrap_or(0);
        SentPrefixes { num_same, all: all.into_iter().map(|(root, keys)| (root, Keys::Own(keys))).collect() }
    }

    /// Takes off what the server knows, and notes that it knows the whole: not of a single key, which is something attached.
    fn strip_cached(&mut self, keys: &mut &[ChunkKey]) -> usize {
        if keys.len() < 2 {
            return 0;
        }
        let num_same = self.prefix_cache.num_same(keys);
        *keys = &keys[num_same..];
        self.prefix_cache.extend(num_same, keys.iter().copied());
        num_same
    }

    fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    fn enqueue(&mut self, request: &Request<'_>) -> u32 {
        if self.unsent() > MAX_UNSENT {
            self.close();
        }
        self.next_number = self.next_number.wrapping_add(1);
        request.encode(self.next_number, &mut self.out);
        if !request.is_one_way() {
            self.unanswered.push_back(self.next_number);
        }
        self.next_number
    }

    fn close_on_error(&mut self, done: &io::Result<()>) {
        if done.is_err() {
            self.close();
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match (&*self.stream).write(&self.out[self.sent..]) {
                Ok(0) => return Err(IoKind::WriteZero.into()),
                Ok(num) => self.sent += num,
                Err(error) if error.kind() == IoKind::WouldBlock => break,
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.sent == self.out.len() || self.sent > SPARE_BYTES {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Sends and receives until the answer to `wanted` is there, or the deadline.
    fn exchange(&mut self, wanted: Option<u32>, deadline: Instant) -> Option<Answer> {
        let mut must_wait = wanted.is_some();
        loop {
            let sent = self.flush();
            self.close_on_error(&sent);
            if let Some(answer) = self.take_answer(wanted) {
                return Some(answer); // it came with the one before
            }
            let out = if self.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            if self.is_closed || (must_wait && !spin_then_wait(&*self.stream, PollFlags::IN | out, deadline)) {
                return None;
            }
            let filled = self.received.fill(&self.stream);
            // What came before the end still counts.
            let answer = self.take_answer(wanted);
            self.close_on_error(&filled);
            if answer.is_some() || wanted.is_none() {
                return answer;
            }
            must_wait = true;
        }
    }

    /// Takes in every whole answer as far as the one that is wanted. What a late one reserved is given back.
    fn take_answer(&mut self, wanted: Option<u32>) -> Option<Answer> {
        loop {
            let next = self.received.next(MAX_MESSAGE).map(|bytes| bytes.map(Answer::decode));
            let (number, answer) = match next {
                Ok(None) => return None,
                Ok(Some(Some(answer))) if self.unanswered.pop_front() == Some(answer.0) => answer,
                _ => {
                    self.close();
                    return None;
                }
            };
            self.is_unresponsive = false;
            if Some(number) == wanted {
                return Some(answer);
            }
            if let Answer::Reserved(ranges) = answer {
                let rows = ranges.iter().flat_map(|(rows, _)| rows);
                self.send(&Request::Abort(rows.map(|row| row.ticket).collect()));
            }
        }
    }
}
