//! NumPy's array file, format 1.0: a header of text, then the values, row after row. Written as the rows come, so that
//! the whole never is in memory.

use std::io::{self, Write};

/// Writes a two-dimensional f32 array row by row.
pub struct NpyWriter<W: Write> {
    out: W,
    columns: usize,
    rows_left: usize,
}

impl<W: Write> NpyWriter<W> {
    /// Writes the header of an array of shape `[rows, columns]`.
    pub fn new(mut out: W, rows: usize, columns: usize) -> io::Result<Self> {
        let dictionary =
            format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
        // Magic, version and length take 10 bytes; the data begins at a multiple of 64, the header ends with a newline.
        let padded = (10 + dictionary.len() + 1).next_multiple_of(64) - 10;
        out.write_all(b"\x93NUMPY\x01\x00")?;
        out.write_all(&(padded as u16).to_le_bytes())?;
        writeln!(out, "{dictionary:width$}", width = padded - 1)?;
        Ok(Self { out, columns, rows_left: rows })
    }

    /// Adds whole rows.
    pub fn write_rows(&mut self, values: &[f32]) -> io::Result<()> {
        let rows = values.len() / self.columns.max(1);
        if rows * self.columns != values.len() || rows > self.rows_left {
            return Err(io::Error::other("bug: logits do not have the announced shape"));
        }
        self.rows_left -= rows;
        let mut bytes = [0; 4096];
        for part in values.chunks(bytes.len() / 4) {
            for (slot, value) in bytes.chunks_exact_mut(4).zip(part) {
                slot.copy_from_slice(&value.to_le_bytes());
            }
            self.out.write_all(&bytes[..part.len() * 4])?;
        }
        Ok(())
    }

    /// Checks that all rows came and flushes.
    pub fn finish(mut self) -> io::Result<()> {
        if self.rows_left > 0 {
            return Err(io::Error::other(format!("bug: {} rows are missing", self.rows_left)));
        }
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::NpyWriter;

    #[test]
    fn header_is_aligned_and_rows_are_counted() {
        let mut file = Vec::new();
        let mut npy = NpyWriter::new(&mut file, 2, 3).expect("memory");
        npy.write_rows(&[1.0, 2.0, 3.0]).expect("memory");
        assert!(npy.write_rows(&[0.0; 4]).is_err());
        npy.write_rows(&[4.0, 5.0, -0.5]).expect("memory");
        assert!(npy.write_rows(&[0.0; 3]).is_err());
        npy.finish().expect("all rows came");
        assert_eq!(&file[..8], b"\x93NUMPY\x01\x00");
        let header = 10 + usize::from(u16::from_le_bytes([file[8], file[9]]));
        assert_eq!(header % 64, 0);
        assert_eq!(file[header - 1], b'\n');
        assert_eq!(file.len(), header + 24);
        assert_eq!(file[file.len() - 4..], (-0.5_f32).to_le_bytes());
    }
}
