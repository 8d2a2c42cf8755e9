//! The disk side of the store: which chunks are read, written and freed, and what happens when the
//! disk fails.
//!
//! Everything here decides under the store's lock. Only `threads` does I/O, without it.
//! From the ground up:
//!
//! | file | contents |
//! |---|---|
//! | `breaker` | pure state: a circuit breaker |
//! | `time_shares` | pure state: how reads and writes share disk time |
//! | `work` | everything the lock guards for the disk tier: queues, jobs in flight, breakers |
//! | `transitions` | changes a chunk's state, with everything that follows from it |
//! | `slots` | free a slot for a chunk that is about to be written |
//! | `reopen` | index the chunks of a tier that was opened; drop them if its directory is removed |
//! | `jobs` | choose the next read, write or free, and apply its outcome |
//! | `threads` | open the tier and run the jobs |

pub(crate) mod breaker;
pub(crate) mod jobs;
pub(crate) mod reopen;
pub(crate) mod slots;
pub(crate) mod threads;
pub(crate) mod time_shares;
pub(crate) mod transitions;
pub(crate) mod work;
