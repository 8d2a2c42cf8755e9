//! Extends many chains in one call, so that blocks completed by running requests in the same step
//! are hashed together.
//!
//! Hashing one block at a time would use only one SIMD lane while the forward pass waits for the
//! keys.

use super::chain::KeyChain;
use super::mode::{CHAIN, Digest, TOKENS};
use crate::Result;

/// Appends token ids to each chain, like [`KeyChain::append_tokens`]. On error, no chain is
/// modified.
pub fn append_to_each(chains: &mut [(&mut KeyChain, &[u32])]) -> Result<()> {
    chains.iter().try_for_each(|(chain, ids)| chain.check_room(ids.len()))?;
    let block_tokens = chains.first().map_or(0, |(chain, _)| chain.block_tokens());
    let mut bytes = Vec::with_capacity(chains.len() * 4 * block_tokens as usize);
    let mut abreast = Vec::with_capacity(chains.len());
    for (chain, ids) in chains {
        if chain.block_tokens() == block_tokens && chain.is_next_block(ids.len()) {
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            abreast.push(chain);
        } else {
            chain.append_tokens(ids)?;
        }
    }
    if abreast.is_empty() {
        return Ok(());
    }
    let mut digests = vec![Digest::default(); abreast.len()];
    TOKENS.hash_each(&bytes, 4 * block_tokens as usize, &mut digests);
    let mut pairs = Vec::with_capacity(64 * abreast.len());
    for (chain, digest) in abreast.iter().zip(&digests) {
        pairs.extend_from_slice(&chain.last().0);
        pairs.extend_from_slice(digest);
    }
    CHAIN.hash_each(&pairs, 64, &mut digests);
    abreast.into_iter().zip(digests).for_each(|(chain, key)| chain.push(key));
    Ok(())
}

#[cfg(test)]
mod tests;
