#!/bin/sh
# Installs muser from the files of a release: checks the archive against SHA256SUMS, tries the program, then copies it.
# Needs no root. See docs/install.md.
set -eu
umask 022

# Where the files of the release are: an address, or a folder. A release has its own address here.
from=''
prefix="${HOME:-}/.local"
version=''
uninstall=no

say() { printf '%s\n' "muser: $*" >&2; }
fail() {
  say "$*"
  exit 1
}

usage() {
  cat <<'END'
usage: install.sh [--from ADDRESS|FOLDER] [--prefix FOLDER] [--version VERSION] [--uninstall]

  --from       where SHA256SUMS and the archives are: an https address or a folder (default: that of the release that this
               script belongs to, or the folder of the script)
  --prefix     what gets bin/muser and share/ (default: ~/.local)
  --version    which version, where there are several
  --uninstall  remove what this script has put below the prefix
END
}

while [ $# -gt 0 ]; do
  case "$1" in
    --from | --prefix | --version)
      [ $# -ge 2 ] && [ -n "$2" ] || fail "$1 wants a value"
      case "$1" in
        --from) from=$2 ;;
        --prefix) prefix=$2 ;;
        --version) version=$2 ;;
      esac
      shift 2
      ;;
    --uninstall) uninstall=yes && shift ;;
    --help | -h) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
  esac
done
case "$prefix" in
  /.local) fail "HOME is not set: name a folder with --prefix" ;;
  /*) ;;
  *) prefix="$(pwd)/$prefix" ;;
esac
# The files that were put here, one a line, below the prefix.
list="$prefix/share/muser/installed-files"

# Removes files of a list that are not in another one, and folders that are empty then.
remove_files() {
  while IFS= read -r file; do
    case "/$file/" in
      */../* | //*) fail "$list names $file, which is no file below $prefix" ;;
    esac
    grep -Fqx -- "$file" "$2" && continue
    rm -f -- "$prefix/$file"
    folder=$(dirname "$file")
    while [ "$folder" != . ] && rmdir -- "$prefix/$folder" 2>/dev/null; do
      folder=$(dirname "$folder")
    done
  done <"$1"
}

work=$(mktemp -d "${TMPDIR:-/tmp}/muser-install.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

if [ "$uninstall" = yes ]; then
  [ -f "$list" ] || fail "nothing of this script's is below $prefix: $list is not there"
  cp "$list" "$work/old"
  rm -f -- "$list"
  : >"$work/none"
  remove_files "$work/old" "$work/none"
  say "removed from $prefix; models, packs and keys stay in ~/.muser, or where MUSER_HOME says"
  exit 0
fi

# fetch NAME FILE
fetch() {
  case "$from" in
    https://*) protocol='=https' ;;
    http://127.0.0.1:* | http://localhost:* | http://\[::1\]:*) protocol='=http' ;;
    http://*) fail "--from $from: only https, or an address of this machine" ;;
    *://*) fail "--from $from: only https, or a folder" ;;
    *)
      cp -- "$from/$1" "$2" || fail "$from has no $1"
      return
      ;;
  esac
  if command -v curl >/dev/null; then
    curl --fail --silent --show-error --location --proto "$protocol" --output "$2" -- "${from%/}/$1" ||
      fail "${from%/}/$1 cannot be fetched"
  elif command -v wget >/dev/null; then
    # It has no word for "https only"; where it is sent on to, the https address above has said.
    wget -q -O "$2" -- "${from%/}/$1" || fail "${from%/}/$1 cannot be fetched"
  else
    fail "neither curl nor wget is here"
  fi
}

checksum() {
  if command -v sha256sum >/dev/null; then
    sha256sum <"$1"
  elif command -v shasum >/dev/null; then
    shasum -a 256 <"$1"
  else
    fail "neither sha256sum nor shasum is here: the archive cannot be checked"
  fi | cut -d ' ' -f 1
}

case "$(uname -s) $(uname -m)" in
  'Linux x86_64' | 'Linux amd64') target=x86_64-unknown-linux-gnu ;;
  'Linux aarch64' | 'Linux arm64') target=aarch64-unknown-linux-gnu ;;
  'Darwin arm64') target=aarch64-apple-darwin ;;
  *) fail "there is no archive for $(uname -s) on $(uname -m): build it with cargo" ;;
esac

if [ -z "$from" ]; then
  from=$(cd "$(dirname "$0")" && pwd)
  [ -f "$from/SHA256SUMS" ] || fail "name the place of the release with --from"
fi

fetch SHA256SUMS "$work/sums"
# Lines "HASH  NAME" of archives for this machine.
grep -E "^[0-9a-f]{64}  muser-[0-9A-Za-z.+-]+-$target\\.tar\\.gz\$" "$work/sums" >"$work/all" || :
if [ -n "$version" ]; then
  grep -F "  muser-$version-$target.tar.gz" "$work/all" >"$work/mine" || :
else
  cp "$work/all" "$work/mine"
fi
case "$(wc -l <"$work/mine" | tr -d ' ')" in
  0) fail "SHA256SUMS names no archive of muser ${version:+$version }for $target" ;;
  1) ;;
  *) fail "there are several versions, name one with --version: $(cut -d ' ' -f 3 "$work/mine" | tr '\n' ' ')" ;;
esac
read -r expected archive <"$work/mine"
stem=${archive%.tar.gz}

fetch "$archive" "$work/archive"
found=$(checksum "$work/archive")
[ "$found" = "$expected" ] || fail "$archive is not the file that SHA256SUMS names: expected $expected, found $found. Nothing was installed."

# Its names are ours, and it has nothing but files and folders.
tar -tzf "$work/archive" >"$work/names"
awk -v top="$stem/" 'index($0, top) != 1 || ("/" $0 "/") ~ /\/\.\.\// { bad = 1 } END { exit bad }' "$work/names" ||
  fail "$archive has names outside of $stem"
tar -tvzf "$work/archive" | awk '/^[^-d]/ { bad = 1 } END { exit bad }' || fail "$archive has more than files and folders"
mkdir "$work/new"
tar -xozf "$work/archive" -C "$work/new"
new="$work/new/$stem"
"$new/bin/muser" --version >/dev/null || fail "this system does not run $stem: on Linux it needs glibc 2.28 or newer; cargo builds it for others"

(cd "$new" && find . -type f | sed 's|^\./||' | sort) >"$work/files"
echo share/muser/installed-files >>"$work/files"
cp "$work/files" "$new/share/muser/installed-files"
[ ! -f "$list" ] || cp "$list" "$work/old"
while IFS= read -r file; do
  folder=$(dirname "$prefix/$file")
  mkdir -p -- "$folder" || fail "$folder cannot be made: name another --prefix"
  # Renamed over the old one, which may be running.
  part="$folder/.$(basename "$file").new.$$"
  if ! cp -- "$new/$file" "$part" || ! mv -f -- "$part" "$prefix/$file"; then
    rm -f -- "$part"
    fail "$prefix/$file cannot be written"
  fi
done <"$work/files"
[ ! -f "$work/old" ] || remove_files "$work/old" "$work/files"

say "$("$prefix/bin/muser" --version) is $prefix/bin/muser"
case ":$PATH:" in
  *":$prefix/bin:"*) ;;
  *) say "add it to your PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
