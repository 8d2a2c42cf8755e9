//! The wire protocol. Each message is preceded by its length (u32). Integers are little-endian.
//!
//! Requests and responses have the form `u32 number, u8 kind, fields`. Responses are sent in the
//! same order as the requests. One-way requests get no response. The first request contains the
//! protocol version, and the server rejects clients with a different version. Engine messages are
//! binary; admin messages contain JSON.
//!
//! A key identifies its whole prefix, so the first prefix in a message is sent without the keys
//! that both ends have cached. All other prefixes are sent in full. Before the client sends a long
//! new prefix, it sends the prefix's anchors (see `prefix_cache`).

pub mod admin;
pub(crate) mod codec;
mod messages;
pub(crate) mod prefix_cache;
pub(crate) mod prefixes;

pub use self::codec::LENGTH_BYTES;
pub use self::messages::{Hello, MAX_CHANGES, Request, Response, SentChanges, VERSION, Welcome};
pub use self::prefix_cache::SentAnchors;
pub use self::prefixes::{Keys, MAX_KEYS, MAX_PREFIXES, SentPrefixes, SentRange};

/// Maximum size of any message, in bytes.
pub const MAX_MESSAGE: usize = 64 << 20;
/// Maximum size of an admin request, and of any message before the welcome, in bytes.
pub const MAX_HELLO: usize = 64 << 10;
