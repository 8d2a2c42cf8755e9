//! What a person has a server do to what it holds, and what it came to, as they cross.
//!
//! A salt crosses as a tag, which does not tell it; logs have the tag, as a status has it, and never the salt.

use kvloft_core::key::SaltTag;

use crate::protocol::codec::{Reader, Writer};

/// Whose chunks are meant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Whose {
    /// Namespaces whose names in hex begin so.
    pub namespace: String,
    /// What has this salt; None for everything.
    pub salt: Option<SaltTag>,
}

/// What an eviction came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GivenUp {
    /// Namespaces that were looked at, those without engines on disk among them.
    pub num_namespaces: u64,
    /// Chunks that went.
    pub num_chunks: u64,
    /// Bytes of host memory that they had.
    pub host_bytes: u64,
    /// Bytes on disk that they had.
    pub disk_bytes: u64,
    /// Chunks in use; see `kvloft_core::store::Evicted`.
    pub num_in_use: u64,
    /// Something is left that may be found yet, or after a restart.
    pub is_cut_short: bool,
}

impl Whose {
    /// What a log calls it.
    pub(crate) fn name(&self) -> String {
        self.salt.map_or_else(
            || "everything".to_owned(),
            |tag| format!("the salt with tag {:016x}", u64::from_be_bytes(tag.0)),
        )
    }

    pub(crate) fn write(&self, to: &mut Writer<'_>) {
        to.text(&self.namespace);
        to.u8(self.salt.is_some().into());
        if let Some(tag) = self.salt {
            to.u64(u64::from_le_bytes(tag.0));
        }
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (namespace, has_salt) = (from.text()?, from.flag()?);
        let salt = if has_salt { Some(SaltTag(from.u64()?.to_le_bytes())) } else { None };
        Some(Self { namespace, salt })
    }
}

impl GivenUp {
    pub(crate) fn write(&self, to: &mut Writer<'_>) {
        for number in [self.num_namespaces, self.num_chunks, self.host_bytes, self.disk_bytes, self.num_in_use] {
            to.u64(number);
        }
        to.u8(self.is_cut_short.into());
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            num_namespaces: from.u64()?,
            num_chunks: from.u64()?,
            host_bytes: from.u64()?,
            disk_bytes: from.u64()?,
            num_in_use: from.u64()?,
            is_cut_short: from.flag()?,
        })
    }
}
