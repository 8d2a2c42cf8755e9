//! `superblock.json` identifies a namespace directory before any of its other files are trusted.
//!
//! The file is a small, human-readable JSON object with a checksum that detects changes.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use serde::{Deserialize, Deserializer, Serialize};
use twox_hash::XxHash3_64;

use crate::io::FrameSizes;
use crate::key::namespace_hex;

/// Format version of the superblock, index and frames files.
pub(crate) const FORMAT: u32 = 4;
pub(crate) const FILE_NAME: &str = "superblock.json";
/// Name of the superblock file while it is being written.
pub(crate) const TEMP_NAME: &str = "superblock.json.tmp";
/// Maximum size of a superblock. A larger file is not read.
const MAX_BYTES: u64 = 64 * 1024;
/// Maximum length of the description, so that the superblock fits in `budget::FIXED_BYTES`.
const MAX_DESCRIPTION_CHARS: usize = 1000;

/// The reason why a superblock was rejected. The text completes the sentence "superblock.json is
/// ...".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The file is not a regular file, is too large, or cannot be parsed.
    NotOurs,
    /// The file is damaged. The text describes the defect.
    Damaged(&'static str),
    /// The file is intact, but its format version is not [`FORMAT`].
    OtherFormat(u32),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOurs => f.write_str("not a kvloft superblock"),
            Self::Damaged(how) => write!(f, "damaged ({how})"),
            Self::OtherFormat(format) => {
                write!(f, "in format {format} (expected {FORMAT})")
            }
        }
    }
}

/// Maximum frame size, which limits how long it takes to read a frame if its size is forged.
const MAX_FRAME_BYTES: u64 = 16 << 30;

pub(crate) fn is_frame_size(bytes: u64) -> bool {
    bytes > 0
        && bytes.is_multiple_of(4096)
        && bytes <= MAX_FRAME_BYTES
        && usize::try_from(bytes).is_ok()
}

/// Deserializes a list of numbers or a single number.
fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Sizes {
        One(u64),
        More(Vec<u64>),
    }
    Ok(match Sizes::deserialize(deserializer)? {
        Sizes::One(size) => vec![size],
        Sizes::More(sizes) => sizes,
    })
}

/// The identity of a namespace directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Superblock {
    pub(crate) format: u32,
    /// Frame size of each size class, in bytes. Earlier versions had a single size named
    /// `frame_bytes`.
    #[serde(alias = "frame_bytes", deserialize_with = "one_or_more")]
    pub(crate) frame_sizes: Vec<u64>,
    namespace: String,
    /// The description that `kvloft inspect` prints.
    pub(crate) description: String,
    pub(crate) checksum: String,
}

impl Superblock {
    /// Creates a superblock. Truncates `description` to [`MAX_DESCRIPTION_CHARS`].
    pub(crate) fn new(namespace: &[u8; 32], frame_sizes: &[u64], description: &str) -> Self {
        let description = description.chars().take(MAX_DESCRIPTION_CHARS).collect();
        let mut made = Self {
            format: FORMAT,
            frame_sizes: frame_sizes.to_owned(),
            namespace: namespace_hex(namespace),
            description,
            checksum: String::new(),
        };
        made.checksum = made.compute_checksum();
        made
    }

    pub(crate) fn has_sizes_of(&self, other: &Self) -> bool {
        self.frame_sizes.iter().any(|size| other.frame_sizes.contains(size))
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let parsed: Self = serde_json::from_slice(bytes).map_err(|_| Refusal::NotOurs)?;
        if parsed.checksum != parsed.compute_checksum() {
            return Err(Refusal::Damaged("its checksum does not match"));
        }
        if parsed.format != FORMAT {
            return Err(Refusal::OtherFormat(parsed.format));
        }
        let is_hex = parsed
            .namespace()
            .is_some_and(|namespace| namespace_hex(&namespace) == parsed.namespace);
        let are_different = FrameSizes::from(parsed.frame_sizes.clone()).check().is_ok();
        let are_sizes = parsed.frame_sizes.iter().all(|size| is_frame_size(*size));
        if !is_hex || !are_different || !are_sizes {
            return Err(Refusal::Damaged("a value is out of range"));
        }
        Ok(parsed)
    }

    /// Reads `dir/superblock.json`. Returns None if the file does not exist.
    pub(crate) fn read(dir: &Path) -> io::Result<Option<Result<Self, Refusal>>> {
        let path = dir.join(FILE_NAME);
        match fs::symlink_metadata(&path) {
            Ok(meta) if !meta.is_file() || meta.len() > MAX_BYTES => {
                Ok(Some(Err(Refusal::NotOurs)))
            }
            Ok(_) => {
                let mut bytes = Vec::new();
                open_options().read(true).open(&path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
                Ok(Some(Self::parse(&bytes)))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Replaces `dir/superblock.json` atomically. On error, the previous file is unchanged and the
    /// temporary file is removed.
    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let temp = dir.join(TEMP_NAME);
        let text = serde_json::to_string_pretty(self)? + "\n";
        let _ = fs::remove_file(&temp);
        let put = || {
            // Always create a new file, so that nothing is written through a link or to another
            // process's file.
            open_options().write(true).create_new(true).open(&temp)?.write_all(text.as_bytes())?;
            fs::rename(&temp, dir.join(FILE_NAME))
        };
        put().inspect_err(|_| drop(fs::remove_file(&temp)))
    }

    /// Returns the full namespace. Returns None if the field is not 64 hex digits, although `parse`
    /// already rejects such a field.
    pub(crate) fn namespace(&self) -> Option<[u8; 32]> {
        blake3::Hash::from_hex(&self.namespace).ok().map(Into::into)
    }

    pub(crate) fn compute_checksum(&self) -> String {
        let sizes = self.frame_sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let text = format!("{}|{sizes}|{}|{}", self.format, self.namespace, self.description);
        format!("{:016x}", XxHash3_64::oneshot(text.as_bytes()))
    }
}

/// Returns options for opening a file without following links or blocking on FIFOs.
fn open_options() -> fs::OpenOptions {
    let mut options = fs::OpenOptions::new();
    options.mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    options
}
