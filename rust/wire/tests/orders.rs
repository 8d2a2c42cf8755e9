//! What a person has a server do: chunks of one tenant go, in every namespace and tier, while engines load and save.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    FRAME, LONG, accepted, found, refusal, remote_config, save, server_config, socket, stat, until, whole, with_disk,
};
use kvloft_core::ErrorKind;
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{DiskSettings, Prefix};
use kvloft_wire::{GivenUp, Pinned, Remote, RemoteConfig, Server, ServerConfig, Whose, evict, pin, status};

/// Orders come one behind the other, each by a connection of its own, and a server may see the end of one later.
fn serve(dir: &Path) -> Server {
    Server::open(ServerConfig { max_connections: 100, ..server_config(dir) }).expect("a server")
}

fn engine(dir: &Path, nth: u8) -> Remote {
    Remote::open(RemoteConfig { namespace: [nth; 32], ..remote_config(dir) }).expect("a client")
}

/// Six blocks of a tenant, with or without an adapter.
fn chain(namespace: u8, salt: Option<&str>, has_adapter: bool, seed: u32) -> KeyChain {
    let adapter = has_adapter.then_some(("lora", "/there"));
    let root = root_key(&[namespace; 32], adapter, salt).expect("short");
    let mut chain = KeyChain::new(root, 1).expect("a chain");
    chain.append_tokens(&(0..6).map(|at| seed * 10 + at).collect::<Vec<_>>()).expect("tokens");
    chain
}

fn whose(namespace: &str, salt: Option<&str>) -> Whose {
    Whose { namespace: namespace.to_owned(), salt: salt.map(SaltTag::of) }
}

#[test]
fn a_tenant_goes_from_every_namespace_and_no_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = DiskSettings { cap_bytes: 4 << 20, ..with_disk(dir.path()).disk.expect("a disk") };
    let config = || ServerConfig { disk: Some(disk.clone()), ..server_config(dir.path()) };
    let server = Server::open(config()).expect("a server");
    let socket = socket(dir.path());
    for nth in [1, 2] {
        let engine = engine(dir.path(), nth);
        for (salt, has_adapter) in [(None, false), (Some("a"), false), (Some("a"), true), (Some("b"), false)] {
            assert_eq!(save(&engine, &chain(nth, salt, has_adapter, 0)), 6);
        }
        assert!(engine.flush(LONG));
    }
    server.close(LONG);
    drop(server);
    // One is open now, the other on disk only.
    let server = Server::open(config()).expect("a server");
    let one = engine(dir.path(), 1);
    let error = evict(&socket, &whose("03", Some("a")), false, LONG).expect_err("there is none");
    assert!(error.kind() == ErrorKind::InvalidConfig && error.to_string().contains("no such namespace"), "{error}");
    let said = evict(&socket, &whose("", Some("a")), false, LONG).expect("done");
    let wanted = GivenUp { num_namespaces: 2, num_chunks: 24, disk_bytes: 24 * FRAME, ..GivenUp::default() };
    assert_eq!(said, wanted);
    let again = evict(&socket, &whose("", Some("a")), false, LONG).expect("done");
    assert_eq!(again, GivenUp { num_namespaces: 2, ..GivenUp::default() });
    let events = server.take_events().join("; ");
    assert!(events.contains("evicted in namespace 0101010101010101 and 1 on disk only"), "{events}");
    let other = engine(dir.path(), 2);
    for (engine, nth) in [(&one, 1), (&other, 2)] {
        let of = |salt, has_adapter| found(engine, &chain(nth, salt, has_adapter, 0));
        assert_eq!([of(None, false), of(Some("a"), false), of(Some("a"), true), of(Some("b"), false)], [6, 0, 0, 6]);
    }
}

#[test]
fn host_memory_alone_is_given_up_where_a_person_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let one = engine(dir.path(), 1);
    save(&one, &chain(1, Some("a"), false, 0));
    save(&one, &chain(1, None, false, 1));
    assert!(one.flush(LONG));
    let lease = one.acquire(Prefix::from(&chain(1, None, false, 1)));
    let said = evict(&socket(dir.path()), &whose("01", None), true, LONG).expect("done");
    let wanted =
        GivenUp { num_namespaces: 1, num_chunks: 6, host_bytes: 6 * FRAME, num_in_use: 6, ..GivenUp::default() };
    assert_eq!((said, one.frames(lease).len()), (wanted, 6), "what is loaded now stays");
    assert_eq!(stat(&server.status().namespaces[0].stats, "evicted"), 6);
    assert_eq!(found(&one, &chain(1, Some("a"), false, 0)), 6, "it is on disk");
}

#[test]
fn without_an_engine_there_is_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    assert_eq!(evict(&socket(dir.path()), &whose("", Some("a")), false, LONG).expect("done"), GivenUp::default());
}

/// Saves and loads until it is told to stop, and looks at every byte that it loads.
fn work(session: &Remote, salt: &str, is_over: &AtomicBool) -> u64 {
    let memory = File::options().read(true).write(true).open(&session.arena().expect("an arena").path).expect("memory");
    let mut num_loaded = 0;
    while !is_over.load(Ordering::Relaxed) {
        for chain in (0..4).map(|seed| chain(1, Some(salt), seed % 2 == 0, seed)) {
            let (rows, _) = session.reserve(Prefix::from(&chain), whole(6)).expect("in range");
            for row in &rows {
                let bytes = row.key.0.repeat(usize::try_from(FRAME / 32).expect("small"));
                memory.write_all_at(&bytes, u64::from(row.frame.0) * FRAME).expect("room");
            }
            session.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
            let lease = session.acquire(Prefix::from(&chain));
            for row in session.frames(lease) {
                let mut bytes = vec![0; usize::try_from(FRAME).expect("small")];
                memory.read_exact_at(&mut bytes, u64::from(row.frame.0) * FRAME).expect("room");
                assert!(bytes == row.key.0.repeat(bytes.len() / 32), "another's bytes in frame {}", row.frame.0);
                num_loaded += 1;
            }
            session.release(lease);
        }
    }
    num_loaded
}

#[test]
fn engines_load_and_save_while_their_tenant_is_evicted() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let is_over = AtomicBool::new(false);
    let engines = [engine(dir.path(), 1), engine(dir.path(), 1)];
    let num_loaded: u64 = std::thread::scope(|scope| {
        let workers = engines.each_ref().map(|engine| scope.spawn(|| work(engine, "a", &is_over)));
        let mut num_evicted = [0, 0];
        until("both ways were gone often", || {
            for (num_evicted, is_host_only) in num_evicted.iter_mut().zip([false, true]) {
                let said = evict(&socket(dir.path()), &whose("", Some("a")), is_host_only, LONG).expect("done");
                *num_evicted += u32::from(said.num_chunks > 0);
            }
            num_evicted.iter().all(|num| *num > 20)
        });
        is_over.store(true, Ordering::Relaxed);
        workers.into_iter().map(|worker| worker.join().expect("no wrong byte")).sum()
    });
    assert!(num_loaded > 0);
    assert!(!evict(&socket(dir.path()), &whose("", Some("a")), false, LONG).expect("done").is_cut_short);
    assert!((0..4).all(|seed| found(&engines[0], &chain(1, Some("a"), seed % 2 == 0, seed)) == 0));
    drop(engines);
    server.close(LONG);
    assert_eq!(server.take_events().iter().filter(|event| event.contains("fail")).count(), 0);
}

/// Enough of others to fill the memory more than once.
fn press(engine: &Remote, nth: u8) {
    for seed in 100..140 {
        save(engine, &chain(nth, None, false, seed));
    }
}

#[test]
fn a_pinned_tenant_outlasts_others_and_is_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let socket = socket(dir.path());
    let error = pin(&socket, &whose("", Some("a")), true, LONG).expect_err("nothing is open");
    assert!(
        error.kind() == ErrorKind::InvalidConfig && error.to_string().contains("nothing can be pinned yet"),
        "{error}"
    );
    let one = engine(dir.path(), 1);
    save(&one, &chain(1, Some("a"), false, 0));
    let said = pin(&socket, &whose("", Some("a")), true, LONG).expect("done");
    assert_eq!(said, Pinned { num_namespaces: 1, num_salts: 1, host_bytes: 6 * FRAME, disk_bytes: 0, num_changed: 1 });
    save(&one, &chain(1, Some("a"), true, 1));
    press(&one, 1);
    assert_eq!([(false, 0), (true, 1)].map(|(lora, seed)| found(&one, &chain(1, Some("a"), lora, seed))), [6, 6]);
    let stats = &server.status().namespaces[0].stats;
    assert_eq!(["pinned", "kept_salts", "kept_host", "kept_disk"].map(|name| stat(stats, name)), [1, 1, 12, 0]);
    assert_eq!(pin(&socket, &whose("01", Some("a")), false, LONG).expect("done").num_salts, 0);
    press(&one, 1);
    assert_eq!(found(&one, &chain(1, Some("a"), false, 0)), 0);
    assert_eq!(stat(&server.status().namespaces[0].stats, "pinned"), 0);
    let events = server.take_events().join("; ");
    assert!(events.contains("pinned in namespace 01") && events.contains("unpinned in namespace 01"), "{events}");
}

#[test]
fn a_pinned_namespace_keeps_its_share_when_its_engines_are_gone() {
    for (salt, off) in [(None, None), (Some("a"), None), (Some("a"), Some("a"))] {
        let dir = tempfile::tempdir().expect("a directory");
        let server = serve(dir.path());
        let socket = socket(dir.path());
        let one = engine(dir.path(), 1);
        pin(&socket, &whose("01", salt), true, LONG).expect("done");
        press(&one, 1);
        drop(one);
        until("it is gone", || server.status().engines().count() == 0);
        let (num_slabs, other) = (|nth: u8| slabs(&server, nth), engine(dir.path(), 2));
        until("the other has its half", || {
            press(&other, 2);
            num_slabs(2) == 8
        });
        (0..5).for_each(|_| press(&other, 2));
        assert_eq!((num_slabs(1), num_slabs(2)), (8, 8), "and no more");
        pin(&socket, &whose("01", off), false, LONG).expect("done");
        until("the other has all", || {
            press(&other, 2);
            num_slabs(1) == 0
        });
    }
}

#[test]
fn a_pin_says_what_there_is_of_its_own_salt() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let (socket, one) = (socket(dir.path()), engine(dir.path(), 1));
    save(&one, &chain(1, Some("a"), false, 0));
    let told = |salt, is_pinned| pin(&socket, &whose("", salt), is_pinned, LONG).expect("done");
    let of_one = Pinned { num_namespaces: 1, num_salts: 1, host_bytes: 6 * FRAME, disk_bytes: 0, num_changed: 1 };
    assert_eq!(told(Some("a"), true), of_one);
    assert_eq!(told(Some("unused"), true), Pinned { host_bytes: 0, ..of_one });
    assert_eq!(told(None, true), Pinned { num_salts: 2, ..of_one }, "without a salt, of all");
    assert_eq!(told(Some("a"), false), Pinned { num_namespaces: 1, num_changed: 1, ..Pinned::default() });
}

#[test]
fn a_pin_says_in_how_many_namespaces_it_changes_something() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let (socket, _one) = (socket(dir.path()), engine(dir.path(), 1));
    let changed = |salt, is_pinned| pin(&socket, &whose("", salt), is_pinned, LONG).expect("done").num_changed;
    let twice = |salt, is_pinned| [changed(salt, is_pinned), changed(salt, is_pinned)];
    assert_eq!(twice(Some("a"), false), [0, 0], "it never was");
    assert_eq!(twice(Some("a"), true), [1, 0]);
    assert_eq!(twice(None, true), [1, 0], "the namespace itself was not, only a salt of it");
    assert_eq!(twice(None, false), [1, 0], "of both");
    assert_eq!(changed(Some("a"), false), 0, "it went with everything");
    assert_eq!((changed(Some("a"), true), twice(None, false)), (1, [1, 0]), "of a salt alone");
    let _other = engine(dir.path(), 2);
    pin(&socket, &whose("01", None), true, LONG).expect("done");
    assert_eq!(changed(None, true), 1, "the other one");
}

#[test]
fn a_log_names_the_tag_and_the_namespaces_of_an_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let (socket, one, _other) = (socket(dir.path()), engine(dir.path(), 1), engine(dir.path(), 2));
    save(&one, &chain(1, Some("a"), false, 0));
    let _before = server.take_events();
    let said = || server.take_events().join("; ");
    let tag = format!("{:016x}", u64::from_be_bytes(SaltTag::of("a").0));
    let (first, second) = ("0101010101010101", "0202020202020202");
    pin(&socket, &whose("01", Some("a")), true, LONG).expect("done");
    assert_eq!(said(), format!("kvloft pin: the salt with tag {tag} pinned in namespace {first}"));
    pin(&socket, &whose("", None), false, LONG).expect("done");
    assert_eq!(said(), format!("kvloft pin: everything unpinned in namespaces {first}, {second}"));
    pin(&socket, &whose("01", Some("a")), false, LONG).expect("done");
    assert_eq!(said(), format!("kvloft pin: the salt with tag {tag} was not pinned in namespace {first}"));
    pin(&socket, &whose("02", None), true, LONG).expect("done");
    assert_eq!(said(), format!("kvloft pin: share of host memory pinned in namespace {second}"));
    evict(&socket, &whose("", Some("a")), false, LONG).expect("done");
    assert_eq!(
        said(),
        format!("kvloft evict: 6 chunks of the salt with tag {tag} evicted in namespaces {first}, {second}")
    );
    evict(&socket, &whose("01", None), true, LONG).expect("done");
    assert_eq!(said(), format!("kvloft evict: 0 chunks of everything evicted from host memory in namespace {first}"));
}

#[test]
fn a_pin_before_the_first_engine_says_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let socket = socket(dir.path());
    let said = |namespace| pin(&socket, &whose(namespace, Some("a")), true, LONG).expect_err("none").to_string();
    for namespace in ["", "01"] {
        assert!(said(namespace).contains("engines open them, so connect one and run this again"));
    }
    let _one = engine(dir.path(), 1);
    assert!(said("02").contains("say --namespace with one of its own: 0101010101010101"));
}

#[test]
fn a_pinned_namespace_says_what_to_do_for_engines_of_another_shape() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let socket = socket(dir.path());
    let refused = || {
        let other = RemoteConfig { namespace: [1; 32], frame_bytes: 2 * FRAME, ..remote_config(dir.path()) };
        refusal(other)
    };
    let one = engine(dir.path(), 1);
    pin(&socket, &whose("01", None), true, LONG).expect("done");
    assert!(
        refused().contains("engines of namespace 0101010101010101 on this kvloft server have chunks of 4096 bytes")
    );
    drop(one);
    until("it is gone", || server.status().engines().count() == 0);
    let said = refused();
    assert!(
        said.contains("namespace 0101010101010101 is pinned") && said.contains("`kvloft pin --namespace"),
        "{said}"
    );
    pin(&socket, &whose("01", None), false, LONG).expect("done");
    let other = RemoteConfig { namespace: [1; 32], frame_bytes: 2 * FRAME, ..remote_config(dir.path()) };
    accepted(other).expect("its memory is others' again");
}

#[test]
fn who_only_looks_is_no_accepted_connection() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let num = |name: &str| stat(&status(&socket(dir.path()), LONG).expect("a server").stats, name);
    let accepted = || num("server_accepted");
    assert_eq!([accepted(), accepted()], [0, 0]);
    let _one = engine(dir.path(), 1);
    assert_eq!(accepted(), 1);
    evict(&socket(dir.path()), &whose("", Some("a")), false, LONG).expect("done");
    assert_eq!((accepted(), stat(&server.status().stats, "server_accepted")), (2, 2));
    assert_eq!(num("server_joined"), 1, "a person is no engine");
}

fn slabs(server: &Server, nth: u8) -> u32 {
    let spaces = server.status().namespaces;
    spaces.iter().find(|space| space.namespace == [nth; 32]).map_or(0, |space| space.num_slabs)
}
