//! The key of the empty prefix: everything but content that decides KV bytes.
//!
//! Each string goes in with its length in front and each absent value as a byte of its own, so no two different
//! inputs are the same bytes.

use super::ChunkKey;
use super::mode::{Digest, NAMESPACE, ROOT};
use crate::{Error, ErrorKind, Result};

/// Fingerprint of (name, value) pairs, in any order. `InvalidConfig` if a name comes twice.
pub fn namespace_digest(fields: &[(&str, &str)]) -> Result<[u8; 32]> {
    let mut sorted = fields.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let message = format!("namespace field {:?} is given twice; give each name once", pair[0].0);
        return Err(Error::new(ErrorKind::InvalidConfig, message));
    }
    let mut bytes = Vec::new();
    for (name, value) in sorted {
        put_str(&mut bytes, name)?;
        put_str(&mut bytes, value)?;
    }
    Ok(NAMESPACE.hash(&bytes))
}

/// The key of the empty prefix in a namespace; `adapter` is (name, path or id) of a `LoRA`.
///
/// No salt and an empty salt are different roots. `InvalidConfig` if a string is 4 GiB or longer.
pub fn root_key(namespace: &[u8; 32], adapter: Option<(&str, &str)>, salt: Option<&str>) -> Result<ChunkKey> {
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
    let digest: Digest = ROOT.hash(&bytes);
    Ok(ChunkKey(digest))
}

/// Appends u32 length and UTF-8 bytes.
pub(super) fn put_str(bytes: &mut Vec<u8>, text: &str) -> Result<()> {
    let len = u32::try_from(text.len())
        .map_err(|_| Error::new(ErrorKind::InvalidConfig, "a string in a key must be shorter than 4 GiB"))?;
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
    Ok(())
}
