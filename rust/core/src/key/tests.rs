//! Compares keys with golden vectors and tests their properties.

use proptest::prelude::*;
use serde_json::Value;

use super::{ChunkKey, KeyChain, namespace_digest, root_key};
use crate::ErrorKind;

const VECTORS: &str = include_str!("../../../../tests/vectors/keys.json");

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn number(value: &Value) -> u32 {
    value.as_u64().unwrap().try_into().unwrap()
}

fn pair(value: &Value) -> (&str, &str) {
    (text(&value[0]), text(&value[1]))
}

fn vector_root(case: &Value) -> ChunkKey {
    let fields: Vec<_> = case["fields"].as_array().unwrap().iter().map(pair).collect();
    let namespace = namespace_digest(&fields).unwrap();
    assert_eq!(namespace[..], hex(text(&case["namespace"])), "{}", case["name"]);
    let adapter = Some(&case["adapter"]).filter(|adapter| !adapter.is_null()).map(pair);
    let root = root_key(&namespace, adapter, case["salt"].as_str()).unwrap();
    assert_eq!(root.to_string(), text(&case["root"]), "{}", case["name"]);
    root
}

#[test]
fn golden_vectors() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    assert_eq!(number(&vectors["schema"]), super::KEY_SCHEMA);
    let cases = vectors["cases"].as_array().unwrap();
    assert!(cases.len() > 50);
    for case in cases {
        let mut chain = KeyChain::new(vector_root(case), number(&case["block_tokens"])).unwrap();
        for item in case["items"].as_array().unwrap() {
            chain.add_item(text(&item[0]), number(&item[1]), number(&item[2])).unwrap();
        }
        for segment in case["content"].as_array().unwrap() {
            if let Some(ids) = segment["tokens"].as_array() {
                chain.append_tokens(&ids.iter().map(number).collect::<Vec<_>>()).unwrap();
            } else {
                let rows = hex(text(&segment["rows"]));
                chain
                    .append_embeds(text(&segment["dtype"]), number(&segment["width"]), &rows)
                    .unwrap();
            }
        }
        let keys: Vec<_> = chain.keys().iter().map(ToString::to_string).collect();
        let wanted: Vec<_> = case["keys"].as_array().unwrap().iter().map(text).collect();
        assert_eq!(keys, wanted, "{}", case["name"]);
    }
}

#[derive(Debug, Clone)]
enum Piece {
    Tokens(Vec<u32>),
    Rows { dtype: &'static str, width: u32, num: usize, seed: u8 },
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Tokens(ids) => ids.len(),
            Piece::Rows { num, .. } => *num,
        }
    }

    /// Appends the piece's positions `from..to` to `chain`.
    fn append(&self, chain: &mut KeyChain, from: usize, to: usize) {
        match self {
            Piece::Tokens(ids) => chain.append_tokens(&ids[from..to]).unwrap(),
            Piece::Rows { dtype, width, num, seed } => {
                let row = *width as usize * if *dtype == "bfloat16" { 2 } else { 4 };
                let mut bytes = vec![0; num * row];
                blake3::Hasher::new().update(&[*seed]).finalize_xof().fill(&mut bytes);
                chain.append_embeds(dtype, *width, &bytes[from * row..to * row]).unwrap();
            }
        }
    }
}

fn piece() -> impl Strategy<Value = Piece> {
    prop_oneof![
        3 => prop::collection::vec(0..5u32, 0..70).prop_map(Piece::Tokens),
        1 => (prop::sample::select(vec!["bfloat16", "float32"]), 1..4u32, 0..40usize, 0..2u8)
            .prop_map(|(dtype, width, num, seed)| Piece::Rows { dtype, width, num, seed }),
    ]
}

#[derive(Debug, Clone)]
struct Prompt {
    pieces: Vec<Piece>,
    items: Vec<(String, u32, u32)>,
    block_tokens: u32,
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let item = ("[ab]", 0..150u32, 1..60u32);
    let pieces = prop::collection::vec(piece(), 0..6);
    (pieces, prop::collection::vec(item, 0..4), 1..33u32).prop_map(
        |(pieces, mut items, block_tokens)| {
            items.sort();
            items.dedup_by_key(|item| (item.0.clone(), item.1));
            Prompt { pieces, items, block_tokens }
        },
    )
}

impl Prompt {
    fn empty(&self) -> KeyChain {
        let root = root_key(&[7; 32], None, None).unwrap();
        let mut chain = KeyChain::new(root, self.block_tokens).unwrap();
        for (identifier, start, num) in &self.items {
            chain.add_item(identifier, *start, *num).unwrap();
        }
        chain
    }

    /// Appends positions `from..to` to `chain` in multiple calls, each with at most `step()`
    /// positions.
    fn append(
        &self,
        chain: &mut KeyChain,
        from: usize,
        to: usize,
        mut step: impl FnMut() -> usize,
    ) {
        let mut start = 0;
        for piece in &self.pieces {
            let mut at = from.max(start) - start;
            let end = to.clamp(start, start + piece.len()) - start;
            while at < end {
                let next = (at + step().max(1)).min(end);
                piece.append(chain, at, next);
                at = next;
            }
            start += piece.len();
        }
    }

    fn len(&self) -> usize {
        self.pieces.iter().map(Piece::len).sum()
    }
}

proptest! {
    #[test]
    fn any_split_of_the_same_content_has_the_same_keys(prompt in prompt(), steps in prop::collection::vec(1..40usize, 1..9)) {
        let mut whole = prompt.empty();
        prompt.append(&mut whole, 0, prompt.len(), || usize::MAX / 2);
        let mut parts = prompt.empty();
        let mut turn = 0;
        prompt.append(&mut parts, 0, prompt.len(), || { turn += 1; steps[turn % steps.len()] });
        prop_assert_eq!(u32::try_from(prompt.len()).unwrap(), whole.num_tokens());
        prop_assert_eq!(whole.keys(), parts.keys());
    }

    #[test]
    fn changing_one_id_changes_its_block_and_all_after_and_none_before(
        ids in prop::collection::vec(any::<u32>(), 1..200), at in any::<prop::sample::Index>(), flip in 0..32u32,
    ) {
        let at = at.index(ids.len());
        let mut other = ids.clone();
        other[at] ^= 1 << flip;
        let root = root_key(&[7; 32], None, None).unwrap();
        let (mut one, mut two) = (KeyChain::new(root, 8).unwrap(), KeyChain::new(root, 8).unwrap());
        one.append_tokens(&ids).unwrap();
        two.append_tokens(&other).unwrap();
        for (block, (left, right)) in one.keys().iter().zip(two.keys()).enumerate() {
            prop_assert_eq!(left == right, (block + 1) * 8 <= at);
        }
    }

    /// The last block's key identifies the whole prompt, so all block keys in a prompt must differ.
    #[test]
    fn no_two_blocks_of_a_prompt_share_a_key(prompt in prompt()) {
        let mut chain = prompt.empty();
        prompt.append(&mut chain, 0, prompt.len(), || 11);
        let unique: std::collections::HashSet<_> = chain.keys().iter().copied().chain([chain.root()]).collect();
        prop_assert_eq!(unique.len(), chain.keys().len() + 1);
    }
}

#[test]
fn embedding_rows_never_alias_token_zero() {
    let root = root_key(&[7; 32], None, None).unwrap();
    for num in [16usize, 17, 40] {
        let mut tokens = KeyChain::new(root, 16).unwrap();
        tokens.append_tokens(&vec![0; num]).unwrap();
        for (dtype, size) in [("bfloat16", 2), ("float32", 4), ("int8", 1), ("int32", 4)] {
            for width in [1u32, 2, 4] {
                let mut rows = KeyChain::new(root, 16).unwrap();
                rows.append_embeds(dtype, width, &vec![0; num * size * width as usize]).unwrap();
                assert_eq!((rows.keys().len(), rows.num_tokens()), (num / 16, tokens.num_tokens()));
                assert!(rows.keys().iter().zip(tokens.keys()).all(|(a, b)| a != b));
            }
        }
    }
}

#[test]
fn big_rows_hashed_on_many_threads_have_the_keys_of_single_steps() {
    let root = root_key(&[7; 32], None, None).unwrap();
    let row = 8192;
    let mut bytes = vec![0; 300 * row];
    blake3::Hasher::new().update(b"rows").finalize_xof().fill(&mut bytes);
    let mut whole = KeyChain::new(root, 128).unwrap();
    whole.append_embeds("bfloat16", 4096, &bytes).unwrap();
    let mut parts = KeyChain::new(root, 128).unwrap();
    for rows in bytes.chunks(7 * row) {
        parts.append_embeds("bfloat16", 4096, rows).unwrap();
    }
    assert_eq!(whole.keys(), parts.keys());
}

#[test]
fn each_field_alone_changes_the_key() {
    let fields = [("model", "m"), ("tp", "1")];
    let base = (fields, None, None);
    let roots = [
        base,
        ([("model", "n"), ("tp", "1")], None, None),
        ([("model", "m"), ("tp", "2")], None, None),
        ([("model", "m"), ("pp", "1")], None, None),
        (fields, Some(("a", "b")), None),
        (fields, Some(("a", "c")), None),
        (fields, Some(("c", "b")), None),
        (fields, Some(("ab", "")), None),
        (fields, None, Some("")),
        (fields, None, Some("s")),
        (fields, Some(("a", "b")), Some("s")),
    ];
    let mut seen: Vec<ChunkKey> = roots
        .iter()
        .map(|(fields, adapter, salt)| {
            root_key(&namespace_digest(fields).unwrap(), *adapter, *salt).unwrap()
        })
        .collect();
    let key = |items: &[(&str, u32, u32)], dtype: &str, width: u32, rows: &[u8]| {
        let mut chain = KeyChain::new(seen[0], 4).unwrap();
        for (identifier, start, num) in items {
            chain.add_item(identifier, *start, *num).unwrap();
        }
        chain.append_tokens(&[1, 2]).unwrap();
        chain.append_embeds(dtype, width, rows).unwrap();
        chain.append_tokens(&[3; 8]).unwrap();
        chain.key(0).unwrap()
    };
    let rows = [1u8; 16];
    let mut other = rows;
    other[15] ^= 0x80;
    let keys = [
        key(&[], "bfloat16", 4, &rows),
        key(&[], "bfloat16", 4, &other),
        key(&[], "float16", 4, &rows),
        key(&[], "float32", 2, &rows),
        key(&[], "bfloat16", 8, &rows),
        key(&[("i", 0, 1)], "bfloat16", 4, &rows),
        key(&[("j", 0, 1)], "bfloat16", 4, &rows),
        key(&[("i", 1, 1)], "bfloat16", 4, &rows),
        key(&[("i", 0, 2)], "bfloat16", 4, &rows),
        key(&[("i", 0, 1), ("i", 1, 1)], "bfloat16", 4, &rows),
    ];
    seen.extend(keys);
    let unique: std::collections::HashSet<_> = seen.iter().collect();
    assert_eq!(unique.len(), seen.len());
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let root = root_key(&[7; 32], None, None).unwrap();
    assert_eq!(KeyChain::new(root, 0).unwrap_err().kind(), ErrorKind::InvalidConfig);
    assert!(namespace_digest(&[("a", "1"), ("b", "1"), ("a", "2")]).is_err());
    let mut chain = KeyChain::new(root, 8).unwrap();
    chain.add_item("a", 6, 4).unwrap();
    chain.append_tokens(&[1; 13]).unwrap();
    let before = chain.keys().to_vec();
    let refused = [
        chain.append_embeds("bfloat16", 4, &[0; 7]),
        chain.append_embeds("bfloat16", 0, &[0; 8]),
        chain.append_embeds("bfloat16", 0, &[]),
        chain.append_embeds("bf16", 4, &[0; 8]),
        chain.append_embeds("torch.bfloat16", 4, &[0; 8]),
        chain.add_item("late", 12, 4),
        chain.add_item("late", 0, 1),
        chain.add_item("a", 6, 5),
        chain.add_item("none", 20, 0),
        chain.add_item("far", u32::MAX, 1),
    ];
    for result in refused {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidConfig);
    }
    assert!(chain.key(1).is_err() && chain.key(u32::MAX).is_err());
    chain.add_item("a", 6, 4).unwrap();
    chain.append_embeds("bfloat16", 4, &[]).unwrap();
    chain.append_tokens(&[]).unwrap();
    assert_eq!((chain.keys(), chain.num_tokens()), (&before[..], 13));
    chain.add_item("next", 13, 1).unwrap();
    assert!(chain.add_item("next", 13, 2).is_err());
}
