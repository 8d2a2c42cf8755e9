//! The protocol: a length (u32), then one message, in little endian.
//!
//! A request is `u32 number, u8 kind, fields`. Each request gets one answer `u32 number, u8 kind,
//! fields`, in order, except one-way requests, which get none. The first request carries the
//! version; the server refuses any other version. Messages of engines are binary; admin messages
//! are JSON.
//!
//! A key stands for its whole prefix. The first prefix of a message is therefore sent without the
//! keys that it shares with the last one; further prefixes are sent whole. Before a long new
//! prefix, the client sends its anchors: see `prefix_cache`.

pub mod admin;
pub(crate) mod codec;
mod messages;
pub(crate) mod prefix_cache;
pub(crate) mod prefixes;

pub use self::codec::LENGTH_BYTES;
pub use self::messages::{
    Answer, Hello, MAX_CHANGES, Request, ReservedRange, SentChanges, VERSION, Welcome,
};
pub use self::prefix_cache::SentAnchors;
pub use self::prefixes::{Keys, MAX_KEYS, MAX_PREFIXES, SentPrefixes, SentRange};

/// Maximum size of a message.
pub const MAX_MESSAGE: usize = 64 << 20;
/// Maximum size of a message before the hello, and of an admin request.
pub const MAX_HELLO: usize = 64 << 10;
