//! Tests damaged directories: reads detect damage, opening accepts no invalid record, and verify
//! and inspect report the damage.

use crate::io::SizeClass;
use crate::key::namespace_id;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use proptest::prelude::*;

use super::super::{Damage, Verifier, inspect};
use super::*;
use crate::ErrorKind;

fn filled(dir: &Path) -> DiskConfig {
    let config = config(dir, 8);
    let (tier, _) = open(&config);
    for i in 0..6 {
        put(&tier, i);
    }
    config
}

fn file(config: &DiskConfig, name: &str) -> PathBuf {
    config.dir.join(namespace_id(&config.namespace)).join(name)
}

fn spoil(path: &Path, offset: u64, mask: u8) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ mask], offset).unwrap();
}

fn verify(dir: &Path) -> Vec<Damage> {
    let mut verifier = Verifier::open(dir).unwrap();
    let mut damage = verifier.step(2);
    while verifier.num_checked() < verifier.num_chunks() {
        damage.extend(verifier.step(2));
    }
    damage
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn test_flipped_bytes_anywhere_cost_chunks_but_never_give_wrong_bytes(
        flips in prop::collection::vec((0..10_u64, any::<u64>(), 1_u8..), 1..8), cut in prop::option::of(0..70_000_u64)
    ) {
        let dir = tempfile::tempdir().unwrap();
        let config = filled(dir.path());
        for (which, offset, mask) in flips {
            let path = file(&config, if which < 4 { "index-8192.dat" } else if which < 9 { "frames-8192.dat" } else { "superblock.json" });
            let len = fs::metadata(&path).unwrap().len();
            spoil(&path, offset % len, mask);
        }
        if let Some(cut) = cut {
            let frames = OpenOptions::new().write(true).open(file(&config, "frames-8192.dat")).unwrap();
            frames.set_len(cut.min(frames.metadata().unwrap().len())).unwrap();
        }
        let bad = verify(dir.path()).len();
        inspect(dir.path()).unwrap();
        let (tier, found) = open(&config);
        let mut served = 0;
        for entry in found {
            let i = numbers(&[entry])[0];
            match get(&tier, entry.slot, i) {
                Ok(bytes) => {
                    prop_assert_eq!(bytes, frame_of(i, 0).to_vec());
                    served += 1;
                }
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
            }
        }
        prop_assert!(served == 6 || bad > 0, "{} of 6 served, and verify found no damage", served);
    }
}

#[test]
fn test_verify_and_inspect_find_nothing_wrong_with_a_sound_directory() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    assert_eq!(verify(dir.path()), []);
    let found = inspect(dir.path()).unwrap();
    let info = &found[0];
    assert_eq!((found.len(), info.chunks, info.slots), (1, 6, 8));
    assert_eq!(info.frame_sizes, [FRAME]);
    assert_eq!((info.description.as_str(), &info.problem), ("a test", &None));
    assert_eq!((info.oldest_s, info.newest_s), (Some(1000), Some(1005)));
    assert!(info.bytes >= 6 * FRAME);
}

#[test]
fn test_verify_names_each_kind_of_damage() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    spoil(&file(&config, "frames-8192.dat"), FRAME * 2 + 17, 1);
    spoil(&file(&config, "index-8192.dat"), 128 + 60, 1);
    OpenOptions::new()
        .write(true)
        .open(file(&config, "frames-8192.dat"))
        .unwrap()
        .set_len(FRAME * 5)
        .unwrap();
    let mut damage: Vec<_> =
        verify(dir.path()).into_iter().map(|d| (d.slot, d.key.is_some(), d.problem)).collect();
    damage.sort();
    let expected = [
        (Some(1), false, "its record is damaged"),
        (Some(2), true, "its checksum does not match"),
        (Some(5), false, "the frames file is too short"),
    ];
    assert_eq!(damage, expected.map(|(slot, key, problem)| (slot, key, problem.to_owned())));
    assert_eq!(
        inspect(dir.path()).unwrap()[0].problem.as_deref(),
        Some("2 records are damaged or have no frame")
    );
    let (tier, found) = open(&config);
    assert_eq!(tier.stats().dropped_records, 2);
    assert!(numbers(&found).iter().all(|i| [0, 2, 3, 4].contains(i)));
}

fn problems_of(dir: &Path) -> Vec<String> {
    verify(dir).into_iter().map(|d| d.problem).collect()
}

#[test]
fn test_verify_and_inspect_report_frames_whose_records_are_gone() {
    let lost = "any chunks in the other frames are lost";
    for (records, problem) in [
        (0, "index-8192.dat is empty, but there are 8 frames: their chunks are lost".to_owned()),
        (2, format!("index-8192.dat has records for 2 of 8 frames: {lost}")),
        (7, format!("index-8192.dat has records for 7 of 8 frames: {lost}")),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let config = filled(dir.path());
        let index = OpenOptions::new().write(true).open(file(&config, "index-8192.dat")).unwrap();
        index.set_len(records * 128 + 5).unwrap();
        assert_eq!(problems_of(dir.path()), std::slice::from_ref(&problem));
        assert_eq!(inspect(dir.path()).unwrap()[0].problem, Some(problem));
    }
}

#[test]
fn test_verify_and_inspect_name_a_file_that_is_missing() {
    for name in ["index-8192.dat", "frames-8192.dat"] {
        let dir = tempfile::tempdir().unwrap();
        let config = filled(dir.path());
        fs::remove_file(file(&config, name)).unwrap();
        let problem = format!("{name} is missing: its chunks are lost");
        assert_eq!(problems_of(dir.path()), std::slice::from_ref(&problem));
        assert_eq!(inspect(dir.path()).unwrap()[0].problem, Some(problem));
    }
}

#[test]
fn test_verify_finds_nothing_wrong_where_nothing_was_saved_yet() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&config(dir.path(), 8));
    tier.close();
    assert_eq!(verify(dir.path()), []);
    assert_eq!(inspect(dir.path()).unwrap()[0].problem, None);
}

/// An engine creates the superblock, then the index, then the frames file, and can be killed
/// between any two steps.
#[test]
fn test_verify_finds_nothing_wrong_where_an_engine_was_killed_before_it_had_files() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    fs::remove_file(file(&config, "frames-8192.dat")).unwrap();
    OpenOptions::new()
        .write(true)
        .open(file(&config, "index-8192.dat"))
        .unwrap()
        .set_len(0)
        .unwrap();
    assert!(problems_of(dir.path()).is_empty());
    fs::remove_file(file(&config, "index-8192.dat")).unwrap();
    assert!(problems_of(dir.path()).is_empty());
}

#[test]
fn test_what_is_no_regular_file_is_a_problem_and_is_not_waited_for() {
    for name in ["index-8192.dat", "frames-8192.dat", "superblock.json"] {
        let dir = tempfile::tempdir().unwrap();
        let config = filled(dir.path());
        fs::remove_file(file(&config, name)).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            file(&config, name),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert_eq!(problems_of(dir.path()).len(), 1, "{name}");
    }
}

#[test]
fn test_an_index_of_terabytes_of_holes_is_not_read_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    OpenOptions::new()
        .write(true)
        .open(file(&config, "index-8192.dat"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    assert!(verify(dir.path()).is_empty());
    assert_eq!(inspect(dir.path()).unwrap()[0].chunks, 6);
    let (_tier, found) = open(&config);
    assert_eq!(found.len(), 6);
    assert!(fs::metadata(file(&config, "index-8192.dat")).unwrap().len() < 1 << 20);
}

#[test]
fn test_a_foreign_superblock_is_told_in_plain_words() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    let path = file(&config, "superblock.json");
    for foreign in ["{\"a\": 1}", "hello", ""] {
        fs::write(&path, foreign).unwrap();
        assert_eq!(problems_of(dir.path()), ["superblock.json is not a kvloft superblock"]);
    }
    let (tier, _) = open(&config);
    let event = &tier.take_events()[0];
    assert!(
        event.starts_with("disk tier: recreating ")
            && event.ends_with(": its superblock.json is not a kvloft superblock"),
        "{event}"
    );
}

#[test]
fn test_verify_of_a_busy_directory_names_the_owner_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let (_tier, _) = open(&filled(dir.path()));
    let text = Verifier::open(dir.path()).unwrap_err().to_string();
    let pid = std::process::id();
    assert_eq!(
        text,
        format!(
            "{} is in use by process {pid}: stop it and verify again, or use `kvloft inspect`, which works while it runs",
            dir.path().display()
        )
    );
}

#[test]
fn test_verify_compares_the_frames_own_trailer() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 4);
    let (tier, _) = open(&config);
    for (i, named) in [(0, 0), (1, 5)] {
        let mut frame = frame_of(i, 0);
        let trailer = frame.len() - 128;
        frame[trailer..trailer + 8].copy_from_slice(b"KVLOFT03");
        frame[trailer + 8..trailer + 40].copy_from_slice(&key_of(named).0);
        tier.write(tier.reserve(SizeClass(0)).unwrap(), &meta_of(i), &frame).unwrap();
    }
    drop(tier);
    let damage = verify(dir.path());
    assert_eq!(damage.len(), 1);
    assert_eq!(
        (damage[0].slot, damage[0].problem.as_str()),
        (Some(1), "its trailer and record have different keys")
    );
}

#[test]
fn test_verify_sees_superblocks_that_are_damaged_or_in_the_wrong_place() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    let good = config.dir.join(namespace_id(&config.namespace));
    fs::rename(&good, config.dir.join("00112233445566aa")).unwrap();
    fs::create_dir(config.dir.join("00112233445566bb")).unwrap();
    let mut problems: Vec<_> = verify(dir.path()).into_iter().map(|d| d.problem).collect();
    problems.sort();
    assert_eq!(
        problems,
        ["superblock.json belongs to a different namespace", "superblock.json is missing"]
    );
    assert_eq!(inspect(dir.path()).unwrap().iter().filter(|n| n.problem.is_some()).count(), 2);
}

#[test]
fn test_a_namespace_of_another_format_is_not_damage_unless_a_digit_flipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&filled(dir.path()), "superblock.json");
    let good = fs::read_to_string(&path).unwrap();
    for format in [2, 5] {
        fs::write(&path, of_format(format, &good)).unwrap();
        let damage = verify(dir.path());
        assert!(damage.len() == 1 && damage[0].is_other_format, "{damage:?}");
        let told = format!(
            "superblock.json is in format {format} (expected 4): this version of kvloft clears the namespace when opening it"
        );
        assert_eq!(
            (&damage[0].problem, inspect(dir.path()).unwrap()[0].problem.as_ref()),
            (&told, Some(&told))
        );
        fs::write(&path, good.replace("\"format\": 4", &format!("\"format\": {format}"))).unwrap();
        let damage = verify(dir.path());
        assert!(damage.len() == 1 && !damage[0].is_other_format, "{damage:?}");
    }
}

#[test]
fn test_verify_and_inspect_follow_no_link_and_count_nothing_behind_one() {
    for name in ["index-8192.dat", "frames-8192.dat", "superblock.json"] {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = file(&filled(dir.path()), name);
        let target = elsewhere.path().join("target");
        fs::rename(&path, &target).unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert_eq!(problems_of(dir.path()).len(), 1, "{name}");
        let before = inspect(dir.path()).unwrap().remove(0);
        assert!(before.problem.is_some(), "{name}");
        OpenOptions::new().write(true).open(&target).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(inspect(dir.path()).unwrap()[0].bytes, before.bytes, "{name}");
    }
}

#[test]
fn test_verify_is_busy_while_an_engine_runs_and_inspect_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    let (tier, _) = open(&config);
    assert_eq!(Verifier::open(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(inspect(dir.path()).unwrap()[0].chunks, 6);
    drop(tier);
    let verifier = Verifier::open(dir.path()).unwrap();
    assert_eq!(DiskTier::open(config.clone()).unwrap_err().kind(), ErrorKind::Busy);
    drop(verifier);
    open(&config);
}

#[test]
fn test_what_is_no_disk_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "x").unwrap();
    for path in [dir.path().to_owned(), dir.path().join("file"), dir.path().join("missing")] {
        assert_eq!(Verifier::open(&path).unwrap_err().kind(), ErrorKind::InvalidConfig);
        assert_eq!(inspect(&path).unwrap_err().kind(), ErrorKind::InvalidConfig);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "inspecting must not create files");
}
