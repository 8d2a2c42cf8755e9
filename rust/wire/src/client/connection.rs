//! The client side of a connection. Sends requests and waits for responses until a deadline.
//!
//! Responses arrive in request order. While a response is overdue, lookups miss without sending a
//! request, so an engine waits for a stopped server only once, not on every call. Commits, aborts
//! and clears are still sent. Late responses are processed when they arrive.

use std::collections::VecDeque;
use std::io::{self, ErrorKind as IoKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvloft_core::store::Prefix;
use kvloft_core::{Error, Result};
use rustix::event::PollFlags;

use crate::protocol::prefix_cache::{PrefixCache, anchor_ends};
use crate::protocol::{Keys, MAX_MESSAGE, Request, Response, SentAnchors};
use crate::socket::{
    ReceiveBuffer, SendBuffer, connect, enlarge_buffers, is_current_user, peer_credentials,
    spin_then_wait, wait,
};

/// Maximum number of unsent bytes. If this limit is exceeded, the next request closes the
/// connection.
const MAX_UNSENT: usize = 8 << 20;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: Arc<UnixStream>,
    received: ReceiveBuffer,
    unsent: SendBuffer,
    next_number: u32,
    /// Numbers of the requests that have not been answered yet, in the order they were sent.
    unanswered: VecDeque<u32>,
    /// Keys of the last long prefix. The server caches the same keys.
    pub(crate) prefix_cache: PrefixCache,
    pub(crate) is_closed: bool,
    /// True if a save has missed its deadline and no response has arrived since. While this is
    /// true, later saves do not wait.
    pub(crate) is_unresponsive: bool,
}

impl Connection {
    /// Connects to the server at `path`. Returns `Io` if no server accepts connections before the
    /// deadline or this user cannot open the socket, and `InvalidConfig` if the server belongs to
    /// another user.
    pub(crate) fn connect(path: &Path, deadline: Instant) -> Result<Self> {
        let fail = |error| {
            Error::io(format!("cannot connect to a kvloft server at {}", path.display()), error)
        };
        let me = rustix::process::geteuid().as_raw();
        let stream = connect(path, deadline).map_err(|error| match error.kind() {
            IoKind::PermissionDenied => {
                let what = format!("user {me} cannot open the socket {}", path.display());
                Error::io(what, error)
            }
            _ => fail(error),
        })?;
        let (uid, _) = peer_credentials(&stream).map_err(fail)?;
        if !is_current_user(uid) {
            return Err(Error::invalid(format!(
                "the server at {} belongs to user {uid}, but this process runs as user {me}; run \
                 this process with `sudo -u '#{uid}'`, or use a server running as user {me}",
                path.display()
            )));
        }
        enlarge_buffers(&stream);
        Ok(Self {
            stream: Arc::new(stream),
            received: ReceiveBuffer::default(),
            unsent: SendBuffer::default(),
            next_number: 0,
            unanswered: VecDeque::new(),
            prefix_cache: PrefixCache::default(),
            is_closed: false,
            is_unresponsive: false,
        })
    }

    /// Sends the first request. Returns the response and any descriptors received with it. If the
    /// server rejects the request, returns `InvalidConfig` with the server's reason.
    pub(crate) fn open(
        &mut self,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<(Response, Vec<OwnedFd>)> {
        let fail = |error| Error::io("the kvloft server is not responding", error);
        let late = || fail(IoKind::TimedOut.into());
        self.enqueue(request);
        let mut found = Vec::new();
        loop {
            // Read even after a send error, because the server may have sent a reason for rejecting
            // the request.
            let sent = self.unsent.flush(&self.stream);
            if !wait(&*self.stream, self.poll_flags(), deadline) {
                return Err(late());
            }
            match self.received.fill_with_fds(&self.stream) {
                Ok(fds) => found.extend(fds),
                Err(error) if error.kind() == IoKind::WouldBlock => continue,
                Err(error) => return Err(fail(error)),
            }
            if let Some(bytes) = self.received.next(MAX_MESSAGE).map_err(fail)? {
                self.unanswered.clear();
                return match Response::decode(bytes) {
                    Some((_, Response::Refused(text))) => Err(Error::invalid(text)),
                    Some((_, answer)) => Ok((answer, found)),
                    None => Err(fail(IoKind::InvalidData.into())),
                };
            }
            sent.map_err(fail)?;
        }
    }

    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        let _gone = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Processes received responses. Returns true if a response is overdue or the connection is
    /// closed.
    pub(crate) fn is_overdue(&mut self) -> bool {
        if !self.unanswered.is_empty() {
            let _none = self.exchange(None, Instant::now());
        }
        self.is_closed || !self.unanswered.is_empty()
    }

    /// Sends a request and waits for the response. Returns None (a miss) if the deadline passes, an
    /// earlier response is overdue or the connection is closed.
    pub(crate) fn call(&mut self, request: &Request<'_>, deadline: Instant) -> Option<Response> {
        if self.is_overdue() { None } else { self.call_always(request, deadline) }
    }

    /// Like [`Self::call`], but sends the request even if an earlier response is overdue. In that
    /// case, does not wait for a response.
    pub(crate) fn call_always(
        &mut self,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Option<Response> {
        let is_overdue = self.is_overdue();
        if self.is_closed {
            return None;
        }
        let number = self.enqueue(request);
        self.exchange(Some(number), if is_overdue { Instant::now() } else { deadline })
    }

    /// Sends multiple requests and waits for their responses. Returns None (a miss) for each
    /// response that does not arrive in time. If an earlier response is overdue, all results are
    /// None.
    pub(crate) fn call_all(
        &mut self,
        requests: &[Request<'_>],
        deadline: Instant,
    ) -> Vec<Option<Response>> {
        if self.is_overdue() {
            return requests.iter().map(|_| None).collect();
        }
        let (mut numbers, mut answers) =
            (Vec::with_capacity(requests.len()), Vec::with_capacity(requests.len()));
        for request in requests {
            while self.unsent.num_unsent() > MAX_UNSENT / 2 && answers.len() < numbers.len() {
                answers.push(self.exchange(Some(numbers[answers.len()]), deadline));
            }
            numbers.push(self.enqueue(request));
            self.flush(); // the server handles this request while the next is encoded
        }
        let rest = &numbers[answers.len()..];
        answers.extend(rest.iter().map(|number| self.exchange(Some(*number), deadline)));
        answers
    }

    /// Waits until no response is overdue. Returns false at the deadline, or immediately if the
    /// server is unresponsive or the connection is closed.
    pub(crate) fn wait_for_overdue(&mut self, deadline: Instant) -> bool {
        while self.is_overdue() && !self.is_closed {
            if self.is_unresponsive || !spin_then_wait(&*self.stream, self.poll_flags(), deadline) {
                self.is_unresponsive = true;
                return false;
            }
        }
        !self.is_closed
    }

    /// Like [`Self::call_all`], but waits for overdue responses first.
    pub(crate) fn call_for_saves(
        &mut self,
        requests: &[Request<'_>],
        deadline: Instant,
    ) -> Vec<Option<Response>> {
        if !self.wait_for_overdue(deadline) {
            return Vec::new();
        }
        let answers = self.call_all(requests, deadline);
        self.is_unresponsive |= answers.iter().any(Option::is_none);
        answers
    }

    pub(crate) fn send(&mut self, request: &Request<'_>) {
        if !self.is_closed {
            self.enqueue(request);
            self.flush();
        }
    }

    /// Sends a long prefix's anchors in one request, and truncates the prefix to the part that
    /// might be stored on the server. Does nothing if the prefix is short or its keys are already
    /// cached. If the request gets no response, the next lookup is a miss.
    pub(crate) fn trim_prefix(&mut self, prefix: &mut Prefix<'_>, deadline: Instant) {
        if !self.prefix_cache.needs_anchors(prefix.keys) {
            return;
        }
        let ends = anchor_ends(prefix.keys.len());
        let (Some(&stride), Some(&last)) = (ends.first(), ends.last()) else { return };
        let keys: Vec<_> = ends.iter().map(|end| prefix.keys[*end as usize - 1]).collect();
        let sent = SentAnchors { stride, last, keys: Keys::Own(&keys) };
        self.prefix_cache.reset(None);
        if let Some(Response::Anchors(found)) = self.call(&Request::Anchors(sent), deadline) {
            let known = (found.num_known as usize).checked_sub(1);
            self.prefix_cache
                .reset(known.and_then(|last| Some((*ends.get(last)?, *keys.get(last)?))));
            let end =
                ends.get(found.num_stored as usize).map_or(prefix.keys.len(), |end| *end as usize);
            prefix.keys = &prefix.keys[..end];
        }
    }

    fn poll_flags(&self) -> PollFlags {
        if self.unsent.num_unsent() > 0 { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    fn enqueue(&mut self, request: &Request<'_>) -> u32 {
        if self.unsent.num_unsent() > MAX_UNSENT {
            self.close();
        }
        self.next_number = self.next_number.wrapping_add(1);
        request.encode(self.next_number, self.unsent.bytes());
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

    fn flush(&mut self) {
        let sent = self.unsent.flush(&self.stream);
        self.close_on_error(&sent);
    }

    /// Sends and receives messages until the response to request `wanted` arrives or the deadline
    /// passes. Does not wait if `wanted` is None.
    fn exchange(&mut self, wanted: Option<u32>, deadline: Instant) -> Option<Response> {
        let mut must_wait = wanted.is_some();
        loop {
            self.flush();
            if let Some(answer) = self.take_answer(wanted) {
                return Some(answer); // arrived together with an earlier response
            }
            if self.is_closed
                || (must_wait && !spin_then_wait(&*self.stream, self.poll_flags(), deadline))
            {
                return None;
            }
            let filled = self.received.fill(&self.stream);
            // Responses that were received before the peer disconnected are still valid.
            let answer = self.take_answer(wanted);
            self.close_on_error(&filled);
            if answer.is_some() || wanted.is_none() {
                return answer;
            }
            must_wait = true;
        }
    }

    /// Processes received responses up to the response to `wanted`, and returns that response.
    /// Aborts any reservations that late responses contain.
    fn take_answer(&mut self, wanted: Option<u32>) -> Option<Response> {
        loop {
            let next = self.received.next(MAX_MESSAGE).map(|bytes| bytes.map(Response::decode));
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
            if let Response::Reserved(ranges) = answer {
                let rows = ranges.iter().flat_map(|range| &range.chunks);
                self.send(&Request::Abort(rows.map(|row| row.ticket).collect()));
            }
        }
    }
}
