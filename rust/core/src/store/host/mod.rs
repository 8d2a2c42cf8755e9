//! The host side of the store: which chunks have a frame, and which of them a load may use.
//!
//! | file | contents |
//! |---|---|
//! | `waiters` | children that arrived before their parent was visible |
//! | `transitions` | changes a chunk's state, with everything that follows from it |
//! | `fill` | a filled chunk becomes visible, or fails with the chunks that wait for it |
//! | `frames` | find or free a frame for a chunk |
//! | `drains` | slabs that are being emptied, as data |
//! | `emptying` | empty slabs for other stores of the same pool, and for other size classes |

pub(crate) mod drains;
pub(crate) mod emptying;
pub(crate) mod fill;
pub(crate) mod frames;
pub(crate) mod transitions;
pub(crate) mod waiters;
