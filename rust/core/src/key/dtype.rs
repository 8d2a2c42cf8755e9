//! Embedding rows: the canonical name of their element type, which is part of keys, and their size.
//!
//! A type outside this list is rejected, because two names of one type would give two keys.

use crate::{Error, Result};

/// Element types by their torch names, without the `torch.` in front, and their bytes.
const DTYPES: [(&str, u32); 9] = [
    ("bfloat16", 2),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
];

/// The shape of an embedding row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// Canonical name, which is part of keys.
    pub(super) dtype: &'static str,
    /// Elements.
    pub(super) width: u32,
    pub(super) size_bytes: usize,
}

impl Row {
    /// A row of `width` elements of `dtype`; `InvalidConfig` if there is no such row.
    pub(super) fn new(dtype: &str, width: u32) -> Result<Self> {
        let bad = |message| Error::invalid(message);
        let (dtype, bytes) =
            DTYPES.into_iter().find(|(name, _)| *name == dtype).ok_or_else(|| {
                let known = DTYPES.map(|(name, _)| name).join(", ");
                bad(format!("dtype {dtype:?} is not one of {known}"))
            })?;
        match usize::try_from(u64::from(bytes) * u64::from(width)) {
            Ok(size_bytes) if size_bytes > 0 => Ok(Self { dtype, width, size_bytes }),
            _ => Err(bad(format!("an embedding row cannot be {width} wide"))),
        }
    }
}

/// Bytes of one embedding row of `width` elements of `dtype` (torch's name); `InvalidConfig` if
/// there is no such row.
pub fn row_bytes(dtype: &str, width: u32) -> Result<usize> {
    Row::new(dtype, width).map(|row| row.size_bytes)
}
