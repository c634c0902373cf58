//! Compiled kernels on disk.
//!
//! Whoever can write here supplies code that sees all weights and all K and V of the process, so the folder is made for its
//! owner alone and is used only while nobody else can write it or a folder above it. A file carries its own hash, so a torn
//! write is compiled again, never loaded.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::trust;

/// Environment variable with the folder of compiled kernels (an absolute path); an empty value turns the cache off.
pub const CACHE_DIR_VAR: &str = "MUSER_CUDA_CACHE_DIR";

/// First bytes of machine code.
const ELF: &[u8] = b"\x7fELF";

/// The cache's folder; `None` if it is turned off or no home folder is known. Relative paths count as unknown: they would
/// be below whatever folder the program is started in.
pub(super) fn folder() -> Option<PathBuf> {
    folder_of(|name| std::env::var_os(name).map(PathBuf::from))
}

fn folder_of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    if let Some(folder) = variable(CACHE_DIR_VAR) {
        return absolute(folder);
    }
    let base = variable("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| variable("HOME").and_then(absolute).map(|home| home.join(".cache")))?;
    Some(base.join("muser").join("cuda"))
}

/// An image that was stored whole in a folder that can be trusted.
pub(super) fn load(folder: &Path, name: &str) -> Option<Vec<u8>> {
    let path = trust::check_file(&folder.join(name)).ok()?;
    let bytes = fs::read(path).ok()?;
    let (hash, image) = bytes.split_at_checked(32)?;
    (blake3::hash(image).as_bytes() == hash && is_image(image)).then(|| image.to_vec())
}

/// Machine code carries its own size; text for the driver's compiler is read up to its final zero, which must be there.
fn is_image(image: &[u8]) -> bool {
    image.starts_with(ELF)
        || (image.len() > 1 && image.iter().position(|&byte| byte == 0) == Some(image.len() - 1))
}

/// Stores an image under `name`.
///
/// # Errors
/// The system's, or [`io::ErrorKind::PermissionDenied`] where others can write the folder.
pub(super) fn store(folder: &Path, name: &str, image: &[u8]) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)?;
    let folder =
        trust::check_folder(folder).map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why))?;
    let partial = folder.join(format!("{name}.{}.part", std::process::id()));
    // What a process of this number left when it was killed.
    let _ = fs::remove_file(&partial);
    // A new file: nothing that lies there under this name, link or not, is written through.
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.write(true).create_new(true).open(&partial)?;
    let written = file.write_all(blake3::hash(image).as_bytes()).and_then(|()| file.write_all(image));
    let done = written.and_then(|()| fs::rename(&partial, folder.join(name)));
    if done.is_err() {
        let _ = fs::remove_file(&partial);
    }
    done
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn fresh(name: &str) -> PathBuf {
        let base = std::env::temp_dir().canonicalize().expect("there is a folder for temporary files");
        let path = base.join(format!("muser-kernel-cache-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
    }

    #[test]
    fn relative_folders_are_none() {
        let of = |set: &[(&str, &str)]| {
            folder_of(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| PathBuf::from(value)))
        };
        assert_eq!(of(&[("HOME", "/home/a")]), Some(PathBuf::from("/home/a/.cache/muser/cuda")));
        assert_eq!(of(&[("HOME", "")]), None);
        assert_eq!(of(&[("HOME", "a")]), None);
        assert_eq!(
            of(&[("HOME", "/h"), ("XDG_CACHE_HOME", "x")]),
            Some(PathBuf::from("/h/.cache/muser/cuda"))
        );
        assert_eq!(of(&[("HOME", "/h"), (CACHE_DIR_VAR, "")]), None, "turned off");
        assert_eq!(of(&[("HOME", "/h"), (CACHE_DIR_VAR, "cache")]), None);
        assert_eq!(of(&[("HOME", "/h"), (CACHE_DIR_VAR, "/c")]), Some(PathBuf::from("/c")));
    }

    #[test]
    fn what_is_stored_is_private_and_comes_back() {
        let folder = fresh("plain");
        store(&folder, "a.bin", b"\x7fELF and more").expect("stored");
        assert_eq!(fs::metadata(&folder).expect("there").permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(folder.join("a.bin")).expect("there").permissions().mode() & 0o777, 0o600);
        assert_eq!(load(&folder, "a.bin").as_deref(), Some(&b"\x7fELF and more"[..]));
        let _ = fs::remove_dir_all(folder);
    }

    #[test]
    fn a_cache_that_others_can_write_is_neither_read_nor_written() {
        let folder = fresh("open");
        store(&folder, "a.bin", b"\x7fELF").expect("stored");
        mode(&folder, 0o777);
        assert_eq!(load(&folder, "a.bin"), None);
        assert!(store(&folder, "b.bin", b"\x7fELF").is_err());
        mode(&folder, 0o700);
        mode(&folder.join("a.bin"), 0o666);
        assert_eq!(load(&folder, "a.bin"), None, "the file itself");
        let _ = fs::remove_dir_all(folder);
    }

    #[test]
    fn what_is_no_image_is_not_given_to_the_driver() {
        let folder = fresh("kinds");
        for (image, good) in [
            (&b".version 9.0\0"[..], true),
            (b".version 9.0", false),
            (b".version\0 9.0\0", false),
            (b"", false),
            (b"\0", false),
        ] {
            store(&folder, "x.bin", image).expect("stored");
            assert_eq!(load(&folder, "x.bin").is_some(), good, "{image:?}");
        }
        let mut torn = fs::read(folder.join("x.bin")).expect("there");
        torn.push(1);
        fs::write(folder.join("x.bin"), torn).expect("written");
        assert_eq!(load(&folder, "x.bin"), None);
        let _ = fs::remove_dir_all(folder);
    }

    #[test]
    fn a_link_in_the_partials_place_is_not_followed() {
        let folder = fresh("link");
        store(&folder, "a.bin", b"\x7fELF").expect("stored");
        let victim = folder.join("victim");
        fs::write(&victim, "precious").expect("written");
        let partial = folder.join(format!("b.bin.{}.part", std::process::id()));
        std::os::unix::fs::symlink(&victim, partial).expect("linked");
        store(&folder, "b.bin", b"\x7fELF").expect("stored");
        assert_eq!(fs::read_to_string(&victim).expect("there"), "precious");
        let _ = fs::remove_dir_all(folder);
    }
}
