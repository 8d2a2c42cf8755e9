//! Compares the disk tier with `fio`, and measures the time it takes to open a directory with a
//! million chunks.
//!
//! fio uses the same file system, block size, number of threads and I/O mode (direct or buffered).
//! Files are created in the target directory or in the directory given by `--dir`, and are removed
//! afterwards. The targets are at least 90% of fio's rate, and at most 1 s to open the directory.
#![expect(clippy::unwrap_used, reason = "a bench that cannot run stops with the reason")]

use kvloft_core::io::SizeClass;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvloft_core::ChunkKey;
use kvloft_core::evict::Eviction;
use kvloft_core::store::{DiskSettings, Store, StoreConfig};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskConfig, DiskMeta, DiskTier, SlotId};
use kvloft_testing::PageBuffer;
use twox_hash::XxHash3_64;

use crate::table::title;

const FILE_BYTES: u64 = 256 << 20;
const SLICE: Duration = Duration::from_millis(350);
/// Number of runs from which each median is computed. The tier and fio take turns, so that other
/// load on the machine affects both.
const ROUNDS: usize = 5;
const CHUNKS: u32 = 1_000_000;
const NAMESPACE: [u8; 32] = [0x42; 32];

#[derive(Clone, Copy, PartialEq)]
enum Verb {
    Write,
    Read,
}

pub(crate) fn run(chosen: Option<PathBuf>) {
    let parent = chosen.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    let dir = tempfile::Builder::new().prefix("kvloft-bench-").tempdir_in(&parent).unwrap();
    let has_fio =
        Command::new("fio").arg("--version").output().is_ok_and(|out| out.status.success());
    title(&format!("Disk tier in {}", parent.display()));
    if !has_fio {
        println!("skipping the comparison with fio: it is not installed (apt-get install fio)");
    }
    println!(
        "{:>8} {:>7} {:>6} {:>11} {:>9} {:>6}",
        "frame", "threads", "", "kvloft GB/s", "fio GB/s", "ratio"
    );
    let mut ratios = Vec::new();
    for frame_kib in [64, 512, 2048] {
        ratios.extend(measure_frame_size(dir.path(), frame_kib * 1024, has_fio));
    }
    if let Some(mean) = geometric_mean(&ratios) {
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        println!("ratio to fio: mean {mean:.2}, minimum {least:.2} (target 0.90)");
    }
    measure_open(dir.path());
}

fn measure_frame_size(dir: &Path, frame_bytes: u64, has_fio: bool) -> Vec<f64> {
    let dir = dir.join(frame_bytes.to_string());
    let config = config(&dir, frame_bytes, FILE_BYTES + (1 << 20));
    let (tier, _) = DiskTier::open(config).unwrap();
    let mut slots = Vec::new();
    let frame = PageBuffer::new(frame_bytes.try_into().unwrap());
    while let Ok(slot) = tier.reserve(SizeClass(0)) {
        tier.write(slot, &meta(slot.0), &frame).unwrap();
        slots.push(slot);
    }
    let file = dir.join("fio.dat");
    fs::write(&file, vec![1; usize::try_from(FILE_BYTES).unwrap()]).unwrap();
    fs::File::open(&file).unwrap().sync_all().unwrap();
    let mut ratios = Vec::new();
    for threads in [1, 2, 4] {
        for verb in [Verb::Write, Verb::Read] {
            let (mut ours, mut fio) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                ours.push(run_tier(&tier, &mut slots, threads, verb, frame_bytes));
                if has_fio {
                    fio.push(run_fio(&file, threads, verb, frame_bytes, tier.stats().direct));
                }
            }
            let (ours, fio) = (median(ours), median(fio));
            let name = if verb == Verb::Write { "write" } else { "read" };
            print!("{:>4} KiB {threads:>7} {name:>6} {:>11.2}", frame_bytes / 1024, ours / 1e9);
            if has_fio {
                print!(" {:>9.2} {:>6.2}", fio / 1e9, ours / fio);
                ratios.push(ours / fio);
            }
            println!();
        }
    }
    drop(tier);
    fs::remove_dir_all(dir).unwrap();
    ratios
}

/// Returns the throughput of random reads or writes in bytes per second, summed over all threads.
///
/// Each thread accesses a separate share of the slots.
fn run_tier(
    tier: &DiskTier,
    slots: &mut [SlotId],
    threads: usize,
    verb: Verb,
    frame_bytes: u64,
) -> f64 {
    let start = Barrier::new(threads);
    let share_len = slots.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let shares = slots.chunks_mut(share_len).enumerate();
        let runs: Vec<_> = shares
            .map(|(t, share)| {
                let start = &start;
                scope.spawn(move || {
                    let mut frames = frames(t, frame_bytes);
                    start.wait();
                    let (began, done) = (Instant::now(), run_share(tier, share, &mut frames, verb));
                    done as f64 * frame_bytes as f64 / began.elapsed().as_secs_f64()
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).sum()
    })
}

/// Allocates more frames than fit in the CPU caches, as an arena does.
///
/// The frames are filled, because memory that has never been written is backed by a single zero
/// page.
fn frames(thread: usize, frame_bytes: u64) -> Vec<PageBuffer> {
    let mut frames: Vec<_> =
        (0..16).map(|_| PageBuffer::new(frame_bytes.try_into().unwrap())).collect();
    for frame in &mut frames {
        frame.fill(thread.try_into().unwrap_or(1));
    }
    frames
}

/// Reads or writes random slots of `share` for one time slice. Returns the number of frames
/// transferred.
fn run_share(tier: &DiskTier, share: &mut [SlotId], frames: &mut [PageBuffer], verb: Verb) -> u64 {
    let mut random = 0x9e37_79b9 + u64::from(share[0].0);
    let (began, mut done) = (Instant::now(), 0);
    while began.elapsed() < SLICE {
        random = next_random(random);
        let at = usize::try_from(random >> 33).unwrap() % share.len();
        let slot = &mut share[at];
        let frame = &mut frames[usize::try_from(random % 16).unwrap()];
        match verb {
            Verb::Read => tier.read(*slot, &meta(slot.0).key, frame).unwrap(),
            Verb::Write => {
                // Another thread may reserve the freed slot first, so the share may get a different
                // slot in return.
                tier.free(*slot).unwrap();
                *slot = tier.reserve(SizeClass(0)).unwrap();
                tier.write(*slot, &meta(slot.0), frame).unwrap();
            }
        }
        done += 1;
    }
    done
}

/// Returns the bytes per second that fio reports for the same access pattern.
fn run_fio(file: &Path, threads: usize, verb: Verb, frame_bytes: u64, direct: bool) -> f64 {
    let name = if verb == Verb::Write { "write" } else { "read" };
    let out = Command::new("fio")
        .args([
            "--name=b",
            "--ioengine=psync",
            "--thread",
            "--group_reporting",
            "--time_based",
            "--norandommap",
        ])
        .args(["--randrepeat=0", "--overwrite=1", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={FILE_BYTES}"))
        .arg(format!("--bs={frame_bytes}"))
        .arg(format!("--numjobs={threads}"))
        .arg(format!("--rw=rand{name}"))
        .arg(format!("--direct={}", u8::from(direct)))
        .arg(format!("--runtime={}ms", SLICE.as_millis()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let json: serde_json::Value =
        serde_json::from_str(&text[text.find('{').unwrap_or(0)..]).unwrap();
    json["jobs"][0][name]["bw_bytes"].as_f64().unwrap()
}

/// Measures the time to open a directory with a million records.
///
/// This function writes the records in the on-disk format. The frames file is sparse.
fn measure_open(dir: &Path) {
    let dir = dir.join("million");
    let config = config(&dir, 4096, 16 << 30);
    drop(DiskTier::open(config.clone()).unwrap());
    let namespace = dir.join("4242424242424242");
    OpenOptions::new()
        .write(true)
        .open(namespace.join("frames-4096.dat"))
        .unwrap()
        .set_len(4096 * u64::from(CHUNKS))
        .unwrap();
    let mut index =
        OpenOptions::new().read(true).write(true).open(namespace.join("index-4096.dat")).unwrap();
    let bytes: Vec<u8> = (0..CHUNKS).flat_map(record).collect();
    index.write_all(&bytes).unwrap();
    for cache in ["cold", "warm"] {
        if cache == "cold" {
            index.sync_all().unwrap();
            rustix::fs::fadvise(&index, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        let (began, cpu_began) = (Instant::now(), cpu_time());
        let (tier, found) = DiskTier::open(config.clone()).unwrap();
        let (took, cpu) = (began.elapsed(), cpu_time().saturating_sub(cpu_began));
        assert_eq!((found.len(), tier.stats().dropped_records), (CHUNKS as usize, 0));
        let (took, cpu) = (took.as_secs_f64(), cpu.as_secs_f64());
        println!(
            "opening the tier with {CHUNKS} chunks ({cache} page cache): {took:.2} s, CPU time {cpu:.2} s (target 1 s)"
        );
    }
    let store = StoreConfig {
        frame_sizes: config.frame_sizes.clone(),
        host_bytes: 1 << 20,
        eviction: Eviction::default(),
        available_bytes: None,
        namespace: NAMESPACE,
        disk: Some(DiskSettings {
            dir,
            cap_bytes: config.cap_bytes,
            num_threads: 1,
            description: config.description,
        }),
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    };
    let (began, cpu_began) = (Instant::now(), cpu_time());
    let store = Store::open(&store).unwrap();
    let (took, cpu) =
        (began.elapsed().as_secs_f64(), cpu_time().saturating_sub(cpu_began).as_secs_f64());
    println!(
        "opening a store with {CHUNKS} chunks (warm page cache): {took:.2} s, CPU time {cpu:.2} s"
    );
    store.close(Duration::ZERO);
}

/// Returns this thread's CPU time, which other load on the machine does not inflate.
fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// Returns the record for a slot. Chunks form chains of 1000, with random slots and save times.
fn record(slot: u32) -> [u8; 128] {
    let n = u32::try_from(u64::from(slot) * 7_368_787 % u64::from(CHUNKS)).unwrap();
    let key = |n: u32| *blake3::hash(&n.to_le_bytes()).as_bytes();
    let parent = if n.is_multiple_of(1000) { [0; 32] } else { key(n - 1) };
    let numbers = [1, n % 1000, slot, 0].map(u32::to_le_bytes).concat();
    let head: [&[u8]; 7] =
        [b"KVLREC01", &key(n), &parent, &[0; 16], &u64::from(n).to_le_bytes(), &[0; 8], &numbers];
    let head = head.concat();
    let seed = u64::from_le_bytes([0x42; 8]);
    let mut out = [0; 128];
    out[..120].copy_from_slice(&head);
    out[120..].copy_from_slice(&XxHash3_64::oneshot_with_seed(seed, &head).to_le_bytes());
    out
}

fn config(dir: &Path, frame_bytes: u64, cap_bytes: u64) -> DiskConfig {
    let description = "bench".to_owned();
    DiskConfig {
        dir: dir.to_owned(),
        cap_bytes,
        frame_sizes: frame_bytes.into(),
        namespace: NAMESPACE,
        description,
    }
}

/// Returns the metadata of the chunk in a slot. The chunk's key depends only on the slot.
fn meta(slot: u32) -> DiskMeta {
    let key = ChunkKey(*blake3::hash(&slot.to_le_bytes()).as_bytes());
    DiskMeta { key, parent: ChunkKey([0; 32]), depth: 0, saved_s: 0 }
}

fn next_random(state: u64) -> u64 {
    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn geometric_mean(ratios: &[f64]) -> Option<f64> {
    let sum: f64 = ratios.iter().map(|r| r.ln()).sum();
    (!ratios.is_empty()).then(|| (sum / ratios.len() as f64).exp())
}
