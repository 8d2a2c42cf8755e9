//! Element types of embedding rows: their one canonical name, which enters keys, and their size.
//!
//! A name outside this list is refused rather than guessed, since two spellings of one type would be two keys.

use crate::{Error, ErrorKind, Result};

/// An element type by its torch name, without the `torch.` in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dtype {
    /// Canonical name: what keys hash.
    pub(super) name: &'static str,
    /// Bytes per element.
    pub(super) size_bytes: u32,
}

const KNOWN: [Dtype; 9] = [
    Dtype { name: "bfloat16", size_bytes: 2 },
    Dtype { name: "float16", size_bytes: 2 },
    Dtype { name: "float32", size_bytes: 4 },
    Dtype { name: "float64", size_bytes: 8 },
    Dtype { name: "float8_e4m3fn", size_bytes: 1 },
    Dtype { name: "float8_e5m2", size_bytes: 1 },
    Dtype { name: "int8", size_bytes: 1 },
    Dtype { name: "uint8", size_bytes: 1 },
    Dtype { name: "int32", size_bytes: 4 },
];

impl Dtype {
    /// The type called `name`; `InvalidConfig` if there is none.
    pub(super) fn parse(name: &str) -> Result<Self> {
        KNOWN.into_iter().find(|dtype| dtype.name == name).ok_or_else(|| {
            let known = KNOWN.map(|dtype| dtype.name).join(", ");
            Error::new(ErrorKind::InvalidConfig, format!("dtype {name:?} is not one of {known}"))
        })
    }
}

/// Bytes of one embedding row of `width` elements of `dtype` (torch's name); `InvalidConfig` if there is no such row.
pub fn row_bytes(dtype: &str, width: u32) -> Result<usize> {
    let bytes = u64::from(Dtype::parse(dtype)?.size_bytes) * u64::from(width);
    usize::try_from(bytes)
        .ok()
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| Error::new(ErrorKind::InvalidConfig, format!("an embedding row cannot be {width} wide")))
}
