//! Every kind of file that is decoded, against Pillow 13.0.0.

use muser_image::{Format, ImageError, Picture, decode, probe};

use crate::{golden, png, read, sha256, table};

/// Largest and mean difference of two pictures' values.
fn apart(a: &Picture, b: &Picture) -> (u8, f64) {
    assert_eq!((a.width, a.height), (b.width, b.height));
    let each = || a.rgb.iter().zip(&b.rgb).map(|(a, b)| a.abs_diff(*b));
    let sum: f64 = each().map(f64::from).sum();
    (each().max().unwrap_or(0), sum / a.rgb.len() as f64)
}

#[test]
fn lossless_kinds_equal_pillow_and_lossy_ones_are_near() {
    let files = table("decode.tsv");
    assert_eq!(files.len(), std::fs::read_dir(golden("decode")).expect("a folder").count() - 11);
    for line in files {
        let [name, height, width, expected] = &line[..] else { panic!("{line:?}") };
        let bytes = read(&format!("decode/{name}"));
        let picture = decode(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((picture.height.to_string(), picture.width.to_string()), (height.clone(), width.clone()));
        let header = probe(&bytes).expect("its header is good");
        assert_eq!((header.width, header.height), (picture.width, picture.height), "{name}");
        assert!(header.memory >= picture.rgb.len() as u64, "{name}: {}", header.memory);
        if !expected.starts_with("expected-") {
            assert_eq!(&sha256(&picture.rgb), expected, "{name}");
            continue;
        }
        let (most, mean) = apart(&picture, &decode(&read(&format!("decode/{expected}"))).expect("lossless"));
        println!("{name}: {most} at most, {mean:.3} on average");
        assert!(most <= 4 && mean <= 0.5, "{name}: {most} at most, {mean:.3} on average");
    }
}

#[test]
fn a_kind_is_told_by_its_content() {
    let rows = [
        ("decode/rgb.png", Format::Png),
        ("decode/grey.jpg", Format::Jpeg),
        ("decode/lossy.webp", Format::WebP),
        ("decode/moving.gif", Format::Gif),
    ];
    for (name, format) in rows {
        let header = probe(&read(name)).expect("good");
        assert_eq!(header.format, format, "{name}");
        let kind = format.media_type().strip_prefix("image/").expect("an image's");
        assert_eq!(kind.to_uppercase(), format.to_string().to_uppercase());
    }
}

#[test]
fn what_is_no_picture_is_called_what_it_is() {
    let rows: [(&[u8], &str); 8] = [
        (b"", "the image is empty"),
        (b"BM\x46\0\0\0\0\0\0\0\x36\0\0\0", "expected a PNG, JPEG, WebP or GIF image, found BMP"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "expected a PNG, JPEG, WebP or GIF image, found SVG or other XML",
        ),
        (b"%PDF-1.7", "expected a PNG, JPEG, WebP or GIF image, found PDF"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "expected a PNG, JPEG, WebP or GIF image, found HEIC"),
        (b"<!doctype html>", "expected a PNG, JPEG, WebP or GIF image, found HTML or other markup"),
        (b"\0\0\0\x1cftypisom\0\0\0\0", "expected a PNG, JPEG, WebP or GIF image, found a video"),
        (b"hello", "expected a PNG, JPEG, WebP or GIF image, found bytes of none of these"),
    ];
    for (bytes, expected) in rows {
        assert_eq!(decode(bytes).expect_err("no picture").to_string(), expected);
        assert_eq!(probe(bytes).expect_err("no picture").to_string(), expected);
    }
}

#[test]
fn a_damaged_note_on_the_orientation_does_not_matter() {
    let good = read("decode/turned6.png");
    let at = good.windows(4).position(|kind| kind == b"eXIf").expect("has one");
    let length = u32::from_be_bytes([good[at - 4], good[at - 3], good[at - 2], good[at - 1]]) as usize;
    let ihdr = &good[16..29];
    let rest = |kind: &[u8; 4]| {
        let at = good.windows(4).position(|k| k == kind).expect("has one");
        let length = u32::from_be_bytes([good[at - 4], good[at - 3], good[at - 2], good[at - 1]]) as usize;
        good[at + 4..][..length].to_vec()
    };
    let idat = rest(b"IDAT");
    for cut in [0, 1, 5, length / 2] {
        let note = &good[at + 4..][..cut];
        let file = png(&[(b"IHDR", ihdr), (b"eXIf", note), (b"IDAT", &idat), (b"IEND", b"")]);
        let picture = decode(&file).expect("shown as it is stored");
        assert_eq!((picture.width, picture.height), (50, 37), "{cut} bytes of the note");
    }
}

#[test]
fn errors_are_values_that_compare() {
    assert_eq!(decode(b""), Err(ImageError::Empty));
}
