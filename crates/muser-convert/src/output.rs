//! Writing the file: pieces of a few megabytes, made by all threads and put at their places.
//!
//! Everything is written beside the final name and moved there when it is complete and on the disk. A process that is killed
//! leaves a `.part` file, which the next conversion to the same name takes over; the result depends on nothing but the
//! checkpoint and the choices.

use std::fs::{File, OpenOptions, TryLockError};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc;

use muser_gguf::{GgmlType, GgufHeader, write_at};

use crate::ConvertError;
use crate::checkpoint::Checkpoint;
use crate::encode;
use crate::error::{io, wrong};
use crate::plan::{Order, Plan, Planned, What};
use crate::safetensors::Dtype;
use crate::source::{Codes, FP4_GROUP, Source};

/// Values of a piece, about.
const PIECE_VALUES: usize = 1 << 20;

/// The file while it is being written.
pub(crate) struct PartFile {
    part: PathBuf,
    file: File,
    done: bool,
}

impl PartFile {
    /// Takes the place beside `path`.
    pub(crate) fn create(path: &Path, force: bool) -> Result<PartFile, ConvertError> {
        if !force && path.exists() {
            return Err(io(path, std::io::ErrorKind::AlreadyExists.into()));
        }
        let Some(name) = path.file_name() else {
            return Err(wrong(path.display().to_string(), "a name for a file", "none"));
        };
        let mut name = name.to_owned();
        name.push(".part");
        let part = path.with_file_name(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&part)
            .map_err(|source| io(&part, source))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ConvertError::Busy(path.display().to_string())),
            Err(TryLockError::Error(source)) => return Err(io(&part, source)),
        }
        file.set_len(0).map_err(|source| io(&part, source))?;
        Ok(PartFile { part, file, done: false })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.part
    }

    /// Moves it to its name.
    pub(crate) fn publish(self, path: &Path) -> Result<(), ConvertError> {
        self.publish_by(path, File::sync_all)
    }

    /// `sync` forces a file, or the names in a folder, to the disk.
    fn publish_by(
        mut self,
        path: &Path,
        sync: impl Fn(&File) -> std::io::Result<()>,
    ) -> Result<(), ConvertError> {
        sync(&self.file).map_err(|source| io(&self.part, source))?;
        std::fs::rename(&self.part, path).map_err(|source| io(path, source))?;
        self.done = true;
        if let Some(folder) = path.parent() {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            // Where folders cannot be synced the name may be lost with the power, never the file's content.
            let _ = File::open(folder).and_then(|folder| sync(&folder));
        }
        Ok(())
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.done {
            // The error that matters is the one that led here.
            let _ = std::fs::remove_file(&self.part);
        }
    }
}

/// Rows of a matrix, or all of a small tensor.
struct Piece {
    tensor: usize,
    rows: Range<u64>,
}

/// Writes header and data. `progress` is told values done and values in all.
pub(crate) fn write(
    checkpoint: &Checkpoint,
    plan: &Plan,
    header: &GgufHeader,
    out: &PartFile,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ConvertError> {
    let at = |source| io(&out.part, source);
    out.file.set_len(header.file_len()).map_err(at)?;
    write_at(&out.file, header.bytes(), 0).map_err(at)?;

    let encoded = |tensor: &Planned| tensor.ty == GgmlType::NVFP4 && !is_nvfp4(tensor);
    let pieces = pieces(plan, |_| true);
    let seen = self::pieces(plan, encoded);
    let values = |pieces: &[Piece]| -> u64 { pieces.iter().map(|piece| values_of(plan, piece)).sum() };
    let (total, mut done) = (values(&pieces) + values(&seen), 0);
    let mut report = |values: u64| {
        done += values;
        progress(done, total);
    };

    // A matrix that is encoded is seen twice: its factor is that of its largest value.
    let largest: Vec<AtomicU32> = plan.tensors.iter().map(|_| AtomicU32::new(0)).collect();
    share(&seen, plan, &mut report, |piece, buffers| {
        let What::Matrix { source, .. } = &plan.tensors[piece.tensor].what else { return Ok(()) };
        let count = values_of(plan, piece) as usize;
        buffers.floats.resize(count, 0.0);
        source.floats(checkpoint, piece.rows.clone(), &mut buffers.floats)?;
        let amax = buffers.floats.iter().fold(0u32, |amax, value| amax.max(value.abs().to_bits()));
        // Magnitudes order like their bits.
        largest[piece.tensor].fetch_max(amax, Ordering::Relaxed);
        Ok(())
    })?;
    let factors: Vec<f32> =
        largest.iter().map(|bits| encode::fp4_factor(f32::from_bits(bits.load(Ordering::Relaxed)))).collect();

    share(&pieces, plan, &mut report, |piece, buffers| {
        let tensor = &plan.tensors[piece.tensor];
        make(checkpoint, tensor, piece, &factors, buffers)?;
        let (start, len) = header.place(piece.tensor);
        let offset = match tensor.what {
            What::Matrix { .. } => piece.rows.start * row_bytes(tensor),
            _ => 0,
        };
        debug_assert!(offset + buffers.out.len() as u64 <= len);
        write_at(&out.file, &buffers.out, start + offset).map_err(at)
    })
}

fn is_nvfp4(tensor: &Planned) -> bool {
    matches!(&tensor.what, What::Matrix { source, .. } if matches!(source.codes, Codes::Nvfp4 { .. }))
}

/// Memory of a thread.
#[derive(Default)]
struct Buffers {
    floats: Vec<f32>,
    sorted: Vec<f32>,
    out: Vec<u8>,
}

/// Shares pieces out among threads; the first error ends all.
fn share(
    pieces: &[Piece],
    plan: &Plan,
    report: &mut dyn FnMut(u64),
    work: impl Fn(&Piece, &mut Buffers) -> Result<(), ConvertError> + Sync,
) -> Result<(), ConvertError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, stop, work) = (sender.clone(), &next, &stop, &work);
            scope.spawn(move || {
                let mut buffers = Buffers::default();
                while !stop.load(Ordering::Relaxed) {
                    let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    let result = work(piece, &mut buffers).map(|()| values_of(plan, piece));
                    if sender.send(result).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut result = Ok(());
        for piece in receiver {
            match piece {
                Ok(values) => report(values),
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    result = Err(error);
                }
            }
        }
        result
    })
}

/// Pieces of the tensors that `wanted` names: whole heads where rows move.
fn pieces(plan: &Plan, wanted: impl Fn(&Planned) -> bool) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (index, tensor) in plan.tensors.iter().enumerate() {
        if !wanted(tensor) {
            continue;
        }
        let What::Matrix { source, order } = &tensor.what else {
            pieces.push(Piece { tensor: index, rows: 0..1 });
            continue;
        };
        let unit = order.unit();
        let step = ((PIECE_VALUES / source.row_values()).max(1).div_ceil(unit) * unit) as u64;
        let mut row = 0;
        while row < source.rows {
            let end = (row + step).min(source.rows);
            pieces.push(Piece { tensor: index, rows: row..end });
            row = end;
        }
    }
    pieces
}

fn values_of(plan: &Plan, piece: &Piece) -> u64 {
    let tensor = &plan.tensors[piece.tensor];
    match &tensor.what {
        What::Matrix { source, .. } => (piece.rows.end - piece.rows.start) * source.cols,
        _ => tensor.dims.iter().product(),
    }
}

fn row_bytes(tensor: &Planned) -> u64 {
    tensor.ty.row_bytes(tensor.dims[0] as usize).unwrap_or(0) as u64
}

/// Makes the bytes of a piece in `buffers.out`.
fn make(
    checkpoint: &Checkpoint,
    tensor: &Planned,
    piece: &Piece,
    factors: &[f32],
    buffers: &mut Buffers,
) -> Result<(), ConvertError> {
    let (source, order) = match &tensor.what {
        What::Values(values) => {
            buffers.out.resize(values.len() * 4, 0);
            encode::to_f32(values, &mut buffers.out);
            return Ok(());
        }
        What::FactorOfLast => {
            buffers.out.resize(4, 0);
            encode::to_f32(&[factors[piece.tensor - 1]], &mut buffers.out);
            return Ok(());
        }
        What::Matrix { source, order } => (source, *order),
    };
    let rows = (piece.rows.end - piece.rows.start) as usize;
    buffers.out.resize(rows * row_bytes(tensor) as usize, 0);
    match (&source.codes, tensor.ty) {
        (Codes::Floats(entry), ty) if is_same(&entry.dtype, ty) => {
            copy(checkpoint, source, piece, order, &mut buffers.out)
        }
        (Codes::Nvfp4 { .. }, GgmlType::NVFP4) => {
            let (codes, scales) = source.fp4_rows(checkpoint, piece.rows.clone())?;
            repack(&codes, &scales, source.cols as usize, order, &mut buffers.out);
            Ok(())
        }
        (_, ty) => {
            let cols = source.cols as usize;
            buffers.floats.resize(rows * cols, 0.0);
            source.floats(checkpoint, piece.rows.clone(), &mut buffers.floats)?;
            let values = if order == Order::AsTheyAre {
                &buffers.floats
            } else {
                buffers.sorted.resize(rows * cols, 0.0);
                for_rows(rows, order, |to, from| {
                    buffers.sorted[to * cols..][..cols]
                        .copy_from_slice(&buffers.floats[from * cols..][..cols]);
                });
                &buffers.sorted
            };
            match ty {
                GgmlType::NVFP4 => encode::to_nvfp4(values, factors[piece.tensor], &mut buffers.out),
                GgmlType::Q8_0 => encode::to_q8_0(values, &mut buffers.out),
                GgmlType::BF16 => encode::to_bf16(values, &mut buffers.out),
                _ => encode::to_f32(values, &mut buffers.out),
            }
            Ok(())
        }
    }
}

fn is_same(dtype: &Dtype, ty: GgmlType) -> bool {
    matches!(
        (dtype, ty),
        (Dtype::F32, GgmlType::F32) | (Dtype::F16, GgmlType::F16) | (Dtype::BF16, GgmlType::BF16)
    )
}

/// Calls with each row's place and where it comes from; units of `order` are whole.
fn for_rows(rows: usize, order: Order, mut call: impl FnMut(usize, usize)) {
    let unit = order.unit();
    for row in 0..rows {
        call(row, row / unit * unit + order.source(row % unit));
    }
}

/// Floats that stay as they are, checked to be numbers.
fn copy(
    checkpoint: &Checkpoint,
    source: &Source,
    piece: &Piece,
    order: Order,
    out: &mut [u8],
) -> Result<(), ConvertError> {
    let Codes::Floats(entry) = &source.codes else { return Ok(()) };
    let row = source.cols as usize * entry.dtype.size().unwrap_or(4) as usize;
    let at = piece.rows.start * row as u64;
    if order == Order::AsTheyAre {
        checkpoint.read(entry, at, out)?;
    } else {
        let mut bytes = vec![0; out.len()];
        checkpoint.read(entry, at, &mut bytes)?;
        for_rows(out.len() / row, order, |to, from| {
            out[to * row..][..row].copy_from_slice(&bytes[from * row..][..row]);
        });
    }
    // Without a branch in the loop, so that it runs at the speed of memory.
    let wide = |out: &[u8], infinity: u16| {
        let magnitude = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]) & 0x7fff;
        out.chunks_exact(2).fold(0, |worst, b| magnitude(b).max(worst)) >= infinity
    };
    let worst = match entry.dtype {
        Dtype::F16 => wide(out, 0x7c00),
        Dtype::BF16 => wide(out, 0x7f80),
        _ => {
            let magnitude = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x7fff_ffff;
            out.chunks_exact(4).fold(0, |worst, b| magnitude(b).max(worst)) >= f32::INFINITY.to_bits()
        }
    };
    if worst {
        let found = format!("an infinity or a NaN in rows {} to {}", piece.rows.start, piece.rows.end - 1);
        return Err(wrong(format!("tensor {}", entry.name), "finite numbers", found));
    }
    Ok(())
}

/// Rows of NVFP4 to blocks of 64: scales first, and nibbles from pairs to halves.
fn repack(codes: &[u8], scales: &[u8], cols: usize, order: Order, out: &mut [u8]) {
    let (groups, row_bytes) = (cols / FP4_GROUP, cols / 64 * encode::FP4_BLOCK_BYTES);
    for_rows(out.len() / row_bytes, order, |to, from| {
        let codes = &codes[from * cols / 2..][..cols / 2];
        let scales = &scales[from * groups..][..groups];
        let blocks = out[to * row_bytes..][..row_bytes].chunks_exact_mut(encode::FP4_BLOCK_BYTES);
        for ((block, scales), codes) in blocks.zip(scales.chunks_exact(4)).zip(codes.chunks_exact(32)) {
            let (head, nibbles) = block.split_at_mut(4);
            head.copy_from_slice(scales);
            for (nibbles, codes) in nibbles.chunks_exact_mut(8).zip(codes.chunks_exact(8)) {
                let value = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
                for (j, byte) in nibbles.iter_mut().enumerate() {
                    *byte = value(j) | value(j + 8) << 4;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_name_only_when_it_is_on_the_disk_and_then_the_name_is_put_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let seen = std::cell::RefCell::new(Vec::new());
        let look = |file: &File| {
            seen.borrow_mut().push((file.metadata()?.is_dir(), path.exists()));
            Ok(())
        };
        PartFile::create(&path, false).and_then(|part| part.publish_by(&path, look)).expect("published");
        let expected = if cfg!(unix) { 2 } else { 1 };
        assert_eq!(*seen.borrow(), [(false, false), (true, true)][..expected]);
        std::fs::remove_file(&path).expect("removed");
        let part = PartFile::create(&path, false).expect("created");
        part.publish_by(&path, |_| Err(std::io::Error::other("no disk"))).expect_err("not synced");
        assert_eq!(std::fs::read_dir(folder.path()).expect("listed").count(), 0, "neither name is left");
    }
}
