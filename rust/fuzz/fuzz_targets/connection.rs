//! Sends arbitrary bytes to a running server, both raw and after a hello. The server must keep
//! running and serve another engine.
#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::session::Session;
use kvloft_core::store::Prefix;
use kvloft_core::{ChunkKey, KeyChain};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::protocol::{Hello, Request, VERSION};
use kvloft_wire::{Client, ClientConfig, Server, ServerConfig};

const FRAME_BYTES: u64 = 4096;
const NAMESPACE: [u8; 32] = [7; 32];

struct Rig {
    _dir: tempfile::TempDir,
    _server: Server,
    engine: Client,
    chain: KeyChain,
    socket: std::path::PathBuf,
}

fn rig() -> &'static Rig {
    static RIG: OnceLock<Rig> = OnceLock::new();
    RIG.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("kvloft.sock");
        let (eviction, gpu_settle) = (Eviction::Lru, Duration::ZERO);
        let config = ServerConfig { eviction, gpu_settle, ..ServerConfig::new(socket.clone(), 64 * FRAME_BYTES) };
        let server = Server::open(config).expect("a server");
        let (namespace, description) = (NAMESPACE, String::new());
        let deadline = Duration::from_secs(60);
        let remote =
            ClientConfig { socket: socket.clone(), deadline, namespace, frame_sizes: FRAME_BYTES.into(), description };
        let engine = Client::open(remote).expect("a client");
        let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
        chain.append_tokens(&[1, 2, 3]).expect("tokens");
        let (rows, _) =
            engine.reserve(Prefix::from(&chain), 0..3).expect("in range");
        engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
        let _pinned = engine.acquire(Prefix::from(&chain));
        Rig { _dir: dir, _server: server, engine, chain, socket }
    })
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let rig = rig();
    let mut hello = Vec::new();
    let namespace = NAMESPACE;
    let fields = Hello { version: VERSION, namespace, frame_sizes: FRAME_BYTES.into(), description: String::new() };
    Request::Hello(fields).encode(1, &mut hello);
    // Sends the bytes once raw and once as the body of a message.
    let framed = [&u32::try_from(data.len()).expect("short").to_le_bytes()[..], data].concat();
    for bytes in [data.to_vec(), [&hello[..], &framed].concat()] {
        let mut stream = UnixStream::connect(&rig.socket).expect("a server");
        let _refused = stream.write_all(&bytes).and_then(|()| stream.shutdown(Shutdown::Write));
        let _responses = stream.read_to_end(&mut Vec::new());
    }
    // The bytes may have cleared the store or discarded chunks, so save the chunks again.
    let found = rig.engine.lookup(Prefix::from(&rig.chain)).host_units;
    assert!(found <= 3);
    if found < 3 {
        let range = 0..3;
        let (rows, _) = rig.engine.reserve(Prefix::from(&rig.chain), range).expect("in range");
        rig.engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
    }
});
