//! Emits `KVLOFT_REVISION`: the git revision of this build, or "unknown". Does not access the
//! network.
//!
//! An sdist has no repository, so `scripts/wheels.sh` writes the revision to `rust/py/REVISION`
//! before it builds the sdist.

use std::path::Path;
use std::process::Command;

fn main() {
    let revision = from_file().or_else(from_git).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=KVLOFT_REVISION={revision}");
}

fn from_file() -> Option<String> {
    let file = Path::new("REVISION");
    println!("cargo::rerun-if-changed=build.rs");
    if !file.exists() {
        return None; // cargo reruns this script in every build if a watched file is missing
    }
    println!("cargo::rerun-if-changed=REVISION");
    std::fs::read_to_string(file).ok().and_then(|text| checked(&text))
}

fn from_git() -> Option<String> {
    // An unpacked sdist can be inside another project's repository, which has the wrong revision.
    if !Path::new("../../.git").exists() {
        return None;
    }
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", file])
            && Path::new(&path).exists()
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"]).and_then(|text| checked(&text))
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn checked(text: &str) -> Option<String> {
    let text = text.trim();
    let is_hex = text.len() >= 7 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| text.to_owned())
}
