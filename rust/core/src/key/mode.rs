//! Keyed BLAKE3 hashes with one fixed key (mode) per purpose, optimized for many short inputs of
//! equal length.
//!
//! Each digest is a regular keyed BLAKE3 hash. Inputs of whole 64-byte blocks, up to one BLAKE3
//! chunk (1024 bytes), are hashed in SIMD lanes by the blake3 crate's doc-hidden `platform` module.
//! The crate version is therefore pinned, and tests compare the results with `keyed_hash` for every
//! length.

use std::sync::LazyLock;

use blake3::IncrementCounter;
use blake3::platform::Platform;

pub(super) type Digest = [u8; 32];

pub(super) static NAMESPACE: LazyLock<Mode> = LazyLock::new(|| Mode::new("namespace"));
pub(super) static ROOT: LazyLock<Mode> = LazyLock::new(|| Mode::new("root"));
pub(super) static SALT: LazyLock<Mode> = LazyLock::new(|| Mode::new("salt"));
pub(super) static TOKENS: LazyLock<Mode> = LazyLock::new(|| Mode::new("tokens"));
pub(super) static EMBEDS: LazyLock<Mode> = LazyLock::new(|| Mode::new("embeds"));
pub(super) static MIXED: LazyLock<Mode> = LazyLock::new(|| Mode::new("mixed"));
pub(super) static CHAIN: LazyLock<Mode> = LazyLock::new(|| Mode::new("chain"));
pub(super) static GROUP: LazyLock<Mode> = LazyLock::new(|| Mode::new("group"));

/// Inputs of at least this size are hashed on rayon's threads. For smaller inputs, waking the
/// threads would cost too much. The first large input starts the thread pool, which does not
/// survive a fork, so a forked process must not hash.
pub(super) const PARALLEL_BYTES: usize = 512 << 10;

// Domain flags, from table 3 in section 2.2 of the BLAKE3 paper.
const FLAG_CHUNK_START: u8 = 1 << 0;
const FLAG_CHUNK_END: u8 = 1 << 1;
const FLAG_ROOT: u8 = 1 << 3;
const FLAG_KEYED_HASH: u8 = 1 << 4;

/// Number of inputs per SIMD call: one for each AVX-512 lane, or two for each AVX2 lane.
const LANES: usize = 16;

/// A keyed hash with a fixed key.
#[derive(Debug)]
pub(super) struct Mode {
    key: [u8; 32],
    words: [u32; 8],
    platform: Platform,
}

impl Mode {
    fn new(name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"kvloft key v").update(super::KEY_SCHEMA.to_string().as_bytes());
        hasher.update(b" ").update(name.as_bytes());
        let key = *hasher.finalize().as_bytes();
        Self {
            key,
            words: blake3::platform::words_from_le_bytes_32(&key),
            platform: Platform::detect(),
        }
    }

    /// Returns the keyed hash of `bytes`. Uses rayon's threads if the input is large.
    pub(super) fn hash(&self, bytes: &[u8]) -> Digest {
        if bytes.len() < PARALLEL_BYTES {
            return *blake3::keyed_hash(&self.key, bytes).as_bytes();
        }
        *blake3::Hasher::new_keyed(&self.key).update_rayon(bytes).finalize().as_bytes()
    }

    /// Returns the keyed hash of the 64-byte block `left | right`, using a single compression.
    pub(super) fn hash_pair(&self, left: &Digest, right: &Digest) -> Digest {
        let mut block = [0; 64];
        block[..32].copy_from_slice(left);
        block[32..].copy_from_slice(right);
        let mut words = self.words;
        let flags = FLAG_CHUNK_START | FLAG_CHUNK_END | FLAG_ROOT | FLAG_KEYED_HASH;
        self.platform.compress_in_place(&mut words, &block, 64, 0, flags);
        blake3::platform::le_bytes_from_words_32(&words)
    }

    /// Writes the keyed hash of each `stride`-byte piece to `out`, ignoring an incomplete last
    /// piece.
    pub(super) fn hash_each(&self, bytes: &[u8], stride: usize, out: &mut [Digest]) {
        macro_rules! by_length {
            ($($blocks:literal)*) => {
                match stride {
                    $(len if len == $blocks * 64 => self.lanes::<{ $blocks * 64 }>(bytes, out),)*
                    _ => {
                        for (input, out) in bytes.chunks_exact(stride).zip(out) {
                            *out = self.hash(input);
                        }
                    }
                }
            };
        }
        by_length!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
    }

    /// Implements `hash_each` for inputs of N bytes, where N is a multiple of 64 and at most 1024.
    /// Each input is a single BLAKE3 chunk and the root of its tree, so its hash is its chaining
    /// value under these flags.
    fn lanes<const N: usize>(&self, bytes: &[u8], out: &mut [Digest]) {
        let (inputs, _) = bytes.as_chunks::<N>();
        for (inputs, out) in inputs.chunks(LANES).zip(out.chunks_mut(LANES)) {
            let mut lanes = [&inputs[0]; LANES];
            for (lane, input) in lanes.iter_mut().zip(inputs) {
                *lane = input;
            }
            self.platform.hash_many(
                &lanes[..inputs.len()],
                &self.words,
                0,
                IncrementCounter::No,
                FLAG_KEYED_HASH,
                FLAG_CHUNK_START,
                FLAG_CHUNK_END | FLAG_ROOT,
                out.as_flattened_mut(),
            );
        }
    }
}

#[cfg(test)]
mod tests;
