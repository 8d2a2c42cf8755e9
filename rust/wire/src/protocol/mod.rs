//! The wire protocol. Each message is preceded by its length (u32). Integers are little endian.
//!
//! A request is `u32 number, u8 kind, fields`. The response to a request is `u32 number, u8 kind,
//! fields`. Responses are sent in the order of the requests. One-way requests get no response. The
//! first request carries the protocol version, and the server rejects clients with a different
//! version. Engine messages are binary, and admin messages contain JSON.
//!
//! A key identifies its whole prefix. The first prefix of a message is therefore sent without the
//! keys that both ends have cached; further prefixes are sent in full. Before a long new prefix,
//! the client sends its anchors (see `prefix_cache`).

pub mod admin;
pub(crate) mod codec;
mod messages;
pub(crate) mod prefix_cache;
pub(crate) mod prefixes;

pub use self::codec::LENGTH_BYTES;
pub use self::messages::{
    Hello, MAX_CHANGES, Request, ReservedRange, Response, SentChanges, VERSION, Welcome,
};
pub use self::prefix_cache::SentAnchors;
pub use self::prefixes::{Keys, MAX_KEYS, MAX_PREFIXES, SentPrefixes, SentRange};

/// Maximum size of a message, in bytes.
pub const MAX_MESSAGE: usize = 64 << 20;
/// Maximum size of an admin request and of any message before the welcome, in bytes.
pub const MAX_HELLO: usize = 64 << 10;
