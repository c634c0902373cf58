//! Grids and bytes of transformers 5.24.0 with torchvision 0.27.1.

use muser_image::{Grid, decode, probe};

use crate::{read, sha256, table};

const UNIT: u32 = 28;
const CAP: u32 = 4096;

#[test]
fn all_grids_are_those_of_the_reference() {
    let grids = read("grids.bin");
    assert_eq!(grids.len(), 2000 * 8);
    for entry in grids.as_chunks::<8>().0 {
        let at = |i: usize| u32::from(u16::from_le_bytes([entry[2 * i], entry[2 * i + 1]]));
        let (height, width) = (at(0), at(1));
        let expected = Grid { rows: at(2), cols: at(3) };
        assert_eq!(Grid::choose(width, height, UNIT, CAP), expected, "{width}x{height}");
    }
}

#[test]
fn all_pictures_decode_and_resize_to_the_bytes_of_the_reference() {
    let pictures = table("pictures.tsv");
    assert_eq!(pictures.len(), 45);
    for line in pictures {
        let [file, height, width, rows, cols, rgb, resized] = &line[..] else { panic!("{line:?}") };
        let number = |field: &String| field.parse::<u32>().expect("a number");
        let bytes = read(file);
        let picture = decode(&bytes).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!((picture.height, picture.width), (number(height), number(width)), "{file}");
        let header = probe(&bytes).expect("its header is good");
        assert_eq!((header.height, header.width), (picture.height, picture.width), "{file}");
        assert_eq!(&sha256(&picture.rgb), rgb, "{file}: decoded");
        let out = picture.resize(UNIT, CAP).expect("resizes");
        assert_eq!(out.grid, Grid { rows: number(rows), cols: number(cols) }, "{file}");
        assert_eq!(&sha256(&out.rgb), resized, "{file}: resized");
    }
}

#[test]
fn a_lower_cap_gives_the_shape_with_fewer_tokens() {
    let picture = decode(&read("32.png")).expect("1800x1900 pixels");
    let rows = [(4096, 65, 62, 4030), (256, 16, 15, 240), (64, 8, 8, 64), (1, 1, 1, 1)];
    for (cap, rows, cols, tokens) in rows {
        let out = picture.resize(UNIT, cap).expect("resizes");
        assert_eq!((out.grid.rows, out.grid.cols, out.grid.tokens()), (rows, cols, tokens), "cap {cap}");
        assert_eq!(out.rgb.len(), (tokens * UNIT * UNIT * 3) as usize);
    }
}
