//! Whose files may run in this process: this user's and root's, where nobody else can change them.

use std::path::{Path, PathBuf};

/// The file's real path, if neither the file nor any folder on the way to it belongs to another user than this one and root,
/// and no group or other user may write there. (In a sticky folder, such as /tmp, others cannot replace what is not
/// theirs; a file directly inside one is refused all the same.)
///
/// # Errors
/// A sentence that names what is wrong.
pub(super) fn check_file(file: &Path) -> Result<PathBuf, String> {
    let real = file.canonicalize().map_err(|error| format!("{}: {error}", file.display()))?;
    for (depth, place) in real.ancestors().enumerate() {
        check(place, depth < 2)?;
    }
    Ok(real)
}

/// A folder that only this user and root can write, and its real path.
pub(super) fn check_folder(folder: &Path) -> Result<PathBuf, String> {
    let real = folder.canonicalize().map_err(|error| format!("{}: {error}", folder.display()))?;
    for (depth, place) in real.ancestors().enumerate() {
        check(place, depth == 0)?;
    }
    Ok(real)
}

#[cfg(unix)]
fn check(place: &Path, strict: bool) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = std::fs::metadata(place).map_err(|error| format!("{}: {error}", place.display()))?;
    judge(meta.uid(), meta.mode(), rustix::process::geteuid().as_raw(), strict)
        .map_err(|what| format!("{} {what}", place.display()))
}

#[cfg(not(unix))]
fn check(_: &Path, _: bool) -> Result<(), String> {
    // There the folders' access lists say who may write; they are not looked at.
    Ok(())
}

/// The rule itself.
#[cfg_attr(not(unix), allow(dead_code, reason = "owners and modes are Unix's"))]
fn judge(owner: u32, mode: u32, user: u32, strict: bool) -> Result<(), String> {
    const STICKY: u32 = 0o1000;
    if owner != 0 && owner != user {
        return Err(format!("belongs to user {owner}, not to root or user {user}"));
    }
    if mode & 0o022 != 0 && (strict || mode & STICKY == 0) {
        return Err(format!("can be written by others (mode {:o})", mode & 0o7777));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::judge;

    #[test]
    fn only_this_user_and_root_may_have_put_it_there() {
        let ok = |owner, mode, user, strict| judge(owner, mode, user, strict).is_ok();
        assert!(ok(0, 0o755, 1000, true) && ok(1000, 0o700, 1000, true) && ok(1000, 0o755, 1000, false));
        assert!(!ok(1001, 0o755, 1000, true), "another user's");
        assert!(!ok(1001, 0o755, 0, true), "another user's, for root too");
        assert!(!ok(0, 0o777, 1000, true) && !ok(1000, 0o775, 1000, true) && !ok(1000, 0o757, 1000, false));
        assert!(ok(0, 0o1777, 1000, false), "/tmp on the way");
        assert!(!ok(0, 0o1777, 1000, true), "/tmp itself");
    }
}
