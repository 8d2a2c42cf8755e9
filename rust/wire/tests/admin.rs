//! What a person has a server do: chunks of one tenant go, in every namespace and tier, while engines load and save.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{FRAME, LONG, found, remote_config, save, server_config, socket, stat, until, whole, with_disk};
use kvloft_core::ErrorKind;
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{DiskSettings, Prefix};
use kvloft_wire::{GivenUp, Remote, RemoteConfig, Server, ServerConfig, Whose, evict, status};

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
    evict(&socket, &whose("", Some("a")), false, LONG).expect("done");
    assert_eq!(
        said(),
        format!("kvloft evict: 6 chunks of the salt with tag {tag} evicted in namespaces {first}, {second}")
    );
    evict(&socket, &whose("01", None), true, LONG).expect("done");
    assert_eq!(said(), format!("kvloft evict: 0 chunks of everything evicted from host memory in namespace {first}"));
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
