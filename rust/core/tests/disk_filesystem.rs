//! Tests the disk tier on real file systems that are full, frozen, unmounted, or read-only after an
//! error.
//!
//! The tests mount a tmpfs or an image file. If mounting fails (no root, no loop device), a test
//! prints a message and returns.

#![expect(clippy::unwrap_used, reason = "test helpers panic to fail")]

use kvloft_core::io::SizeClass;
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::{Arena, PartSpec};
use kvloft_core::store::{DiskSettings, Store, StoreConfig, TenantLimits};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskConfig, DiskEntry, DiskMeta, DiskTier, SlotId};
use kvloft_core::{ChunkKey, ErrorKind, KeyChain, key::root_key};
use kvloft_testing::PageBuffer;
use kvloft_testing::one_prefix::StoreExt;
use tempfile::TempDir;

const FRAME: usize = 64 * 1024;
const HUNG: Duration = Duration::from_secs(60);

fn run(program: &str, args: &[&str]) -> bool {
    let status =
        Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// A file system for one test. Dropping it unmounts it, even if it is frozen or in use.
struct Mounted {
    kind: &'static str,
    dir: TempDir,
}

impl Mounted {
    fn new(kind: &'static str, size_mib: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        fs::File::create(dir.path().join("image")).unwrap().set_len(size_mib << 20).unwrap();
        let it = Self { kind, dir };
        let mkfs = format!("mkfs.{kind}");
        let is_made =
            kind == "tmpfs" || run(&mkfs, &["-q", "-F", it.path("image").to_str().unwrap()]);
        if is_made && it.mount(size_mib) {
            return Some(it);
        }
        eprintln!("skipped: cannot mount a {kind} file system");
        None
    }

    fn mount(&self, size_mib: u64) -> bool {
        let (image, mnt, size) =
            (self.path("image"), self.path("mnt"), format!("size={size_mib}m"));
        let (image, mnt) = (image.to_str().unwrap(), mnt.to_str().unwrap());
        match self.kind {
            "tmpfs" => run("mount", &["-t", "tmpfs", "-o", &size, "none", mnt]),
            kind => run("mount", &["-t", kind, "-o", "loop,errors=remount-ro", image, mnt]),
        }
    }

    /// Unmounts the file system. Retries while a process forked by another test still holds files
    /// open.
    fn unmount(&self) {
        let begun = Instant::now();
        while !run("umount", &[self.path("mnt").to_str().unwrap()]) {
            assert!(begun.elapsed() < HUNG, "the file system is still in use");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn freeze(&self, flag: &str) -> bool {
        run("fsfreeze", &[flag, self.path("mnt").to_str().unwrap()])
    }

    fn sync(&self) {
        assert!(run("sync", &["-f", self.path("mnt").to_str().unwrap()]));
    }

    /// Waits until a removed file's space is available, because a journaling file system frees
    /// space asynchronously.
    fn wait_for_room(&self) {
        let begun = Instant::now();
        loop {
            self.sync();
            let found = rustix::fs::statvfs(self.path("mnt")).unwrap();
            if found.f_bavail > found.f_blocks / 2 {
                return;
            }
            assert!(begun.elapsed() < HUNG, "the space was never freed");
        }
    }

    fn config(&self, num_slots: u64) -> DiskConfig {
        DiskConfig {
            dir: self.path("mnt/cache"),
            cap_bytes: 128 * 1024 + num_slots * (FRAME as u64 + 256),
            frame_sizes: (FRAME as u64).into(),
            namespace: [7; 32],
            description: "a failing file system".to_owned(),
        }
    }

    /// Fills the file system to the last byte.
    fn fill(&self) -> PathBuf {
        let path = self.path("mnt/filler");
        let mut file = fs::File::create(&path).unwrap();
        for size in [1 << 20, 4096, 1] {
            while std::io::Write::write_all(&mut file, &vec![1; size]).is_ok() {}
        }
        let _ = file.sync_all();
        path
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.freeze("-u");
        let mnt = self.path("mnt");
        let _ = run("umount", &[mnt.to_str().unwrap()])
            || run("umount", &["-l", mnt.to_str().unwrap()]);
    }
}

fn key(i: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&i.to_le_bytes()).as_bytes())
}

fn frame(i: u32) -> PageBuffer {
    let mut frame = PageBuffer::new(FRAME);
    blake3::Hasher::new_keyed(&key(i).0).finalize_xof().fill(&mut frame);
    frame
}

fn write(tier: &DiskTier, slot: SlotId, i: u32) -> kvloft_core::Result<()> {
    tier.write(
        slot,
        &DiskMeta { key: key(i), parent: ChunkKey([0; 32]), depth: 0, saved_s: 0 },
        &frame(i),
    )
}

fn put(tier: &DiskTier, i: u32) -> SlotId {
    let slot = tier.reserve(SizeClass(0)).unwrap();
    write(tier, slot, i).unwrap();
    slot
}

fn is_whole(tier: &DiskTier, slot: SlotId, i: u32) -> bool {
    let mut into = PageBuffer::new(FRAME);
    tier.read(slot, &key(i), &mut into).is_ok_and(|()| *into == *frame(i))
}

fn keys(found: &[DiskEntry]) -> Vec<ChunkKey> {
    found.iter().map(|entry| entry.meta.key).collect()
}

/// Runs a call that must not hang and returns its result. If the call hangs, thaws the file system
/// so that the test can end, and panics.
fn within<T: Send + 'static>(mounted: &Mounted, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    std::thread::spawn(move || send.send(work()));
    receive.recv_timeout(HUNG).unwrap_or_else(|_| {
        mounted.freeze("-u");
        panic!("the call is waiting for a frozen file system")
    })
}

fn is_held_by_the_kernel(thread: &Path) -> bool {
    let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('D'))
}

fn full_and_emptied_again(kind: &'static str, size_mib: u64) {
    let Some(mounted) = Mounted::new(kind, size_mib) else { return };
    fs::create_dir(mounted.path("mnt/cache")).unwrap();
    let filler = mounted.fill();
    for _ in 0..2 {
        match DiskTier::open(mounted.config(8)) {
            // Some file systems still have space for a directory and a small file, but not a slot.
            Ok((tier, _)) => assert_eq!(tier.reserve(SizeClass(0)).ok(), None),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Io, "the error must be retryable: {error}");
            }
        }
    }
    fs::remove_file(filler).unwrap();
    mounted.wait_for_room();
    let (tier, found) = DiskTier::open(mounted.config(8)).unwrap();
    assert!(found.is_empty());
    assert_eq!(
        (tier.take_events(), tier.stats().fresh_starts),
        (Vec::new(), 0),
        "a partial file was left behind"
    );
    let slots: Vec<_> = (0..8).map(|i| put(&tier, i)).collect();
    // Allocated slots can still be written, read and freed on a full file system.
    mounted.fill();
    tier.free(slots[0]).unwrap();
    put(&tier, 9);
    assert!((1..8).all(|i| is_whole(&tier, slots[i as usize], i)));
    drop(tier);
    let (_tier, found) = DiskTier::open(mounted.config(8)).unwrap();
    assert_eq!(keys(&found), (1..8).chain([9]).map(key).collect::<Vec<_>>());
}

#[test]
fn test_a_full_ext4_is_worth_another_try() {
    full_and_emptied_again("ext4", 24);
}

#[test]
fn test_a_full_tmpfs_is_worth_another_try() {
    full_and_emptied_again("tmpfs", 2);
}

/// Writes frames of one size until the file system is full. Then frees some of these frames and
/// writes a few frames of a different size.
fn full_of_another_size(kind: &'static str, size_mib: u64) {
    let Some(mounted) = Mounted::new(kind, size_mib) else { return };
    let frame_sizes = vec![FRAME as u64, 4096].into();
    let config = DiskConfig { cap_bytes: 1 << 30, frame_sizes, ..mounted.config(1) };
    let (tier, _) = DiskTier::open(config.clone()).unwrap();
    let meta = |i| DiskMeta { key: key(i), parent: ChunkKey([0; 32]), depth: 0, saved_s: 0 };
    let mut small = VecDeque::new();
    while let Ok(slot) = tier.reserve(SizeClass(1)) {
        let i = u32::try_from(small.len()).unwrap();
        if tier.write(slot, &meta(i), &frame(i)[..4096]).is_err() {
            tier.free(slot).unwrap();
            break;
        }
        small.push_back(slot);
    }
    assert!(small.len() as u64 * 4096 > (size_mib << 20) / 2, "{} frames", small.len());
    let mut large = Vec::new();
    while large.len() < 8 {
        if let Ok(slot) = tier.reserve(SizeClass(0)) {
            write(&tier, slot, 10_000 + u32::try_from(large.len()).unwrap()).unwrap();
            large.push(slot);
        } else {
            tier.free(small.pop_front().expect("space of small frames for large frames")).unwrap();
        }
    }
    assert!((10_000..).zip(&large).all(|(i, slot)| is_whole(&tier, *slot, i)));
    drop(tier);
    assert_eq!(DiskTier::open(config).unwrap().1.len(), small.len() + large.len());
}

#[test]
fn test_frames_of_another_size_fit_where_the_file_system_is_full() {
    full_of_another_size("ext4", 24);
    full_of_another_size("tmpfs", 4);
}

#[test]
fn test_a_frozen_file_system_holds_up_its_own_calls_only() {
    let Some(mounted) = Mounted::new("ext4", 24) else { return };
    let config = mounted.config(8);
    let tier = Arc::new(DiskTier::open(config.clone()).unwrap().0);
    let (slot, spare) = (put(&tier, 0), tier.reserve(SizeClass(0)).unwrap());
    if !mounted.freeze("-f") {
        eprintln!("skipped: cannot freeze this file system");
        return;
    }
    let (begun, hears) = channel();
    let writer = Arc::clone(&tier);
    let hung = std::thread::spawn(move || {
        begun.send(fs::read_link("/proc/thread-self").unwrap()).unwrap();
        write(&writer, spare, 1)
    });
    let thread = Path::new("/proc").join(hears.recv().unwrap());
    let begun = Instant::now();
    while !hung.is_finished() && !is_held_by_the_kernel(&thread) {
        assert!(begun.elapsed() < HUNG, "the call neither completed nor was delayed");
    }
    let reader = Arc::clone(&tier);
    assert!(within(&mounted, move || is_whole(&reader, slot, 0)));
    let closer = Arc::clone(&tier);
    within(&mounted, move || {
        let _ = (closer.stats(), closer.take_events());
        closer.close();
    });
    if !hung.is_finished() {
        let again = config.clone();
        let error = within(&mounted, move || DiskTier::open(again).unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Busy, "two owners: {error}");
    }
    assert!(mounted.freeze("-u"));
    let is_written = hung.join().unwrap().is_ok();
    drop(tier);
    let (tier, found) = DiskTier::open(config).unwrap();
    assert_eq!(found.len(), 1 + usize::from(is_written));
    assert!(is_whole(&tier, slot, 0));
}

#[test]
fn test_a_file_system_that_becomes_read_only_costs_no_chunk() {
    let Some(mounted) = Mounted::new("ext4", 24) else { return };
    let config = mounted.config(8);
    let (tier, _) = DiskTier::open(config.clone()).unwrap();
    let mut slots: Vec<_> = (0..6).map(|i| put(&tier, i)).collect();
    slots.push(tier.reserve(SizeClass(0)).unwrap());
    // Like a power loss, the error would discard pending writes.
    mounted.sync();
    if !break_ext4(&mounted.path("mnt")) {
        eprintln!("skipped: this kernel cannot trigger an ext4 error");
        return;
    }
    for slot in 0..6 {
        assert_eq!(write(&tier, slots[6], 6).unwrap_err().kind(), ErrorKind::Io);
        tier.free(slots[6]).expect("the slot was never written");
        slots[6] = tier.reserve(SizeClass(0)).expect("the slot is free again");
        assert_eq!(tier.free(slots[slot]).unwrap_err().kind(), ErrorKind::Io);
    }
    assert_eq!(tier.clear().unwrap().len(), 6);
    assert_eq!(tier.stats().slots_used, 6);
    assert!((0..6).all(|i| is_whole(&tier, slots[i as usize], i)));
    drop(tier);
    assert_eq!(
        DiskTier::open(config.clone()).unwrap_err().kind(),
        ErrorKind::Io,
        "the error must be retryable"
    );
    mounted.unmount();
    assert!(mounted.mount(24));
    let (_tier, found) = DiskTier::open(config).unwrap();
    assert_eq!(keys(&found), (0..6).map(key).collect::<Vec<_>>());
}

/// Triggers an ext4 error that makes the file system read-only, as a failed internal write does.
fn break_ext4(mnt: &Path) -> bool {
    let output = Command::new("findmnt").args(["-no", "SOURCE", mnt.to_str().unwrap()]).output();
    let Ok(output) = output else { return false };
    let device =
        String::from_utf8_lossy(&output.stdout).trim().trim_start_matches("/dev/").to_owned();
    fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "1").is_ok()
        && fs::write(mnt.join("probe"), "x").is_err()
}

#[test]
fn test_an_unmounted_file_system_is_not_a_removed_directory() {
    let Some(mounted) = Mounted::new("ext4", 24) else { return };
    let (tier, _) = DiskTier::open(mounted.config(8)).unwrap();
    let slot = put(&tier, 0);
    assert_eq!(tier.removed(), None);
    assert!(run("umount", &["-l", mounted.path("mnt").to_str().unwrap()]));
    assert!(!mounted.path("mnt/cache").exists());
    assert_eq!(tier.removed(), None, "the tier would reopen on the file system below the mount");
    assert!(is_whole(&tier, slot, 0));
}

#[test]
fn test_a_directory_removed_from_any_file_system_is_noticed() {
    for kind in ["ext4", "ext2", "tmpfs"] {
        let Some(mounted) = Mounted::new(kind, 24) else { continue };
        let (tier, _) = DiskTier::open(mounted.config(8)).unwrap();
        assert_eq!(tier.removed(), None);
        fs::remove_dir_all(mounted.path("mnt/cache")).unwrap();
        assert_eq!(tier.removed(), Some(mounted.path("mnt/cache")), "{kind}");
    }
}

/// Opens a store with a `disk_size` larger than the file system, so that the disk tier can fill the
/// file system.
fn open_store(mounted: &Mounted) -> Store {
    let cap_bytes = 1 << 30;
    let dir = mounted.path("mnt/cache");
    let disk = DiskSettings { dir, cap_bytes, num_threads: 2, description: String::new() };
    let config = StoreConfig {
        frame_sizes: (FRAME as u64).into(),
        host_bytes: 16 * FRAME as u64,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [7; 32],
        disk: Some(disk),
        now_s: 0,
        limits: TenantLimits::default(),
    };
    Store::open(&config).unwrap()
}

fn stat(store: &Store, name: &str) -> u64 {
    store.stats().into_iter().find(|(known, _)| *known == name).unwrap().1
}

fn prompt(first: u32) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
    chain.append_tokens(&[first]).unwrap();
    chain
}

fn spec(key: ChunkKey) -> PartSpec<'static> {
    PartSpec { key, layout: [1; 32], page_bytes: &[], num_blocks: 1, rank: 0 }
}

fn arena_of(store: &Store) -> Arena {
    let arena = store.arena();
    Arena::open(&arena.path, arena.size_bytes).unwrap()
}

/// Saves one-chunk prompts and waits until each chunk is written to disk or dropped.
fn save_prompts(store: &Store, range: std::ops::Range<u32>) {
    let arena = arena_of(store);
    for first in range {
        let reserved = store.reserve(&prompt(first), 0..1).unwrap();
        let reservation = reserved.chunks[0].reservation();
        arena
            .seal(
                u64::from(reservation.frame.number()) * FRAME as u64,
                FRAME,
                &spec(reservation.key),
            )
            .unwrap();
        assert_eq!(store.commit(reserved.chunks), 1);
        assert!(store.flush(HUNG));
    }
}

fn is_loaded(store: &Store, first: u32) -> bool {
    let (lease, begun) = (store.acquire(&prompt(first)), Instant::now());
    while lease.poll().pending_units > 0 && begun.elapsed() < HUNG {
        std::thread::yield_now();
    }
    let (frames, arena) = (lease.frames(), arena_of(store));
    frames.len() == 1
        && arena
            .check(u64::from(frames[0].frame.number()) * FRAME as u64, FRAME, &spec(frames[0].key))
            .unwrap()
            .is_none()
}

#[test]
fn test_a_full_ext2_is_used_like_a_disk_tier_at_its_cap() {
    const ROOM: u64 = 24 << 20;
    let Some(mounted) = Mounted::new("ext2", 24) else { return };
    let store = open_store(&mounted);
    save_prompts(&store, 0..800); // 50 MiB
    let failures =
        ["disk_write_errors", "disk_trips", "disk_dropped"].map(|name| stat(&store, name));
    assert_eq!(failures, [0; 3]);
    let num_stored = stat(&store, "disk_used");
    assert!(num_stored * FRAME as u64 > ROOM * 3 / 4, "only {num_stored} chunks fit");
    let (num_writes, num_evictions) = (stat(&store, "disk_writes"), stat(&store, "disk_evictions"));
    assert_eq!((num_writes, num_evictions), (800, 800 - num_stored));
    let events = store.take_events();
    assert!(events.len() == 1 && events[0].contains("is full; evicting chunks"), "{events:?}");
    store.check().unwrap();
    drop(store);
    let store = open_store(&mounted);
    let first_stored = 800 - u32::try_from(num_stored).unwrap();
    assert!((0..first_stored).all(|first| store.lookup(&prompt(first)).stored_units == 0));
    assert!((first_stored..800).all(|first| is_loaded(&store, first)));
    // Saves also work after the store is reopened on a full file system.
    save_prompts(&store, 800..900);
    assert_eq!(
        ["disk_write_errors", "disk_trips", "disk_dropped"].map(|name| stat(&store, name)),
        [0; 3]
    );
    assert!((800..900).all(|first| is_loaded(&store, first)));
}

#[test]
fn test_an_ext2_that_gets_room_back_holds_more_chunks() {
    let Some(mounted) = Mounted::new("ext2", 24) else { return };
    fs::create_dir(mounted.path("mnt/cache")).unwrap();
    let filler = mounted.path("mnt/filler");
    fs::write(&filler, vec![1; 12 << 20]).unwrap();
    let store = open_store(&mounted);
    save_prompts(&store, 0..400);
    let before = stat(&store, "disk_used");
    fs::remove_file(filler).unwrap();
    save_prompts(&store, 400..1200);
    let after = stat(&store, "disk_used");
    assert!(before > 64 && after > before + 128, "{before} chunks, then {after}");
    assert_eq!(
        ["disk_write_errors", "disk_trips", "disk_dropped"].map(|name| stat(&store, name)),
        [0; 3]
    );
}
