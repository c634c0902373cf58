//! Files that are made to hurt. The limits are checked by their figures; time and memory by hand where a figure is stated.

use std::time::Instant;

use muser_image::limits::{MAX_ENCODED_BYTES, MAX_SIDE};
use muser_image::{ImageError, decode, probe};

use crate::{deflated, ihdr, png, read};

/// Bytes that this process has held at most, as the system counts them; 0 where it does not tell.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// A JPEG with this header; nothing stands behind it.
fn jpeg_header(width: u16, height: u16) -> Vec<u8> {
    let mut out = vec![0xff, 0xd8, 0xff, 0xc0, 0, 17, 8];
    out.extend(height.to_be_bytes());
    out.extend(width.to_be_bytes());
    out.extend([3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0]);
    out.extend([0xff, 0xda, 0, 12, 3, 1, 0, 2, 0, 3, 0, 0, 63, 0, 0xff, 0xd9]);
    out
}

fn gif_header(width: u16, height: u16) -> Vec<u8> {
    let mut out = b"GIF89a".to_vec();
    out.extend(width.to_le_bytes());
    out.extend(height.to_le_bytes());
    // Two colours; behind them the image that somebody is to look for.
    out.extend([0x80, 0, 0, 0, 0, 0, 255, 255, 255]);
    out
}

/// With one pixel of one frame behind the header.
fn gif(width: u16, height: u16) -> Vec<u8> {
    [gif_header(width, height), vec![0x2c, 0, 0, 0, 0, 1, 0, 1, 0, 0, 2, 2, 0x44, 1, 0, 0x3b]].concat()
}

/// An extended WebP header with this canvas.
fn webp_header(width: u32, height: u32) -> Vec<u8> {
    let mut out = b"RIFF".to_vec();
    out.extend(22u32.to_le_bytes());
    out.extend(b"WEBPVP8X");
    out.extend(10u32.to_le_bytes());
    out.extend([0; 4]);
    out.extend(&(width - 1).to_le_bytes()[..3]);
    out.extend(&(height - 1).to_le_bytes()[..3]);
    out
}

#[test]
fn a_header_that_promises_too_much_is_refused_before_anything_is_allocated() {
    let idat = deflated(&[0; 64]);
    let big_png = |w, h| png(&[(b"IHDR", &ihdr(w, h, 2)), (b"IDAT", &idat), (b"IEND", b"")]);
    let before = peak();
    for side in [60_000, 65_535] {
        let wide = u32::from(side);
        for file in [big_png(wide, wide), jpeg_header(side, side), gif(side, side)] {
            assert_eq!(decode(&file), Err(ImageError::Side(wide, wide)));
            assert_eq!(probe(&file), Err(ImageError::Side(wide, wide)));
        }
    }
    for file in [big_png(16_384, 16_384), jpeg_header(16_384, 16_384), gif(16_384, 16_384)] {
        assert_eq!(decode(&file), Err(ImageError::Pixels(16_384, 16_384)));
    }
    assert_eq!(decode(&big_png(MAX_SIDE + 1, 1)), Err(ImageError::Side(MAX_SIDE + 1, 1)));
    let huge = big_png(0x7fff_ffff, 0x7fff_ffff);
    assert_eq!(decode(&huge), Err(ImageError::Side(0x7fff_ffff, 0x7fff_ffff)));
    assert_eq!(decode(&big_png(0, 5)), Err(ImageError::Side(0, 5)));
    assert!(decode(&jpeg_header(0, 5)).is_err());
    assert!(decode(&gif(0, 0)).is_err());
    assert!(decode(&webp_header(1 << 24, 1 << 8)).is_err());
    assert!(peak() - before < 32 << 20, "{} bytes more", peak() - before);
    let long = vec![0; MAX_ENCODED_BYTES + 1];
    assert_eq!(decode(&long), Err(ImageError::Encoded(MAX_ENCODED_BYTES + 1)));
    assert!(matches!(decode(&long[1..]), Err(ImageError::Format(_))), "at the limit it is looked at");
}

#[test]
fn a_promise_within_the_limits_without_pixels_is_an_error() {
    let idat = deflated(&[0; 64]);
    let file = png(&[(b"IHDR", &ihdr(8000, 8000, 0)), (b"IDAT", &idat), (b"IEND", b"")]);
    assert!(matches!(decode(&file), Err(ImageError::Damaged { .. })));
}

#[test]
fn chunks_that_inflate_do_not_fill_the_memory() {
    // A gigabyte of zeros is a megabyte deflated: as text, as a profile, as a picture's surplus.
    let bomb = deflated(&vec![0; 256 << 20]);
    let before = peak();
    let pixels = deflated(&[0, 1, 2, 3]);
    let text = [b"Comment\0\0".as_slice(), &bomb].concat();
    let international = [b"XML:com.adobe.xmp\0\x01\0\0\0".as_slice(), &bomb].concat();
    let surplus = png(&[(b"IHDR", &ihdr(1, 1, 2)), (b"IDAT", &bomb), (b"IEND", b"")]);
    for (kind, data) in [(b"zTXt", &text), (b"iTXt", &international), (b"iCCP", &text)] {
        let file = png(&[(b"IHDR", &ihdr(1, 1, 2)), (kind, data), (b"IDAT", &pixels), (b"IEND", b"")]);
        if let Ok(picture) = decode(&file) {
            assert_eq!(picture.rgb, [1, 2, 3]);
        }
    }
    let _ = decode(&surplus);
    assert!(peak() - before < 96 << 20, "{} bytes more", peak() - before);
}

#[test]
fn every_beginning_of_a_file_is_an_error_or_a_picture() {
    for name in [
        "decode/turned6.png",
        "decode/interlaced-odd.png",
        "decode/palette4.png",
        "decode/grey.jpg",
        "decode/progressive.jpg",
        "decode/turned.jpg",
        "decode/lossy.webp",
        "decode/lossy-alpha.webp",
        "decode/turned.webp",
        "decode/moving.webp",
        "decode/moving.gif",
        "decode/clear.gif",
        "decode/one.gif",
    ] {
        let bytes = read(name);
        let whole = decode(&bytes).expect("good");
        for end in 0..bytes.len() {
            if let Ok(picture) = decode(&bytes[..end]) {
                let at = format!("{name}, {end} of {} bytes", bytes.len());
                // The note on the orientation may stand behind the pixels and be what is missing.
                let sides = |p: &muser_image::Picture| [p.width.min(p.height), p.width.max(p.height)];
                assert_eq!(sides(&picture), sides(&whole), "{at}");
            }
        }
    }
}

#[test]
fn a_jpeg_of_many_scans_is_refused_or_answered_soon() {
    let file = read("decode/progressive.jpg");
    let scan = file.windows(2).position(|pair| pair == [0xff, 0xda]).expect("has scans");
    let end = file.len() - 2;
    // The first scan, 99 times more: past the limit with the ten that are there.
    let second = scan + 2 + file[scan + 2..].windows(2).position(|pair| pair == [0xff, 0xda]).expect("more");
    let many = |times: usize| [&file[..end], &file[scan..second].repeat(times), &[0xff, 0xd9]].concat();
    assert!(matches!(decode(&many(99)), Err(ImageError::Scans { pixels: 1850, .. })));
    let start = Instant::now();
    let _ = decode(&many(85));
    assert!(start.elapsed().as_secs() < 5);
    // A large picture may have fewer.
    let mut large = jpeg_header(8000, 8000);
    let scan = large[21..35].to_vec();
    large.splice(21..21, scan.repeat(16));
    assert!(matches!(decode(&large), Err(ImageError::Scans { scans: 17, pixels: 64_000_000 })));
}

#[test]
fn of_ten_thousand_frames_one_is_decoded() {
    let frame = |colour: u8| {
        let mut out = vec![0x2c, 0, 0, 0, 0, 100, 0, 100, 0, 0, 2];
        // Clear, the colour once, end: the decoder fills the rest or calls it an error for the first frame.
        let codes = u16::from(4u8) | u16::from(colour) << 3 | 5 << 6;
        out.push(2);
        out.extend(codes.to_le_bytes());
        out.push(0);
        out
    };
    let mut file = gif_header(100, 100);
    (0..10_000).for_each(|i| file.extend(frame((i % 2) as u8)));
    file.push(0x3b);
    let (start, before) = (Instant::now(), peak());
    if let Ok(picture) = decode(&file) {
        assert_eq!((picture.width, picture.height), (100, 100));
    }
    // The same frames behind a whole first one.
    let whole = read("decode/moving.gif");
    let mut long = whole[..whole.len() - 1].to_vec();
    (0..10_000).for_each(|i| long.extend(frame((i % 2) as u8)));
    long.push(0x3b);
    assert_eq!(decode(&long), decode(&whole));
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    assert!(peak() - before < 16 << 20, "{} bytes more", peak() - before);
}

#[test]
fn a_frame_outside_its_canvas_is_an_error_or_a_picture_of_the_canvas() {
    let mut file = gif_header(4, 4);
    file.extend([0x2c, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 2, 2, 0x44, 0x01, 0, 0x3b]);
    if let Ok(picture) = decode(&file) {
        assert_eq!((picture.width, picture.height), (4, 4));
    }
}

/// Found by fuzzing: 200 bytes of WebP made the decoder take 570 MB for an EXIF chunk that was not there.
#[test]
fn a_note_that_claims_more_than_the_file_has_is_no_note() {
    let good = read("decode/turned.webp");
    let at = good.windows(4).position(|four| four == b"EXIF").expect("a note");
    let turned = probe(&good).expect("a picture");
    for claim in [u32::MAX, 1 << 31, 0x2200_001A, good.len() as u32] {
        let mut bytes = good.clone();
        bytes[at + 4..at + 8].copy_from_slice(&claim.to_le_bytes());
        let stored = probe(&bytes).expect("the pixels are good");
        assert_eq!((stored.width, stored.height), (turned.height, turned.width), "as it is stored: {claim}");
        assert!(decode(&bytes).is_ok());
    }
}
