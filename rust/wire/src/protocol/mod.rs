//! What crosses the socket: length (u32), then one message. Little endian, by hand, so that it is small and every byte is checked.
//!
//! A request is `u32 number, u8 kind, fields`; each but the one-way kinds gets one answer `u32 number, u8 kind, fields`, in order.
//! A first request says the version: any other is refused. A prefix is sent without what the last one had of it, because a key
//! stands for its whole prefix; those behind it in the same message are sent whole. Before a long one that is new, anchors are asked
//! about: see `known`.

pub(crate) mod admin;
mod answer;
pub(crate) mod changes;
pub(crate) mod codec;
pub(crate) mod prefix_cache;
pub(crate) mod prefixes;
mod request;
pub(crate) mod status;
mod tenants;

pub use self::answer::Answer;
pub use self::changes::{MAX_CHANGES, SentChanges};
pub use self::codec::LENGTH_BYTES;
pub use self::prefix_cache::SentAnchors;
pub use self::prefixes::{Keys, MAX_KEYS, MAX_PREFIXES, SentPrefixes, SentRange};
pub use self::request::{Hello, Request, VERSION};
pub use self::status::{EngineStatus, NamespaceStatus, Status};

/// Most bytes of a message, and of one from somebody who has not said hello.
pub const MAX_MESSAGE: usize = 64 << 20;
/// See [`MAX_MESSAGE`].
pub const MAX_HELLO: usize = 64 << 10;
