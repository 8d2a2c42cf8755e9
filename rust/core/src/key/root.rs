//! The key of the empty prefix: a hash of everything that affects KV bytes, except the content.
//!
//! Strings are prefixed with their length, and optional values with a presence byte, so different
//! inputs never have the same encoding. A root key's last bytes identify its salt, so that a store
//! can group chunks by tenant across adapters, restarts and directories.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer};
use serde::{Serialize, Serializer};

use super::ChunkKey;
use super::mode::{Digest, NAMESPACE, ROOT, SALT};
use crate::{Error, Result};

const TAG_BYTES: usize = 8;

/// Identifies a cache salt in root keys without revealing the salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SaltTag(pub [u8; TAG_BYTES]);

impl SaltTag {
    /// Returns the tag of a salt, which may be empty.
    pub fn of(salt: &str) -> Self {
        Self::end(&SALT.hash(salt.as_bytes()))
    }

    /// Returns the tag in a root key, or None if the root has no salt.
    pub fn of_root(root: &ChunkKey) -> Option<Self> {
        Some(Self::end(&root.0)).filter(|tag| tag.0 != [0; TAG_BYTES])
    }

    fn end(digest: &Digest) -> Self {
        Self(*digest.last_chunk().expect("a digest is longer than a tag"))
    }
}

/// Formats the tag as 16 lowercase hex digits, which is also its JSON format.
impl fmt::Display for SaltTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl Serialize for SaltTag {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SaltTag {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let tag = u64::from_str_radix(&text, 16).map(|number| Self(number.to_be_bytes())).ok();
        let is_same = |tag: &Self| tag.to_string() == text;
        tag.filter(is_same)
            .ok_or_else(|| de::Error::custom("a salt tag must be 16 lowercase hex digits"))
    }
}

impl ChunkKey {
    /// Replaces the salt tag of this key with the tag of `root`.
    pub(super) fn with_salt_of(mut self, root: &Self) -> Self {
        self.0[32 - TAG_BYTES..].copy_from_slice(&root.0[32 - TAG_BYTES..]);
        self
    }
}

/// Returns an order-independent fingerprint of (name, value) pairs. Returns `InvalidConfig` if any
/// name appears more than once.
pub fn namespace_digest(fields: &[(&str, &str)]) -> Result<[u8; 32]> {
    let mut sorted = fields.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let message = format!("namespace field {:?} appears twice; use each name once", pair[0].0);
        return Err(Error::invalid(message));
    }
    let mut bytes = Vec::new();
    for (name, value) in sorted {
        put_str(&mut bytes, name)?;
        put_str(&mut bytes, value)?;
    }
    Ok(NAMESPACE.hash(&bytes))
}

/// Formats a namespace as 64 lowercase hex digits.
pub fn namespace_hex(namespace: &[u8; 32]) -> String {
    ChunkKey(*namespace).to_string()
}

/// Returns a namespace's first 16 hex digits, which identify it in logs and status output and name
/// its directory.
pub fn namespace_id(namespace: &[u8; 32]) -> String {
    namespace_hex(namespace)[..16].to_owned()
}

/// Returns the key of a namespace's empty prefix. `adapter` holds the name of a `LoRA` adapter and
/// its path or id.
///
/// A missing salt and an empty salt yield different root keys. Returns `InvalidConfig` if any
/// string is 4 GiB or longer.
pub fn root_key(
    namespace: &[u8; 32],
    adapter: Option<(&str, &str)>,
    salt: Option<&str>,
) -> Result<ChunkKey> {
    let mut bytes = namespace.to_vec();
    bytes.push(u8::from(adapter.is_some()));
    if let Some((name, place)) = adapter {
        put_str(&mut bytes, name)?;
        put_str(&mut bytes, place)?;
    }
    bytes.push(u8::from(salt.is_some()));
    if let Some(salt) = salt {
        put_str(&mut bytes, salt)?;
    }
    let mut root: Digest = ROOT.hash(&bytes);
    root[32 - TAG_BYTES..]
        .copy_from_slice(&salt.map_or([0; TAG_BYTES], |salt| SaltTag::of(salt).0));
    Ok(ChunkKey(root))
}

/// Appends a string's length (u32) and UTF-8 bytes.
pub(super) fn put_str(bytes: &mut Vec<u8>, text: &str) -> Result<()> {
    let len = u32::try_from(text.len())
        .map_err(|_| Error::invalid("a string in a key must be shorter than 4 GiB"))?;
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
    Ok(())
}
