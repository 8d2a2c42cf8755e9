//! A part of a frame: a payload, padding, and a 128-byte trailer that identifies the payload.
//!
//! The format is defined in `docs/design/frames.md`. A part is sealed once its bytes have been
//! gathered, and is checked before it is used. A mismatch is reported as [`Damage`], and the part
//! must not be used.

use crate::key::ChunkKey;
use crate::tag::chunk_tag;
use crate::{Error, Result};

/// Size of the trailer at the end of each part, in bytes.
pub const TRAILER_BYTES: usize = 128;

/// First bytes of a trailer. The last two digits are the format version, which covers the
/// definition of the tag. A part with any other version is reported as unsealed.
pub(crate) const MAGIC: [u8; 8] = *b"KVLOFT03";

/// Expected contents of a part: its key, layout and shape.
#[derive(Debug, Clone, Copy)]
pub struct PartSpec<'a> {
    /// The chunk's key.
    pub key: ChunkKey,
    /// Digest of the worker's page layout.
    pub layout: [u8; 32],
    /// Size of each page of a block, in bytes.
    pub page_bytes: &'a [u32],
    /// Number of blocks in the payload.
    pub num_blocks: u32,
    /// The rank that the part belongs to.
    pub rank: u32,
}

/// Why a part must not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// The part has no trailer of this format version, for example because the copy to the part
    /// never finished.
    Unsealed,
    /// The bytes belong to a different chunk.
    Key,
    /// The part belongs to the expected chunk, but its page layout differs from the reader's.
    Layout,
    /// The number of blocks, the payload size or the rank does not match, or the payload is
    /// encoded. Only the GPU kernels can read an encoded payload.
    Shape,
    /// The payload changed after it was sealed.
    Tag,
}

impl Damage {
    /// Returns the name of this kind of damage, as used in logs and counters.
    pub fn as_str(self) -> &'static str {
        match self {
            Damage::Unsealed => "unsealed",
            Damage::Key => "key",
            Damage::Layout => "layout",
            Damage::Shape => "shape",
            Damage::Tag => "tag",
        }
    }
}

impl PartSpec<'_> {
    /// Returns the payload size, in bytes. Returns `InvalidConfig` if `part_bytes` is too small for
    /// the payload and the trailer.
    pub fn payload_bytes(&self, part_bytes: usize) -> Result<usize> {
        let block_bytes: u64 = self.page_bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        let payload = block_bytes
            .checked_mul(u64::from(self.num_blocks))
            .and_then(|bytes| usize::try_from(bytes).ok());
        match payload {
            Some(payload)
                if payload.checked_add(TRAILER_BYTES).is_some_and(|bytes| bytes <= part_bytes) =>
            {
                Ok(payload)
            }
            _ => Err(Error::invalid("the pages and trailer do not fit in the part")
                .with_context("block_bytes", block_bytes)
                .with_context("num_blocks", self.num_blocks)
                .with_context("part_bytes", part_bytes)),
        }
    }

    /// Returns the trailer and tag for `payload`.
    pub fn seal(&self, payload: &[u8]) -> Result<([u8; TRAILER_BYTES], u64)> {
        let tag = chunk_tag(payload, self.page_bytes, self.num_blocks)?;
        Ok((self.trailer(payload.len(), tag), tag))
    }

    /// Returns the kind of damage, or None if `trailer` and `payload` match this part.
    pub fn check(&self, payload: &[u8], trailer: &[u8; TRAILER_BYTES]) -> Option<Damage> {
        let expected = self.trailer(payload.len(), 0);
        let mut fields = [
            (0..8, Damage::Unsealed),
            (8..40, Damage::Key),
            (40..72, Damage::Layout),
            (80..128, Damage::Shape),
        ]
        .into_iter();
        if let Some((_, damage)) =
            fields.find(|(field, _)| trailer[field.clone()] != expected[field.clone()])
        {
            return Some(damage);
        }
        match chunk_tag(payload, self.page_bytes, self.num_blocks) {
            Ok(tag) if tag.to_le_bytes() == trailer[72..80] => None,
            Ok(_) => Some(Damage::Tag),
            Err(_) => Some(Damage::Shape),
        }
    }

    /// Returns the trailer of an unencoded part: the encoding (bytes 104 to 107) is 0, and the
    /// encoded size equals the payload size.
    fn trailer(&self, payload_bytes: usize, tag: u64) -> [u8; TRAILER_BYTES] {
        let mut trailer = [0; TRAILER_BYTES];
        trailer[..8].copy_from_slice(&MAGIC);
        trailer[8..40].copy_from_slice(&self.key.0);
        trailer[40..72].copy_from_slice(&self.layout);
        trailer[72..80].copy_from_slice(&tag.to_le_bytes());
        trailer[80..88].copy_from_slice(&(payload_bytes as u64).to_le_bytes());
        trailer[88..92].copy_from_slice(&self.num_blocks.to_le_bytes());
        trailer[92..96].copy_from_slice(&self.rank.to_le_bytes());
        trailer[96..104].copy_from_slice(&(payload_bytes as u64).to_le_bytes());
        trailer
    }
}
