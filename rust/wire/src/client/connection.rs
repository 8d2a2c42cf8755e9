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

use crate::protocol::prefix_cache::{Known, ends};
use crate::protocol::{Answer, Keys, MAX_MESSAGE, Request, SentAnchors, SentPrefixes};
use crate::socket::{Inbox, is_own, peer, wait, wait_awake, widen};

/// Most bytes that wait for a server that does not read when another request is made.
const MAX_UNSENT: usize = 8 << 20;
/// Sent bytes that are left at the front until the rest is sent.
const SPARE_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) stream: Arc<UnixStream>,
    inbox: Inbox,
    /// Of it, bytes before `sent` are sent.
    out: Vec<u8>,
    sent: usize,
    next_number: u32,
    /// Numbers of requests that have no answer yet.
    unanswered: VecDeque<u32>,
    /// The prefix that the server knows.
    pub(crate) known: Known,
    is_dead: bool,
    /// A save has waited in vain, and nothing was answered since: the next ones do not wait.
    is_silent: bool,
}

impl Link {
    /// `Io` if no server listens, `InvalidConfig` for a socket that another user's process has.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let fail = |error| Error::io(format!("no kvloft server answers at {}", path.display()), error);
        let stream = UnixStream::connect(path).map_err(fail)?;
        let (uid, _) = peer(&stream).map_err(fail)?;
        if !is_own(uid) {
            let message = format!("the server at {} is another user's; set server to one of your own", path.display());
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        widen(&stream);
        stream.set_nonblocking(true).map_err(fail)?;
        Ok(Self {
            stream: Arc::new(stream),
            inbox: Inbox::default(),
            out: Vec::new(),
            sent: 0,
            next_number: 0,
            unanswered: VecDeque::new(),
            known: Known::default(),
            is_dead: false,
            is_silent: false,
        })
    }

    /// The first request, and the descriptors that come with its answer. `InvalidConfig`: the server refused, in its own words.
    pub(crate) fn open(&mut self, request: &Request<'_>, timeout: Duration) -> Result<(Answer, Vec<OwnedFd>)> {
        let deadline = Instant::now() + timeout;
        let fail = |error| Error::io("the kvloft server does not answer", error);
        let late = || fail(IoKind::TimedOut.into());
        self.push(request);
        let mut found = Vec::new();
        loop {
            let sent = self.flush(); // one who refuses may be gone already, but has said why
            let out = if self.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            if !wait(&*self.stream, PollFlags::IN | out, deadline) {
                return Err(late());
            }
            match self.inbox.fill_with(&self.stream) {
                Ok(fds) => found.extend(fds),
                Err(error) if error.kind() == IoKind::WouldBlock => continue,
                Err(error) => return Err(fail(error)),
            }
            if let Some(bytes) = self.inbox.next(MAX_MESSAGE).map_err(fail)? {
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

    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.is_silent
    }

    pub(crate) fn die(&mut self) {
        self.is_dead = true;
        let _gone = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Whether some answer is overdue. Takes in what has come.
    pub(crate) fn is_late(&mut self) -> bool {
        if !self.unanswered.is_empty() {
            let _late = self.pump(None, Instant::now());
        }
        self.is_dead || !self.unanswered.is_empty()
    }

    /// Asks, unless an answer is overdue. None: a miss.
    pub(crate) fn ask(&mut self, request: &Request<'_>, deadline: Instant) -> Option<Answer> {
        if self.is_late() { None } else { self.ask_anyway(request, deadline) }
    }

    /// Asks in any case, and waits unless an answer is overdue already.
    pub(crate) fn ask_anyway(&mut self, request: &Request<'_>, deadline: Instant) -> Option<Answer> {
        let is_late = self.is_late();
        if self.is_dead {
            return None;
        }
        let number = self.push(request);
        self.pump(Some(number), if is_late { Instant::now() } else { deadline })
    }

    /// Asks all of them at once, unless an answer is overdue. None: a miss.
    pub(crate) fn ask_all(&mut self, requests: &[Request<'_>], deadline: Instant) -> Vec<Option<Answer>> {
        if self.is_late() {
            return requests.iter().map(|_| None).collect();
        }
        let (mut numbers, mut answers) = (Vec::with_capacity(requests.len()), Vec::with_capacity(requests.len()));
        for request in requests {
            while self.unsent() > MAX_UNSENT / 2 && answers.len() < numbers.len() {
                answers.push(self.pump(Some(numbers[answers.len()]), deadline)); // the server has all the time that there is
            }
            numbers.push(self.push(request));
            let sent = self.flush(); // the server begins with it while the next is written
            self.note(&sent);
        }
        let rest = &numbers[answers.len()..];
        answers.extend(rest.iter().map(|number| self.pump(Some(*number), deadline)));
        answers
    }

    /// Waits until no answer is overdue; whether that is so. Does not wait for a server that has been silent since the last time.
    pub(crate) fn catch_up(&mut self, deadline: Instant) -> bool {
        while self.is_late() && !self.is_dead {
            let out = if self.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            if self.is_silent || !wait_awake(&*self.stream, PollFlags::IN | out, deadline) {
                self.is_silent = true;
                return false;
            }
        }
        !self.is_dead
    }

    /// As [`Self::ask_all`], but overdue answers are waited for, too.
    pub(crate) fn ask_for_saves(&mut self, requests: &[Request<'_>], deadline: Instant) -> Vec<Option<Answer>> {
        if !self.catch_up(deadline) {
            return Vec::new();
        }
        let answers = self.ask_all(requests, deadline);
        self.is_silent |= answers.iter().any(Option::is_none);
        answers
    }

    /// Sends what has no answer.
    pub(crate) fn tell(&mut self, request: &Request<'_>) {
        if !self.is_dead {
            self.push(request);
            let sent = self.flush();
            self.note(&sent);
        }
    }

    /// Leaves as much of a prefix as can be stored. Of a long one that the server does not know, its anchors say how much that is;
    /// without an answer the next question is a miss.
    pub(crate) fn shorten(&mut self, prefix: &mut Prefix<'_>, per_chunk: u32, deadline: Instant) {
        if !self.known.is_far_from(prefix.keys) {
            return;
        }
        let ends = ends(prefix.keys.len(), per_chunk);
        let (Some(&stride), Some(&last)) = (ends.first(), ends.last()) else { return };
        let keys: Vec<_> = ends.iter().map(|end| prefix.keys[*end as usize - 1]).collect();
        let sent = SentAnchors { stride, last, keys: Keys::Own(&keys) };
        self.known.begin(None);
        if let Some(Answer::Anchors(found)) = self.ask(&Request::Anchors(sent), deadline) {
            let known = (found.num_known as usize).checked_sub(1);
            self.known.begin(known.and_then(|last| Some((*ends.get(last)?, *keys.get(last)?))));
            let end = ends.get(found.num_stored as usize).map_or(prefix.keys.len(), |end| *end as usize);
            prefix.keys = &prefix.keys[..end];
        }
    }

    /// Prefixes without what the server knows of the first one. They must be sent.
    pub(crate) fn prefixes<'a>(&mut self, prefixes: &[Prefix<'a>]) -> SentPrefixes<'a> {
        let mut all: Vec<_> = prefixes.iter().map(|prefix| (prefix.root, prefix.keys)).collect();
        let num_same = all.first_mut().map_or(0, |(_, keys)| self.leave_out(keys));
        let num_same = u32::try_from(num_same).unwrap_or(0);
        SentPrefixes { num_same, all: all.into_iter().map(|(root, keys)| (root, Keys::Own(keys))).collect() }
    }

    /// Takes off what the server knows, and notes that it knows the whole: not of a single key, which is something attached.
    fn leave_out(&mut self, keys: &mut &[ChunkKey]) -> usize {
        if keys.len() < 2 {
            return 0;
        }
        let num_same = self.known.num_same(keys);
        *keys = &keys[num_same..];
        self.known.go_on(num_same, keys.iter().copied());
        num_same
    }

    fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    fn push(&mut self, request: &Request<'_>) -> u32 {
        if self.unsent() > MAX_UNSENT {
            self.die();
        }
        self.next_number = self.next_number.wrapping_add(1);
        request.encode(self.next_number, &mut self.out);
        if !request.is_one_way() {
            self.unanswered.push_back(self.next_number);
        }
        self.next_number
    }

    fn note(&mut self, done: &io::Result<()>) {
        if done.is_err() {
            self.die();
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
    fn pump(&mut self, wanted: Option<u32>, deadline: Instant) -> Option<Answer> {
        let mut must_wait = wanted.is_some();
        loop {
            let sent = self.flush();
            self.note(&sent);
            if let Some(answer) = self.take_in(wanted) {
                return Some(answer); // it came with the one before
            }
            let out = if self.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            if self.is_dead || (must_wait && !wait_awake(&*self.stream, PollFlags::IN | out, deadline)) {
                return None;
            }
            let filled = self.inbox.fill(&self.stream);
            // What came before the end still counts.
            let answer = self.take_in(wanted);
            self.note(&filled);
            if answer.is_some() || wanted.is_none() {
                return answer;
            }
            must_wait = true;
        }
    }

    /// Takes in every whole answer as far as the one that is wanted. What a late one reserved is given back.
    fn take_in(&mut self, wanted: Option<u32>) -> Option<Answer> {
        loop {
            let next = self.inbox.next(MAX_MESSAGE).map(|bytes| bytes.map(Answer::decode));
            let (number, answer) = match next {
                Ok(None) => return None,
                Ok(Some(Some(answer))) if self.unanswered.pop_front() == Some(answer.0) => answer,
                _ => {
                    self.die();
                    return None;
                }
            };
            self.is_silent = false;
            if Some(number) == wanted {
                return Some(answer);
            }
            if let Answer::Reserved(ranges) = answer {
                let rows = ranges.iter().flat_map(|(rows, _)| rows);
                self.tell(&Request::Abort(rows.map(|row| row.ticket).collect()));
            }
        }
    }
}
