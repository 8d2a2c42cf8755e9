//! The disk side of the store: which chunks are read, written and freed, and what happens when the
//! disk fails.
//!
//! Everything here decides under the store's lock. Only `threads` does I/O, without it.
//! From the ground up:
//!
//! | file | contents |
//! |---|---|
//! | `breaker`, `queue` | pure state: a circuit breaker, a queue of chunks |
//! | `time_shares` | pure state: how reads and writes share disk time |
//! | `work` | everything the lock guards for the disk tier: queues, jobs in flight, breakers |
//! | `transitions` | changes a chunk's state, with everything that follows from it |
//! | `slots` | free a slot for a chunk that is about to be written |
//! | `recover` | index the chunks that a tier held when it was opened |
//! | `removed_dir` | drop the chunks of a tier whose directory was removed |
//! | `jobs` | choose the next read, write or free, and apply its outcome |
//! | `threads` | open the tier and run the jobs |

pub(crate) mod breaker;
pub(crate) mod jobs;
pub(crate) mod queue;
pub(crate) mod recover;
pub(crate) mod removed_dir;
pub(crate) mod slots;
pub(crate) mod threads;
pub(crate) mod time_shares;
pub(crate) mod transitions;
pub(crate) mod work;
