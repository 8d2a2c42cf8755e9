//! Tests a real `kill -9` (I3): a child process writes and frees chunks in a loop and is killed at
//! a random moment. The next open must find only complete chunks, and must find all chunks that the
//! child reported. Half of the children run a whole store that saves and evicts chunks.
//!
//! `KV_KILLS` is the number of kills (default 50). A line of JSON reports the recovery times.

#![expect(clippy::unwrap_used, reason = "test helpers panic to fail")]

use kvloft_core::io::SizeClass;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::root_key;
use kvloft_core::store::{DiskSettings, Store, StoreConfig};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskConfig, DiskMeta, DiskTier, SlotId};
use kvloft_core::{ChunkKey, KeyChain};
use kvloft_testing::PageBuffer;
use kvloft_testing::faults::blocks;
use kvloft_testing::one_prefix::StoreExt;

const DIR_VARIABLE: &str = "KVLOFT_TEST_KILL_DIR";
const LIFE_VARIABLE: &str = "KVLOFT_TEST_KILL_LIFE";
/// Frame sizes in bytes, by size class. `save` uses only the first size.
const SIZES: [u64; 3] = [40960, 4096, 12288];
const FRAME: usize = 40960;
const CAP: u64 = 16 << 20;

fn config(dir: &Path) -> DiskConfig {
    DiskConfig {
        dir: dir.to_owned(),
        cap_bytes: CAP,
        frame_sizes: SIZES.to_vec().into(),
        namespace: [7; 32],
        description: "kill test".to_owned(),
    }
}

fn key(life: u64, n: u64) -> ChunkKey {
    ChunkKey(*blake3::hash(&[life.to_le_bytes(), n.to_le_bytes()].concat()).as_bytes())
}

/// Returns the metadata of chunk `n` of child `life`. Chunks form chains of four.
fn meta(life: u64, n: u64) -> DiskMeta {
    let depth = u32::try_from(n % 4).unwrap();
    let parent = if depth == 0 { ChunkKey([0; 32]) } else { key(life, n - 1) };
    DiskMeta { key: key(life, n), parent, depth, saved_s: 0 }
}

fn fill(frame: &mut [u8], key: &ChunkKey) {
    blake3::Hasher::new_keyed(&key.0).finalize_xof().fill(frame);
}

fn buffer(frame_bytes: u64) -> PageBuffer {
    PageBuffer::new(usize::try_from(frame_bytes).unwrap())
}

/// Runs a child until the parent kills it. Prints "w N" after each successful write and "f N"
/// before each free.
fn live(dir: &Path, life: u64) {
    let (tier, _) = DiskTier::open(config(dir)).unwrap();
    tier.clear().unwrap();
    let mut frames = SIZES.map(buffer);
    let mut out = std::io::stdout().lock();
    let mut chains: VecDeque<Vec<(u64, SlotId)>> = VecDeque::new();
    writeln!(out, "ready").unwrap();
    for n in 0.. {
        let class = SizeClass(u8::try_from(n % 3).unwrap());
        let frame = &mut frames[class.index()];
        let slot = loop {
            if let Ok(slot) = tier.reserve(class) {
                break slot;
            }
            // Free the oldest chain, deepest chunk first.
            for (n, slot) in chains.pop_front().unwrap().into_iter().rev() {
                writeln!(out, "f {n}").unwrap();
                tier.free(slot).unwrap();
            }
        };
        let meta = meta(life, n);
        fill(frame, &meta.key);
        tier.write(slot, &meta, frame).unwrap();
        writeln!(out, "w {n}").unwrap();
        if n % 4 == 0 {
            chains.push_back(Vec::new());
        }
        chains.back_mut().unwrap().push((n, slot));
    }
}

fn store_config(dir: &Path) -> StoreConfig {
    let DiskConfig { dir, cap_bytes, frame_sizes, namespace, description } = config(dir);
    let host_bytes = 256 * frame_sizes.largest();
    let disk = Some(DiskSettings { dir, cap_bytes, num_threads: 3, description });
    StoreConfig {
        frame_sizes,
        host_bytes,
        eviction: Eviction::default(),
        available_bytes: None,
        namespace,
        disk,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    }
}

/// Runs the other kind of child: saves prompts of eight chunks as fast as possible, so that older
/// chunks are evicted.
fn save(dir: &Path, life: u64) {
    let store = Store::open(&store_config(dir)).unwrap();
    let arena = File::options().write(true).open(&store.arena().path).unwrap();
    let grid = store.arena().grid(FRAME as u64).unwrap();
    let mut frame = vec![0; FRAME];
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready").unwrap();
    for n in 0_u32.. {
        let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
        let tokens = (0..8).map(|at| n * 8 + at + u32::try_from(life).unwrap() * 1_000_000);
        chain.append_tokens(&tokens.collect::<Vec<_>>()).unwrap();
        let reserved = store.reserve(&chain, 0..8).unwrap();
        for lease in &reserved.chunks {
            fill(&mut frame, &lease.reservation().key);
            arena.write_all_at(&frame, grid.start(lease.reservation().frame.number())).unwrap();
        }
        store.commit(reserved.chunks);
        store.flush(Duration::from_millis(1));
    }
}

fn spawn(dir: &Path, life: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(DIR_VARIABLE, dir)
        .env(LIFE_VARIABLE, life.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Starts a child and kills it after a while. Returns, for each chunk number, whether the chunk
/// must be present. A chunk need not be present if the child had started to free it.
fn live_and_die(dir: &Path, life: u64) -> BTreeMap<u64, bool> {
    let mut child = spawn(dir, life);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    while !first.ends_with("ready\n") {
        first.clear();
        assert_ne!(out.read_line(&mut first).unwrap(), 0, "the child exited on its own");
    }
    // Kill times are spread over many writes. The pipe holds thousands of lines, so the child never
    // blocks on its output.
    std::thread::sleep(Duration::from_micros(life * 7919 % 60_000));
    child.kill().unwrap();
    child.wait().unwrap();
    let mut text = String::new();
    out.read_to_string(&mut text).unwrap();
    // A line truncated by the kill has no newline and is ignored.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(what, n)| (n.parse().unwrap(), what == "w"))
        .collect()
}

#[test]
fn child() {
    // The test below runs this test in a child process with these environment variables set.
    // Otherwise, this test does nothing.
    if let (Ok(dir), Ok(life)) = (std::env::var(DIR_VARIABLE), std::env::var(LIFE_VARIABLE)) {
        let (dir, life) = (Path::new(&dir), life.parse().unwrap());
        if life % 2 == 0 { live(dir, life) } else { save(dir, life) }
    }
}

/// Opens the tier, compares every chunk found with its expected bytes, and returns the keys.
fn recovered(dir: &Path, life: u64) -> Vec<ChunkKey> {
    let (tier, found) = DiskTier::open(config(dir)).unwrap();
    let stats = tier.stats();
    assert!(stats.bytes <= CAP && blocks(dir) <= CAP, "life {life}: {stats:?}");
    for entry in &found {
        let frame_bytes = SIZES[entry.slot.class().index()];
        let (mut bytes, mut expected) = (buffer(frame_bytes), buffer(frame_bytes));
        tier.read(entry.slot, &entry.meta.key, &mut bytes).expect("a visible chunk is complete");
        fill(&mut expected, &entry.meta.key);
        assert!(
            *bytes == *expected,
            "life {life}: slot {} holds another chunk's bytes",
            entry.slot.0
        );
    }
    found.into_iter().map(|entry| entry.meta.key).collect()
}

#[test]
fn test_kill_9_at_random_times_loses_no_acknowledged_chunk() {
    // The number is read from an environment variable, because tests take no arguments.
    let lives: u64 = std::env::var("KV_KILLS").map_or(50, |text| text.parse().expect("a number"));
    let dir = tempfile::tempdir().unwrap();
    let (mut written, mut compared, mut recoveries) = (0, 0, Vec::new());
    for life in 0..lives {
        let chunks = live_and_die(dir.path(), life);
        written += chunks.len();
        let start = Instant::now();
        let store = Store::open(&store_config(dir.path())).unwrap();
        recoveries.push(start.elapsed());
        store.check().unwrap();
        drop(store);
        let found: std::collections::HashSet<_> = recovered(dir.path(), life).into_iter().collect();
        compared += found.len();
        for (n, must_be_there) in chunks {
            let is_there = found.contains(&key(life, n));
            assert!(
                is_there || !must_be_there,
                "life {life}: chunk {n} was reported as written but was lost"
            );
        }
    }
    recoveries.sort();
    let (median, worst) = (recoveries[recoveries.len() / 2], recoveries[recoveries.len() - 1]);
    // Bypass the test harness, which hides the output of passing tests.
    let line = format!(
        "{{\"kills\": {lives}, \"chunks_compared\": {compared}, \"wrong_bytes\": 0, \"recovery_median_ms\": {:.2}, \
         \"recovery_worst_ms\": {:.2}}}",
        median.as_secs_f64() * 1e3,
        worst.as_secs_f64() * 1e3
    );
    writeln!(std::io::stderr(), "{line}").unwrap();
    assert!(written > 0 && compared > 0, "no child lived long enough to write");
}
