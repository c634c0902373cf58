use std::fs;
use std::path::{Path, PathBuf};

use super::{Surroundings, choose};

/// A fresh folder that nobody else can write, and what removes it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let base = std::env::temp_dir().canonicalize().expect("there is a folder for temporary files");
        let path = base.join(format!("muser-nvrtc-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("created");
        set_mode(&path, 0o755);
        Self(path)
    }

    /// A folder with something called like the compiler.
    fn with_library(&self, folder: &str) -> PathBuf {
        let folder = self.0.join(folder);
        fs::create_dir_all(&folder).expect("created");
        for name in ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"] {
            fs::write(folder.join(name), "not a library").expect("written");
            set_mode(&folder.join(name), 0o644);
        }
        folder.ancestors().take_while(|folder| folder.starts_with(&self.0)).for_each(|f| set_mode(f, 0o755));
        folder
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
}

#[test]
fn the_working_folder_and_those_above_are_never_searched() {
    let place = Place::new("cwd");
    place.with_library(".venv/lib/python3.12/site-packages/nvidia/cu13/lib");
    place.with_library(".venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib");
    let below = place.0.join("project/deep");
    fs::create_dir_all(&below).expect("created");
    // Another process, since the working folder is the whole process's: this very test, asked to print its folders.
    if std::env::var_os("MUSER_TEST_PRINT_FOLDERS").is_some() {
        println!("FOLDERS {:?}", Surroundings::of_this_process().folders());
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().expect("a test has a path"))
        .args([
            "--nocapture",
            "--exact",
            "nvrtc::library::tests::the_working_folder_and_those_above_are_never_searched",
        ])
        .current_dir(&below)
        .env("MUSER_TEST_PRINT_FOLDERS", "1")
        .env("LD_LIBRARY_PATH", "relative:.:")
        .env_remove("VIRTUAL_ENV")
        .env_remove(super::NVRTC_DIR_VAR)
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let folders = text.lines().find(|line| line.contains("FOLDERS")).expect("printed");
    let here = place.0.display().to_string();
    assert!(
        !folders.contains(&here) && !folders.contains("\".") && !folders.contains("relative"),
        "{folders}"
    );
}

#[test]
fn the_order_is_the_variable_then_the_program_then_the_loader_then_the_system() {
    let place = Place::new("order");
    let [explicit, own, loader, system] =
        ["explicit", "own", "loader", "system"].map(|name| place.with_library(name));
    let mut around = Surroundings {
        explicit: Some(explicit.clone()),
        own: Some(own.clone()),
        loader: vec![loader.clone()],
        system: vec![system.clone()],
        roots: Vec::new(),
    };
    let compiler = |around: &Surroundings| choose(around).map(|found| found.compiler);
    assert_eq!(compiler(&around), Ok(explicit.join("libnvrtc.so.13")));
    around.explicit = None;
    assert_eq!(compiler(&around), Ok(own.join("libnvrtc.so.13")));
    around.own = None;
    let found = choose(&around).expect("there");
    assert_eq!(found.compiler, loader.join("libnvrtc.so.13"));
    assert_eq!(found.builtins, Some(loader.join("libnvrtc-builtins.so.13.0")), "from the same folder");
    around.loader.clear();
    assert_eq!(compiler(&around), Ok(system.join("libnvrtc.so.13")));
    // A variable that names the wrong folder is said, not passed over.
    around.explicit = Some(place.0.clone());
    assert!(compiler(&around).expect_err("nothing there").contains("MUSER_NVRTC_DIR"));
    around.explicit = Some(PathBuf::from("explicit"));
    assert!(compiler(&around).expect_err("relative").contains("absolute"));
}

#[test]
fn what_others_can_write_is_refused_and_the_next_one_is_taken() {
    let place = Place::new("modes");
    let (first, second) = (place.with_library("first"), place.with_library("second"));
    let around = Surroundings { loader: vec![first.clone(), second.clone()], ..Surroundings::default() };
    let chosen = || choose(&around).expect("the second at least").compiler;
    assert_eq!(chosen(), first.join("libnvrtc.so.13"));
    let refused = |path: &Path, mode: u32, back: u32| {
        set_mode(path, mode);
        let found = chosen();
        set_mode(path, back);
        assert_eq!(found, second.join("libnvrtc.so.13"), "{} with mode {mode:o}", path.display());
    };
    refused(&first, 0o777, 0o755);
    refused(&first, 0o775, 0o755);
    refused(&first, 0o1777, 0o755);
    refused(&first.join("libnvrtc.so.13"), 0o666, 0o644);
    refused(&first.join("libnvrtc-builtins.so.13.0"), 0o664, 0o644);
    // A link is judged by what it points to.
    let open = place.with_library("open");
    set_mode(&open, 0o777);
    fs::remove_file(first.join("libnvrtc.so.13")).expect("removed");
    std::os::unix::fs::symlink(open.join("libnvrtc.so.13"), first.join("libnvrtc.so.13")).expect("linked");
    assert_eq!(chosen(), second.join("libnvrtc.so.13"));
    // A folder above that all may write: whoever renames it puts another in its place.
    set_mode(&place.0, 0o777);
    let why = choose(&around).expect_err("both are below it");
    assert!(why.contains("refused") && why.contains("mode 777"), "{why}");
}

#[test]
fn another_users_library_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = Place::new("owner");
    let folder = place.with_library("theirs");
    let around = Surroundings { loader: vec![folder.clone()], ..Surroundings::default() };
    assert!(choose(&around).is_ok());
    for path in [folder.join("libnvrtc.so.13"), folder.clone()] {
        std::os::unix::fs::chown(&path, Some(12345), None).expect("root may");
        let why = choose(&around).expect_err("another user's");
        assert!(why.contains("12345"), "{why}");
        std::os::unix::fs::chown(&path, Some(0), None).expect("root may");
    }
}
