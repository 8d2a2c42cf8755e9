//! Tracks engines that the server is currently rejecting, lists them in the status, and limits how
//! often the same reason is logged.
//!
//! An engine retries at least once per minute, so an entry without a recent attempt belongs to an
//! engine that has exited. Callers pass in the current time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::protocol::admin::RefusalStatus;

/// Minimum interval between log lines with the same reason.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// An engine that has not retried for this long is assumed to have exited.
const FORGET_AFTER: Duration = Duration::from_secs(150);
/// Maximum number of namespaces to list, and of reasons to remember.
const MAX_ENTRIES: usize = 64;

#[derive(Debug)]
struct Refused {
    count: u64,
    reason: String,
    last: Instant,
}

#[derive(Debug)]
struct Logged {
    at: Instant,
    num_repeated: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Refusals {
    by_namespace: HashMap<String, Refused>,
    /// Keyed by the reason with its digits removed, because the sizes in a reason vary.
    logged: HashMap<String, Logged>,
}

impl Refusals {
    /// Counts a rejected connection from one of the namespace's engines.
    pub(crate) fn add(&mut self, namespace: &str, reason: &str, now: Instant) {
        self.by_namespace.retain(|_, each| now.duration_since(each.last) < FORGET_AFTER);
        let count = self.by_namespace.get(namespace).map_or(0, |each| each.count) + 1;
        if count > 1 || self.by_namespace.len() < MAX_ENTRIES {
            let entry = Refused { count, reason: reason.to_owned(), last: now };
            self.by_namespace.insert(namespace.to_owned(), entry);
        }
    }

    /// Removes a namespace's entry once one of its engines has been accepted.
    pub(crate) fn remove(&mut self, namespace: &str) {
        self.by_namespace.remove(namespace);
    }

    /// Returns the line to log, or None if the same reason was logged recently.
    pub(crate) fn log_line(&mut self, pid: u32, reason: &str, now: Instant) -> Option<String> {
        let key: String = reason.chars().filter(|digit| !digit.is_ascii_digit()).collect();
        let is_recent = |logged: &Logged| now.duration_since(logged.at) < LOG_INTERVAL;
        if let Some(logged) = self.logged.get_mut(&key).filter(|logged| is_recent(logged)) {
            logged.num_repeated += 1;
            return None;
        }
        let num_repeated = self.logged.remove(&key).map_or(0, |logged| logged.num_repeated);
        self.logged.retain(|_, logged| is_recent(logged));
        if self.logged.len() < MAX_ENTRIES {
            self.logged.insert(key, Logged { at: now, num_repeated: 0 });
        }
        let more = match num_repeated {
            0 => String::new(),
            1 => " (and 1 more time since last logged)".to_owned(),
            num => format!(" (and {num} more times since last logged)"),
        };
        Some(format!("rejected process {pid}: {reason}{more}"))
    }

    /// Returns the namespaces whose engines are currently being rejected, sorted.
    pub(crate) fn status(&self, now: Instant) -> Vec<RefusalStatus> {
        let recent = self
            .by_namespace
            .iter()
            .filter(|(_, each)| now.duration_since(each.last) < FORGET_AFTER);
        let mut all: Vec<_> = recent
            .map(|(namespace, each)| RefusalStatus {
                namespace: namespace.clone(),
                count: each.count,
                reason: each.reason.clone(),
            })
            .collect();
        all.sort_by(|a, b| a.namespace.cmp(&b.namespace));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_reason_with_other_numbers_is_logged_once_per_interval() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let mut line = |left: u32, after_s: u64| {
            let now = start + Duration::from_secs(after_s);
            refusals.log_line(7, &format!("more than the {left} MiB"), now)
        };
        assert_eq!(line(285, 0).as_deref(), Some("rejected process 7: more than the 285 MiB"));
        assert_eq!([line(284, 1), line(9, 30), line(285, 59)], [None, None, None]);
        assert_eq!(
            line(11, 61).as_deref(),
            Some("rejected process 7: more than the 11 MiB (and 3 more times since last logged)")
        );
        assert!(refusals.log_line(7, "another reason", start).is_some());
    }

    #[test]
    fn namespace_without_recent_attempts_is_not_listed() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        refusals.add("b", "first", start);
        refusals.add("b", "second", after(60));
        refusals.add("a", "other", after(100));
        let listed = refusals.status(after(120));
        let listed: Vec<_> =
            listed.iter().map(|each| (&*each.namespace, each.count, &*each.reason)).collect();
        assert_eq!(listed, [("a", 1, "other"), ("b", 2, "second")]);
        assert_eq!(refusals.status(after(220)).len(), 1);
        refusals.remove("a");
        assert!(refusals.status(after(120)).iter().all(|each| each.namespace == "b"));
        refusals.add("b", "again", after(300));
        assert_eq!(refusals.status(after(300))[0].count, 1, "the earlier engine has exited");
    }
}
