//! Messages come out as they went in, and bytes that are no message are none.

use kvloft_core::ChunkKey;
use kvloft_core::io::FrameId;
use kvloft_core::key::SaltTag;
use kvloft_core::store::{
    Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation, SaveRange, Tenant, TierName, Tiers,
};
use kvloft_wire::protocol::{
    Answer, Hello, Keys, LENGTH_BYTES, MAX_PREFIXES, Request, SentAnchors, SentChanges, SentPrefixes, SentRange,
    VERSION,
};
use kvloft_wire::{Counts, EngineStatus, GivenUp, NamespaceStatus, Status, Whose};
use proptest::collection::vec;
use proptest::prelude::*;

/// What requests are made of: proptest cannot make what borrows.
#[derive(Debug, Clone)]
struct Parts {
    kind: u8,
    number: u64,
    root: [u8; 32],
    keys: Vec<[u8; 32]>,
    numbers: Vec<u64>,
    small: [u32; 4],
    text: String,
}

fn parts() -> impl Strategy<Value = Parts> {
    let fields = (1..=20_u8, any::<u64>(), any::<[u8; 32]>(), vec(any::<[u8; 32]>(), 0..5), vec(any::<u64>(), 0..5));
    (fields, any::<[u32; 4]>(), ".{0,9}").prop_map(|((kind, number, root, keys, numbers), small, text)| Parts {
        kind,
        number,
        root,
        keys,
        numbers,
        small,
        text,
    })
}

fn request(parts: &Parts) -> Request<'_> {
    let keys = Keys::Bytes(&parts.keys);
    // Some hang on the root of the one before, some on another.
    let roots = || parts.numbers.iter().map(|number| ChunkKey([number.to_le_bytes()[0] % 2; 32]));
    let all =
        roots().zip(0..).map(|(root, nth)| (root, Keys::Bytes(&parts.keys[..parts.keys.len().min(nth)]))).collect();
    let prefixes = SentPrefixes { num_same: parts.small[0], all };
    let range = SaveRange { start: parts.small[1], stop: parts.small[2], tail_blocks: parts.small[3] };
    match parts.kind {
        1 => Request::Hello(Hello {
            version: VERSION,
            namespace: parts.root,
            frame_bytes: parts.number,
            blocks_per_chunk: parts.small[0],
            description: parts.text.clone(),
        }),
        2 => {
            if prefixes.num_same.is_multiple_of(2) {
                Request::Lookup(prefixes)
            } else {
                Request::LookAgain(prefixes)
            }
        }
        3 => Request::Acquire(parts.number, prefixes),
        4 => Request::Poll(parts.number),
        5 => Request::Frames(parts.number),
        6 => Request::Release(parts.number),
        7 => {
            let ranges =
                roots().map(|root| SentRange { root, first: parts.small[0], keys, range, is_attached: root.0[0] == 1 });
            Request::Reserve(ranges.collect())
        }
        8 => Request::Commit(parts.numbers.clone()),
        9 => Request::Abort(parts.numbers.clone()),
        10 => Request::Discard(keys),
        11 => Request::Clear,
        12 => Request::Stats([parts.number, 2]),
        13 => Request::LimitFrames(parts.small[0]),
        14 => Request::IsSettled,
        15 => Request::Bye,
        16 => Request::Status(parts.small[0]),
        17 => Request::Forget(parts.small[0], parts.text.clone()),
        18 => Request::Anchors(SentAnchors { stride: parts.small[0], last: parts.small[1], keys }),
        19 => Request::Changes(SentChanges { capacity: parts.small[0], limit: parts.small[1], asked: keys }),
        _ => {
            let salt = parts.numbers.first().map(|number| SaltTag(number.to_le_bytes()));
            Request::Evict(
                parts.small[0],
                Whose { namespace: parts.text.clone(), salt },
                parts.small[1].is_multiple_of(2),
            )
        }
    }
}

fn answer(parts: &Parts) -> Answer {
    let [one, two, ..] = parts.small;
    let key = ChunkKey(parts.root);
    let tier = if two.is_multiple_of(2) { TierName::Host } else { TierName::Disk };
    let leased = LeasedFrame { frame: FrameId(one), key, first_block: two, num_blocks: 3, tier };
    let row = Reservation { ticket: parts.number, frame: FrameId(one), key, first_block: two, num_blocks: 5 };
    let stats: Vec<_> = parts.numbers.iter().map(|number| (parts.text.clone(), *number)).collect();
    let num_rows = parts.numbers.len();
    match parts.kind {
        1 => Answer::Welcome(one),
        2 => Answer::Refused(parts.text.clone()),
        3 => Answer::Found(vec![Lookup { host_blocks: one, stored_blocks: two }; num_rows]),
        4 => Answer::Progress(Progress { ready_blocks: one, pending_blocks: two }),
        5 => Answer::Frames(vec![leased; num_rows]),
        6 => Answer::Reserved((0..num_rows).map(|nth| (vec![row; nth], one)).collect()),
        7 => Answer::Count(parts.number),
        8 => Answer::Stats(stats),
        9 => Answer::Anchors(Anchors { num_known: one, num_stored: two }),
        11 => Answer::GivenUp(GivenUp {
            num_namespaces: 7,
            num_chunks: parts.number,
            host_bytes: one.into(),
            disk_bytes: two.into(),
            num_in_use: 3,
            is_cut_short: one.is_multiple_of(2),
        }),
        10 => {
            let tiers = |nth: u8| Tiers { host: nth.is_multiple_of(2), disk: nth > 1, coming: nth == 3 };
            let rows = parts.keys.iter().zip(0..).map(|(key, nth)| (ChunkKey(*key), tiers(nth))).collect();
            Answer::Changes(Changes { rows, lost: two.is_multiple_of(2) })
        }
        _ => {
            let (connected_ms, num_reserved, num_leases) = (1, 2, parts.number);
            let counts = Counts([5, 4, 3, parts.number, 1, 0, 7]);
            let engine = EngineStatus { pid: one, connected_ms, num_reserved, num_leases, counts };
            let tenant = Tenant {
                tag: Some(SaltTag([7; 8])).filter(|_| one.is_multiple_of(2)),
                num_host: one,
                num_disk: two,
                max_host: Some(one).filter(|number| *number < u32::MAX),
                max_disk: None,
                ttl_s: Some(9),
            };
            let space = NamespaceStatus {
                namespace: parts.root,
                description: parts.text.clone(),
                frame_bytes: parts.number,
                num_slabs: two,
                stats: stats.clone(),
                tenants: vec![tenant; num_rows],
                engines: vec![engine; num_rows],
            };
            let settings = vec![(parts.text.clone(), "x".to_owned()); num_rows];
            let (slab_bytes, namespaces) = (parts.number, vec![space; num_rows]);
            Answer::Status(Status { host_bytes: 5, slab_bytes, stats, settings, namespaces })
        }
    }
}

/// The one message in `bytes`, without its length, which is right.
fn body(bytes: &[u8]) -> &[u8] {
    let (length, body) = bytes.split_first_chunk::<LENGTH_BYTES>().expect("a length");
    assert_eq!(u32::from_le_bytes(*length) as usize, body.len());
    body
}

/// A message cut off, and one with something behind it.
fn wrong(whole: &[u8], cut: prop::sample::Index, more: usize) -> [Vec<u8>; 2] {
    [whole[..cut.index(whole.len())].to_vec(), [whole, &vec![0; more]].concat()]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn requests_come_out_as_they_went_in(parts in parts(), number: u32) {
        let (request, mut bytes) = (request(&parts), Vec::new());
        request.encode(number, &mut bytes);
        prop_assert_eq!(Request::decode(body(&bytes)), Some((number, request)));
    }

    #[test]
    fn answers_come_out_as_they_went_in(parts in parts(), number: u32) {
        let (answer, mut bytes) = (answer(&parts), Vec::new());
        answer.encode(number, &mut bytes);
        prop_assert_eq!(Answer::decode(body(&bytes)), Some((number, answer)));
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_no_message(parts in parts(), cut: prop::sample::Index, more in 1..9_usize) {
        let mut bytes = Vec::new();
        request(&parts).encode(1, &mut bytes);
        for wrong in wrong(body(&bytes), cut, more) {
            prop_assert_eq!(Request::decode(&wrong), None);
        }
        bytes.clear();
        answer(&parts).encode(1, &mut bytes);
        for wrong in wrong(body(&bytes), cut, more) {
            prop_assert_eq!(Answer::decode(&wrong), None);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..200), kind in 0..26_u8) {
        let mut bytes = bytes;
        if let Some(at) = bytes.get_mut(4) {
            *at = kind;
        }
        let _none = Request::decode(&bytes);
        let _none = Answer::decode(&bytes);
    }
}

#[test]
fn counts_that_lie_take_no_memory() {
    for kind in 0..26 {
        let bytes = [[1, 0, 0, 0, kind].as_slice(), &[0xff; 64]].concat();
        assert_eq!(Answer::decode(&bytes), None, "kind {kind}");
    }
}

#[test]
fn more_prefixes_than_a_message_may_have_are_none() {
    for (num, is_message) in [(MAX_PREFIXES, true), (MAX_PREFIXES + 1, false)] {
        let all = vec![(ChunkKey::default(), Keys::Bytes(&[])); num as usize];
        let mut bytes = Vec::new();
        Request::Lookup(SentPrefixes { num_same: 0, all }).encode(1, &mut bytes);
        assert_eq!(Request::decode(body(&bytes)).is_some(), is_message);
    }
}
