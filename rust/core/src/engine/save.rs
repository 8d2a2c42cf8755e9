//! Reserves frames for saving units and Mamba states.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::EngineSession;
use super::group::{Group, GroupKind};
use crate::Result;
use crate::chunk_batch::{ChunkBatch, NULL_BLOCK};
use crate::key::{ChunkKey, KeyChain};
use crate::store::{Prefix, Reserved, SaveRequest};

/// One request's units to save, in all groups except Mamba groups.
#[derive(Debug)]
pub struct SaveRow<'a> {
    /// The request's prefix.
    pub chain: &'a mut KeyChain,
    /// The units to save.
    pub units: Range<u32>,
    /// The units' block ids, group by group, in [`EngineSession::saved_groups`] order. The null
    /// block is 0.
    pub blocks: &'a [i32],
}

/// A state to save: a Mamba group's state at the end of a unit.
#[derive(Debug)]
pub struct StateRow(Part<'static>);

/// One group's chunks to save for one request.
#[derive(Debug)]
struct Part<'a> {
    group: usize,
    root: ChunkKey,
    keys: Cow<'a, [ChunkKey]>,
    units: Range<u32>,
    blocks: Cow<'a, [i32]>,
    /// See [`SaveRequest::is_independent`].
    is_independent: bool,
}

impl EngineSession {
    /// Returns the groups that [`Self::reserve`] saves, with their indices. Excludes Mamba groups,
    /// because vLLM provides their states one at a time.
    pub fn saved_groups(&self) -> impl Iterator<Item = (usize, &Group)> {
        let groups = self.order.iter().map(|nth| (*nth, &self.groups[*nth]));
        groups.filter(|(_, group)| group.kind != GroupKind::State)
    }

    /// Reserves frames for each row's missing chunks and adds these chunks to the saves in flight.
    /// For each row, returns the reserved chunks and the number of units that did not get a frame,
    /// counting only full-attention groups if there are any. On error, reserves nothing.
    ///
    /// In groups without full attention, skips chunks with a block that vLLM has freed.
    pub fn reserve(&self, rows: &mut [SaveRow<'_>]) -> Result<Vec<(Arc<ChunkBatch>, u32)>> {
        for row in rows.iter_mut() {
            self.extend_groups(row.chain);
        }
        let parts = rows.iter().map(|row| self.parts(row)).collect::<Result<Vec<_>>>()?;
        self.reserve_parts(&parts)
    }

    fn parts<'a>(&self, row: &'a SaveRow<'_>) -> Result<Vec<Part<'a>>> {
        let (mut parts, mut rest) = (Vec::with_capacity(self.groups.len()), row.blocks);
        for (nth, group) in self.saved_groups() {
            let num_blocks = row.units.len() * group.blocks_per_unit as usize;
            let own = rest.split_off(..num_blocks.min(rest.len())).unwrap_or_default();
            if !group.is_full() {
                parts.push(independent_part(nth, group, row, own)?);
                continue;
            }
            let (root, keys) = row.chain.kept_by(group.number);
            let (keys, units, blocks) = (keys.into(), row.units.clone(), own.into());
            parts.push(Part { group: nth, root, keys, units, blocks, is_independent: false });
        }
        Ok(parts)
    }

    /// Reserves frames for states. On error, reserves nothing.
    pub fn reserve_states(&self, rows: Vec<StateRow>) -> Result<Vec<Arc<ChunkBatch>>> {
        let parts: Vec<_> = rows.into_iter().map(|row| vec![row.0]).collect();
        Ok(self.reserve_parts(&parts)?.into_iter().map(|(batch, _)| batch).collect())
    }

    /// Prepares to save the state of `group` at the end of `unit`. `block` will hold this state.
    /// Returns `InvalidConfig` if the chain has no such unit.
    pub fn state_row(
        &self,
        chain: &KeyChain,
        group: usize,
        unit: u32,
        block: i32,
    ) -> Result<StateRow> {
        let number = self.groups.get(group).and_then(|group| group.number).unwrap_or_default();
        let (root, mut keys) = chain.independent_keys(number, [unit])?;
        // The key of the prefix ending with this unit.
        keys.extend(chain.keys().get(unit as usize));
        let (keys, blocks) = (keys.into(), vec![block].into());
        Ok(StateRow(Part { group, root, keys, units: 0..1, blocks, is_independent: true }))
    }

    fn reserve_parts(&self, rows: &[Vec<Part<'_>>]) -> Result<Vec<(Arc<ChunkBatch>, u32)>> {
        // Lock before the store assigns tickets, so that tickets are added in ascending order.
        let mut in_flight = self.in_flight();
        let (mut asked, mut nums_of_runs) = (Vec::new(), Vec::new());
        for part in rows.iter().flatten() {
            let before = asked.len();
            self.runs(part, &mut asked);
            nums_of_runs.push(asked.len() - before);
        }
        let reserved = self.session.reserve_many(&asked)?;
        let (mut batches, mut rest) = (Vec::new(), reserved.as_slice());
        let mut of_part = nums_of_runs.into_iter().map(|num| rest.split_off(..num).unwrap_or(&[]));
        for parts in rows {
            let joined = self.join(parts.iter().zip(&mut of_part));
            batches.push(joined.inspect_err(|_| {
                let chunks = reserved.iter().flat_map(|each| &each.chunks);
                self.abort_reservations(chunks.map(|chunk| chunk.ticket));
            })?);
        }
        let mut added = Vec::with_capacity(batches.len());
        for (batch, without_kv, num_dropped) in batches {
            self.abort_reservations(without_kv);
            added.push((in_flight.add(batch, self.num_ranks), num_dropped));
        }
        Ok(added)
    }

    /// Appends requests for one group's chunks to `runs`: one request per run of chunks with the
    /// same frame size.
    fn runs<'a>(&self, part: &'a Part<'_>, runs: &mut Vec<SaveRequest<'a>>) {
        let group = &self.groups[part.group];
        let asked = SaveRequest {
            prefix: Prefix::new(part.root, &part.keys),
            units: part.units.clone(),
            class: group.class,
            is_independent: part.is_independent,
        };
        let Some(compact) = group.compact else { return runs.push(asked) };
        let misfits = &mut self.misfits()[part.group];
        let candidates = misfits.candidates(&asked.units);
        if candidates.is_empty() {
            return runs.push(asked);
        }
        if misfits.is_empty() && candidates == asked.units {
            return runs.push(SaveRequest { class: compact, ..asked });
        }
        let class = |unit: &u32| {
            let may_fit = || misfits.may_fit(&asked.prefix.key_of(unit + 1));
            if candidates.contains(unit) && may_fit() { compact } else { group.class }
        };
        let units: Vec<_> = asked.units.clone().collect();
        let before = runs.len();
        for run in units.chunk_by(|one, next| class(one) == class(next)) {
            let units = run[0]..run[0] + u32::try_from(run.len()).unwrap_or(u32::MAX);
            runs.push(SaveRequest { class: class(&run[0]), units, ..asked.clone() });
        }
        if runs.len() - before > 1 && asked.is_independent {
            // The key after the range has a special meaning (see `SaveRequest`), so no run may keep
            // a key after its last unit.
            for run in &mut runs[before..] {
                run.prefix.keys = &run.prefix.keys[..run.units.end as usize];
            }
        }
    }

    /// Combines one request's reservations into a batch. Also returns the tickets of chunks without
    /// KV and the number of units without a frame.
    fn join<'a>(
        &self,
        parts: impl Iterator<Item = (&'a Part<'a>, &'a [Reserved])>,
    ) -> Result<(ChunkBatch, Vec<u64>, u32)> {
        let (mut batch, mut without_kv, mut num_dropped) = (ChunkBatch::default(), Vec::new(), 0);
        let has_full = self.full_groups().next().is_some();
        for (part, runs) in parts {
            let group = &self.groups[part.group];
            let number = u32::try_from(part.group).unwrap_or(u32::MAX);
            let num_blocks =
                if part.is_independent { group.kept_blocks } else { group.blocks_per_unit };
            let first_unit = part.units.start;
            let skipped = batch.add_saves(number, runs, &part.blocks, first_unit, num_blocks)?;
            without_kv.extend(skipped);
            if group.is_full() || !has_full {
                num_dropped = num_dropped.max(runs.iter().map(|run| run.num_dropped).sum());
            }
        }
        Ok((batch, without_kv, num_dropped))
    }
}

/// Returns the chunks of a sliding-window or local group, except chunks with blocks that vLLM has
/// freed. `blocks` holds the blocks of the row's units.
fn independent_part<'a>(
    nth: usize,
    group: &Group,
    row: &SaveRow<'_>,
    blocks: &[i32],
) -> Result<Part<'a>> {
    let (each, kept) = (group.blocks_per_unit, group.kept_blocks);
    let (mut units, mut kept_blocks) = (Vec::new(), Vec::new());
    for (unit, own) in row.units.clone().zip(blocks.chunks_exact(each as usize)) {
        let own = &own[(each - kept) as usize..];
        if !own.contains(&NULL_BLOCK) {
            units.push(unit);
            kept_blocks.extend_from_slice(own);
        }
    }
    let num_units = u32::try_from(units.len()).unwrap_or(u32::MAX);
    let (root, keys) = row.chain.independent_keys(group.number.unwrap_or_default(), units)?;
    let (keys, blocks) = (keys.into(), kept_blocks.into());
    Ok(Part { group: nth, root, keys, units: 0..num_units, blocks, is_independent: true })
}
