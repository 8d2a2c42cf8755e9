//! Tests that messages round-trip and that malformed bytes are rejected.

use kvloft_core::ChunkKey;
use kvloft_core::io::FrameId;
use kvloft_core::io::SizeClass;
use kvloft_core::key::SaltTag;
use kvloft_core::store::{
    Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation, Reserved, Tenant, TierName, Tiers,
};
use kvloft_wire::protocol::admin::{
    AdminRequest, EngineStatus, EvictRequest, RefusalStatus, Stats,
};
use kvloft_wire::protocol::{
    Hello, Keys, LENGTH_BYTES, MAX_HELLO, MAX_PREFIXES, Request, Response, SentAnchors,
    SentChanges, SentPrefixes, SentRange, VERSION, Welcome,
};
use kvloft_wire::{NamespaceStatus, Status};
use proptest::collection::vec;
use proptest::prelude::*;

/// Owned values for a request that borrows them.
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
    let fields = (
        1..=19_u8,
        any::<u64>(),
        any::<[u8; 32]>(),
        vec(any::<[u8; 32]>(), 0..5),
        vec(any::<u64>(), 0..5),
    );
    (fields, any::<[u32; 4]>(), ".{0,9}").prop_map(
        |((kind, number, root, keys, numbers), small, text)| Parts {
            kind,
            number,
            root,
            keys,
            numbers,
            small,
            text,
        },
    )
}

fn request(parts: &Parts) -> Request<'_> {
    let keys = Keys::Bytes(&parts.keys);
    // Some root keys repeat; others do not.
    let roots = || parts.numbers.iter().map(|number| ChunkKey([number.to_le_bytes()[0] % 2; 32]));
    let all = roots()
        .zip(0..)
        .map(|(root, nth)| (root, Keys::Bytes(&parts.keys[..parts.keys.len().min(nth)])))
        .collect();
    let prefixes = SentPrefixes { num_same: parts.small[0], all };
    let units = parts.small[1]..parts.small[2];
    match parts.kind {
        1 => Request::Hello(Hello {
            version: VERSION,
            namespace: parts.root,
            frame_sizes: vec![parts.number, 4096].into(),
            description: parts.text.clone(),
        }),
        2 => {
            if prefixes.num_same.is_multiple_of(2) {
                Request::Lookup(prefixes)
            } else {
                Request::LookupForSave(prefixes)
            }
        }
        3 => Request::Acquire(parts.number, prefixes),
        4 => Request::Poll(parts.number),
        5 => Request::Frames(parts.number),
        6 => Request::Release(parts.number),
        7 => {
            let ranges = roots().map(|root| SentRange {
                root,
                first: parts.small[0],
                keys,
                units: units.clone(),
                class: SizeClass(root.0[0] % 16),
                is_independent: root.0[0] == 1,
            });
            Request::Reserve(ranges.collect())
        }
        8 => Request::Commit(parts.numbers.clone()),
        9 => Request::Abort(parts.numbers.clone()),
        10 => Request::Discard(keys),
        11 => Request::Clear,
        12 => Request::Stats(parts.number, 2),
        13 => Request::LimitMemory(parts.number),
        14 => Request::IsSettled,
        15 => Request::Bye,
        16 => Request::Admin(parts.small[0], parts.text.as_bytes()),
        18 => Request::Anchors(SentAnchors { stride: parts.small[0], last: parts.small[1], keys }),
        _ => Request::Changes(SentChanges {
            capacity: parts.small[0],
            limit: parts.small[1],
            asked: keys,
        }),
    }
}

fn response(parts: &Parts) -> Response {
    let [one, two, ..] = parts.small;
    let key = ChunkKey(parts.root);
    let tier = if two.is_multiple_of(2) { TierName::Host } else { TierName::Disk };
    let leased = LeasedFrame { frame: FrameId(one), key, tier };
    let row = Reservation { ticket: parts.number, frame: FrameId(one), key, unit: two };
    let stats: Vec<_> = parts.numbers.iter().map(|number| (parts.text.clone(), *number)).collect();
    let num_rows = parts.numbers.len();
    match parts.kind {
        1 => Response::Welcome(Welcome { size_bytes: one.into(), slab_bytes: two.into() }),
        2 => Response::Refused(parts.text.clone()),
        3 => Response::Found(vec![Lookup { host_units: one, stored_units: two }; num_rows]),
        4 => Response::Progress(Progress { ready_units: one, pending_units: two }),
        5 => Response::Frames(vec![leased; num_rows]),
        6 => {
            let range = |nth| Reserved { num_dropped: one, chunks: vec![row; nth] };
            Response::Reserved((0..num_rows).map(range).collect())
        }
        7 => Response::Count(parts.number),
        8 => Response::Stats(stats),
        9 => Response::Anchors(Anchors { num_known: one, num_stored: two }),
        10 => {
            let tiers =
                |nth: u8| Tiers { host: nth.is_multiple_of(2), disk: nth > 1, pending: nth == 3 };
            let rows =
                parts.keys.iter().zip(0..).map(|(key, nth)| (ChunkKey(*key), tiers(nth))).collect();
            Response::Changes(Changes { rows, lost: two.is_multiple_of(2) })
        }
        _ => Response::Admin(parts.text.clone().into_bytes()),
    }
}

fn admin_request(parts: &Parts) -> AdminRequest {
    let namespace = parts.text.clone();
    let tenant = parts.numbers.first().map(|number| SaltTag(number.to_le_bytes()));
    match parts.kind % 3 {
        0 => AdminRequest::Status,
        1 => AdminRequest::Clear { namespace },
        _ => AdminRequest::Evict(EvictRequest {
            namespace,
            tenant,
            host_only: parts.small[1].is_multiple_of(2),
        }),
    }
}

fn status(parts: &Parts) -> Status {
    let ([one, two, ..], num_rows) = (parts.small, parts.numbers.len());
    let stats: Stats =
        parts.numbers.iter().map(|number| (format!("{}{number}", parts.text), *number)).collect();
    let (connected_ms, num_reserved, num_leases) = (1, 2, parts.number);
    let engine =
        EngineStatus { pid: one, connected_ms, num_reserved, num_leases, counters: stats.clone() };
    let tenant = Tenant {
        tag: Some(SaltTag([7; 8])).filter(|_| one.is_multiple_of(2)),
        host_bytes: one.into(),
        disk_bytes: two.into(),
        max_host_bytes: Some(one.into()),
        max_disk_bytes: None,
        ttl_s: Some(9),
    };
    let namespace = NamespaceStatus {
        namespace: parts.root,
        description: parts.text.clone(),
        frame_sizes: vec![parts.number, 4096],
        num_slabs: two,
        stats: stats.clone(),
        tenants: vec![tenant; num_rows],
        engines: vec![engine; num_rows],
    };
    let refusal = RefusalStatus {
        namespace: parts.text.clone(),
        count: parts.number,
        reason: parts.text.clone(),
    };
    let settings = [(parts.text.clone(), "x".to_owned())].into();
    Status {
        host_bytes: 5,
        slab_bytes: parts.number,
        stats,
        settings,
        namespaces: vec![namespace; num_rows],
        refusals: vec![refusal; num_rows],
        disk_trouble: Some(parts.text.clone()),
    }
}

/// Checks a message's length prefix and returns the bytes after it.
fn body(bytes: &[u8]) -> &[u8] {
    let (length, body) = bytes.split_first_chunk::<LENGTH_BYTES>().expect("a length");
    assert_eq!(u32::from_le_bytes(*length) as usize, body.len());
    body
}

/// Returns a truncated copy and an extended copy of a message.
fn wrong(whole: &[u8], cut: prop::sample::Index, more: usize) -> [Vec<u8>; 2] {
    [whole[..cut.index(whole.len())].to_vec(), [whole, &vec![0; more]].concat()]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn requests_round_trip(parts in parts(), number: u32) {
        let (request, mut bytes) = (request(&parts), Vec::new());
        request.encode(number, &mut bytes);
        prop_assert_eq!(Request::decode(body(&bytes)), Some((number, request)));
    }

    #[test]
    fn responses_round_trip(parts in parts(), number: u32) {
        let (response, mut bytes) = (response(&parts), Vec::new());
        response.encode(number, &mut bytes);
        prop_assert_eq!(Response::decode(body(&bytes)), Some((number, response)));
    }

    #[test]
    fn admin_messages_round_trip(parts in parts()) {
        let (request, status) = (admin_request(&parts), status(&parts));
        let json = serde_json::to_vec(&request).expect("JSON");
        prop_assert_eq!(AdminRequest::parse(&json), Some(request));
        let json = serde_json::to_vec(&status).expect("JSON");
        prop_assert_eq!(serde_json::from_slice::<Status>(&json).expect("a status"), status);
    }

    #[test]
    fn malformed_admin_requests_are_rejected(parts in parts(), cut: prop::sample::Index, bytes in vec(any::<u8>(), 0..99)) {
        let json = serde_json::to_vec(&admin_request(&parts)).expect("JSON");
        prop_assert_eq!(AdminRequest::parse(&json[..cut.index(json.len())]), None);
        prop_assert_eq!(AdminRequest::parse(&[json.as_slice(), b"x"].concat()), None);
        let _none = AdminRequest::parse(&bytes);
    }

    #[test]
    fn truncated_and_extended_messages_are_rejected(parts in parts(), cut: prop::sample::Index, more in 1..9_usize) {
        let mut bytes = Vec::new();
        request(&parts).encode(1, &mut bytes);
        for wrong in wrong(body(&bytes), cut, more) {
            prop_assert_eq!(Request::decode(&wrong), None);
        }
        bytes.clear();
        response(&parts).encode(1, &mut bytes);
        for wrong in wrong(body(&bytes), cut, more) {
            prop_assert_eq!(Response::decode(&wrong), None);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..200), kind in 0..26_u8) {
        let mut bytes = bytes;
        if let Some(at) = bytes.get_mut(4) {
            *at = kind;
        }
        let _none = Request::decode(&bytes);
        let _none = Response::decode(&bytes);
    }
}

#[test]
fn false_counts_allocate_no_memory() {
    for kind in 0..26 {
        let bytes = [[1, 0, 0, 0, kind].as_slice(), &[0xff; 64]].concat();
        assert_eq!(Response::decode(&bytes), None, "kind {kind}");
    }
}

#[test]
fn number_of_prefixes_is_bounded() {
    for (num, is_message) in [(MAX_PREFIXES, true), (MAX_PREFIXES + 1, false)] {
        let all = vec![(ChunkKey::default(), Keys::Bytes(&[])); num as usize];
        let mut bytes = Vec::new();
        Request::Lookup(SentPrefixes { num_same: 0, all }).encode(1, &mut bytes);
        assert_eq!(Request::decode(body(&bytes)).is_some(), is_message);
    }
}

#[test]
fn admin_requests_are_bounded_and_have_no_unknown_fields() {
    let padded = |num: usize| [br#""status""#.as_slice(), &vec![b' '; num]].concat();
    assert_eq!(AdminRequest::parse(&padded(MAX_HELLO - 8)), Some(AdminRequest::Status));
    assert_eq!(AdminRequest::parse(&padded(MAX_HELLO - 7)), None, "too long");
    let evict = |tenant: &str| {
        format!(r#"{{"evict":{{"namespace":"","tenant":{tenant},"host_only":false}}}}"#)
    };
    assert!(AdminRequest::parse(evict("null").as_bytes()).is_some());
    assert!(AdminRequest::parse(evict(r#""00000000000000ff""#).as_bytes()).is_some());
    for tenant in
        [r#""ff""#, r#""+0000000000000ff""#, r#""00000000000000FF""#, "255", r#"null,"salt":"a""#]
    {
        assert_eq!(AdminRequest::parse(evict(tenant).as_bytes()), None, "{tenant}");
    }
    assert_eq!(AdminRequest::parse("[".repeat(MAX_HELLO).as_bytes()), None, "deeply nested");
}
