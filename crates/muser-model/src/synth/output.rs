//! Filling a laid-out file: pieces of a few megabytes, made by all threads and put at their places.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use muser_gguf::{GgufError, GgufHeader, write_at};

use super::fill::{fill, key_of};
use super::plan::Planned;
use crate::ModelError;

/// Bytes of a piece, about: large enough for the disk, small enough for the cache.
const PIECE_BYTES: u64 = 1 << 20;

/// Whole blocks of one tensor.
struct Piece {
    tensor: usize,
    first_block: u64,
    offset: u64,
    len: usize,
}

pub(super) fn to_memory(header: &GgufHeader, tensors: &[Planned], seed: u64) -> Result<Vec<u8>, ModelError> {
    let len = usize::try_from(header.file_len())
        .map_err(|_| ModelError::Synth("the file does not fit the address space".to_owned()))?;
    let mut out = vec![0; len];
    out[..header.bytes().len()].copy_from_slice(header.bytes());
    for piece in pieces(header, tensors) {
        make(&piece, tensors, seed, &mut out[piece.offset as usize..][..piece.len]);
    }
    Ok(out)
}

pub(super) fn to_file(
    path: &Path,
    header: &GgufHeader,
    tensors: &[Planned],
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ModelError> {
    let name = path
        .file_name()
        .ok_or_else(|| ModelError::Synth(format!("{} is no name for a file", path.display())))?
        .to_string_lossy();
    let part = path.with_file_name(format!("{name}.part"));
    let result = fill_file(&part, header, tensors, seed, progress)
        .and_then(|()| std::fs::rename(&part, path).map_err(|source| io_error(path, source)));
    if result.is_err() {
        // The error that matters is the one that we have.
        let _ = std::fs::remove_file(&part);
    }
    result.map(|()| header.file_len())
}

fn fill_file(
    path: &Path,
    header: &GgufHeader,
    tensors: &[Planned],
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ModelError> {
    let total = header.file_len();
    let file = File::create(path).map_err(|source| io_error(path, source))?;
    file.set_len(total).map_err(|source| io_error(path, source))?;
    write_at(&file, header.bytes(), 0).map_err(|source| io_error(path, source))?;
    let mut done = header.bytes().len() as u64;
    progress(done, total);

    let pieces = pieces(header, tensors);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, pieces, file, next, stop) = (sender.clone(), &pieces, &file, &next, &stop);
            scope.spawn(move || {
                let mut buffer = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    buffer.resize(piece.len, 0);
                    make(piece, tensors, seed, &mut buffer);
                    let written = write_at(file, &buffer, piece.offset).map(|()| piece.len as u64);
                    if sender.send(written).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut result = Ok(());
        for written in receiver {
            match written {
                Ok(len) => {
                    done += len;
                    progress(done, total);
                }
                Err(source) => {
                    stop.store(true, Ordering::Relaxed);
                    result = Err(io_error(path, source));
                }
            }
        }
        result
    })?;
    progress(total, total);
    Ok(())
}

fn pieces(header: &GgufHeader, tensors: &[Planned]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let (start, len) = header.place(index);
        let block_bytes = tensor.ty.block_bytes() as u64;
        // Multiples of 8 blocks, so that every piece begins at a whole word of the stream.
        let step = (PIECE_BYTES / block_bytes).next_multiple_of(8) * block_bytes;
        let mut at = 0;
        while at < len {
            let piece_len = step.min(len - at);
            pieces.push(Piece {
                tensor: index,
                first_block: at / block_bytes,
                offset: start + at,
                len: piece_len as usize,
            });
            at += piece_len;
        }
    }
    pieces
}

fn make(piece: &Piece, tensors: &[Planned], seed: u64, out: &mut [u8]) {
    let tensor = &tensors[piece.tensor];
    fill(out, tensor.ty, tensor.fill, key_of(&tensor.name, seed), piece.first_block);
}

fn io_error(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::Gguf(GgufError::Io { path: path.display().to_string(), source })
}
